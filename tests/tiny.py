"""A whole model in two seconds, made here: a byte-level tokenizer and a random two-layer Llama, saved as a checkpoint.

Nothing is downloaded. Models are cached under `.pytest_cache/tiny`, keyed by their options and by this file's content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".pytest_cache" / "tiny"
EOS, PAD, TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
VOCABULARY = 1024

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT_LINES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "What is the capital of France? The capital of France is Paris.",
    "Describe a process of making bread. First, mix the flour, the water and the salt.",
    "### User: ### Assistant: system user assistant tool",
    "def add(one, other):\n    return one + other\n\n\nprint(add(1, 2))",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 你好 😊",
)


def tiny_model(
    *, chat_template: bool = True, tied: bool = True, vocabulary: int = VOCABULARY, cache: Path = CACHE
) -> Path:
    """Directory of a model that transformers loads: 2 layers, hidden size 64, 1024 tokens, 130k-200k parameters.

    Args:
        chat_template: ChatML; False leaves the tokenizer without a template.
        tied: input and output embeddings are one tensor.
        vocabulary: number of tokens, as in `tiny_tokenizer`.
        cache: where models are kept between runs.
    """
    name = f"{'chat' if chat_template else 'plain'}-{'tied' if tied else 'untied'}-{vocabulary}"
    return _cached(cache, name, lambda path: _save_model(path, chat_template, tied, vocabulary))


def tiny_decoder(model_type: str, cache: Path = CACHE, **changes: Any) -> Path:
    """A random model of an architecture of transformers, with the tokenizer of `tiny_model`: 2 layers, hidden size 64.

    Args:
        changes: of its configuration.
    """
    digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
    return _cached(cache, f"{model_type}-{digest}", lambda path: _save_decoder(path, model_type, changes))


def tiny_tokenizer(
    *,
    chat_template: bool = True,
    trim_offsets: bool = False,
    vocabulary: int = VOCABULARY,
    lines: Sequence[str] = TEXT_LINES,
) -> PreTrainedTokenizerFast:
    """The tokenizer alone (no torch): eos `<|im_end|>`, pad `<|endoftext|>`, no bos.

    Args:
        chat_template: ChatML; False leaves it without a template.
        trim_offsets: leave a token's spaces out of its character offsets, as GPT-2's and Llama 3's tokenizers do.
        vocabulary: number of tokens; 259 are the bytes and the three special tokens.
        lines: the text whose words become tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[PAD, TURN, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHATML if chat_template else None,
        model_max_length=2048,
    )


def tiny_adapter(cache: Path = CACHE) -> Path:
    """The configuration of an adapter as PEFT saves it, without weights: for tests that train nothing."""

    def build(path: Path) -> None:
        config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8}
        (path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj", "v_proj"]}))

    return _cached(cache, "adapter", build)


def shared_dir() -> Path:
    """The directory of real datasets and tokenizers; skips the test where there is none.

    `TRL_SHARED_DIR` names it; without that, `shared` beside the repository is looked for.
    """
    path = Path(os.environ.get("TRL_SHARED_DIR", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"no shared data: {path / 'data'} does not exist; TRL_SHARED_DIR can name another place")
    return path


def qwen_tokenizer() -> Any:
    """Qwen2.5's own tokenizer and chat template; skips the test where it is not at hand."""
    path = shared_dir() / "models" / "qwen2.5-tokenizer"
    if not path.is_dir():
        pytest.skip(f"no tokenizer: {path} does not exist")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _cached(cache: Path, name: str, build: Any) -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache / f"{name}-{digest}"
    if path.is_dir():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    build(scratch)
    try:
        scratch.rename(path)
    except OSError:  # another process was first
        if not path.is_dir():
            raise
        shutil.rmtree(scratch)
    return path


def _save_model(path: Path, chat_template: bool, tied: bool, vocabulary: int) -> None:
    save_llama(
        path,
        tiny_tokenizer(chat_template=chat_template, vocabulary=vocabulary),
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )


def _save_decoder(path: Path, model_type: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model_type.startswith("gemma"):
        sizes["query_pre_attn_scalar"] = 16
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # norms, which begin at 1 or 0 everywhere, and biases
                    weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_llama(path: Path, tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> None:
    """Save a random Llama of these sizes, the same one on every call, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
