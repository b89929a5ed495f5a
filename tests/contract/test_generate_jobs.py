"""Jobs that answer the prompts of a dataset, on a service that is killed with its trainers in between."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.census import census
from tests.contract.crashing import CrashingService
from tests.contract.generate_requests import GENERATE, answers_of, request
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import JOBS, running, running_service
from tests.contract.stack import DPO, SFT, Json, poll
from tests.required import IN_FULL, in_full

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]


@pytest.mark.parametrize("ranks", [2, *in_full(1)])
def test_answers_are_the_same_bytes_whatever_was_killed_in_between(tmp_path: Path, ranks: int) -> None:
    """16 answers in batches of 4, of one process and of `ranks`. The trainer dies while it writes the second batch,
    which is half written then; its runner dies with all its processes, and the service, after the third; the service
    dies again once the dataset is registered, before the job is completed."""
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        server.submit(GENERATE, request("undisturbed", "plain"))
        server.wait("undisturbed", "completed", timeout=server.patience)
        server.arm("answering-4", "kill")
        server.arm("step-12", "hold")
        server.submit(GENERATE, request("killed", "answers"), options={"retries": 3, "nproc_per_node": ranks})
        server.wait_taken("step-12", server.patience)

        def progress_of() -> Json | None:
            found: Json = server.status("killed")["resources_allocated"]["progress"]
            return found if found["total_steps"] else None

        progress = poll(progress_of, "its progress is read", server.patience)
        assert (progress["total_steps"], progress["percent"] is not None) == (16, True)
        assert server.store.get("killed").attempt == 2
        assert [server.store.get(name).spec.ranks for name in ("undisturbed", "killed")] == [1, ranks]
        server.kill()
        for process in census(server.data_dir).running:
            os.kill(process.pid, signal.SIGKILL)
        server.arm("supervisor-result-kept", "kill")
        server.launch()
        server.wait_killed()
        assert server.recorded("killed") == "in_progress"
        server.launch()
        server.wait_until_it_answers()
        server.wait("killed", "completed", timeout=server.patience)
        digest, lines = answers_of(server, "killed")
        assert digest == answers_of(server, "undisturbed")[0]
        assert [(line["row"], line["sample"]) for line in lines] == [(row, n) for row in range(8) for n in range(2)]
        found = server.get("/datasets/answers").json()
        assert found["metadata"]["job_uuid"] == "killed"
        assert found["metadata"]["sha256"] == server.get("/datasets/plain").json()["metadata"]["sha256"]
        result = server.status("killed")["resources_allocated"]["result"]
        assert result["answers"]["count"] == 16
        assert result["dataset"]["num_rows"] == found["metadata"]["num_rows"] > 0


def placed_of(output: str) -> list[Json]:
    """The lines of the jobs of a pipeline."""
    lines = map(json.loads, output.splitlines())
    return [line for line in lines if line["event"]["type"] == "placed"]


@IN_FULL
def test_a_student_is_tuned_on_answers_that_are_promised_by_the_job_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a pipeline: an adapter is trained, answers, and the answers train another model."""
    teacher = {**sft("unused", "rows"), "algorithm_config": LORA}
    student = sft("unused", "job:ask")
    for one in (teacher, student):
        del one["job_uuid"]
    ask = {"kind": "generate", "model": "job:teach", "dataset_id": "rows", "max_new_tokens": 8}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"jobs": {"learn": student, "ask": ask, "teach": teacher}}))
    with running_service(tmp_path) as service:
        monkeypatch.setenv("TRL_SERVICE_URL", service.url)
        service.register("rows", QUESTIONS)
        assert main(["run", str(file), "--json", "--interval", "0.2"]) == 0, capsys.readouterr().err
        placed = placed_of(capsys.readouterr().out)
        assert [one["event"]["name"] for one in placed] == ["teach", "ask", "learn"]
        teach, generated, learned = (one["job_uuid"] for one in placed)
        config = service.status(generated)["resources_allocated"]["effective_config"]
        assert config["adapter"]["model"].endswith(f"{teach}/final")
        made = service.get(f"/datasets/{generated}").json()["metadata"]
        assert 0 < made["num_rows"] <= len(QUESTIONS)
        run = json.loads((tmp_path / "data" / "jobs" / learned / "attempts" / "1" / "spec.json").read_text())
        found = run["job"]["data"]["dataset"]
        assert (found["sha256"], found["num_rows"]) == (made["sha256"], made["num_rows"])
        assert main(["run", str(file), "--json", "--interval", "0.2"]) == 0
        again = placed_of(capsys.readouterr().out)
        assert [one["event"]["is_new"] for one in again] == [False, False, False]


