"""Scripts that are written for OpenAI's fine-tuning API, with its SDK: only `base_url` is another."""

from __future__ import annotations

import csv
import hashlib
import io
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import APIConnectionError, APIStatusError, BadRequestError, ConflictError, NotFoundError, OpenAI

from tests.contract.openai_files import CHATS, lines, uploaded
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import poll
from tests.judges import saying
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
Json = dict[str, Any]
NAME = "gpt-4o-mini-2024-07-18"
PREFERENCES = [
    {
        "input": {"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}]},
        "preferred_output": [{"role": "assistant", "content": f"It is {2 * n}."}],
        "non_preferred_output": [{"role": "assistant", "content": "I would rather not say."}],
    }
    for n in range(10)
]


SMALL = {"num_generations": 2, "max_completion_length": 8}
SAME = {
    "type": "string_check", "name": "same", "operation": "like",
    "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("openai")
    models = {NAME: {"model": str(tiny_model()), "learning_rate": 5e-3, "batch_size": 5, "lora_rank": 4, **SMALL}}
    models["judge"] = {"model": str(saying(root / "judge", "1"))}
    with running_service(root, openai={"models": models}) as service:
        yield service


@pytest.fixture
def client(service: TrainingService) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/openai/v1", api_key="none", _strict_response_validation=True) as client:
        yield client


def ended(client: OpenAI, job_id: str) -> Any:
    poll(lambda: client.fine_tuning.jobs.retrieve(job_id).finished_at is not None, f"{job_id} has ended", timeout=120)
    return client.fine_tuning.jobs.retrieve(job_id)


def test_a_script_trains_follows_reads_and_deletes(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(lines(CHATS))
    with path.open("rb") as file:
        training = client.files.create(file=file, purpose="fine-tune")
    assert (training.filename, training.bytes, training.status) == ("chats.jsonl", path.stat().st_size, "processed")
    client.files.wait_for_processing(training.id, poll_interval=0.1)
    assert client.files.content(training.id).read() == path.read_bytes()
    validation = uploaded(client, CHATS[:2])

    job = client.fine_tuning.jobs.create(
        model=NAME,
        training_file=training.id,
        validation_file=validation,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"}
            },
        },
        suffix="tutor",
        seed=7,
        metadata={"team": "a"},
    )
    assert (job.status, job.seed, job.metadata) == ("queued", 7, {"team": "a"})
    assert (job.training_file, job.validation_file) == (training.id, validation)
    hyperparameters = job.hyperparameters
    assert (hyperparameters.n_epochs, hyperparameters.batch_size) == (2, 5)

    seen: dict[str, Any] = {}
    while True:  # as scripts follow a job
        is_over = client.fine_tuning.jobs.retrieve(job.id).status in ("succeeded", "failed", "cancelled")
        for event in client.fine_tuning.jobs.list_events(job.id, limit=3):
            seen.setdefault(event.id, event)
        if is_over:
            break
        time.sleep(0.3)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    assert job.fine_tuned_model == f"ft:{NAME}:trl:tutor:{job.id}"
    assert (job.trained_tokens or 0) > 100
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=4))
    assert [event.id for event in events] == list(dict.fromkeys(event.id for event in events))
    assert {event.id for event in events} == seen.keys()
    assert events[0].message == "The job has successfully completed"
    assert events[-1].message.startswith(f"Created fine-tuning job {job.id}")
    steps = [event.data for event in reversed(events) if event.type == "metrics"]
    assert [one["step"] for one in steps if "train_loss" in one] == [1, 2, 3, 4]  # type: ignore[index, operator]
    assert any("valid_loss" in one for one in steps)  # type: ignore[operator]

    (result,) = job.result_files
    found = client.files.retrieve(result)
    content = client.files.content(result).read()
    assert (found.purpose, found.bytes) == ("fine-tune-results", len(content))
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert list(rows[0]) == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[-1]["valid_loss"]) < float(rows[1]["valid_loss"])
    assert all(0 <= float(row["train_accuracy"]) <= 1 for row in rows)
    assert [file.id for file in client.files.list(purpose="fine-tune-results")] == [result]

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [one.step_number for one in checkpoints][:2] == sorted(
        (one.step_number for one in checkpoints), reverse=True
    )[:2]
    assert checkpoints[0].metrics.full_valid_loss == pytest.approx(float(rows[-1]["valid_loss"]), rel=1e-4)
    early = next(one for one in checkpoints if one.step_number == 2)
    for model in (job.fine_tuned_model, early.fine_tuned_model_checkpoint):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Try."}], max_tokens=4
        )
        assert answer.model == model

    tuned = early.fine_tuned_model_checkpoint
    permissions = client.fine_tuning.checkpoints.permissions
    listed = getattr(permissions, "list", permissions.retrieve)  # that of openai 1
    assert listed(tuned).data == []
    with pytest.raises(BadRequestError, match="a service has no projects"):
        permissions.create(tuned, project_ids=["proj_a"])
    with pytest.raises(NotFoundError, match="no permission 'cp_a'"):
        permissions.delete("cp_a", fine_tuned_model_checkpoint=tuned)
    with pytest.raises(NotFoundError, match="no model"):
        listed(f"{tuned}9")
    assert client.models.retrieve(tuned).id == tuned
    with pytest.raises(BadRequestError, match="is a checkpoint"):
        client.models.delete(tuned)
    for call in (
        client.models.retrieve,
        lambda name: client.fine_tuning.jobs.create(model=name, training_file=training.id),
    ):
        with pytest.raises(NotFoundError, match="ckpt-step-99"):
            call(f"{job.fine_tuned_model}:ckpt-step-99")
    on = client.fine_tuning.jobs.create(model=tuned, training_file=training.id, hyperparameters={"n_epochs": 1})
    assert on.model == tuned
    assert ended(client, on.id).status == "succeeded"

    more = client.fine_tuning.jobs.create(
        model=job.fine_tuned_model, training_file=training.id, hyperparameters={"n_epochs": 1}
    )
    assert client.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model
    with pytest.raises(ConflictError, match="wait for it or use its checkpoint"):
        client.models.delete(job.fine_tuned_model)
    client.fine_tuning.jobs.cancel(more.id)
    assert ended(client, more.id).status == "cancelled"
    assert job.fine_tuned_model in [one.id for one in client.models.list()]
    assert client.models.delete(job.fine_tuned_model).deleted
    assert job.fine_tuned_model not in [one.id for one in client.models.list()]
    with pytest.raises(NotFoundError, match="no model"):
        client.models.retrieve(job.fine_tuned_model)
    assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
    assert client.files.delete(training.id).deleted
    with pytest.raises(NotFoundError) as gone:
        client.files.retrieve(training.id)
    assert gone.value.param == "id"


