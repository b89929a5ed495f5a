"""What an agent asks the service over HTTP: the answers are played. Files go in pieces, from where the service has them
on, and at their pace."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl_remote import pull
from llama_stack_provider_trl_remote.client import SLOWEST_DISK, ServiceAnswer, ServiceClient
from llama_stack_provider_trl_remote.nodes import calls
from llama_stack_provider_trl_remote.nodes.calls import Behind, NodeClient, Pace, is_gone
from llama_stack_provider_trl_remote.wire import POLL_SECONDS, Poll
from tests.fakes import FakeClock
from tests.orders import write

pytestmark = pytest.mark.timeout(30)
FILE = bytes(range(25))


class PlayedClient(NodeClient):
    """A NodeClient whose service has one file, whole once its digest was compared."""

    def __init__(self, have: bytes = b"", pace: Pace | None = None) -> None:
        super().__init__("http://head:8322", "t", "b", pace or Pace(None, FakeClock()))
        self._identified = True
        self.have, self.whole = have, False
        self.sent: list[tuple[int, int]] = []
        """Offset and bytes of every piece."""
        self.limits: list[tuple[float | None, float | None]] = []
        """Read and total of every call."""
        self.cut: list[int] = []
        """Of the next pieces only so many bytes arrive, and no answer comes back."""
        self.answer: Any = {}
        self.body: Any = None
        """JSON of the last call."""

    async def _once(self, method: str, path: str, **request: Any) -> ServiceAnswer:
        self.limits.append((request.get("read"), request.get("total")))
        self.body = request.get("json")
        if "params" not in request:
            return ServiceAnswer(200, "application/json", json.dumps(self.answer).encode())
        offset, data = int(request["params"]["offset"]), request["data"]
        if not isinstance(data, bytes):
            data = b"".join([chunk async for chunk in data])
        self.sent.append((offset, len(data)))
        if offset != len(self.have):
            return ServiceAnswer(409, "application/json", b'{"detail": "it does not fit"}', str(len(self.have)))
        if self.cut:
            self.have += data[: self.cut.pop()]
            raise ServiceUnreachable(self.url, "broke off")
        self.have += data
        self.whole = hashlib.sha256(self.have).hexdigest() == request["params"].get("sha256")
        return ServiceAnswer(204, "", b"", str(len(self.have)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PIECE", 10)
    monkeypatch.setattr(calls, "_CHUNK", 4)


def upload(client: PlayedClient, tmp_path: Path, data: bytes = FILE) -> None:
    file = write(tmp_path / "model.bin", data)
    asyncio.run(client.upload("job-1", "checkpoint-2", "model.bin", hashlib.sha256(data).hexdigest(), file))


def test_a_file_goes_in_pieces_and_the_last_one_has_time_for_all_of_it(tmp_path: Path) -> None:
    client = PlayedClient()
    upload(client, tmp_path)
    assert client.whole
    assert client.sent == [(0, 10), (10, 10), (20, 5)]
    assert client.limits == [(60 + size / SLOWEST_DISK, 0) for size in (10, 10, 5 + 25)]


def test_a_file_without_bytes_is_sent_too(tmp_path: Path) -> None:
    client = PlayedClient()
    upload(client, tmp_path, b"")
    assert client.whole
    assert client.sent == [(0, 0)]


def test_after_a_lost_connection_it_continues_where_the_service_is(tmp_path: Path) -> None:
    client = PlayedClient()
    client.cut = [7]
    with pytest.raises(ServiceUnreachable):
        upload(client, tmp_path)
    upload(client, tmp_path)
    assert client.whole
    assert client.sent == [(0, 10), (0, 10), (7, 10), (17, 8)]


def test_a_service_that_was_stopped_with_all_bytes_is_called_for_the_digest(tmp_path: Path) -> None:
    client = PlayedClient(FILE)
    upload(client, tmp_path)
    assert client.whole
    assert client.sent == [(0, 10), (25, 0)]


def test_a_service_that_has_more_than_the_file_is_an_error(tmp_path: Path) -> None:
    client = PlayedClient(FILE + b"?")
    with pytest.raises(Behind) as caught:
        upload(client, tmp_path)
    assert caught.value.size == 26


def test_a_service_that_contradicts_itself_is_not_called_forever(tmp_path: Path) -> None:
    class Stubborn(PlayedClient):
        async def _once(self, method: str, path: str, **request: Any) -> ServiceAnswer:
            self.sent.append((int(request["params"]["offset"]), 0))
            return ServiceAnswer(409, "application/json", b'{"detail": "no"}', str(len(self.have)))

    client = Stubborn(FILE)
    with pytest.raises(Behind):
        upload(client, tmp_path)
    assert client.sent == [(0, 0), (25, 0)]


def test_events_and_logs_that_do_not_fit_bring_back_where_the_service_is() -> None:
    client = PlayedClient(b"one\n")
    assert asyncio.run(client.append_events("job-1", 0, b"one\n")) == 4
    assert asyncio.run(client.put_log("job-1", "rank-0.log", 4, b"two\n")) == 8


def test_a_conflict_that_names_no_offset_is_none_of_a_file() -> None:
    client = PlayedClient()
    found = client._refusal("/v1/nodes", ServiceAnswer(409, "application/json", b'{"detail": "the name is taken"}'))
    assert isinstance(found, ServiceRefusal)
    assert not isinstance(found, Behind)
    full = client._refusal("/v1/nodes", ServiceAnswer(507, "application/json", b'{"detail": "full"}', "4"))
    assert not isinstance(full, Behind)
    assert is_gone(ServiceRefusal("", 410, ""))
    assert not is_gone(full)


def test_a_poll_outwaits_the_service_by_little() -> None:
    client = PlayedClient()
    client.answer = {"revision": 3, "tasks": []}
    assert asyncio.run(client.poll(Poll(boot_id="1", tasks=(), seen=0))).revision == 3
    ((read, total),) = client.limits
    assert read is not None
    assert POLL_SECONDS < read < POLL_SECONDS + 5
    assert total == read


def test_rows_get_their_name_once_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "datasets" / "aa.jsonl"

    async def fetch(client: ServiceClient, url: str, path: Path, file: dict[str, Any]) -> None:
        assert (url, file["sha256"]) == ("/v1/blobs/aa", "aa")
        assert path != target
        path.write_bytes(b"{}\n")

    monkeypatch.setattr(calls, "fetch", fetch)
    asyncio.run(PlayedClient().rows("aa", target))
    assert [(path.name, path.read_bytes()) for path in target.parent.iterdir()] == [("aa.jsonl", b"{}\n")]


def test_a_listing_has_time_for_all_files_to_be_read() -> None:
    client = PlayedClient()
    client.answer = {"files": []}
    assert asyncio.run(client.checkpoint_files("job", "checkpoint-2")) == []
    assert client.limits == [(3600.0, 0)]


def test_a_file_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[int] = []
    sha256 = pull.sha256_of

    def noted(path: Path) -> str:
        read_by.append(threading.get_ident())
        return sha256(path)

    monkeypatch.setattr(pull, "sha256_of", noted)
    file = {"path": "a.bin", "size": len(FILE), "sha256": hashlib.sha256(FILE).hexdigest()}
    asyncio.run(PlayedClient().checkpoint_file("job", "final", write(tmp_path / "a.bin", FILE), file))
    assert len(read_by) == 1
    assert read_by[0] != threading.get_ident()


# Pace


class Paced:
    """A pace of 10 bytes per second on a clock that only sleeping moves."""

    def __init__(self, rate: float | None = 10.0) -> None:
        self.clock = FakeClock(0.0)
        self.pace = Pace(rate, self.clock, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def take(self, *sizes: int) -> float:
        """Seconds until all have gone."""

        async def run() -> None:
            for size in sizes:
                await self.pace.take(size)

        before = self.clock.now
        asyncio.run(run())
        return self.clock.now - before


def test_bytes_go_at_their_pace() -> None:
    assert Paced().take(20, 30) == pytest.approx(5.0)
    assert Paced(None).take(10**12) == 0


def test_several_uploads_share_the_pace() -> None:
    paced = Paced()
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    paced.pace._sleep = note

    async def run() -> None:
        await asyncio.gather(paced.pace.take(20), paced.pace.take(30))

    asyncio.run(run())
    assert waits == pytest.approx([2.0, 5.0])


def test_a_pause_is_not_made_up_for() -> None:
    paced = Paced()
    paced.take(10)
    paced.clock.advance(3600)
    assert paced.take(40) == pytest.approx(4.0)


def test_an_upload_is_paced(tmp_path: Path) -> None:
    paced = Paced()
    upload(PlayedClient(pace=paced.pace), tmp_path)
    assert paced.clock.now == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("status", "detail", "end"),
    [
        (401, "the token is missing.", "the token is missing. TRL_SERVICE_NODE_TOKEN must be the same here as on the"),
        (403, "it needs a token with the role node", "role node. TRL_SERVICE_NODE_TOKEN must be the same here as on"),
        (403, "the Host header is 'b'", "answered 403: the Host header is 'b'"),
    ],
)
def test_an_agent_whose_token_is_refused_is_pointed_to_its_own_variable(status: int, detail: str, end: str) -> None:
    answer = ServiceAnswer(status, "application/json", json.dumps({"detail": detail}).encode())
    error = PlayedClient()._refusal("/v1/nodes", answer)
    assert isinstance(error, ServiceRefusal)
    assert (error.status, error.detail) == (status, detail)
    assert end in str(error)
    assert "TRL_SERVICE_TOKEN" not in str(error)
    assert ("TRL_SERVICE_NODE_TOKEN" in str(error)) == ("token" in detail)


def test_a_node_sends_its_credential_and_joins_with_the_token_without_one() -> None:
    client = PlayedClient()
    assert client._headers == {"Authorization": "Bearer t"}
    client.authenticate("own")
    assert client._headers == {"Authorization": "Bearer own"}
    client.authenticate(None)
    assert client._headers == {"Authorization": "Bearer t"}
    client._join_token = None
    client.authenticate(None)
    assert client._headers == {}
