"""The answers of jobs that have answered prompts, over HTTP, in Python and as a command."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.work import CheckedAnswering, EvaluateSpec, GenerateSpec, Work
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.client import ServiceClient
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.contract.dashboard import dashboard
from tests.contract.service import JOBS, TrainingService, running_service
from tests.fakes import job_spec

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0, "top_p": 1, "seed": 1, "samples_per_prompt": 1}
ASKS = GenerateSpec(output_dataset_id="made", **SAMPLING)
CHECKS = EvaluateSpec(answers=CheckedAnswering(checks=(AnswerCheck(type="json"),), **SAMPLING))
LINES = [{"row": n, "sample": 0, "prompt": [], "text": "a\u2028b\x85\n", "passed": {"json": n == 1}} for n in range(3)]
CONTENT = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in LINES)
LARGE = 96 << 20


def add(store: Store, root: Path, name: str, work: Work | None, content: bytes | None, state: JobState) -> Path:
    """A job that has ended, with its answers."""
    directory = root / "checkpoints" / name
    directory.mkdir(parents=True)
    if content is not None:
        (directory / "answers.jsonl").write_bytes(content)
    store.add_job(job_spec(name, checkpoint_dir=directory, work=work), "digest")
    store.launch(name, 1, "cpu", root / "jobs" / name / "attempts" / "1")
    store.transition(name, 1, JobState.launching, state)
    return directory


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("answers")
    data = root / "data"
    data.mkdir()
    (root / "secret").write_text('{"secret": 1}\n')
    store = Store(data / DATABASE)
    add(store, data, "generated", ASKS, CONTENT, JobState.completed)
    add(store, data, "checked", CHECKS, CONTENT, JobState.completed)
    add(store, data, "cut", CHECKS, CONTENT + b'{"row": 3, "te', JobState.failed)
    add(store, data, "part", CHECKS, b'{"row": 0, "te', JobState.failed)
    add(store, data, "gone", ASKS, None, JobState.completed)
    add(store, data, "trained", None, CONTENT, JobState.completed)
    add(store, data, "measured", EvaluateSpec(), CONTENT, JobState.completed)
    add(store, data, "large", ASKS, (b'"' + b"x" * 1021 + b'"\n') * (LARGE >> 10), JobState.completed)
    add(store, data, "linked", ASKS, None, JobState.failed).joinpath("answers.jsonl").symlink_to(root / "secret")
    for name, work in (("waiting", ASKS), ("dropped", CHECKS)):
        store.add_job(job_spec(name, checkpoint_dir=data / "checkpoints" / name, work=work), "digest")
    kept = data / "checkpoints" / "dropped"  # of a deleted job of this name
    kept.mkdir()
    (kept / "answers.jsonl").write_bytes(CONTENT)
    add(store, root, "foreign", CHECKS, CONTENT, JobState.failed)  # outside of the data directory, without a record
    store.request_pause("waiting")
    store.request_cancel("dropped")
    store.close()
    with running_service(root) as service:
        yield service


@pytest.mark.parametrize("name", ["generated", "checked", "cut"])
def test_the_answers_are_the_whole_lines_of_the_file(service: TrainingService, name: str) -> None:
    answer = service.get(f"{JOBS}/{name}/answers")
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert answer.headers["ETag"] == f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    assert list(TrlClient(service.url).answers(name)) == LINES
    part = requests.get(f"{service.url}/v1{JOBS}/{name}/answers", headers={"Range": "bytes=10-"}, timeout=30)
    assert (part.status_code, part.content) == (206, CONTENT[10:])


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("unknown", 404, "job 'unknown' not found"),
        ("trained", 404, "job 'trained' trains and answers no prompts: generate jobs and evaluations with checks do"),
        ("measured", 404, "job 'measured' is of kind evaluate without checks and answers no prompts"),
        ("waiting", 409, "job 'waiting' is paused: its answers can be read once it has ended"),
        ("dropped", 404, "job 'dropped' is cancelled and has no answers: it ended before the first batch"),
        ("foreign", 404, "job 'foreign' is failed and has no answers"),
        ("part", 404, "job 'part' is failed and has no answers"),
        ("linked", 404, "job 'linked' is failed and has no answers"),
        ("gone", 404, "the answers of job 'gone' are gone: /"),
    ],
)
def test_a_job_without_answers_is_refused_by_its_reason(
    service: TrainingService, name: str, status: int, reason: str
) -> None:
    answer = service.get(f"{JOBS}/{name}/answers")
    assert (answer.status_code, reason in answer.json()["detail"]) == (status, True), answer.text
    with pytest.raises(ServiceRefusal) as caught:
        next(iter(TrlClient(service.url).answers(name)))
    assert caught.value.status == status


@pytest.mark.parametrize(("etag", "begin"), [(hashlib.sha256(CONTENT).hexdigest(), 10), ("other", 0)])
def test_a_download_is_continued_in_the_same_file_alone(service: TrainingService, etag: str, begin: int) -> None:
    async def found() -> tuple[int, bytes, str]:
        path = f"/v1{JOBS}/checked/answers"
        async with ServiceClient(service.url).download(path, 10, f'"{etag}"') as (start, pieces, tag):
            return start, b"".join([piece async for piece in pieces]), tag

    assert asyncio.run(found()) == (begin, CONTENT[begin:], f'"{hashlib.sha256(CONTENT).hexdigest()}"')


def test_answers_are_streamed_and_never_in_memory_as_a_whole(service: TrainingService) -> None:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    before, largest, size = process.memory_info().rss, 0, 0
    with requests.get(f"{service.url}/v1{JOBS}/large/answers", stream=True, timeout=60) as answer:
        for piece in answer.iter_content(1 << 20):
            size += len(piece)
            largest = max(largest, process.memory_info().rss)
    assert size == LARGE
    assert largest - before < 24 << 20
    found = TrlClient(service.url).answers("large")
    assert next(found) == "x" * 1021
    found.close()  # read no further


def test_the_dashboard_of_an_inline_provider_serves_the_answers_of_its_evaluations(tmp_path: Path) -> None:
    store = Store(tmp_path / DATABASE)
    add(store, tmp_path, "checked", CHECKS, CONTENT, JobState.completed)
    store.close()
    with dashboard(tmp_path) as address:
        assert requests.get(f"{address}/v1{JOBS}/checked/answers", timeout=30).content == CONTENT


def test_the_command_prints_lines_that_do_nothing_to_a_terminal_and_writes_files(
    service: TrainingService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["jobs", "answers", "checked", "--url", service.url]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "\x85" not in out
    assert [json.loads(line) for line in out.rstrip("\n").split("\n")] == LINES
    target = tmp_path / "found.jsonl"
    assert main([*words, "--output", str(target)]) == 0
    assert target.read_bytes() == CONTENT
    assert "3 answers" in capsys.readouterr().out
    assert main(["jobs", "answers", "trained", "--url", service.url, "--output", str(tmp_path / "none")]) != 0
    assert "answers no prompts" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.jsonl"]