def test_a_dpo_job_pauses_resumes_and_is_listed_newest_first(client: OpenAI, service: TrainingService) -> None:
    file = uploaded(client, PREFERENCES)
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 8}}}
    old = client.fine_tuning.jobs.create(model=NAME, training_file=file, method=method, metadata={"team": "b"})
    new = client.fine_tuning.jobs.create(model=NAME, training_file=file, method=method, metadata={"team": "b"})
    assert old.method
    assert old.method.dpo
    assert old.method.dpo.hyperparameters
    assert old.method.dpo.hyperparameters.beta == 0.2
    listed = [job.id for job in client.fine_tuning.jobs.list(limit=1, metadata={"team": "b"})]
    assert listed == [new.id, old.id]
    assert client.fine_tuning.jobs.pause(new.id).status == "queued"
    assert service.state(new.id) == "paused"
    assert client.fine_tuning.jobs.resume(new.id).status == "queued"
    client.fine_tuning.jobs.cancel(new.id)
    assert ended(client, new.id).status == "cancelled"
    with pytest.raises(ConflictError):
        client.fine_tuning.jobs.resume(new.id)
    done = ended(client, old.id)
    assert done.status == "succeeded", done.error
    config = service.status(old.id)["resources_allocated"]["effective_config"]
    assert (config["method"]["beta"], config["lora"]["rank"]) == (0.2, 4)


