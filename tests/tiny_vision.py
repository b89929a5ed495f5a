"""Whole vision-language models with random weights, made here with their processors: LLaVA, Idefics3 and Qwen2-VL.

LLaVA writes 4 tokens for every image; Idefics3 cuts an image into tiles, and writes tokens around each. Qwen2-VL writes
as many as an image has patches, which the processor puts one behind another for all images of a batch, and numbers
positions by rows and columns of them. Its processor reads videos, too.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from tests.tiny import CACHE, EOS, TURN, _cached, tiny_tokenizer

PARTS_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Images first, and a text only as a part, as LLaVA's own template has it."""
IN_PLACE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Images where the content has them."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
IMAGE_TOKENS = ("<image>", "<|image_pad|>")
FAMILIES = ("llava", "idefics3", "qwen2_vl")


def tiny_vision_model(family: str, cache: Path = CACHE) -> Path:
    """Directory of a model of `FAMILIES` with its processor."""
    save = {"llava": _save_llava, "idefics3": _save_idefics3, "qwen2_vl": _save_qwen2, "qwen2_5_vl": _save_qwen2_5}
    return _cached(cache, f"vision-{family}-2", save[family])


def picture(number: int, width: int = 40, height: int = 30, kind: str = "PNG") -> bytes:
    """An image in a colour of its own, with a gradient."""
    from PIL import Image

    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            ((x * 6 + number * 37) % 256, (y * 8 + number * 91) % 256, (number * 53) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def uri(data: bytes) -> str:
    """An image as a row has it."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_rows(count: int) -> list[dict[str, Any]]:
    """Conversations with an image each; every third one has a second image in a later turn."""
    rows = []
    for number in range(count):
        part = {"type": "image_url", "image_url": {"url": uri(picture(number))}}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": [part, {"type": "text", "text": f"What is picture {number}?"}]},
            {"role": "assistant", "content": f"Picture {number} has {number + 2} colours."},
        ]
        if number % 3 == 2:
            other = {"type": "image", "image": uri(picture(100 + number, 90, 60))}
            turns += [
                {"role": "user", "content": [{"type": "text", "text": "And this: "}, other]},
                {"role": "assistant", "content": "It is larger."},
            ]
        rows.append({"messages": turns})
    return rows


def image_pairs(count: int) -> list[dict[str, Any]]:
    """Pairs whose prompt has an image; every third one has a second image, and a turn of its own for it."""
    pairs = []
    for number, row in enumerate(image_rows(count)):
        *prompt, last = row["messages"]
        pairs.append(
            {
                "prompt": prompt,
                "chosen": [last],
                "rejected": [{"role": "assistant", "content": f"I cannot see {number + 1} of them."}],
            }
        )
    return pairs


def _tokenizer(*special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN, EOS, "<image>", *special]})
    return tokenizer


def _save_llava(path: Path) -> None:
    import torch
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = _tokenizer()
    text = LlamaConfig(vocab_size=len(tokenizer), **_of(tokenizer), **_TEXT)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, projection_dim=32, **_VISION),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(path)
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=PARTS_TEMPLATE,
    ).save_pretrained(path)


def _save_idefics3(path: Path) -> None:
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    around = [f"<row_{row + 1}_col_{col + 1}>" for row in range(6) for col in range(6)]
    tokenizer = _tokenizer("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *around)
    text = LlamaConfig(vocab_size=len(tokenizer), **_of(tokenizer), **_TEXT)
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_config={"image_size": 56, **_VISION},
        text_config=text.to_dict(),
        scale_factor=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Idefics3ForConditionalGeneration(config).save_pretrained(path)
    Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        tokenizer,
        image_seq_len=4,
        chat_template=IN_PLACE_TEMPLATE,
    ).save_pretrained(path)


def _save_qwen2(path: Path) -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    _save_qwen(path, Qwen2VLConfig, Qwen2VLForConditionalGeneration, vision)


def _save_qwen2_5(path: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "depth": 2,
        "num_heads": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    _save_qwen(path, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, vision)


def _save_qwen(path: Path, config_class: Any, model_class: Any, vision: dict[str, Any]) -> None:
    """The files of the processor are those that the hub has: its own class writes them with torchvision only."""
    import torch

    begin, image, video, end = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
    tokenizer = _tokenizer(begin, image, video, end)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in {"vision_start": begin, "vision_end": end, "image": image, "video": video}.items()
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**_TEXT, **_of(tokenizer), "vocab_size": len(tokenizer), "rope_parameters": rope}
    config = config_class(text_config=text, vision_config=vision, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(config).save_pretrained(path)
    tokenizer.chat_template = IN_PLACE_TEMPLATE.replace("<image>", begin + image + end)
    tokenizer.save_pretrained(path)
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[config.model_type]
    preprocessor = {
        "processor_class": name,
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": 84 * 84,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def _of(tokenizer: Any) -> dict[str, Any]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
