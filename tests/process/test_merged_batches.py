"""Merged micro steps: the numbers of separate ones, the bits of a request for that batch, also after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, TrainingArguments

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import micro_steps, preflight
from llama_stack_provider_trl.recipes.build import build_trainer
from llama_stack_provider_trl.recipes.checkpoint.adapter_card import CARD, code, write_card
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan
from llama_stack_provider_trl.recipes.fast import larger_batches
from llama_stack_provider_trl.recipes.fast.larger_batches import larger_plans, why_separate
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.nearest import Capacity
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.micro_steps import MicroBatches, RowsOnDevice, merge_micro_steps
from llama_stack_provider_trl.recipes.preflight import before_training
from llama_stack_provider_trl.recipes.trainer.reference import Precomputation
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Event,
    EventWriter,
    Prepared,
    Progress,
    Warned,
    iter_events,
)
from llama_stack_provider_trl.specs.job import DpoSpec, ReferenceSpec
from llama_stack_provider_trl.specs.methods import KtoSpec
from tests.process.supervised import GRPO, UNPAIRED
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

TIMED = ("seconds", "per_second", "memory")
JOBS: dict[str, dict[str, Any]] = {
    "sft": {"rows": SFT_ROWS[:11], "validation_rows": SFT_ROWS[:3]},  # the last step has three rows
    "dpo-lora": {"algorithm": "dpo", "lora": LORA, "rows": DPO_ROWS[:11]},
    "kto": {"algorithm": "kto", "rows": UNPAIRED[:11], "method": KtoSpec()},
}


def small_job(root: Path, kind: str, batch_size: int, steps: int, merge: str, **changes: Any) -> Any:
    given = {"n_epochs": 2, "batch_size": batch_size, "gradient_accumulation_steps": steps, **JOBS[kind], **changes}
    return job_spec(root, tiny_model(), given.pop("algorithm", "sft"), merge_micro_batches=merge, **given)


def points(events: list[Event]) -> list[dict[str, float]]:
    """Metrics of each step but for what the clock and the machine decide."""
    found = [{**point.metrics, "tokens": float(point.tokens_seen)} for point in of_kind(events, Progress)]
    return [{key: value for key, value in one.items() if not any(part in key for part in TIMED)} for one in found]


def batches(events: list[Event]) -> tuple[Any, ...]:
    """Of an attempt: rows of a micro batch, micro steps of a step, and how many of the request's are in each."""
    effective = of_kind(events, Prepared)[0].effective
    return (*effective["batches"].values(), effective.get("merged_micro_steps"))