def _reinforcement(grader: Json, **hyperparameters: Any) -> Any:
    block = {"grader": grader, "hyperparameters": hyperparameters}
    return {"method": {"type": "reinforcement", "reinforcement": block}}


def _with_format(response_format: Json) -> Any:
    given = _reinforcement(SAME)
    given["method"]["reinforcement"]["response_format"] = response_format
    return given


def test_a_job_is_rewarded_by_a_grader(client: OpenAI, service: TrainingService) -> None:
    file = uploaded(
        client, [{"messages": row["messages"][:1], "answer": row["messages"][-1]["content"]} for row in CHATS]
    )
    given = _reinforcement(SAME, n_epochs=1, batch_size=2, compute_multiplier=2)
    job = client.fine_tuning.jobs.create(model=NAME, training_file=file, **given)
    done = ended(client, job.id)
    assert done.status == "succeeded", done.error
    assert done.method.reinforcement.grader.operation == "like"
    assert done.method.reinforcement.hyperparameters.compute_multiplier == 2
    method = service.status(job.id)["resources_allocated"]["effective_config"]["method"]
    assert (method["num_generations"], method["max_completion_length"]) == (4, 8)


def test_a_file_arrives_in_parts(client: OpenAI) -> None:
    content = lines(CHATS)
    whole = client.uploads.upload_file_chunked(
        file=content,  # openai 1 does not close the file of a path
        filename="chats.jsonl",
        bytes=len(content),
        mime_type="text/jsonl",
        purpose="fine-tune",
        part_size=500,
        md5=hashlib.md5(content).hexdigest(),
    )
    assert (whole.status, whole.bytes, whole.expires_at - whole.created_at) == ("completed", len(content), 3600)
    assert whole.file
    assert (whole.file.filename, whole.file.bytes, whole.file.purpose) == ("chats.jsonl", len(content), "fine-tune")
    assert client.files.content(whole.file.id).read() == content
    assert whole.file.id in [file.id for file in client.files.list(purpose="fine-tune")]
    job = client.fine_tuning.jobs.create(model=NAME, training_file=whole.file.id)
    client.fine_tuning.jobs.cancel(job.id)

    create = client.uploads.create
    upload = create(bytes=9, filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune")
    assert (upload.status, upload.file) == ("pending", None)
    part = client.uploads.parts.create(upload.id, data=b"{}\n{}\n")
    assert part.upload_id == upload.id
    with pytest.raises(BadRequestError, match="6 bytes, and 9 were declared") as wrong:
        client.uploads.complete(upload.id, part_ids=[part.id])
    assert wrong.value.param == "part_ids"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(BadRequestError, match="it is cancelled"):
        client.uploads.parts.create(upload.id, data=b"{}\n")
    with pytest.raises(NotFoundError) as gone:
        client.uploads.cancel("upload_gone")
    assert gone.value.param == "upload_id"
    with pytest.raises(BadRequestError, match="purpose"):
        create(bytes=9, filename="a", mime_type="text/plain", purpose="vision")
    with pytest.raises(APIStatusError, match="max_upload_mb") as large:
        create(bytes=1 << 50, filename="a", mime_type="text/plain", purpose="fine-tune")
    assert large.value.status_code == 413


def test_a_job_is_rewarded_by_models_that_grade(client: OpenAI, service: TrainingService) -> None:
    file = uploaded(client, [{"messages": row["messages"][:1]} for row in CHATS])
    asked = {"model": "judge", "input": [{"role": "user", "content": f"Is {SAME['input']} right?"}]}
    score = {"type": "score_model", "name": "score", **asked, "sampling_params": {"max_completions_tokens": 8}}
    multi = {"type": "multi", "name": "both", "graders": score, "calculate_output": "1 + 2 * score"}
    job = client.fine_tuning.jobs.create(model=NAME, training_file=file, **_reinforcement(multi, n_epochs=1))
    done = ended(client, job.id)
    assert done.status == "succeeded", done.error
    assert done.method.reinforcement.grader.graders.model == "judge"
    points = service.get(f"/post-training/jobs/{job.id}/metrics").json()["data"]
    assert {point["metrics"]["rewards/grader/mean"] for point in points if point["kind"] == "train"} == {3.0}
    # The result of a job grades another one, which waits for it.
    tuned = {**score, "model": f"ft:{NAME}:trl::{job.id}"}
    other = client.fine_tuning.jobs.create(model=NAME, training_file=file, **_reinforcement(tuned, n_epochs=1))
    assert ended(client, other.id).status == "succeeded"
    assert client.fine_tuning.jobs.retrieve(other.id).method.reinforcement.grader.model == tuned["model"]
    assert "no reward, which counts as 0" in " ".join(
        one.message for one in client.fine_tuning.jobs.list_events(other.id)
    )
    with pytest.raises(NotFoundError, match=f"name one of {NAME}, judge, a fine-tuned model") as refused:
        client.fine_tuning.jobs.create(model=NAME, training_file=file, **_reinforcement({**score, "model": "gpt-9"}))
    assert refused.value.param == "method.reinforcement.grader.model"


def test_what_cannot_be_honoured_is_refused_by_its_field(client: OpenAI) -> None:
    file = uploaded(client, CHATS)
    create = client.fine_tuning.jobs.create
    with pytest.raises(NotFoundError, match=f"the models are {NAME}, judge") as refused:
        create(model="gpt-5", training_file=file)
    assert (refused.value.param, refused.value.code, refused.value.type) == (
        "model",
        "model_not_found",
        "invalid_request_error",
    )
    bad = uploaded(client, [*CHATS, {"messages": [{"role": "user", "content": "a"}]}])
    broken = client.files.create(
        file=("broken.jsonl", lines(CHATS) + b'{"messages": "\xff"}\n'), purpose="fine-tune"
    ).id
    for changes, param, text in (
        ({"training_file": "file-gone"}, "training_file", "no file 'file-gone'"),
        ({"training_file": bad}, "training_file", "row 10"),
        ({"training_file": broken}, "training_file", "UTF-8"),
        ({"training_file": uploaded(client, PREFERENCES)}, "training_file", 'was the method {"type": "dpo"} meant'),
        ({"training_file": file, "validation_file": bad}, "validation_file", "row 10"),
        (_reinforcement({}), "method.reinforcement.grader", "type"),
        (_reinforcement({**SAME, "type": "endpoint"}), "method.reinforcement.grader", "endpoint"),
        (_reinforcement({**SAME, "reference": "{{item.gone}}"}), "training_file", "gone"),
        (_reinforcement(SAME, eval_samples=4), "method.reinforcement.hyperparameters.eval_samples", "eval_samples"),
        (_reinforcement(SAME, reasoning_effort="high"), "method.reinforcement.hyperparameters.reasoning_effort", ""),
        (_with_format({"type": "json_object"}), "method.reinforcement.response_format", "response_format"),
        (_reinforcement({**SAME, "input": "{{sample.output_tools}}"}), "method.reinforcement.grader", "calls of tools"),
        ({"suffix": "a b"}, "suffix", "suffix"),
        (
            {"hyperparameters": {"n_epochs": "three"}},
            "hyperparameters.n_epochs",
            "hyperparameters.n_epochs='three' is not supported: Input should be a valid integer or 'auto'",
        ),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations", "trackers"),
        ({"extra_body": {"price": 1}}, "price", "price"),
    ):
        with pytest.raises(BadRequestError) as wrong:
            create(**{"model": NAME, "training_file": file, **changes})  # type: ignore[arg-type]
        assert wrong.value.param == param, wrong.value
        assert text in str(wrong.value)
    with pytest.raises(BadRequestError, match="purpose='assistants' is not supported"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    with pytest.raises(BadRequestError, match="expires_after"):
        client.files.create(
            file=("a", b"{}"), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    with pytest.raises(BadRequestError, match="the name of the file"):
        client.files.create(file=("a\u202eb", b"{}"), purpose="fine-tune")
    with pytest.raises(BadRequestError, match="empty"):
        client.files.create(file=("a.jsonl", b""), purpose="fine-tune")


def test_a_body_that_breaks_off_leaves_no_file(client: OpenAI, service: TrainingService) -> None:
    before = sorted(path.name for path in (service.data_dir / "datasets").iterdir())
    known = [file.id for file in client.files.list()]
    head = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    file = head.format("file", '; filename="x.jsonl"') + '{"messages": []}\n'
    for body in (file, file + "\r\n--b--\r\n", file + "\r\n" + head.format("purpose", "") + "evals\r\n--b--\r\n"):
        answer = service.session.post(
            f"{service.url}/openai/v1/files",
            data=body.encode(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
            timeout=30,
        )
        assert answer.status_code == 400, answer.text
    assert sorted(path.name for path in (service.data_dir / "datasets").iterdir()) == before
    assert [one.id for one in client.files.list()] == known


def test_a_repeated_create_is_one_job_and_an_equal_one_another(client: OpenAI, service: TrainingService) -> None:
    body = {"model": NAME, "training_file": uploaded(client, CHATS), "metadata": {"n": "1"}}

    def create(retry: int | str) -> requests.Response:
        return service.post(
            "/fine_tuning/jobs", body, prefix="/openai/v1", headers={"x-stainless-retry-count": str(retry)}
        )

    first, repeated, another = (create(retry).json()["id"] for retry in (0, 1, 0))
    assert first == repeated != another
    assert create(2).json()["id"] == another
    assert client.fine_tuning.jobs.retrieve(another).status == "queued"  # the answer was not lost
    assert create(1).json()["id"] == first
    for name in (first, another):
        client.fine_tuning.jobs.cancel(name)
    wanted = create(1).json()  # by a script that runs again, whose first try did not arrive
    assert wanted["id"] not in (first, another)
    odd = create("\u00b2").json()["id"]  # a digit, of which no number is made
    assert odd not in (first, another, wanted["id"])
    assert wanted["status"] == "queued"
    client.fine_tuning.jobs.cancel(wanted["id"])


def test_lists_refuse_what_they_do_not_have_in_terms_of_this_api(client: OpenAI, service: TrainingService) -> None:
    jobs = "/fine_tuning/jobs"
    job = client.fine_tuning.jobs.create(model=NAME, training_file=uploaded(client, CHATS))
    client.fine_tuning.jobs.cancel(job.id)
    for path, status, param in (
        (f"{jobs}?status=running", 400, "status"),
        (f"{jobs}?metadata=null", 400, "metadata"),
        (f"{jobs}?after=ftjob-nope", 404, "after"),
        (f"{jobs}/ftjob-nope", 404, "fine_tuning_job_id"),
        (f"{jobs}/{job.id}/events?metadata[a]=b", 400, "metadata[a]"),
        (f"{jobs}/{job.id}/events?after=nope", 400, "after"),
        (f"{jobs}/{job.id}/events?after=ftevent-nope", 400, "after"),
        (f"{jobs}/{job.id}/events?after=ftevent-9-9", 400, "after"),
        (f"{jobs}/{job.id}/checkpoints?order=asc", 400, "order"),
        ("/files?page=2", 400, "page"),
    ):
        answer = service.session.get(f"{service.url}/openai/v1{path}", timeout=30)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (path, error)
        assert "/v1/post-training" not in error["message"]
        assert "cursor" not in error["message"]
    assert service.session.get(f"{service.url}/openai/v1{jobs}?metadata[a]=b&limit=1", timeout=30).json()["data"] == []


def test_files_are_listed_in_pages_of_either_order(client: OpenAI) -> None:
    mine = [uploaded(client, CHATS, f"{n}.jsonl") for n in range(3)]
    newest = [file.id for file in client.files.list(limit=2, purpose="fine-tune")]
    assert newest[:3] == mine[::-1]
    assert [file.id for file in client.files.list(limit=1, order="asc", purpose="fine-tune")] == newest[::-1]
    page = client.files.list(limit=1, after=mine[2])
    assert [file.id for file in page.data] == [mine[1]]


def test_a_kill_leaves_no_half_file_and_loses_no_job(tmp_path: Path) -> None:
    """In the middle of an upload and of a training: the client's poll continues, and what it repeats is there."""
    models = {NAME: {"model": str(tiny_model()), "lora_rank": 4}}
    with running_service(tmp_path, openai={"models": models}) as service:
        url = f"{service.url}/openai/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            body = {"model": NAME, "training_file": uploaded(client, CHATS), "hyperparameters": {"n_epochs": 20}}
            job = client.fine_tuning.jobs.create(**body)  # type: ignore[arg-type]
            poll(
                lambda: any(one.type == "metrics" for one in client.fine_tuning.jobs.list_events(job.id).data),
                "it trains",
                timeout=60,
            )
            before = [event.id for event in client.fine_tuning.jobs.list_events(job.id)]
            content = lines(CHATS[:2])
            upload = client.uploads.create(
                bytes=len(content), filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune"
            )
            parts = [client.uploads.parts.create(upload.id, data=content[:100]).id]
            head = '--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n{"a": 1}\n'
            with socket.create_connection(("127.0.0.1", service.port)) as half:
                half.sendall(
                    b"POST /openai/v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n"
                    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + head.encode() + b"x" * 200_000
                )
                poll(lambda: [*(service.data_dir / "datasets").glob(".incoming-*")], "the upload arrives", timeout=20)
                service.kill()
            service.start()
            assert [file.id for file in client.files.list(purpose="fine-tune")] == [body["training_file"]]
            assert not [*(service.data_dir / "datasets").glob(".incoming-*")]
            parts.append(client.uploads.parts.create(upload.id, data=content[100:]).id)
            whole = client.uploads.complete(upload.id, part_ids=parts).file
            assert whole
            assert client.files.content(whole.id).read() == content
            repeated = client.fine_tuning.jobs.create(**body, extra_headers={"x-stainless-retry-count": "1"})  # type: ignore[arg-type]
            assert repeated.id == job.id
            assert ended(client, job.id).status == "succeeded"
            events = [event.id for event in client.fine_tuning.jobs.list_events(job.id)]
            assert len(events) == len({*events})
            assert [event for event in events if event in before] == before


def test_a_kill_between_the_rows_and_the_file_loses_no_part_however_small_the_quota(tmp_path: Path) -> None:
    content = b"".join(b'{"text": "%06d"}\n' % number for number in range(40_000))
    assert len(content) > (1 << 20) / 2  # stored rows and declared bytes are more than the quota together
    with (
        running_service(tmp_path, openai={"models": {}}, max_stored_mb=1) as service,
        OpenAI(base_url=f"{service.url}/openai/v1", api_key="none", max_retries=0) as client,
    ):
        size = len(content)
        upload = client.uploads.create(bytes=size, filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune").id
        parts = [client.uploads.parts.create(upload, data=content[:500_000]).id]
        service.kill()
        service.start()
        parts.append(client.uploads.parts.create(upload, data=content[500_000:]).id)
        service.arm("upload-counted", "kill")
        with pytest.raises(APIConnectionError):
            client.uploads.complete(upload, part_ids=parts)
        poll(lambda: not service.runs(), "the service is killed", timeout=20, pause=0.05)
        service.start()
        whole = client.uploads.complete(upload, part_ids=parts).file
        assert whole
        assert client.files.content(whole.id).read() == content
