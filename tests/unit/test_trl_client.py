"""`TrlClient` and `AsyncTrlClient`, against a service that is played on loopback."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import llama_stack_provider_trl_remote as package
from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobNotFound, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl_remote import AsyncTrlClient, JobEvent, TrlClient, UploadedRows
from tests.fake_service import FakeService, fake_service, ndjson, status
from tests.tiny import REPOSITORY

ROWS = [{"prompt": "Two and two?", "completion": "Four."}, {"prompt": "And three?", "completion": "Six."}]
DIGEST = sha256(ndjson(ROWS)).hexdigest()
EVENTS = [(f"1-{n}", {"type": "progress", "step": n, "text": "x" * 300_000 * (n == 2)}) for n in range(1, 6)]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    monkeypatch.delenv("TRL_SERVICE_TOKEN", raising=False)
    with fake_service() as service:
        yield service


@pytest.fixture
def client(service: FakeService) -> TrlClient:
    return TrlClient(service.url)


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Python's own handler of SIGINT, which a process that a shell starts in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_package_exports_the_clients_without_importing_them_for_everything_else() -> None:
    script = """
import sys
import llama_stack_provider_trl_remote as package
before = {"aiohttp", "pydantic"} & set(sys.modules)
from llama_stack_provider_trl_remote import AsyncTrlClient, JobEvent, TrlClient, UploadedRows
print(sorted(before), sorted({"torch", "matplotlib", "plotly", "llama_stack", "fastapi"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"
    with pytest.raises(AttributeError, match="has no attribute 'Client'"):
        _ = package.Client


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = inspect.getmembers(kind, lambda one: inspect.isfunction(one) and not one.__name__.startswith("_"))
        return {
            name: [str(p.replace(annotation="")) for p in inspect.signature(one).parameters.values()]
            for name, one in public
        }

    assert methods(TrlClient) == methods(AsyncTrlClient)
    page = (REPOSITORY / "docs" / "reference" / "remote.md").read_text()
    table = page.split("<!-- python -->")[1].split("<!-- /python -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(definitions(TrlClient))


def definitions(kind: type) -> list[str]:
    """Its public methods, in their order."""
    return [name for name, one in vars(kind).items() if inspect.isfunction(one) and not name.startswith("_")]


def test_rows_are_uploaded_from_a_file_or_as_they_are(client: TrlClient, service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "my rows.jsonl"
    file.write_bytes(ndjson(ROWS))
    by_content = f"my-rows-{DIGEST[:12]}"
    assert client.upload(file) == UploadedRows(by_content, 2, DIGEST)
    assert client.upload(str(file), "mine") == UploadedRows("mine", 2, DIGEST)
    assert client.upload(iter(ROWS)).dataset_id == f"rows-{DIGEST[:12]}"
    assert service.seen[f"PUT /v1/blobs/{DIGEST}"] == 1
    assert [body["dataset_id"] for _, body in service.posted] == [by_content, "mine", f"rows-{DIGEST[:12]}"]


def test_bad_rows_are_refused_before_anything_is_sent(client: TrlClient, service: FakeService, tmp_path: Path) -> None:
    with pytest.raises(InvalidRows, match="row 1"):
        client.upload([{"a": 1}, 5])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=r"expected a name that ends in"):
        client.upload(tmp_path / "rows.xlsx")
    with pytest.raises(FileNotFoundError):
        client.upload(tmp_path / "missing.jsonl")
    assert not service.seen


@pytest.mark.parametrize(
    ("body", "algorithm", "call"),
    [
        ({}, None, "supervised-fine-tune"),
        ({"algorithm_config": {"type": "dpo"}}, None, "preference-optimize"),
        ({}, "dpo", "preference-optimize"),
    ],
)
def test_a_job_is_submitted_to_the_call_of_its_algorithm(
    client: TrlClient, service: FakeService, body: dict[str, object], algorithm: str | None, call: str
) -> None:
    assert client.submit({"job_uuid": "one", **body}, algorithm) == "one"  # type: ignore[arg-type]
    assert service.posted == [(f"post-training/{call}", {"job_uuid": "one", **body})]


def test_wait_returns_the_last_status_over_an_absence_of_the_service(client: TrlClient, service: FakeService) -> None:
    service.jobs["one"] = [status("one"), status("one", "in_progress"), status("one", "failed")]
    seen: list[str] = []
    notes: list[str] = []

    def on_status(found: dict[str, object]) -> None:
        seen.append(str(found["status"]))
        if len(seen) == 1:
            service.trouble = [500, 500]

    last = client.wait("one", interval=0.01, on_status=on_status, note=notes.append)
    assert last["status"] == "failed"
    assert seen == ["scheduled", "in_progress", "failed"]
    assert len(notes) == 1
    assert "the sentence of a 500" in notes[0]


def test_wait_ends_after_its_timeout_and_the_job_is_left_alone(client: TrlClient, service: FakeService) -> None:
    service.jobs["one"] = [status("one")]
    with pytest.raises(TimeoutError):
        client.wait("one", timeout=0.05, interval=0.01)
    assert not service.posted


@pytest.mark.usefixtures("default_interrupt")
def test_an_interrupted_wait_ends_and_leaves_no_thread(client: TrlClient, service: FakeService) -> None:
    service.jobs["one"] = [status("one")]
    seen: list[object] = []

    def press_ctrl_c(found: object) -> None:
        seen.append(found)
        if len(seen) == 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        client.wait("one", interval=0.01, on_status=press_ctrl_c)
    assert not [thread for thread in threading.enumerate() if thread.name == "TrlClient"]


def test_errors_are_those_of_the_service(client: TrlClient, service: FakeService) -> None:
    with pytest.raises(ServiceRefusal, match="not found") as refused:
        client.wait("nobody")
    assert refused.value.status == 404
    with pytest.raises(JobNotFound):
        client.pause("../nodes")
    with pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:1"):
        TrlClient("http://127.0.0.1:1").status("one")
    with pytest.raises(ValueError, match="expected the address"):
        TrlClient("8322")


@pytest.mark.parametrize("breaks", [[], [2], [0, 3, 0, 1]])
def test_events_arrive_once_each_however_often_the_stream_breaks(service: FakeService, breaks: list[int]) -> None:
    service.events, service.breaks = EVENTS, breaks

    async def collect() -> list[JobEvent]:
        return [event async for event in AsyncTrlClient(service.url).events("one")]

    assert asyncio.run(collect()) == [JobEvent(*event) for event in EVENTS]


def test_events_continue_behind_a_cursor_and_need_not_be_followed(client: TrlClient, service: FakeService) -> None:
    service.events = EVENTS
    assert [event.id for event in client.events("one", "1-3")] == ["1-4", "1-5"]
    assert [event.id for event in client.events("one", follow=False)] == [name for name, _ in EVENTS]
    assert [event.id for event in client.events("one", "1-4", follow=False)] == ["1-5"]


def test_events_that_are_not_read_to_their_end_leave_nothing(client: TrlClient, service: FakeService) -> None:
    service.events = EVENTS
    found = client.events("one")
    assert isinstance(found, Iterator)
    assert next(found).id == "1-1"
    found.close()  # type: ignore[attr-defined]
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "TrlClient"]


@pytest.mark.usefixtures("default_interrupt")
def test_a_stream_that_is_interrupted_between_two_events_leaves_nothing(
    client: TrlClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.events, service.breaks = EVENTS, [2]
    wait = asyncio.sleep

    async def press_ctrl_c(seconds: float) -> None:
        if seconds == 1.0:  # not aiohttp's own
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await wait(60)

    monkeypatch.setattr(asyncio, "sleep", press_ctrl_c)  # before the stream is opened again
    with pytest.raises(KeyboardInterrupt):
        list(client.events("one"))
    gc.collect()  # a connection that is not closed would be a warning, which is an error
    assert not [thread for thread in threading.enumerate() if thread.name == "TrlClient"]


def test_the_calls_work_inside_a_running_event_loop_as_in_a_notebook(client: TrlClient, service: FakeService) -> None:
    service.jobs["one"] = [status("one", "completed")]
    service.events = EVENTS

    async def cell() -> tuple[str, int]:
        return client.wait("one")["status"], len(list(client.events("one")))

    assert asyncio.run(cell()) == ("completed", 5)


def test_pull_and_the_small_calls(client: TrlClient, service: FakeService, tmp_path: Path) -> None:
    service.jobs["one"] = [status("one", "completed")]
    service.files = {"model": b"weights"}
    service.points = [{"kind": "train", "step": 1}]
    assert client.pull("one", tmp_path / "model") == "one-final"
    assert (tmp_path / "model" / "model").read_bytes() == b"weights"
    assert [job["job_uuid"] for job in client.jobs("completed")] == ["one"]
    assert client.metrics("one") == service.points
    assert client.samples("one") == {"prompts": [[]], "data": []}
    service.samples = [{"step": step} for step in range(45)]
    assert client.samples("one")["data"] == service.samples
    assert client.pause("one")["resources_allocated"]["state"] == "pause"
    assert client.resume("one")["resources_allocated"]["state"] == "resume"
    client.cancel("one")
    assert [path for path, _ in service.posted][-1] == "post-training/job/cancel"


def test_the_address_and_the_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_service(token="s3cret") as guarded:
        monkeypatch.setenv("TRL_SERVICE_URL", f"{guarded.url}/v1")
        monkeypatch.setenv("TRL_SERVICE_TOKEN", "s3cret\n")
        assert TrlClient().url == guarded.url
        assert TrlClient().jobs() == []
        with pytest.raises(ServiceRefusal) as refused:
            TrlClient(token="").jobs()
        assert refused.value.status == 401