def final(events: list[Event]) -> bytes:
    (file,) = Path(of_kind(events, CheckpointSaved)[-1].path).glob("*model.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize("kind", ["sft", "dpo-lora", *in_full("kto")])
def test_merged_micro_steps_have_the_numbers_of_separate_ones_and_the_bits_of_a_request_for_them(
    kind: str, tmp_path: Path
) -> None:
    made = {}
    for name, sizes in {"separate": (1, 4, "never"), "merged": (1, 4, "always"), "requested": (4, 1, "never")}.items():
        status, events = run(tmp_path / name, small_job(tmp_path / name, kind, *sizes), estimates=True)
        assert status == 0
        made[name] = events
    assert {name: batches(events) for name, events in made.items()} == {
        "separate": (1, 4, None),
        "merged": (4, 1, 4),
        "requested": (4, 1, None),
    }
    assert points(made["merged"]) == points(made["requested"])
    assert final(made["merged"]) == final(made["requested"])
    assert len(points(made["merged"])) == 6
    for one, other in zip(points(made["merged"]), points(made["separate"]), strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)


def test_an_attempt_continues_with_the_micro_batches_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {}
    for merge in ("always", "never"):
        spec = small_job(tmp_path / merge, "sft", 1, 4, merge, save_steps=2)
        status, events = run(tmp_path / merge, spec, estimates=True)
        assert status == 0
        whole[merge] = events
    # Later the machine has no room for batches that nobody asked for, but for those of the checkpoint.
    monkeypatch.setattr(micro_steps, "SHARE_FOR_MERGED", 0.0)
    for merge, expected in (("always", (4, 1, 4)), ("never", (1, 4, None))):
        spec = small_job(tmp_path / merge, "sft", 1, 4, "always", save_steps=2)
        status, events = run(tmp_path / f"{merge}-again", spec, spec.checkpoint_dir / "checkpoint-2", estimates=True)
        assert (status, batches(events)) == (0, expected)
        assert points(events) == points(whole[merge])[2:]
        assert final(events) == final(whole[merge])
    new = small_job(tmp_path / "new", "sft", 1, 4, "always", max_steps_per_epoch=1)
    _, events = run(tmp_path / "new", new, estimates=True)
    assert batches(events) == (1, 4, None)
    assert of_kind(events, Prepared)[0].effective["micro_steps"] == "not merged: larger ones may not fit"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"lora": LORA}, ""),
        ({"padding_free": False}, "batches have padding"),
        ({"method": DpoSpec(loss_type="kto_pair", reference=ReferenceSpec())}, "the loss has means over a batch"),
        ({"method": GRPO}, "the model answers the prompts of a batch together"),
        ({"averaging": AveragingSpec(interval=2), "ranks": 2}, "other workers would train on other rows"),
        ({"lora": LORA.model_copy(update={"dropout": 0.1})}, "dropout would leave out other units"),
    ],
)
def test_micro_steps_stay_separate_where_numbers_would_change(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert why_separate(job_spec(tmp_path, tiny_model(), **changes)) == reason


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mixtral", {}, ""),
        ("mixtral", {"router_jitter_noise": 0.1}, "the routing of its experts is random, and would choose others"),
        # It draws random numbers for its experts in training whatever its settings are.
        (
            "phimoe",
            {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
            "the routing of its experts is random, and would choose others",
        ),
        ("dbrx", {}, ""),
        ("dbrx", {"attn_config": {"attn_pdrop": 0.1}}, "dropout would leave out other units"),
    ],
)
def test_micro_steps_of_a_model_that_draws_random_numbers_stay_separate(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[kind](**settings).save_pretrained(tmp_path / "model")
    assert why_separate(job_spec(tmp_path, tmp_path / "model")) == reason


def test_evaluations_and_reference_scores_keep_the_batches_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"method": DpoSpec(reference=ReferenceSpec(precompute=True)), "validation_rows": DPO_ROWS[:3]}
    spec = small_job(tmp_path, "dpo-lora", 1, 4, "always", **changes)
    built = build_trainer(spec, torch.device("cpu"))
    trainer = built.trainer
    assert (trainer.batch_plan.batch_size, built.merged.steps) == (4, 4)
    assert (len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())) == (3, 3)  # of 11 and 3 rows
    batches_scored: list[None] = []
    assert Precomputation(trainer, lambda: batches_scored.append(None), lambda: False).run() is not None
    assert len(batches_scored) == 11 + 3
    write_card(tmp_path, trainer.spec)  # as of a step checkpoint
    assert "| batch size of a rank | 1 |" in (tmp_path / CARD).read_text()
    assert [code(name) for name in ("a", "a|b", "`a` ![b](c)")] == ["`a`", "`a\\|b`", "`` `a` ![b](c) ``"]
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    assert len(trainer._get_eval_sampler(trainer.eval_dataset)) == 4  # 3 rows, filled up for two ranks


@pytest.mark.parametrize(
    ("device", "merge", "merges"),
    [
        ("cpu", "auto", False),
        ("cuda", "auto", True),
        ("cuda", "never", False),
        ("cpu", "always", True),
        ("mps", "auto", False),
    ],
)
def test_micro_steps_are_merged_by_themselves_on_gpus(device: str, merge: str, merges: bool, tmp_path: Path) -> None:
    assert job_spec(tmp_path, tmp_path, merge_micro_batches=merge).may_merge(device) is merges


