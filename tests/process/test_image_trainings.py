"""Rows with images: losses are those of transformers itself, on one process and on two ranks, and after a resume."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import InvalidRows, JobFailure
from llama_stack_provider_trl.recipes.build import load_data
from llama_stack_provider_trl.recipes.data.images import load_processor
from llama_stack_provider_trl.recipes.data.keys import RowKeys
from llama_stack_provider_trl.recipes.model.loading import load_job_tokenizer
from llama_stack_provider_trl.recipes.vision import with_images
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Failed,
    NullEventWriter,
    Prepared,
    Progress,
    Reason,
    Warned,
)
from llama_stack_provider_trl.specs.job import JobSpec, RowNames
from llama_stack_provider_trl.specs.model_source import ModelSource
from tests.process.image_jobs import RATE, image_job
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.tiny_vision import IMAGE_TOKENS, image_rows, picture, tiny_vision_model, uri
from tests.training import LORA, SFT_ROWS, dataset, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def losses_of_transformers(family: str, rows: list[dict[str, Any]]) -> list[float]:
    """SGD over batches of two rows, each padded, with labels where the answers are."""
    import base64

    from PIL import Image
    from transformers import AutoModelForImageTextToText

    directory = tiny_vision_model(family)
    # Where torchvision is not installed, transformers alone loads no processor that reads videos, too.
    processor = load_processor(ModelSource(model=str(directory)))
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        held = part["image_url"]["url"] if part["type"] == "image_url" else part.get("image")
        if held is None:
            return part
        data = base64.b64decode(held.partition(",")[2])
        return {"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")}

    def parts(content: Any) -> list[dict[str, Any]]:
        return [{"type": "text", "text": content}] if isinstance(content, str) else [opened(part) for part in content]

    found = []
    for first in range(0, len(rows), 2):
        talks = [
            [{"role": turn["role"], "content": parts(turn["content"])} for turn in row["messages"]]
            for row in rows[first : first + 2]
        ]
        inputs = processor.apply_chat_template(
            talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        labels = torch.full_like(inputs["input_ids"], -100)
        for number, talk in enumerate(talks):
            for turn, message in enumerate(talk):
                if message["role"] == "assistant":
                    before, behind = (
                        processor.apply_chat_template(
                            talk[:count], tokenize=True, return_dict=True, add_generation_prompt=count == turn
                        )["input_ids"][0]
                        for count in (turn, turn + 1)
                    )
                    labels[number, len(before) : len(behind)] = torch.tensor(behind[len(before) :])
        loss = model(**inputs, labels=labels).loss
        found.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", *in_full("idefics3", "qwen2_5_vl")])
def test_losses_are_those_of_a_loop_over_the_models_own_processor(tmp_path: Path, family: str) -> None:
    spec = image_job(tmp_path, family)
    status, events = run(tmp_path, spec)
    assert status == 0, of_kind(events, Failed)
    assert losses(events) == pytest.approx(losses_of_transformers(family, image_rows(5)), rel=1e-5)
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["data"]["images"] == 6
    assert prepared.effective["attention_mask"] == "passed"
    assert prepared.effective["padding_free"] == "not used: the rows have images"
    # What is exported reads images again, and has learnt.
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    final = of_kind(events, CheckpointSaved)[-1].path
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (tiny_vision_model(family), final)
    )
    vision = [
        name
        for name in before
        if ("vision" in name or "visual" in name) and "position" not in name and name.endswith("weight")
    ]
    assert any(not torch.equal(before[name], after[name]) for name in vision)
    image = Image.open(io.BytesIO(picture(0)))
    processors = [load_processor(ModelSource(model=str(path))) for path in (spec.source.model, final)]
    ids = [one(images=[image], text=[one.image_token])["input_ids"] for one in processors]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("family", ["llava", *in_full("qwen2_vl")])
def test_two_ranks_train_what_one_process_trains(tmp_path: Path, ranks: Ranks, family: str) -> None:
    spec, together = image_job(tmp_path / "one", family), image_job(tmp_path / "two", family, ranks=2)
    _, events = run(tmp_path / "one", spec)
    codes, of_ranks = ranks.run(tmp_path / "two" / "run", together)
    assert codes == [0, 0], of_kind(of_ranks, Failed)
    assert losses(of_ranks) == pytest.approx(losses(events), rel=1e-4)


def test_a_resumed_job_ends_with_the_weights_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    changes = {"n_epochs": 2, "shuffle": True}
    found = []
    for name in ("whole", "resumed"):
        root = tmp_path / name
        spec = image_job(root, **changes)
        _, events = run(root, spec)
        if name == "resumed":
            first = of_kind(events, CheckpointSaved)[0]
            assert (first.kind, first.step) == ("step", 3)
            status, events = run(root / "again", spec, resume_from=first.path)
            assert status == 0
            assert [point.step for point in of_kind(events, Progress)] == [4, 5, 6]
        found.append(AutoModelForImageTextToText.from_pretrained(spec.checkpoint_dir / "final").state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", ["llava", *in_full("qwen2_vl")])
def test_adapters_are_added_to_the_language_model_alone(tmp_path: Path, family: str) -> None:
    status, events = run(tmp_path, image_job(tmp_path, family, lora=LORA, merge_adapter=True))
    assert status == 0, of_kind(events, Failed)
    from safetensors.torch import load_file

    final, merged = (saved.path for saved in of_kind(events, CheckpointSaved)[-2:])
    names = load_file(final / "adapter_model.safetensors").keys()
    assert names
    assert all(".language_model." in name for name in names)
    assert all(
        (path / ("preprocessor_config.json" if family == "qwen2_vl" else "processor_config.json")).is_file()
        for path in (final, merged)
    )


@pytest.mark.parametrize("family", ["idefics3", *in_full("llava", "qwen2_vl")])
def test_a_preview_finds_each_turn_as_the_processor_has_it_at_inference(tmp_path: Path, family: str) -> None:
    from llama_stack_provider_trl.recipes.preview import examined
    from llama_stack_provider_trl.specs.preflight import PreviewSpec

    found = examined(image_job(tmp_path, family), PreviewSpec(first_row=0, rows=5), lambda: None, every_row=True)
    assert (found.data["images"], found.inference.turns, found.inference.equal) == (6, 6, 6)
    marks = [
        mark for row in found.rows for mark, text in zip(row.trained, row.texts, strict=True) if text in IMAGE_TOKENS
    ]
    assert set(marks) == {"0"}


def test_what_reads_no_images_refuses_them_by_a_sentence(tmp_path: Path) -> None:
    _, events = run(tmp_path, image_job(tmp_path, "llava").changed(source=job_spec(tmp_path, tiny_model()).source))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_model
    assert "row 0 has 1 image," in failed.message
    _, events = run(tmp_path / "packed", image_job(tmp_path, packed=True))
    assert "the rows have images, and packed is true" in of_kind(events, Failed)[0].message


def warnings(spec: JobSpec) -> list[str]:
    spec = with_images(spec)
    return load_data(spec, load_job_tokenizer(spec), NullEventWriter(), 2).warnings


def test_rows_that_differ_in_their_images_alone_are_no_duplicates(tmp_path: Path) -> None:
    rows = [{"messages": image_rows(1)[0]["messages"]} for _ in range(3)]
    rows[1] = json.loads(json.dumps(rows[1]).replace(uri(picture(0)), uri(picture(1))))
    (message,) = warnings(image_job(tmp_path, rows=rows))
    assert message == "1 of 3 training examples repeat an earlier one (row 2 repeats row 0)"


def test_a_text_with_the_models_own_image_token_is_refused(tmp_path: Path) -> None:
    turns = _messages({"prompt": "What is <image>?", "completion": "A word."})
    for row, sentence in (
        ({"messages": turns}, "it writes 1 placeholders '<image>' for 0 images"),
        ({"text": "A <image>."}, "row 1: the text '<image>', which stands for a part of an image"),
    ):
        with pytest.raises(JobFailure, match=sentence):
            warnings(image_job(tmp_path, rows=[*image_rows(1), row]))


@pytest.mark.parametrize("way", [True, False])
def test_a_column_of_images_may_have_a_name_beyond_ascii(tmp_path: Path, way: bool) -> None:
    turns = _messages({"prompt": "<image>What is it?", "completion": "A picture."})
    spec = image_job(tmp_path, rows=[{"messages": turns, "büder": [uri(picture(0))]}])
    ref = spec.data.dataset
    ref.path.write_text(json.dumps(json.loads(ref.path.read_text()), ensure_ascii=way) + "\n")
    assert not with_images(spec).data.has_images
    named = spec.changed(dataset=ref.model_copy(update={"names": RowNames(columns={"images": "büder"})}))
    assert with_images(named).data.has_images


def test_a_vision_model_refuses_a_column_of_images_with_paths_that_a_text_model_does_not_read(tmp_path: Path) -> None:
    plain = {**SFT_ROWS[0], "image": "a.png"}
    for rows in ([plain], [*image_rows(1), plain]):
        spec = image_job(tmp_path, rows=rows)
        with pytest.raises(InvalidRows, match=f"^row {len(rows) - 1}: column image, image 0: found 'a.png'"):
            warnings(spec)
    spec = job_spec(tmp_path, tiny_model(), rows=[plain])
    assert load_data(with_images(spec), load_job_tokenizer(spec), NullEventWriter(), 4).report.kept == 1


def test_rows_that_a_processor_of_the_models_own_has_read_are_not_cached(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_vision_model("llava"), tmp_path / "model")
    code = "from transformers import LlavaProcessor\n\nclass Own(LlavaProcessor):\n    ...\n"
    (directory / "own.py").write_text(code)
    path = directory / "processor_config.json"
    described = json.loads(path.read_text())
    described |= {"processor_class": "Own", "auto_map": {"AutoProcessor": "own.Own"}}
    path.write_text(json.dumps(described))
    spec = image_job(tmp_path)
    of_library = with_images(spec)
    own = spec.changed(source=job_spec(tmp_path, directory, trust_remote_code=True).source, has_images=True)
    assert type(load_processor(own.source)).__name__ == "Own"
    tokenizer = load_job_tokenizer(spec)
    assert RowKeys(of_library, tokenizer).of(spec.data.dataset)
    assert RowKeys(own, tokenizer).of(spec.data.dataset) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": _messages({"prompt": "?", "completion": "A <|video_pad|>."})},
            "writes '<|video_pad|>', which stands",
        ),
        ({"text": "A <|video_pad|>."}, "row 1: the text '<|video_pad|>', which stands for a part of"),
    ],
)
def test_a_placeholder_of_a_video_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    _, events = run(tmp_path, image_job(tmp_path, "qwen2_vl", rows=[*image_rows(1), row]))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_dataset
    assert message in failed.message


def test_rows_without_images_train_beside_those_with_some(tmp_path: Path) -> None:
    rows = [*image_rows(2), *({"messages": _messages(row)} for row in SFT_ROWS[:3])]
    status, events = run(tmp_path, image_job(tmp_path, rows=rows))
    assert status == 0, of_kind(events, Failed)
    assert losses(events) == pytest.approx(losses_of_transformers("llava", rows), rel=1e-5)


def test_on_several_ranks_each_row_needs_an_image(tmp_path: Path) -> None:
    rows = [*image_rows(2), {"messages": _messages(SFT_ROWS[0])}]
    spec = with_images(image_job(tmp_path, rows=rows, ranks=2))
    with pytest.raises(JobFailure, match="1 of 3 sequences have no image, and on 2 ranks each needs one"):
        load_data(spec, load_job_tokenizer(spec), NullEventWriter(), 2)


def test_the_template_of_an_older_processor_is_found_in_its_own_file(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_vision_model("llava"), tmp_path / "model")
    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_job_tokenizer(job_spec(tmp_path, directory)).chat_template == template


def test_a_column_of_images_is_read_as_parts_are(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.data.prepare import read_examples

    parts = image_rows(1)
    column = [
        {
            "messages": [{"role": "user", "content": "<image>What is picture 0?"}, parts[0]["messages"][1]],
            "images": [{"bytes": picture(0), "path": "0.png"}],
        }
    ]
    one, other = (list(read_examples(dataset(tmp_path, rows).path, "sft")) for rows in (parts, column))
    assert one == other


def test_a_row_whose_images_would_be_cut_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = image_rows(3)
    _, events = run(tmp_path, image_job(tmp_path, "idefics3", rows=rows, max_seq_length=60))
    messages = [event.message for event in of_kind(events, Warned)]
    assert any("max_seq_length=60 would cut off a part of their images" in message for message in messages), messages
