"""An order as the service gives it to a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.job import AttemptSpec, DpoSpec, JobSpec
from llama_stack_provider_trl_remote.wire import Stage, TaskOrder
from tests.fakes import job_spec

AA, BB = "aa" * 32, "bb" * 32
"""Digests."""


def spec(**changes: Any) -> dict[str, Any]:
    """An AttemptSpec as JSON. `job`: fields of the job, and of its parts, which are not validated."""
    rows = {"dataset_id": "d", "path": f"/service/datasets/{AA}.jsonl", "sha256": AA, "num_rows": 2}
    given = {
        "job_uuid": "job",
        "model": "org/model",
        "checkpoint_dir": "/service/checkpoints/job",
        "dataset": rows,
        "method": DpoSpec(),
    }
    attempt = AttemptSpec(job=job_spec(**given), attempt=1, run_dir=Path("/service/jobs/job/attempts/1"))
    found = attempt.model_dump(mode="json")
    for name, value in changes.pop("job", {}).items():
        part = next((part for part, kind in JobSpec.parts().items() if name in kind.model_fields), None)
        (found["job"] if part is None else found["job"][part])[name] = value
    return {**found, **changes}


def order(stage: Stage = Stage.prepare, **changes: Any) -> TaskOrder:
    fields = {"task_id": "job-1", "job_uuid": "job", "attempt": 1, "stage": stage, "devices": ("cpu",), "spec": spec()}
    return TaskOrder.model_validate({**fields, **changes})


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