def test_micro_batches_grow_to_a_number_of_tokens_and_no_further_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(larger_batches.TOKENS, "cuda", 2 * 4 * 30)
    rows = Dataset.from_list([{"input_ids": [1] * size, "labels": [1] * size} for size in (20, 40)])
    spec = job_spec(tmp_path, tiny_model(), batch_size=2, gradient_accumulation_steps=12)
    plan = BatchPlan.of_job(spec)
    plans = larger_plans(spec, plan, rows, "cuda")
    assert [(one.batch_size, one.accumulation_steps) for one in plans] == [(8, 3), (6, 4), (4, 6)]
    assert all(one.rows_per_step == plan.rows_per_step for one in plans)
    assert larger_plans(spec, plan, rows, "mps") == []

    def chosen(total: int, free: int = 1, trained: int | None = None, **changes: Any) -> tuple[int, int, int]:
        rows_on_device = RowsOnDevice(rows, "cuda", lambda: (Capacity(free), total))
        found = merge_micro_steps(spec.changed(**changes), plan, rows_on_device, trained)
        assert found.spec.rows_per_step == plan.rows_per_step
        return found.batch_plan.batch_size, found.batch_plan.accumulation_steps, found.steps

    of_six = estimate(spec, Batch(2, 40, ((0, (39,)), (0, (19,))), 58), "cuda").total
    assert chosen(1 << 60) == (8, 3, 4)  # whatever is free at the moment
    assert chosen(1 << 60, trained=6) == (6, 4, 3)
    assert chosen(of_six // 2, 1 << 60) == (2, 12, 1)
    assert chosen(of_six // 2, trained=6) == (2, 12, 1)
    assert chosen(1 << 60, preflight="off") == (2, 12, 1)


def test_the_largest_micro_batches_that_fit_are_found_by_few_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_list([{"input_ids": [1] * 20, "labels": [1] * 20}] * 200)
    spec = job_spec(tmp_path, tiny_model(), batch_size=1, gradient_accumulation_steps=96)
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    estimated: list[int] = []

    def counted(job: Any, batch: Batch, *_: Any) -> SimpleNamespace:
        estimated.append(batch.sequences)
        return SimpleNamespace(total=1000 * batch.sequences, machine=0)

    def chosen(total: int) -> int:
        rows_on_device = RowsOnDevice(rows, "cuda", lambda: (Capacity(1), total))
        found = merge_micro_steps(spec, BatchPlan.of_job(spec), rows_on_device)
        return found.batch_plan.batch_size

    monkeypatch.setattr(micro_steps, "estimate", counted)
    for size in sizes:
        estimated.clear()
        assert chosen(int(1000 * size * 1.1 / 0.7) + 10) == size
        assert len(estimated) <= 5


def test_micro_steps_stay_separate_where_memory_cannot_be_read(tmp_path: Path) -> None:
    """Other ranks wait for the choice of the first one, which `before_training` lets train unchecked."""

    def fail() -> tuple[Capacity, int]:
        raise RuntimeError("CUDA driver error")

    rows = Dataset.from_list([{"input_ids": [1] * 20, "labels": [1] * 20}] * 8)
    spec = job_spec(tmp_path, tiny_model(), batch_size=1, gradient_accumulation_steps=4)
    found = merge_micro_steps(spec, BatchPlan.of_job(spec), RowsOnDevice(rows, "cuda", fail))
    assert found.shown == {"micro_steps": "not merged: larger ones may not fit"}


def test_a_job_is_refused_where_it_does_not_fit_without_merged_micro_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_list([{"input_ids": [1] * 400, "labels": [1] * 400}] * 8)
    spec = job_spec(tmp_path, tiny_model(), batch_size=1, gradient_accumulation_steps=8)
    rows_on_device = RowsOnDevice(rows, "cuda", lambda: (Capacity(1), 1 << 60))
    merged = merge_micro_steps(spec, BatchPlan.of_job(spec), rows_on_device)
    assert merged.unmerged == MicroBatches(spec, BatchPlan.of_job(spec))
    writer = EventWriter(tmp_path / "events")

    def checked(one: MicroBatches, free: int) -> dict[str, Any]:
        monkeypatch.setattr(preflight, "memory_of", lambda *_: (Capacity(free), 1 << 60))
        cuda = torch.device("cuda")
        found = before_training(one.spec, one.batch_plan, rows, cuda, writer, spec, unmerged=one.unmerged)
        assert found is not None
        return found

    needed = checked(merged.unmerged, 1 << 60)["estimate_bytes"] * 1.1
    assert checked(merged.unmerged, int(needed) + 1)["fits"]
    found = checked(merged, int(needed) + 1)
    assert not found["fits"]  # it trains all the same
    (warned,) = of_kind(list(iter_events(tmp_path / "events")), Warned)
    assert warned.message == found["message"]
    assert "the merged micro steps of this job take about" in warned.message
    with pytest.raises(JobFailure, match="does not fit") as separate:
        checked(merged.unmerged, int(needed) - 1)
    with pytest.raises(JobFailure) as together:
        checked(merged, int(needed) - 1)
    assert str(together.value) == str(separate.value)
