"""Trainings by methods of installed packages: the losses of examples/custom_trainer, and packages that are unusable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.custom import find_method
from llama_stack_provider_trl.specs.events import CheckpointSaved, Evaluated, Failed, Prepared, Warned
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import CustomSpec
from tests.plugins import install, install_example
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

BROKEN = """
from pydantic import BaseModel
from llama_stack_provider_trl.specs.custom import CustomMethod
class Fields(BaseModel):
    pass
def method(trainer):
    return CustomMethod("Broken", "pairs", Fields, trainer)
class Methods:
    pass
for name in ("mean", "absent", "rows", "hides", "bare", "empty"):
    setattr(Methods, name, method(f"broken_trainers:{name.title()}"))
"""
BROKEN_TRAINERS = """
from llama_stack_provider_trl.recipes.trainer.custom import CustomPairTrainer, CustomRowTrainer
class Mean(CustomPairTrainer):
    def pair_losses(self, log_probs, lengths):
        return -log_probs.mean(), {}
class Rows(CustomRowTrainer):
    def token_losses(self, log_probs):
        return -log_probs
class Hides(CustomPairTrainer):
    def pair_losses(self, log_probs, lengths):
        losses = -log_probs.chunk(2)[0]
        return losses, {"loss": 0 * losses}
class Bare(CustomPairTrainer):
    def pair_losses(self, log_probs, lengths):
        return -log_probs.chunk(2)[0]
class Empty(CustomPairTrainer):
    pass
