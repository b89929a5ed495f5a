"""Jobs that begin with what other jobs have made, on nodes that had nothing of it: whatever machine is lost, they make
the bytes of an undisturbed job on the service's machine."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl.system.files import sha256_of
from tests.cluster.asking import WORKERS, ask, with_questions
from tests.cluster.bed import Bed
from tests.cluster.jobs import completed, has_saved, machines_of, prepared, ready, resources_of
from tests.contract.payloads import LORA
from tests.contract.stack import DPO, SFT, Json
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), IN_FULL]

STEPS = 4


def job(job_uuid: str, model: str, rows: str, algorithm: Json | None, **options: Any) -> Json:
    training = {"n_epochs": 1, "max_steps_per_epoch": STEPS, "learning_rate": 1e-3, "dtype": "fp32"}
    body: Json = {
        "job_uuid": job_uuid,
        "model": model,
        "checkpoint_dir": job_uuid,
        "training_config": {**training, "data_config": {"dataset_id": rows, "batch_size": 1, "shuffle": True}},
        "provider_options": {"save_steps": 1, "retries": 3, "nproc_per_node": 1, "preflight": "off", **options},
    }
    return body if algorithm is None else {**body, "algorithm_config": algorithm}


def of_answers(job_uuid: str, **options: Any) -> Json:
    """Continues the adapter of a job on the answers of another."""
    return job(job_uuid, "job:adapter-1", "job:answers-1", None, adapter="continue", **options)


def of_a_teacher(job_uuid: str, **options: Any) -> Json:
    """A student that learns the distributions of a job's model."""
    algorithm = {"type": "distillation", "teacher": "job:teacher-1", "max_completion_length": 8}
    return job(job_uuid, str(tiny_model()), "questions", algorithm, **options)


def submit(bed: Bed, route: str, body: Json) -> None:
    answer = bed.post(route, body)
    assert answer.status_code == 200, answer.text


def weights_of(bed: Bed, job_uuid: str) -> dict[str, str]:
    """sha256 of the weights of its result on the service's machine, by name."""
    (final,) = (bed.machines[0].data_dir / "checkpoints").glob(f"**/{job_uuid}/final")
    found = {file.name: sha256_of(file) for file in final.glob("*.safetensors")}
    assert found
    return found


def test_a_node_fetches_the_adapter_the_rows_and_the_teacher_of_a_job(bed: Bed) -> None:
    prepared(bed)
    with_questions(bed)
    head = bed.machines[0]
    submit(bed, SFT, job("adapter-1", str(tiny_model()), "questions", LORA))
    submit(bed, SFT, job("teacher-1", str(tiny_model()), "questions", None))
    ask(bed, "generate", "answers-1", {"after": ["teacher-1"]}, output={"dataset_id": "answers"})
    submit(bed, SFT, of_answers("plain-1"))
    submit(bed, DPO, of_a_teacher("plain-2"))
    for name in ("plain-1", "plain-2"):
        completed(bed, name)
    for name in ("a", "b", "c"):
        bed.machine(name).join(head, "--label", "rack=7")
    ready(bed, "a", "b", "c")
    for route, body in (
        (SFT, of_answers("moved-1", resources=WORKERS)),
        (DPO, of_a_teacher("moved-2", resources=WORKERS)),
    ):
        name = str(body["job_uuid"])
        stay = bed.hold("step-3")
        submit(bed, route, body)
        bed.wait(lambda name=name: has_saved(bed, name, 2), "the service has the second checkpoint", 300)
        lost = machines_of(bed, resources_of(bed, name))[0]
        assert lost.name in ("a", "b", "c")
        lost.turn_off()
        found = completed(bed, name)
        assert [attempt["reason"] for attempt in found["attempts"]] == ["node_lost", None]
        assert found["attempts"][1]["start_step"] == 2
        assert machines_of(bed, found)[0] not in (lost, head)
        plain = f"plain-{name[-1]}"
        assert bed.losses(name) == bed.losses(plain)
        assert weights_of(bed, name) == weights_of(bed, plain)
        stay()
    bed.nothing_is_left()


def of_each_kind(prefix: str, options: Json) -> list[tuple[str, Json]]:
    """Jobs that read models of other jobs, with their routes: a merge, an ensemble, an evaluation with a judge, and
    GRPO with a reward model."""
    teacher, adapter = {"model": "job:teacher-1"}, {"model": "job:adapter-1"}
    scale = {"scale": [1, 5], "at_least": 3, "max_new_tokens": 8}
    judge = {"type": "judge", "name": "good", "model": "job:teacher-1", **scale}
    judged = {"model": "job:adapter-1", "dataset_id": "questions", "checks": [judge], "max_new_tokens": 8}
    algorithm = {
        "type": "grpo",
        "rewards": [{"model": "job:judge-1"}],
        "num_generations": 2,
        "max_completion_length": 4,
    }
    rewarded = job(f"{prefix}-rewarded", str(tiny_model()), "questions", algorithm, **options)
    others: dict[str, tuple[str, Json]] = {
        "merged": ("merge", {"models": [teacher, {"model": str(tiny_model())}]}),
        "averaged": ("evaluate", {"models": [teacher, adapter], "dataset_id": "questions", "dtype": "fp32"}),
        "judged": ("evaluate", {**judged, "dtype": "fp32"}),
    }
    return [
        *(
            (f"/post-training/{kind}", {**body, "job_uuid": f"{prefix}-{name}", "provider_options": options})
            for name, (kind, body) in others.items()
        ),
        (DPO, rewarded),
    ]


def test_a_node_merges_measures_judges_and_rewards_with_models_of_jobs(bed: Bed) -> None:
    prepared(bed)
    with_questions(bed)
    submit(bed, SFT, job("adapter-1", str(tiny_model()), "questions", LORA))
    submit(bed, SFT, job("teacher-1", str(tiny_model()), "questions", None))
    submit(bed, DPO, job("judge-1", str(tiny_model()), "pairs", {"type": "reward"}))
    for route, body in of_each_kind("plain", {}):
        submit(bed, route, body)
    expected = {name: completed(bed, f"plain-{name}") for name in ("merged", "averaged", "judged", "rewarded")}
    bed.machine("a").join(bed.machines[0], "--label", "rack=7")
    ready(bed, "a")
    for route, body in of_each_kind("moved", {"resources": WORKERS}):
        submit(bed, route, body)
    for name, plain in expected.items():
        found = completed(bed, f"moved-{name}")
        assert machines_of(bed, found)[0].name == "a"
        assert without_paths(found["result"]) == without_paths(plain["result"])
        if name in ("merged", "rewarded"):
            assert weights_of(bed, f"moved-{name}") == weights_of(bed, f"plain-{name}")
    bed.nothing_is_left()


def without_paths(result: Json | None) -> Json | None:
    """A result without the place of its answers."""
    if result is None or "answers" not in result:
        return result
    return {**result, "answers": {**result["answers"], "path": ""}}
