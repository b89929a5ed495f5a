"""Pairs with images: the losses are those of a plain loop over the processor's output, with every kind of reference."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import load_data
from llama_stack_provider_trl.recipes.data.images import load_processor
from llama_stack_provider_trl.recipes.model.loading import load_job_tokenizer
from llama_stack_provider_trl.recipes.vision import with_images
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Failed,
    NullEventWriter,
    Preflighted,
    Prepared,
    Reason,
    Warned,
)
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, ReferenceSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import CpoSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.preflight import PreflightSpec, PreviewSpec
from tests.process.image_jobs import RATE, SGD, image_job
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny_vision import FAMILIES, IMAGE_TOKENS, image_pairs, picture, tiny_vision_model, uri
from tests.training import LORA, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
BETA = 0.5


def pair_job(root: Path, family: str = "llava", ranks: int = 1, **changes: Any) -> JobSpec:
    own = {"rows": image_pairs(5), "algorithm": "dpo", "method": DpoSpec(beta=BETA)}
    return image_job(root, family, ranks, **{**own, **changes})


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities, those of the reference, tokens), of the chosen answers, then of the rejected ones -> loss."""


def dpo_loss(logps: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    chosen, rejected = (logps - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def cpo_loss(logps: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    chosen, rejected = logps.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean() - chosen.sum() / lengths.chunk(2)[0].sum()


def simpo_loss(logps: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    chosen, rejected = (logps / lengths).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected) - 0.3).mean()


def losses_of_transformers(
    family: str, rows: list[dict[str, Any]], loss_of: Loss = dpo_loss, adapter: Path | None = None
) -> list[float]:
    """SGD over batches of two pairs, of which each answer is a padded row of its own with all the images.

    Args:
        adapter: that is trained; None: every weight is.
    """
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    directory = tiny_vision_model(family)
    processor = load_processor(ModelSource(model=str(directory)))
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).train()
    reference = copy.deepcopy(model).eval()
    if adapter:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=RATE)

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        held = part["image_url"]["url"] if part["type"] == "image_url" else part["image"]
        return {"type": "image", "image": Image.open(io.BytesIO(base64.b64decode(held.partition(",")[2])))}

    def parts(turn: dict[str, Any]) -> dict[str, Any]:
        content = turn["content"]
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {"role": turn["role"], "content": [opened(part) for part in given]}

    def tokens(talks: list[list[dict[str, Any]]], **options: Any) -> Any:
        kwargs = {"padding": True, "padding_side": "right"}
        return processor.apply_chat_template(
            talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=kwargs, **options
        )

    found = []
    for first in range(0, len(rows), 2):
        batch = rows[first : first + 2]
        talks = [[*map(parts, row["prompt"] + row[side])] for side in ("chosen", "rejected") for row in batch]
        inputs, scored = tokens(talks), []
        for talk, mask in zip(talks, inputs["attention_mask"], strict=True):
            before = tokens([talk[:-1]], add_generation_prompt=True)["input_ids"].shape[1]
            # The template writes a line break behind the end of a turn, which an answer has, too.
            scored.append(((torch.arange(len(mask)) >= before) & mask.bool())[1:])

        def log_probs(scorer: Any, inputs: Any = inputs, scored: Any = scored) -> torch.Tensor:
            logits = scorer(**inputs).logits[:, :-1].log_softmax(-1)
            of_tokens = logits.gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
            return (of_tokens * torch.stack(scored)).sum(dim=1)

        with torch.no_grad():
            theirs = log_probs(reference)
        loss = loss_of(log_probs(model), theirs, torch.stack(scored).sum(dim=1))
        found.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


# Rows of all families are in test_image_trainings.py.
@pytest.mark.parametrize("family", [*FAMILIES[:1], *in_full(*FAMILIES[1:], "qwen2_5_vl")])
def test_losses_are_those_of_a_loop_over_the_models_own_processor(tmp_path: Path, family: str) -> None:
    status, events = run(tmp_path, pair_job(tmp_path, family))
    assert status == 0, of_kind(events, Failed)
    expected = losses_of_transformers(family, image_pairs(5))
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["data"]["images"] == 6
    assert prepared.effective["attention_mask"] == "passed"