def test_rows_of_another_job_and_bad_requests_are_refused_by_name(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        service.register("rows", QUESTIONS)
        service.register("pairs", PAIRS, dataset_type="preference")
        service.register("texts", [{"text": "no prompt"}])
        client = TrlClient(service.url)
        service.arm("started", "hold")
        assert client.generate(request("ask", "answers")) == "ask"
        assert client.generate(request("ask", "answers")) == "ask"
        service.wait_taken("started", 60)
        promised = sft("learn", "job:ask")
        data = promised["training_config"]["data_config"]
        tuned: Json = {"type": "dpo", "beta": 0.1}
        named_like_a_job: Json = {"dataset_id": "job:x", "purpose": "post-training/messages"}
        named_like_a_job["source"] = {"type": "rows", "rows": QUESTIONS}
        for path, body, sentence in (
            (GENERATE, request("a", "rows"), "output.dataset_id='rows' is not supported: a dataset of this name is"),
            (GENERATE, request("a", "answers"), "job 'ask' is to make a dataset of this name: choose another one"),
            (GENERATE, request("a", "job:x"), "output.dataset_id='job:x' is not supported: job:NAME means the rows"),
            (GENERATE, request("a", "b", dataset_id="gone"), "dataset_id='gone' is not supported: no dataset"),
            (
                GENERATE,
                request("a", "b", dataset_id="texts"),
                "dataset 'texts', row 0: found the columns text",
            ),
            (GENERATE, request("a", "b", dataset_id="job:ask"), "dataset_id='job:ask' is not supported: its rows are"),
            (GENERATE, request("a", "b", engine="vllm"), "engine='vllm' is not supported: this service has no vLLM"),
            (GENERATE, request("a", "b", temperature=0), "samples_per_prompt=2 is not supported: at temperature 0"),
            (GENERATE, request("a", "b", model="job:typo"), "model='job:typo' is not supported: there is no such job"),
            (
                GENERATE,
                request("a", "b", model="job:ask"),
                "model='job:ask' is not supported: job 'ask' does not",
            ),
            (GENERATE, request("a", "b", dtype="int3"), "dtype='int3' is not supported"),
            (GENERATE, request("a", "b", top_k=3), "top_k"),
            (GENERATE, request("a", "b", provider_options={"lr_scheduler": "linear"}), "provider_options.lr_scheduler"),
            (GENERATE, request("ask", "other"), "job 'ask' exists already"),
            (SFT, sft("learn", "job:typo"), "there is no job 'typo' here"),
            (SFT, {**promised, "training_config": with_data(promised, train_split_percentage=0.5)}, "not known yet"),
            (SFT, {**promised, "training_config": with_data(promised, validation_dataset_id="job:ask")}, "evaluate on"),
            (DPO, {**promised, "algorithm_config": tuned}, "DPO needs chosen and rejected"),
            (DPO, {**promised, "algorithm_config": {"type": "orpo"}}, "ORPO needs chosen and rejected"),
            ("/datasets", {**named_like_a_job, "dataset_id": "answers"}, "job 'ask' is to make a dataset of the name"),
            ("/datasets", named_like_a_job, "dataset_id='job:x' is not supported: job:NAME means the rows"),
            ("/post-training/preflight", promised, "its rows are made by that job"),
        ):
            answer = service.post(path, body)
            assert answer.status_code in (400, 409), (body, answer.text)
            assert sentence in answer.json()["detail"], answer.text
        assert data["dataset_id"] == "job:ask"
        service.submit(SFT, promised)
        assert service.status("learn")["resources_allocated"]["after"][0]["job_uuid"] == "ask"
        assert service.delete(f"{JOBS}/ask").status_code == 409
        service.go("started")
        service.wait("ask", "completed")
        assert service.get("/datasets/answers").json()["metadata"]["job_uuid"] == "ask"
        service.wait("learn", "completed")


def with_data(body: Json, **changes: object) -> Json:
    training = body["training_config"]
    return {**training, "data_config": {**training["data_config"], **changes}}
