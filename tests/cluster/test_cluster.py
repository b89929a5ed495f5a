"""A service and its worker nodes on machines of their own, started by the shipped scripts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.contract.payloads import PAIRS, Json
from tests.contract.stack import DPO
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


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


def prepared(bed: Bed, *workers: str) -> None:
    """A service on `head` with the pairs, and these nodes."""
    head = bed.machine("head")
    tiny_model()
    head.serve()
    for name in workers:
        bed.machine(name).join(head)
    bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 60)
    body = {"dataset_id": "pairs", "purpose": "post-training/messages", "source": {"type": "rows", "rows": PAIRS}}
    assert bed.post("/datasets", body).ok
    bed.wait_for_nodes(*workers)


def submit(bed: Bed, body: Json) -> str:
    answer = bed.post(DPO, body)
    assert answer.status_code == 200, answer.text
    return str(body["job_uuid"])


def test_two_machines_train_what_two_ranks_of_one_do(bed: Bed) -> None:
    prepared(bed, "a", "b")
    head, a, b = bed.machines
    submit(bed, dpo("pair", 20, resources={"nodes": 2, "labels": {}}, nproc_per_node=1))
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, a.log_tail(), b.log_tail())
    placed = status["resources_allocated"]["device"].split(",")
    assert sorted(placed) == ["a/cpu", "b/cpu"]  # rank 0 is not on the service's machine
    assert status["resources_allocated"]["attempt"] == 1
    submit(bed, dpo("single", 20, nproc_per_node=2))
    assert bed.wait_for_end("single")["status"] == "completed"
    expected, found = bed.losses("single"), bed.losses("pair")
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step
    exported = head.data_dir / "pair" / "pair" / "final"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(exported).config.num_hidden_layers == 2
    saved = [event["path"] for event in bed.events("pair") if event["type"] == "checkpoint"]
    assert saved == [
        str(exported.with_name(name)) for name in (*(f"checkpoint-{n}" for n in (4, 8, 12, 16, 20)), "final")
    ]
    assert not list(a.root.rglob("*.safetensors")) + list(b.root.rglob("*.safetensors"))  # nothing stays on the workers
    assert (head.data_dir / "jobs" / "pair" / "attempts" / "1" / "rank-1.log").exists()
    bed.nothing_trains()