"""
BROKEN_NAMES = ("mean", "absent", "rows", "hides", "bare", "empty")


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of sys.path with the example, and a package whose trainers are wrong."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    install_example(tmp_path / "site")
    modules = {"broken_methods": BROKEN, "broken_trainers": BROKEN_TRAINERS}
    points = {name: f"broken_methods:Methods.{name}" for name in BROKEN_NAMES}
    install(tmp_path / "site", "broken", points, modules, "2.0")
    return tmp_path / "site"


def spec_of(root: Path, name: str, version: str = "1.0.0", **changes: Any) -> JobSpec:
    fields: dict[str, Any] = changes.pop("fields", {})
    focal = name == "focal"
    method = CustomSpec(
        algorithm="custom_rows" if focal else "custom_pairs",
        type=name,
        package="custom-trainer-example",
        version=version,
        parameters=fields,
    )
    rows = SFT_ROWS if focal else DPO_ROWS
    given: dict[str, Any] = {
        "rows": rows[:8],
        "validation_rows": rows[8:],
        "n_epochs": 2,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "shuffle": False,
        "save_steps": 2,
        "optimizer": OptimizerSpec(learning_rate=5e-3),
        "method": method,
    }
    return job_spec(root, tiny_model(), method.algorithm, **{**given, **changes})


def log_probs(model: Any, tokenizer: Any, prompt: str, answer: str) -> Any:
    """Of the answer's tokens, by transformers alone."""
    import torch

    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    texts = [
        tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True),
        tokenizer.apply_chat_template(turns, tokenize=False),
    ]
    before, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    with torch.no_grad():
        of_all = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    start = len(before)
    return of_all[start - 1 : -1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


def robust_loss(score: Callable[[str, str], Any], beta: float, flipped: float) -> float:
    """Written out for the first four pairs."""
    import math

    total = 0.0
    for row in DPO_ROWS[:4]:
        chosen, rejected = (float(score(row["prompt"], row[name]).mean()) for name in ("chosen", "rejected"))
        right = 1 / (1 + math.exp(-beta * (chosen - rejected)))
        total += (-(1 - flipped) * math.log(right) + flipped * math.log(1 - right)) / (1 - 2 * flipped)
    return total / 4


def focal_loss(score: Callable[[str, str], Any], gamma: float) -> float:
    """Written out for the tokens of the first four rows."""
    import torch

    found = torch.cat([score(row["prompt"], row["completion"]) for row in SFT_ROWS[:4]])
    return float(((1 - found.exp()) ** gamma * -found).mean())


@pytest.mark.parametrize(
    ("name", "compile_blocks"),
    [
        ("robust", "never"),
        ("focal", "never"),
        # torch's compiler warns of its own code.
        *in_full(
            pytest.param("robust", "always", marks=pytest.mark.filterwarnings("ignore")),
            pytest.param("focal", "always", marks=pytest.mark.filterwarnings("ignore")),
        ),
    ],
)
def test_a_method_of_a_package_trains_its_loss_on_the_engine_and_continues_exactly(
    tmp_path: Path, name: str, compile_blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    fields = {"robust": {"beta": 1.5, "flip_rate": 0.2}, "focal": {"gamma": 1.5}}[name]
    spec = spec_of(tmp_path, name, fields=fields, compile_blocks=compile_blocks)
    status, events = run(tmp_path / "run", spec, estimates=True)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    model, tokenizer = (kind.from_pretrained(tiny_model()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    score = lambda prompt, answer: log_probs(model, tokenizer, prompt, answer)  # noqa: E731
    expected = robust_loss(score, 1.5, 0.2) if name == "robust" else focal_loss(score, 1.5)
    assert losses(events)[0] == pytest.approx(expected, rel=1e-5)
    assert losses(events)[-1] < losses(events)[0]
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["method"] == {
        "type": name,
        "package": "custom-trainer-example",
        "version": "1.0.0",
        "trainer": find_method(name).method.trainer,
    }
    assert prepared.effective["padding_free"] == "used"
    assert prepared.effective["compiled_blocks"].startswith("used") is (compile_blocks == "always")
    assert prepared.effective["memory"]["fits"]
    assert not [event for event in of_kind(events, Warned) if "has checked this request" in event.message]
    final = of_kind(events, CheckpointSaved)[-1]
    assert AutoModelForCausalLM.from_pretrained(final.path).config.model_type == "llama"
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    resumed = run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-2")[1]
    assert losses(resumed) == losses(events)[2:]
    padded = spec_of(tmp_path / "padded", name, fields=fields, batch_size=4, gradient_accumulation_steps=1)
    padded = padded.changed(padding_free=False)
    other = run(tmp_path / "padded-run", padded)[1]
    assert losses(other) == pytest.approx(losses(events), rel=1e-4)
    assert of_kind(other, Evaluated)[-1].metrics["eval_loss"] == pytest.approx(
        of_kind(events, Evaluated)[-1].metrics["eval_loss"], rel=1e-4
    )


def test_adapters_are_trained_and_another_version_than_has_checked_the_request_is_reported(tmp_path: Path) -> None:
    status, events = run(tmp_path / "run", spec_of(tmp_path, "robust", "0.9", lora=LORA, merge_adapter=True))
    assert status == 0
    assert losses(events)[-1] < losses(events)[0]
    assert [saved.kind for saved in of_kind(events, CheckpointSaved)][-2:] == ["final", "merged"]
    warning = "custom-trainer-example 0.9 has checked this request, and custom-trainer-example 1.0.0 trains it"
    assert [event for event in of_kind(events, Warned) if warning in event.message]
    assert of_kind(events, Prepared)[0].effective["method"]["version"] == "1.0.0"


@pytest.mark.parametrize(
    ("name", "fields", "reason", "words"),
    [
        ("gone", {}, "launch_failed", "no installed package adds the method 'gone'"),
        ("robust", {"beta": -1}, "launch_failed", "it does not accept the fields of the request"),
        ("absent", {}, "launch_failed", "broken_trainers:Absent cannot be imported: AttributeError"),
        ("mean", {}, "rank_failed", "returned 'loss' as (), expected a tensor of shape (2,)"),
        ("rows", {}, "launch_failed", "broken_trainers:Rows of broken 2.0 cannot train the method 'rows': it is"),
        ("empty", {}, "launch_failed", "cannot train the method 'empty': it does not override pair_losses"),
        ("hides", {}, "rank_failed", "returned a metric named 'loss', which would hide the trainer's"),
        ("bare", {}, "rank_failed", "returned an object of type Tensor, expected losses and a dict of metrics"),
    ],
)
def test_a_package_that_cannot_be_used_where_it_trains_fails_the_job_with_its_reason(
    tmp_path: Path, name: str, fields: dict[str, Any], reason: str, words: str
) -> None:
    status, events = run(tmp_path / "run", spec_of(tmp_path, name, fields=fields))
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason == reason
    assert words in failed.message
    assert not failed.traceback


def test_rows_that_another_job_has_made_are_checked_before_they_are_trained(tmp_path: Path) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    spec = spec_of(tmp_path, "robust", rows=[*DPO_ROWS[:3], same])
    spec = spec.changed(dataset=spec.data.dataset.model_copy(update={"of_job": "made"}))
    assert run(tmp_path / "run", spec)[0] == 1
    events = run(tmp_path / "again", spec)[1]
    (failed,) = of_kind(events, Failed)
    assert failed.reason == "invalid_dataset"
    assert "row 3: chosen and rejected are the same answer" in failed.message
