"""Large and deep bodies: the service stays small and answers others meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from fastapi import HTTPException
from starlette.requests import Request

from llama_stack_provider_trl.errors import InvalidRequest, StoreError
from llama_stack_provider_trl.requests import choices
from llama_stack_provider_trl.requests.choices import nearest_choice, no_such_field
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registration import Registration, StoredRows
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http import received as module
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.http.received import BodyMemory, Received, parse
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from llama_stack_provider_trl_remote.service.space import Space
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, refusal, running_service

MIB = 1 << 20


# Pure


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "parse_json")
    with pytest.raises(HTTPException, match="more than 20000 values"):
        parse(b"[" + b"[]," * 20_000 + b"[]]", 20_000)


@pytest.mark.parametrize("levels", [65, 1000, 15_000])
def test_a_body_that_is_nested_too_deeply_is_refused(levels: int) -> None:
    with pytest.raises(HTTPException, match="64 levels"):
        parse(b"[" * levels + b"]" * levels, 20_000)


def test_a_body_of_64_levels_is_taken() -> None:
    assert parse(b"[" * 63 + b"]" * 63, 20_000)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text, expected UTF-8"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8 text (invalid continuation byte at byte 7)"),
        (b'{"a": ' + b"1" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_with_the_reason(body: bytes, expected: str) -> None:
    with pytest.raises(HTTPException) as refused:
        parse(body, 20_000)
    assert refused.value.status_code == 400
    assert "the body cannot be read: " in refused.value.detail
    assert expected in refused.value.detail


def test_a_long_word_is_not_compared_letter_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[str]()
    monkeypatch.setattr(choices, "_nearest", lambda value, *_: compared.append(value))
    assert nearest_choice("a" * MIB, ["adamw" * 20, "sgd"]).startswith("expected one of")
    assert "leave it out" in no_such_field("a" * MIB, ["sgd"])
    assert compared == ["a" * choices.COMPARED] * 2


def test_an_error_shows_the_beginning_of_its_value() -> None:
    assert len(str(InvalidRequest("f" * MIB, "v" * MIB, "choose another"))) < 1000


def test_bodies_wait_for_memory_and_are_refused_when_none_is_free_in_time() -> None:
    async def run() -> list[str]:
        memory, seen = BodyMemory(10, patience=0.2), []

        async def hold(name: str, size: int, seconds: float) -> None:
            try:
                async with memory.reserved(size):
                    seen.append(name)
                    await asyncio.sleep(seconds)
            except HTTPException as error:
                seen.append(f"{name}: {error.status_code} {(error.headers or {})['Retry-After']}")

        await asyncio.gather(hold("first", 6, 0.1), hold("second", 6, 0.5), hold("third", 6, 0.0))
        await hold("larger than all", 100, 0.0)
        return seen

    assert asyncio.run(run()) == ["first", "second", "third: 503 5", "larger than all"]


def test_one_caller_holds_a_quarter_of_the_room_and_of_the_places_of_those_that_wait() -> None:
    async def run() -> list[str]:
        memory, seen = BodyMemory(32, patience=0.2), []

        async def hold(caller: str) -> None:
            try:
                async with memory.reserved(1, caller):
                    seen.append(caller)
                    await asyncio.sleep(0.5)
            except HTTPException:
                seen.append(f"{caller} refused")

        await asyncio.gather(*(hold("greedy") for _ in range(150)), *(hold("other") for _ in range(8)))
        return seen

    seen = asyncio.run(run())
    assert {name: seen.count(name) for name in set(seen)} == {"greedy": 8, "greedy refused": 142, "other": 8}


def received(pieces: list[bytes], pause: float, announced: int, rows: Registration | None = None) -> Received:
    """A body that comes in pieces, with a pause before each."""
    coming = list(pieces)

    async def receive() -> Any:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming)}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"%d" % announced)]}
    return Received(Request(scope, receive), "ci", 32 * MIB, BodyMemory(), ThreadPoolExecutor(1), rows)


def test_a_body_that_trickles_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.2)
    with pytest.raises(HTTPException, match="too slowly") as refused:
        asyncio.run(received([b" "] * 100, 0.05, MIB).body())
    assert refused.value.status_code == 408


def test_a_body_that_comes_at_the_least_rate_is_received_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.2)
    monkeypatch.setattr(module, "_BYTES_PER_SECOND", 1)
    assert len(asyncio.run(received([b" " * 10] * 10, 0.05, MIB).body())) == 100


def test_a_body_that_is_not_small_is_parsed_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    others, begun = threading.Event(), threading.Event()

    def wait(*_: Any) -> bool:
        begun.set()
        return others.wait(30)

    async def run() -> bool:
        parsed = asyncio.ensure_future(received([b" " * (module.SMALL + 1)], 0.0, MIB).json())
        await asyncio.to_thread(begun.wait, 30)
        others.set()  # by the event loop, which a body that is parsed on it would hold
        return bool(await parsed)

    monkeypatch.setattr(module, "parse", wait)
    assert asyncio.run(run())


def test_rows_of_a_large_body_are_read_while_others_are_answered(tmp_path: Path) -> None:
    body = tmp_path / "body"
    os.mkfifo(body)
    text = json.dumps({"dataset_id": "a", "source": {"type": "rows", "rows": [{"prompt": "a"}]}})

    async def run() -> int:
        parsed = asyncio.ensure_future(Registration(tmp_path, 1000, 30.0, Space(0)).parse(body))
        with await asyncio.to_thread(body.open, "w") as rows:  # the reader has begun then
            rows.write(text)  # by the event loop, which would be held if it waited for the reader
        return (await parsed)[1].num_rows

    assert asyncio.run(run()) == 1


def test_a_body_for_which_the_disk_has_no_space_is_not_spooled(tmp_path: Path) -> None:
    async def run() -> None:
        rows = Registration(tmp_path, 1000, 10.0, Space(1 << 60))
        await received([b" " * MIB] * 3, 0.0, 3 * MIB, rows).body()

    with pytest.raises(HTTPException, match="are needed") as refused:
        asyncio.run(run())
    assert (refused.value.status_code, list(tmp_path.iterdir())) == (507, [])


def test_rows_of_a_large_body_are_not_kept_on_a_full_disk(tmp_path: Path) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path})
    blobs = Blobs(settings)
    datasets = DatasetRegistry(settings, blobs)
    blobs.prepare()
    datasets.prepare()
    stored = StoredRows(tmp_path / "datasets" / "rows", "0" * 64, 1)
    stored.path.write_text("{}\n")
    blobs.space = Space(1 << 60)
    body = RegisterDataset.model_validate({"dataset_id": "a", "source": {"type": "rows", "rows": []}})
    with pytest.raises(StoreError, match="are needed"):
        asyncio.run(datasets.register(body, stored))
    assert not asyncio.run(blobs.holds("0" * 64))


# Against a service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("bodies")) as found:
        found.get("/health")
        yield found


class Watch:
    """The largest memory of a service while a block runs, and that it answers every call of /v1/health meanwhile and
    behind it."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._over = threading.Event()
        self.before = self.mib = service.rss_mib()
        self.answers: list[int] = []
        self.meanwhile = 0
        """Answers that came before the block ended."""

    def run(self) -> None:
        while True:
            self.answers.append(requests.get(f"{self._service.url}/v1/health", timeout=60).status_code)
            self.mib = max(self.mib, self._service.rss_mib())
            if self._over.wait(0.05):
                return

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield self
        finally:
            self.meanwhile = len(self.answers)
            self._over.set()
            thread.join()
        self.answers.append(requests.get(f"{self._service.url}/v1/health", timeout=60).status_code)
        assert set(self.answers) == {200}


