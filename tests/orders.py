"""An order as the service gives it to a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl_remote.wire import Stage, TaskOrder

AA, BB = "aa" * 32, "bb" * 32
"""Digests."""


def nested(job: dict[str, Any]) -> dict[str, Any]:
    """Fields of a job and of its parts, by their names in `JobSpec.flat`, as the JSON of a JobSpec has them."""
    rest, found = dict(job), dict[str, Any]()
    for part, kind in JobSpec.parts().items():
        own = {name: rest.pop(name) for name in kind.model_fields if name in rest}
        if part == "source" and "model_path" in rest:
            own["path"] = rest.pop("model_path")
        if own:
            found[part] = own
    return {**rest, **found}


def spec(**changes: Any) -> dict[str, Any]:
    """The beginning of an AttemptSpec: what has to do with places. `job`: by the names of `JobSpec.flat`."""
    job = {
        "job_uuid": "job",
        "model": "org/model",
        "checkpoint_dir": "/service/checkpoints/job",
        "dataset": {"dataset_id": "d", "path": f"/service/datasets/{AA}.jsonl", "sha256": AA, "num_rows": 2},
        "validation": None,
        "resume_from": None,
        "best_checkpoint": None,
        "min_free_bytes": 0,
        "failover": True,
    }
    return {
        "job": nested(job | changes.pop("job", {})),
        "attempt": 1,
        "run_dir": "/service/jobs/job/attempts/1",
        "resume_from": None,
        "fall_back_to": [],
        **changes,
    }


def order(stage: Stage = Stage.prepare, **changes: Any) -> TaskOrder:
    fields = {"task_id": "job-1", "job_uuid": "job", "attempt": 1, "stage": stage, "devices": ("cpu",), "spec": spec()}
    return TaskOrder.model_validate({**fields, **changes})


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
