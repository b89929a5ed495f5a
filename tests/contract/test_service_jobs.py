"""Jobs on the training service, from POST to downloaded checkpoints, with `requests` and with llama-stack-client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_stack_client import BadRequestError, LlamaStackClient, NotFoundError

from llama_stack_provider_trl.system.ownership import Ownership, record
from llama_stack_provider_trl.system.process import FileLock
from llama_stack_provider_trl_remote.cli.main import main
from tests.contract.payloads import (
    LORA,
    PAIRS,
    QUESTIONS,
    assert_original_example_is_honoured,
    original_example,
    promised,
)
from tests.contract.service import JOBS, TrainingService, refusal, running_service
from tests.contract.stack import DPO, ENDED, Json, poll
from tests.required import FULL
from tests.tiny import REPOSITORY, tiny_model
from tests.tutorials import SERVICE, commands
from tests.tutorials import job as job_of

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def dpo(service: TrainingService) -> Json:
    """The promised payload, ended; the jobs of the other fixtures wait behind it."""
    pairs = service.register("pairs", PAIRS, dataset_type="preference")
    job = service.submit(DPO, promised("promised", pairs))
    return service.wait(job, "completed")


@pytest.fixture(scope="module")
def client(service: TrainingService) -> LlamaStackClient:
    return LlamaStackClient(base_url=service.url, max_retries=0)


@pytest.fixture(scope="module")
def queue(service: TrainingService, dpo: Json) -> Iterator[list[str]]:
    """Three jobs that are held back, while another job has the device."""
    jobs = [f"held-{number}" for number in range(3)]
    device = FileLock(service.root / "locks" / "cpu.lock")
    poll(lambda: device.acquire("a test"), "the device is free", timeout=20)
    for job in jobs:
        service.submit(DPO, promised(job, "pairs"), provider_options={"priority": "low"})
        service.post(f"{JOBS}/{job}/pause")
        service.wait_state(job, "paused")
    yield jobs
    for job in jobs:
        service.post(f"{JOBS}/{job}/cancel")
    device.release()


def test_the_promised_payload_completes_and_every_checkpoint_loads(service: TrainingService, dpo: Json) -> None:
    from transformers import AutoModelForCausalLM

    steps = [(c["identifier"], c["epoch"]) for c in dpo["checkpoints"]]
    assert steps == [("my-dpo-model-checkpoint-2", 1), ("my-dpo-model-checkpoint-4", 2), ("my-dpo-model-final", 3)]
    assert {Path(c["path"]).parent for c in dpo["checkpoints"]} == {
        service.data_dir.resolve() / "checkpoints/results/promised"
    }
    for checkpoint in dpo["checkpoints"]:
        AutoModelForCausalLM.from_pretrained(checkpoint["path"])
    effective = dpo["resources_allocated"]["effective_config"]
    requested = {"beta": 0.1, "loss_type": "sigmoid", "reward_scale": 1.0, "reward_clip": 5.0}
    assert requested.items() <= effective["method"].items()
    assert effective["dataset"]["num_rows"] == len(PAIRS)


def test_the_commands_of_the_tutorial_end_with_an_adapter_that_was_fetched_and_answers(
    service: TrainingService,
    dpo: Json,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job_of(SERVICE) | {"model": str(tiny_model())}))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_SERVICE_URL", service.url)
    done = commands(SERVICE)
    *steps, chat = done
    assert [words[1] for words in steps] == ["add", "preflight", "submit", "watch", "logs", "pull"]
    for words in steps:
        assert main(words) == 0, words
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()
    assert chat[:2] == ["chat", "sft-1"]
    if FULL:  # tests/contract/test_chats.py asks results in each run
        capsys.readouterr()
        assert main(chat) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("prefix", ["/v1", "/v1alpha"])
def test_both_path_styles_under_both_prefixes_answer_the_same(service: TrainingService, dpo: Json, prefix: str) -> None:
    for what in ("status", "artifacts"):
        by_query = service.get(f"/post-training/job/{what}", prefix=prefix, job_uuid="promised").json()
        by_path = service.get(f"{JOBS}/promised/{what}", prefix=prefix).json()
        assert by_query == by_path
        assert by_query["checkpoints"] == dpo["checkpoints"]


def test_the_example_of_the_original_providers_runs_as_it_stands(service: TrainingService) -> None:
    rows = service.register("three", PAIRS[:3])
    job = service.submit(DPO, original_example("original", rows))
    assert_original_example_is_honoured(service.wait(job, "completed"))


def test_the_status_has_the_configuration_on_request_only(service: TrainingService, dpo: Json) -> None:
    for path, name in (("/post-training/job/status", {"job_uuid": "promised"}), (f"{JOBS}/promised/status", {})):
        short = service.get(path, **name).json()
        whole = service.get(path, **name, config="true").json()
        assert whole["resources_allocated"].pop("effective_config")["job_uuid"] == "promised"
        assert whole == short


def test_the_same_body_again_is_the_same_job_and_another_is_a_conflict(service: TrainingService, dpo: Json) -> None:
    assert service.post(DPO, promised("promised", "pairs")).status_code == 200
    assert service.status("promised") == dpo
    other = promised("promised", "pairs") | {"provider_options": {"seed": 1}}
    assert "choose another job_uuid" in refusal(service.post(DPO, other), 409)


def test_a_digest_in_the_request_is_not_part_of_what_makes_it_the_same(service: TrainingService, dpo: Json) -> None:
    _, digest = service.put_blob(PAIRS)
    again = service.post(DPO, promised("promised", "pairs") | {"dataset_digests": {"pairs": digest}})
    assert again.status_code == 200
    assert service.status("promised") == dpo


def test_events_are_paged_by_cursor_without_gap_or_repetition(service: TrainingService, dpo: Json) -> None:
    whole = service.get(f"{JOBS}/promised/events").json()
    types = [line["event"]["type"] for line in whole["data"]]
    assert (types[0], types[-1], types.count("progress")) == ("started", "finished", 6)
    assert whole["next"] == whole["data"][-1]["id"]
    pages: list[Json] = []
    cursor = ""
    while page := service.get(f"{JOBS}/promised/events", after=cursor, limit=4).json():
        pages += page["data"]
        cursor = page["next"]
        if not page["data"]:
            break
    assert pages == whole["data"]


@pytest.mark.parametrize("cursor", ["x", "1-3", "1-99999999", "7-0", "-1-2"])
def test_a_cursor_that_is_none_is_refused(service: TrainingService, dpo: Json, cursor: str) -> None:
    assert "after=" in refusal(service.get(f"{JOBS}/promised/events", after=cursor))


def test_a_stream_of_an_ended_job_brings_every_event_and_ends(service: TrainingService, dpo: Json) -> None:
    whole = service.get(f"{JOBS}/promised/events").json()["data"]
    answer = service.get(f"{JOBS}/promised/events", headers={"Accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = [block.splitlines() for block in answer.text.strip().split("\n\n")]
    assert [event[0] for event in events] == [f"id: {line['id']}" for line in whole]
    assert [json.loads(event[1].removeprefix("data: ")) for event in events] == [line["event"] for line in whole]
    assert end[0] == "event: end"
    headers = {"Accept": "text/event-stream", "Last-Event-ID": whole[-2]["id"]}
    rest = service.get(f"{JOBS}/promised/events", headers=headers)
    assert rest.text.count("id: ") == 1


def test_metrics_hold_every_step_and_can_be_requested_from_one_on(service: TrainingService, dpo: Json) -> None:
    points = service.get(f"{JOBS}/promised/metrics").json()["data"]
    assert [(point["kind"], point["step"]) for point in points] == [("train", step) for step in range(1, 7)]
    assert all(point["metrics"]["loss"] > 0 for point in points)
    later = service.get(f"{JOBS}/promised/metrics", after=4).json()["data"]
    assert later == points[4:]


def test_logs_are_text_and_a_rank_that_is_not_there_is_not_found(service: TrainingService, dpo: Json) -> None:
    answer = service.get(f"{JOBS}/promised/logs", rank=0, tail=3)
    assert answer.headers["content-type"].startswith("text/plain")
    assert len(answer.text.splitlines()) <= 3
    assert "logs of: 0" in refusal(service.get(f"{JOBS}/promised/logs", rank=7), 404)
    assert "rank=" in refusal(service.get(f"{JOBS}/promised/logs", rank="../0"))


def test_a_checkpoint_can_be_pulled_file_by_file_and_in_parts(service: TrainingService, dpo: Json) -> None:
    final = dpo["checkpoints"][-1]
    listed = service.get(f"{JOBS}/promised/checkpoints").json()["data"]
    assert listed == dpo["checkpoints"]
    by_name = service.get(f"{JOBS}/promised/checkpoints/final").json()
    shown = service.get(f"{JOBS}/promised/checkpoints/{final['identifier']}").json()
    assert shown == by_name
    for file in shown["files"]:
        content = (Path(final["path"]) / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    weights = f"{JOBS}/promised/checkpoints/final/files/model.safetensors"
    whole = service.get(weights)
    etag = whole.headers["etag"]
    assert etag == f'"{hashlib.sha256(whole.content).hexdigest()}"'
    size = len(whole.content)
    for wanted, start, stop in [("0-9", 0, 10), (f"{size - 5}-", size - 5, size), ("-7", size - 7, size)]:
        part = service.get(weights, headers={"Range": f"bytes={wanted}", "If-Range": etag})
        assert (part.status_code, part.content) == (206, whole.content[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    beyond = service.get(weights, headers={"Range": f"bytes={size}-"})
    assert str(size) in refusal(beyond, 416)
    assert beyond.headers["content-range"] == f"bytes */{size}"
    for ignored in ({"Range": "bytes=9-1"}, {"Range": "pages=1-2"}, {"Range": "bytes=0-1", "If-Range": '"other"'}):
        assert service.get(weights, headers=ignored).status_code == 200


def test_a_download_never_leaves_the_checkpoint(service: TrainingService, dpo: Json) -> None:
    final = Path(dpo["checkpoints"][-1]["path"])
    secret = service.root / "secret.txt"
    secret.write_text("secret")
    (final / "link").symlink_to(secret)
    (final / "inside").symlink_to("config.json")
    base = f"{service.url}/v1{JOBS}/promised/checkpoints/final"
    try:
        for path in ("link", "%2e%2e/checkpoint-2/config.json", "%2e%2e%2f%2e%2e%2fsecret.txt", "%2fetc%2fpasswd"):
            answer = service.session.get(f"{base}/files/{path}", timeout=30)
            assert answer.status_code in (400, 404), path
            assert "secret" not in answer.text.replace("secret.txt", "")
        assert service.session.get(f"{base}/files/inside", timeout=30).status_code == 200
        assert "link" not in [
            file["path"] for file in service.get(f"{JOBS}/promised/checkpoints/final").json()["files"]
        ]
    finally:
        (final / "link").unlink()
        (final / "inside").unlink()


def test_llama_stack_client_drives_the_service_without_a_llama_stack(
    service: TrainingService, client: LlamaStackClient, dpo: Json
) -> None:
    registered = client.datasets.register(
        dataset_id="client-rows", purpose="post-training/messages", source={"type": "rows", "rows": QUESTIONS}
    )
    assert registered.identifier == "client-rows"
    assert client.datasets.retrieve("client-rows").metadata["num_rows"] == len(QUESTIONS)
    assert "client-rows" in [dataset.identifier for dataset in client.datasets.list()]
    training: Any = {
        "n_epochs": 1,
        "gradient_accumulation_steps": 1,
        "data_config": {"dataset_id": "client-rows", "batch_size": 4, "shuffle": True, "data_format": "instruct"},
        "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.01, "num_warmup_steps": 1},
    }
    post_training = client.alpha.post_training
    common: Any = {"hyperparam_search_config": {}, "logger_config": {}, "training_config": training}
    tuned = post_training.supervised_fine_tune(
        job_uuid="client-sft", model=str(tiny_model()), algorithm_config=LORA, **common
    )
    assert tuned.job_uuid == "client-sft"
    training["data_config"] = training["data_config"] | {"dataset_id": "pairs"}
    post_training.preference_optimize(
        job_uuid="client-dpo",
        finetuned_model="client-named",
        algorithm_config={"beta": 0.2},
        extra_body={"model": str(tiny_model())},  # as the README has it: the call has no such argument
        **common,
    )
    queued = post_training.job.status(job_uuid="client-dpo", extra_query={"config": True}).resources_allocated
    assert queued["effective_config"]["model"] == str(tiny_model())
    assert [job.job_uuid for job in post_training.job.list()][-2:] == ["client-sft", "client-dpo"]
    post_training.job.cancel(job_uuid="client-dpo")
    poll(lambda: post_training.job.status(job_uuid="client-dpo").status == "cancelled", "it is cancelled", timeout=20)
    poll(lambda: post_training.job.status(job_uuid="client-sft").status in ENDED, "the client's job ends", timeout=60)
    status = post_training.job.status(job_uuid="client-sft")
    assert status.status == "completed", status.resources_allocated
    artifacts = post_training.job.artifacts(job_uuid="client-sft")
    assert [c.identifier for c in artifacts.checkpoints] == ["client-sft-final"]
    client.datasets.unregister("client-rows")
    with pytest.raises(NotFoundError, match="client-rows"):
        client.datasets.retrieve("client-rows")
    with pytest.raises(NotFoundError, match="job 'nobody' not found"):
        post_training.job.status(job_uuid="nobody")
    training["data_config"] = {**training["data_config"], "data_format": "parquet"}
    with pytest.raises(BadRequestError, match="data_format='parquet' is not supported"):
        post_training.supervised_fine_tune(job_uuid="refused", model=str(tiny_model()), **common)


def test_the_list_is_filtered_and_paged(service: TrainingService, queue: list[str]) -> None:
    everything = [job["job_uuid"] for job in service.get(JOBS).json()["data"]]
    assert everything[-3:] == queue
    assert service.get(JOBS).json()["data"][0] == {"job_uuid": everything[0]}
    assert [job["job_uuid"] for job in service.get(JOBS, status="paused").json()["data"]] == queue
    assert [job["job_uuid"] for job in service.get(JOBS, status="scheduled").json()["data"]] == queue
    first = service.get(JOBS, status="paused", limit=2).json()
    assert ([job["job_uuid"] for job in first["data"]], first["next"]) == (queue[:2], queue[1])
    last = service.get(JOBS, status="paused", limit=2, after=first["next"]).json()
    assert ([job["job_uuid"] for job in last["data"]], last["next"]) == (queue[2:], None)
    row = service.get(JOBS, full=True, status="paused", limit=1).json()["data"][0]
    assert (row["job_uuid"], row["state"], row["status"], row["priority"]) == (queue[0], "paused", "scheduled", -1)
    assert "expected one of" in refusal(service.get(JOBS, status="asleep"))
    assert "not found" in refusal(service.get(JOBS, after="nobody"), 404)


def test_a_paused_job_is_queued_when_it_is_resumed_and_a_cancelled_one_is_not(
    service: TrainingService, queue: list[str]
) -> None:
    answer = service.post(f"{JOBS}/{queue[1]}/resume").json()
    assert answer["resources_allocated"]["state"] in ("scheduled", "launching")
    assert "cancel it" in refusal(service.delete(f"{JOBS}/{queue[1]}"), 409)
    assert service.post(f"{JOBS}/{queue[1]}/cancel").text == "null"
    assert service.post("/post-training/job/cancel", {"job_uuid": queue[2]}).text == "null"
    assert service.post(f"/post-training/job/cancel?job_uuid={queue[2]}").text == "null"
    assert service.state(queue[2]) == "cancelled"
    assert "submit it again" in refusal(service.post(f"{JOBS}/{queue[2]}/resume"), 409)
    service.wait(queue[1], "cancelled")


def test_the_service_stays_small(service: TrainingService, dpo: Json) -> None:
    assert service.rss_mib() < 85
    maps = Path(f"/proc/{service.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_a_job_is_deleted_with_its_files(service: TrainingService, dpo: Json) -> None:
    final = Path(dpo["checkpoints"][-1]["path"])
    assert record(final.parent).exists()
    assert service.delete(f"{JOBS}/promised", checkpoints=True).status_code == 204
    assert not final.exists()
    assert not record(final.parent).exists()
    assert not (service.data_dir / "jobs" / "promised").exists()
    assert "not found" in refusal(service.get(f"{JOBS}/promised/status"), 404)
    assert "not found" in refusal(service.delete(f"{JOBS}/promised"), 404)


def test_a_checkpoint_directory_of_another_data_directory_is_refused_and_outlives_a_delete(
    service: TrainingService, tmp_path: Path
) -> None:
    job, base = "elsewhere", service.data_dir / "checkpoints" / "results"
    service.submit(DPO, promised(job, service.register("elsewhere", PAIRS)))
    service.post(f"{JOBS}/{job}/cancel")
    service.wait(job, "cancelled")
    record(base / job).unlink(missing_ok=True)
    for name in (job, "taken"):
        Ownership(tmp_path / "other").claim(base / name, name)
        (base / name / "final").mkdir(parents=True, exist_ok=True)
    assert f"of another data directory, {tmp_path}/other" in refusal(service.post(DPO, promised("taken", "pairs")), 409)
    assert service.delete(f"{JOBS}/{job}", checkpoints=True).status_code == 204
    assert (base / job / "final").is_dir()
    assert record(base / job).exists()