def test_an_adapter_is_compared_with_the_model_without_it(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"dropout": 0.0})
    still = SGD.model_copy(update={"learning_rate": 1e-12})
    _, events = run(tmp_path / "begin", pair_job(tmp_path / "begin", "qwen2_vl", lora=lora, optimizer=still))
    begin = of_kind(events, CheckpointSaved)[-1].path
    status, events = run(tmp_path, pair_job(tmp_path, "qwen2_vl", lora=lora))
    assert status == 0, of_kind(events, Failed)
    expected = losses_of_transformers("qwen2_vl", image_pairs(5), adapter=begin)
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.69


@pytest.mark.parametrize(
    ("method", "loss_of"),
    [
        (CpoSpec(algorithm="cpo", beta=BETA, alpha=1.0), cpo_loss),
        (CpoSpec(algorithm="simpo", loss_type="simpo", beta=BETA, gamma=0.3, alpha=0.0), simpo_loss),
    ],
)
def test_cpo_and_simpo_are_computed_over_the_same_features(tmp_path: Path, method: CpoSpec, loss_of: Loss) -> None:
    status, events = run(tmp_path, pair_job(tmp_path, method=method, rows=image_pairs(4)))
    assert status == 0, of_kind(events, Failed)
    assert losses(events) == pytest.approx(losses_of_transformers("llava", image_pairs(4), loss_of), rel=1e-5)


def test_ranks_with_whole_models_wait_for_no_gradient_of_unused_vision_blocks(tmp_path: Path, ranks: Ranks) -> None:
    whole = {"sharding": ShardingSpec(strategy="NO_SHARD"), "gradient_checkpointing": True}
    codes, events = ranks.run(tmp_path / "run", pair_job(tmp_path, ranks=2, **whole))
    assert codes == [0, 0], of_kind(events, Failed)
    assert losses(events) == pytest.approx(losses_of_transformers("llava", image_pairs(5)), rel=1e-4)


def test_a_reference_that_is_scored_once_is_that_of_each_step_and_known_by_its_images(tmp_path: Path) -> None:
    def trained(name: str, rows: list[dict[str, Any]], **reference: Any) -> tuple[list[float], str]:
        method = DpoSpec(beta=BETA, reference=ReferenceSpec(**reference))
        status, events = run(tmp_path / name, pair_job(tmp_path / name, rows=rows, method=method, lora=LORA))
        assert status == 0, of_kind(events, Failed)
        (prepared,) = of_kind(events, Prepared)
        return losses(events), prepared.effective.get("reference", {}).get("train_dataset", "")

    rows = image_pairs(5)
    each, _ = trained("each", rows)
    assert len(set(each)) == 3
    once = {"precompute": True, "cache": tmp_path / "reference"}
    assert trained("once", rows, **once) == (pytest.approx(each, rel=1e-5), "computed")
    assert trained("again", rows, **once) == (pytest.approx(each, rel=1e-5), "cache")
    # The same tokens under another image.
    rows[4]["prompt"][0]["content"][0] = {"type": "image", "image": uri(picture(50))}
    changed, source = trained("other", rows, **once)
    assert source == "computed"
    assert changed[:2] == pytest.approx(each[:2], rel=1e-5)
    assert changed[2] != pytest.approx(each[2], rel=1e-5)


def test_a_pair_whose_images_would_be_cut_is_dropped_and_counted(tmp_path: Path) -> None:
    long = {"role": "user", "content": "And what else, of all that there may be in it? " * 8}
    rows = image_pairs(2)
    rows[1]["prompt"] += [{"role": "assistant", "content": "One."}, long]
    spec = pair_job(tmp_path, rows=rows, max_seq_length=90, truncation_side="left")
    status, events = run(tmp_path, spec)
    assert status == 0, of_kind(events, Failed)
    messages = [event.message for event in of_kind(events, Warned)]
    found = "1 of 2 pairs were dropped: max_seq_length=90 would cut off a part of their images"
    assert any(found in message for message in messages), messages


