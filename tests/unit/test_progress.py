from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobProgress, JobRecord
from llama_stack_provider_trl.specs.events import Progress, ProgressValues
from llama_stack_provider_trl.stack.responses import resources
from tests.fakes import job_spec

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_the_progress_of_a_status_has_the_keys_of_the_reference_in_its_order() -> None:
    job = JobRecord(job_spec(), JobState.scheduled, 0, 0, datetime(2026, 1, 1, tzinfo=UTC))
    (row,) = [line for line in REFERENCE.read_text().splitlines() if line.startswith("| `progress` |")]
    assert list(resources(job)["progress"]) == re.findall(r"`(\w+)`", row.split("|")[2])


def test_the_progress_of_a_status_has_every_value_of_the_last_point() -> None:
    point = Progress(
        step=3,
        epoch=0.5,
        metrics={"loss": 2.0, "tokens_per_second": 9.5},
        peak_memory_bytes=7,
        tokens_seen=64,
        rank_memory_bytes=(5, 6),
        rank_peak_memory_bytes=(7, 8),
    )
    progress = JobProgress(**point.values().model_dump(), step=3, total_steps=6, eta_seconds=1.5)
    job = JobRecord(job_spec(), JobState.in_progress, 1, 0, datetime(2026, 1, 1, tzinfo=UTC), progress=progress)
    shown = resources(job)["progress"]
    assert (shown["step"], shown["total_steps"], shown["percent"], shown["eta_seconds"]) == (3, 6, 50.0, 1.5)
    assert (shown["epoch"], shown["loss"], shown["tokens_per_second"]) == (0.5, 2.0, 9.5)
    assert (shown["peak_memory_bytes"], shown["tokens_seen"]) == (7, 64)
    assert (shown["rank_memory_bytes"], shown["rank_peak_memory_bytes"]) == ((5, 6), (7, 8))


def test_no_value_of_progress_has_the_name_of_a_figure_that_the_status_computes() -> None:
    assert not {"step", "total_steps", "percent", "eta_seconds"} & ProgressValues.model_fields.keys()
