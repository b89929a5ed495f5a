"""Requests to a service that the tests of several machines share, and the fields that they check."""

from __future__ import annotations

from typing import Any

from tests.cluster.bed import Bed, Machine
from tests.contract.payloads import PAIRS
from tests.contract.stack import DPO, Json
from tests.tiny import tiny_model


def dpo(job_uuid: str, steps: int, **options: Any) -> Json:
    """A job of two ranks, fp32, one pair per rank and step."""
    return {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "finetuned_model": "tuned",
        "checkpoint_dir": job_uuid,
        "algorithm_config": {"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
        "training_config": {
            "n_epochs": (steps + 3) // 4,
            "max_steps_per_epoch": 4,
            "learning_rate": 1e-3,
            "dtype": "fp32",
            "data_config": {"dataset_id": "pairs", "batch_size": 1, "shuffle": True},
        },
        "provider_options": {"save_steps": 4, "preflight": "off", **options},
    }


def prepared(bed: Bed, *workers: str, disk_mb: int = 0, **settings: Any) -> None:
    """A service on `head` with the pairs, and these nodes.

    Args:
        disk_mb: of each machine's own disk, which may be filled up to its end.
        settings: of the service.
    """
    head = bed.machine("head")
    tiny_model()
    head.disk_mb = disk_mb
    head.serve({**settings, **({"min_free_disk_mb": 0} if disk_mb else {})})
    for name in workers:
        worker = bed.machine(name)
        worker.disk_mb = disk_mb
        worker.join(head, "--label", "rack=7")
    ready(bed, *workers)


def ready(bed: Bed, *workers: str) -> None:
    """Until the service has the pairs and these nodes."""
    bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 240)
    body = {"dataset_id": "pairs", "purpose": "post-training/messages", "source": {"type": "rows", "rows": PAIRS}}
    assert bed.post("/datasets", body).ok
    bed.wait_for_nodes(*workers)


def submit(bed: Bed, body: Json) -> str:
    answer = bed.post(DPO, body)
    assert answer.status_code == 200, answer.text
    return str(body["job_uuid"])


def machines_of(bed: Bed, resources: Json) -> list[Machine]:
    """Those that a job is on, rank 0's first."""
    names = [place.rpartition("/")[0] or "head" for place in resources["device"].split(",")]
    return [next(machine for machine in bed.machines if machine.name == name) for name in names]


def resources_of(bed: Bed, job_uuid: str) -> Json:
    return dict(bed.status(job_uuid)["resources_allocated"])


def has_saved(bed: Bed, job_uuid: str, step: int) -> Json | None:
    """Once the service lists that checkpoint: what the job has."""
    status = bed.status(job_uuid)
    names = [checkpoint["path"].rpartition("/")[2] for checkpoint in status["checkpoints"]]
    return dict(status["resources_allocated"]) if f"checkpoint-{step}" in names else None


def trains(bed: Bed, job_uuid: str, attempt: int = 1, beyond: int = 0) -> Json | None:
    resources = resources_of(bed, job_uuid)
    step = (resources.get("progress") or {}).get("step") or 0
    return (
        resources if resources["state"] == "in_progress" and resources["attempt"] == attempt and step > beyond else None
    )


def completed(bed: Bed, job_uuid: str) -> Json:
    status = bed.wait_for_end(job_uuid)
    assert status["status"] == "completed", status
    return dict(status["resources_allocated"])