def at_once(number: int, call: Callable[[], requests.Response]) -> list[requests.Response]:
    with ThreadPoolExecutor(number) as pool:
        return [found.result() for found in [pool.submit(call) for _ in range(number)]]


def post(service: TrainingService, path: str, data: Any) -> requests.Response:
    headers = {"Content-Type": "application/json"}
    return requests.post(f"{service.url}/v1{path}", data=data, headers=headers, timeout=120)


LISTS = b'{"dataset_id": "a", "source": {"type": "rows", "rows": [' + b"[]," * 5_000_000 + b"[]]}}"


@pytest.mark.contract
def test_many_large_bodies_cost_little_memory(service: TrainingService) -> None:
    with Watch(service).watching() as seen:
        answers = at_once(4, lambda: post(service, "/datasets", LISTS))
    assert {answer.status_code for answer in answers} <= {400, 413, 503}, [answer.text for answer in answers]
    assert seen.mib - seen.before < 100
    assert seen.meanwhile > 1, "others were answered when the bodies were"


@pytest.mark.contract
def test_a_large_registration_is_registered_as_a_small_one_is(service: TrainingService) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f"{n}."} for n in range(30_000)]
    body = {"dataset_id": "large", "source": {"type": "rows", "rows": rows}, "metadata": {"by": "hand"}}
    with Watch(service).watching() as seen:
        answer = service.post("/datasets", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"]["num_rows"] == 30_000
    assert answer.json()["metadata"]["by"] == "hand"
    assert answer.json()["source"] == {"type": "rows", "rows": []}
    lines = service.session.get(f"{service.url}/v1/blobs/{answer.json()['metadata']['sha256']}", timeout=30)
    assert [json.loads(line) for line in lines.text.splitlines()] == rows
    assert seen.mib - seen.before < 60
    assert service.post("/datasets", body).json() == answer.json()
    assert "exists already" in refusal(service.post("/datasets", {**body, "metadata": {}}), 409)
    assert not list((service.data_dir / "datasets").glob(".incoming-*"))


def large(row: Any, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": "x" * 1000, "completion": "y"}] * 2000
    return {"dataset_id": "bad", "source": {"type": "rows", "rows": [*rows, row]}, **changes}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("row", "changes", "sentence"),
    [
        (3, {}, "source.rows.2000=3 is not supported: Input should be a valid dictionary"),
        ({}, {"purpose": "fun"}, "purpose='fun' is not supported"),
        ({}, {"new": 1}, "new=1 is not supported: there is no such field: leave it out"),
        ({}, {"meta_data": 1}, "meta_data=1 is not supported: there is no such field: did you mean `metadata`?"),
        ({}, {"metadata": {"a": "m" * 100_000}}, "65536 at most"),
    ],
    ids=["no object", "no such purpose", "no such field", "another spelling", "large metadata"],
)
def test_what_is_wrong_with_a_large_body_is_reported_as_for_a_small_one(
    service: TrainingService, row: Any, changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(post(service, "/datasets", json.dumps(large(row, **changes)).encode()))


@pytest.mark.contract
def test_a_key_that_a_large_body_has_twice_is_named(service: TrainingService) -> None:
    twice = json.dumps(large({"prompt": "a", "other": "b"})).replace('"other"', '"prompt"').encode()
    assert "in the body the key 'prompt' is there twice" in refusal(post(service, "/datasets", twice))


@pytest.mark.contract
def test_a_large_body_that_is_no_json_is_refused_with_its_place(service: TrainingService) -> None:
    broken = json.dumps(large({})).encode()[:-1]
    assert "the body is not JSON" in refusal(post(service, "/datasets", broken))
    assert f"at character {len(broken)}" in refusal(post(service, "/datasets", broken))


@pytest.mark.contract
@pytest.mark.parametrize(
    "path",
    ["/post-training/supervised-fine-tune", "/post-training/job/cancel", "/datasets"],
)
@pytest.mark.parametrize("kind", ["keys", "a long key", "a long value", "levels"])
def test_hostile_json_is_refused_in_few_words(service: TrainingService, path: str, kind: str) -> None:
    text = {
        "keys": json.dumps({f"k{n}": n for n in range(60_000)}),
        "a long key": json.dumps({"j" * 900_000: 1}),
        "a long value": json.dumps({"job_uuid": "j" * 900_000, "training_config": {"n_epochs": "e" * 90_000}}),
        "levels": "[" * 400_000,
    }[kind]
    with Watch(service).watching():
        detail = post(service, path, text.encode())
    assert detail.status_code in (400, 413), detail.text[:300]
    assert len(detail.text) < 12_000


@pytest.mark.contract
def test_events_for_a_task_that_does_not_exist_are_refused_unread(service: TrainingService) -> None:
    head = (
        b"POST /v1/nodes/nobody/tasks/none/events?offset=0 HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/octet-stream\r\n"
    )
    with Watch(service).watching() as seen:
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as one:
            one.sendall(head + b"Content-Length: 2147483648\r\n\r\n")
            assert one.recv(1000).startswith(b"HTTP/1.1 413 ")
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as one:
            one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
            sent = 0
            try:
                for _ in range(2048):
                    one.sendall(chunk)
                    sent += 1
            except OSError:
                pass
            assert sent < 300
    assert seen.mib - seen.before < 30


@pytest.mark.contract
@pytest.mark.timeout(300)
def test_many_streams_of_a_job_are_cheap_and_all_get_every_event(service: TrainingService) -> None:
    _, sha256 = service.put_blob(QUESTIONS)
    body = sft("streamed", "rows", dataset_digests={"rows": sha256})
    body["training_config"]["n_epochs"] = 5
    service.post("/post-training/supervised-fine-tune", body)
    request = (
        b"GET /v1/post-training/jobs/streamed/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
    )
    before = service.rss_mib()
    ones = [socket.create_connection(("127.0.0.1", service.port), timeout=60) for _ in range(100)]
    try:
        for one in ones:
            one.sendall(request)
        with Watch(service).watching() as seen:
            service.wait_state("streamed", "completed", timeout=200)
            texts = [whole(one) for one in ones]
    finally:
        for one in ones:
            one.close()
    assert {text.count(b"id: ") for text in texts} == {texts[0].count(b"id: ")}
    assert texts[0].count(b'"type":"progress"') == 20
    assert seen.mib - before < 60
    assert seen.meanwhile > 1, "others were answered when the streams had ended"


def whole(one: socket.socket) -> bytes:
    found = b""
    while b"event: end" not in found:
        piece = one.recv(1 << 16)
        assert piece, found[-300:]
        found += piece
    return found