def test_pairs_without_images_train_beside_those_with_some_on_one_rank(tmp_path: Path) -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("It is 4.", "I would rather not.")]
    plain = {"prompt": [{"role": "user", "content": "What is 2 plus 2?"}], "chosen": answers[0], "rejected": answers[1]}
    rows = [image_pairs(1)[0], plain, plain, image_pairs(3)[2]]
    status, events = run(tmp_path, pair_job(tmp_path, "qwen2_vl", rows=rows))
    assert status == 0, of_kind(events, Failed)
    assert losses(events) == pytest.approx(losses_of_transformers("qwen2_vl", rows), rel=1e-5)
    spec = with_images(pair_job(tmp_path, rows=rows, ranks=2))
    with pytest.raises(JobFailure, match="2 of 4 pairs have no image, and on 2 ranks each needs one"):
        load_data(spec, load_job_tokenizer(spec), NullEventWriter(), 2)


def test_a_preflight_counts_the_images_of_pairs_and_says_what_its_estimate_lacks(tmp_path: Path) -> None:
    _, events = run(tmp_path, pair_job(tmp_path), preflight=PreflightSpec(device="cpu"))
    (found,) = of_kind(events, Preflighted)
    assert (found.data["images"], found.data["trained"]) == (6, 5)
    assert "the estimate of memory leaves out what the vision part of the model takes for images" in found.warnings


@pytest.mark.parametrize("family", [*FAMILIES[:1], *in_full(*FAMILIES[1:])])
def test_a_preview_finds_each_answer_as_the_processor_has_it_at_inference(tmp_path: Path, family: str) -> None:
    from llama_stack_provider_trl.recipes.preview import examined

    found = examined(pair_job(tmp_path, family), PreviewSpec(first_row=0, rows=5), lambda: None, every_row=True)
    assert (found.data["images"], found.inference.turns, found.inference.equal) == (6, 10, 10)
    marks = [
        mark for row in found.rows for mark, text in zip(row.trained, row.texts, strict=True) if text in IMAGE_TOKENS
    ]
    assert set(marks) == {"0"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"chosen": "A <image>."},
            "row 1: the model's chat template refuses the turns user, assistant: it writes 2 placeholders",
        ),
        ({"prompt": "?", "rejected": "A <image>."}, "it writes 1 placeholders '<image>' for 0 images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": uri(picture(1)[:60])}]}]},
            "prompt, turn 0: image 0 cannot be decoded",
        ),
    ],
)
def test_what_is_no_image_of_a_prompt_is_refused_with_its_row(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    rows = image_pairs(2)
    rows[1] |= changed
    _, events = run(tmp_path, pair_job(tmp_path, rows=rows))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_dataset
    assert message in failed.message


def test_a_text_with_a_token_that_a_processor_writes_around_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pair_job(tmp_path)
    processor = load_processor(spec.source)  # those of Pixtral and InternVL have several
    ids = [processor.image_token_id, processor.tokenizer.eos_token_id]
    monkeypatch.setattr(processor, "_image_token_ids", ids, raising=False)
    _, events = run(tmp_path, spec)
    assert "row 0: the text '<|im_end|>', which stands for a part of an image" in of_kind(events, Failed)[0].message


def test_a_reference_with_another_processor_is_refused_by_name(tmp_path: Path) -> None:
    other = ReferenceSpec(source=ModelSource(model=str(tiny_vision_model("idefics3"))))
    _, events = run(tmp_path, pair_job(tmp_path, method=DpoSpec(reference=other)))
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_model
    assert "its processor reads them otherwise" in failed.message
