"""What the preflight reports of a job is what the job then does, and a job that does not fit never loads its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes import preflight
from llama_stack_provider_trl.recipes.data.lengths import histogram
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan, EpochSampler
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.micro_steps import plan_steps
from llama_stack_provider_trl.specs.events import (
    Event,
    Failed,
    Finished,
    Preflighted,
    Prepared,
    Reason,
    Warned,
    iter_events,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec
from llama_stack_provider_trl.specs.preflight import PreflightSpec
from llama_stack_provider_trl.system.files import RunDir
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SAMPLES, SFT_ROWS, attempt_in_process, job_spec, of_kind, run

pytestmark = pytest.mark.process


def ask(root: Path, spec: JobSpec, **requested: Any) -> list[Event]:
    """The events of a preflight, in this process."""
    paths = RunDir(root / "preflight")
    paths.root.mkdir()
    wanted = PreflightSpec(**{"device": "cpu", **requested})
    paths.spec.write_text(AttemptSpec(job=spec, attempt=1, run_dir=paths.root, preflight=wanted).model_dump_json())
    attempt_in_process(paths.spec)
    return list(iter_events(paths.events))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_epochs": 3, "batch_size": 5},
        {"n_epochs": 2, "batch_size": 2, "gradient_accumulation_steps": 4},
        {"batch_size": 1, "gradient_accumulation_steps": 4, "merge_micro_batches": "always"},
        {"n_epochs": 2, "batch_size": 2, "max_steps_per_epoch": 2},
        {"algorithm": "dpo", "batch_size": 3, "max_seq_length": 40},
        {"batch_size": 2, "packed": True, "max_seq_length": 100},
        {"validation_rows": [SFT_ROWS[5]], "rows": [*SFT_ROWS, SFT_ROWS[0]]},
    ],
    ids=["batches", "accumulation", "merged", "capped", "pairs-cut", "packed", "duplicates"],
)
def test_steps_and_rows_are_those_of_the_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = job_spec(tmp_path, tiny_model(), changes.pop("algorithm", "sft"), **changes)
    (found,) = of_kind(ask(tmp_path, spec), Preflighted)
    assert not spec.checkpoint_dir.exists()
    status, events = run(tmp_path / "run", spec, estimates=True)
    assert status == 0
    (prepared,) = of_kind(events, Prepared)
    assert found.steps["total_steps"] == prepared.total_steps
    assert found.data["trained"] == prepared.num_rows == sum(bucket["rows"] for bucket in found.data["histogram"])
    assert found.data["truncated"] == prepared.effective["data"]["truncated"]
    of_rows = [one.message for one in of_kind(events, Warned) if "examples" in one.message]
    assert len(of_rows) == 2 * ("validation_rows" in changes)
    assert {*of_rows} <= {*found.warnings}
    assert found.memory["largest_batch"] == prepared.effective["memory"]["largest_batch"]


@pytest.mark.parametrize(
    ("rows_per_step", "batch_size", "ranks", "largest"), [(8, 4, 3, 3), (8, 4, 1, 4), (6, 4, 1, 4), (8, 8, 2, 4)]
)
def test_the_steps_of_an_attempt_are_those_of_its_batch_plan(
    tmp_path: Path, rows_per_step: int, batch_size: int, ranks: int, largest: int
) -> None:
    batch_plan = BatchPlan.of(rows_per_step, batch_size, ranks)
    shared = {
        "batch_size": batch_plan.batch_size,
        "gradient_accumulation_steps": batch_plan.accumulation_steps,
        "ranks": ranks,
    }
    planned = plan_steps(job_spec(tmp_path, tiny_model(), n_epochs=2, **shared), [5, 9, *[7] * 19], batch_plan)
    sampler = EpochSampler(21, None, shuffle=True, seed=0, batch_plan=batch_plan)
    assert (planned.steps_per_epoch, planned.global_batch) == (sampler.steps_per_epoch, rows_per_step)
    assert planned.total_steps == 2 * sampler.steps_per_epoch
    assert planned.batch == Batch(largest, 9)


def test_fewer_rows_than_a_batch_are_filled_up_where_ranks_take_equal_parts(tmp_path: Path) -> None:
    alone = job_spec(tmp_path, tiny_model(), batch_size=8)
    assert plan_steps(alone, [5, 9]).batch == Batch(2, 9)
    assert plan_steps(alone.model_copy(update={"ranks": 2}), [5, 9]).batch == Batch(8, 9)


def test_the_largest_batch_is_as_long_as_the_longest_row_that_is_trained_on(tmp_path: Path) -> None:
    rows = [*SFT_ROWS, {"prompt": "x " * 300, "completion": "y"}]
    spec = job_spec(tmp_path, tiny_model(), rows=rows, max_seq_length=64, batch_size=2)
    (found,) = of_kind(ask(tmp_path, spec), Preflighted)
    assert found.data["dropped"] == 1  # its prompt fills 64 tokens
    assert found.memory["largest_batch"]["tokens"] == found.data["max_tokens"] < 64
    assert found.data["longest_before_cut"] > 300


def test_lengths_are_counted_by_powers_of_two() -> None:
    assert histogram([1, 2, 3, 4, 5, 8, 9, 1000]) == [
        {"up_to": 1, "rows": 1},
        {"up_to": 2, "rows": 1},
        {"up_to": 4, "rows": 2},
        {"up_to": 8, "rows": 2},
        {"up_to": 16, "rows": 1},
        {"up_to": 1024, "rows": 1},
    ]


def test_a_job_that_does_not_fit_fails_before_its_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "machine_memory", lambda: 200 << 20)
    monkeypatch.setattr("llama_stack_provider_trl.recipes.build.load_model", lambda *_: pytest.fail("it was read"))
    status, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model()), estimates=True)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, Reason.does_not_fit)
    assert "the job needs about" in failed.message
    assert "does not fit in 0.20 GiB" in failed.message


def test_warn_reports_it_and_trains_and_off_checks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "machine_memory", lambda: 200 << 20)
    spec = job_spec(tmp_path, tiny_model(), preflight="warn", max_steps_per_epoch=1)
    status, events = run(tmp_path / "warn", spec, estimates=True)
    assert status == 0
    assert "does not fit in 0.20 GiB" in of_kind(events, Warned)[0].message
    monkeypatch.setattr(preflight, "estimate", lambda *_: pytest.fail("it was estimated"))
    status, events = run(tmp_path / "off", job_spec(tmp_path, tiny_model(), preflight="off", max_steps_per_epoch=1))
    assert status == 0
    assert "memory" not in of_kind(events, Prepared)[0].effective


def test_a_model_that_cannot_be_traced_is_trained_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise NotImplementedError("no fake kernel")

    monkeypatch.setattr(preflight, "estimate", broken)
    status, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model(), max_steps_per_epoch=1), estimates=True)
    assert status == 0
    assert "could not be estimated (NotImplementedError: no fake kernel)" in of_kind(events, Warned)[0].message


def test_a_busy_machine_is_a_warning_and_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 100 << 20)
    status, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model(), max_steps_per_epoch=1), estimates=True)
    assert status == 0
    assert "other programs leave 0.10 GiB" in of_kind(events, Warned)[0].message


def test_what_would_fail_the_job_fails_the_preflight_in_the_same_words(tmp_path: Path) -> None:
    events = ask(tmp_path, job_spec(tmp_path, tmp_path / "nothing"))
    (failed,) = of_kind(events, Failed)
    assert failed.reason == Reason.invalid_model
    assert not of_kind(events, Finished)
    samples = SAMPLES.model_copy(update={"max_new_tokens": 4096})
    (tmp_path / "samples").mkdir()
    (failed,) = of_kind(ask(tmp_path / "samples", job_spec(tmp_path, tiny_model(), samples=samples)), Failed)
    assert failed.reason == Reason.invalid_request
    assert "provider_options.samples.prompts[0] has" in failed.message


def test_a_full_disk_does_not_fit_either(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), "dpo", rows=DPO_ROWS, min_free_bytes=1 << 60)
    (found,) = of_kind(ask(tmp_path, spec), Preflighted)
    assert found.memory["fits"]
    assert not found.fits
    assert "free some, or keep fewer checkpoints" in found.message


@pytest.mark.parametrize(("device", "limit"), [("cpu", 1 << 20), ("cuda", 1 << 20), ("cuda", None)])
def test_a_preflight_names_the_cpu_memory_of_a_machine_and_refuses_what_exceeds_it(
    tmp_path: Path, device: str, limit: int | None
) -> None:
    spec = job_spec(tmp_path, tiny_model())
    (found,) = of_kind(
        ask(tmp_path, spec, device=device, memory_bytes=1 << 40, machine_memory_bytes=limit), Preflighted
    )
    assert (found.memory["machine_limit_bytes"], found.memory["ranks_per_machine"]) == (limit, 1)
    assert found.memory["machine_bytes"] > 0
    assert found.memory["page_cache_bytes"] > 0
    assert found.fits == (limit is None)
    assert ("does not fit in 0.00 GiB" in found.message) == (limit is not None)


def test_a_job_whose_machine_has_too_little_memory_fails_before_its_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "device_limit", lambda *_: 1 << 40)
    monkeypatch.setattr(preflight, "machine_memory", lambda: 200 << 20)
    monkeypatch.setattr("llama_stack_provider_trl.recipes.build.load_model", lambda *_: pytest.fail("it was read"))
    _, events = run(tmp_path / "run", job_spec(tmp_path, tiny_model()), estimates=True)
    (failed,) = of_kind(events, Failed)
    assert failed.reason == Reason.does_not_fit
    assert "of CPU memory on each machine, for 1 of its ranks" in failed.message
