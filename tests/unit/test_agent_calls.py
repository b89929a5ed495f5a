"""What an agent asks the service over HTTP: the answers are played, the sentences are real."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote import pull
from llama_stack_provider_trl_remote.client import SLOWEST_DISK, Answer
from llama_stack_provider_trl_remote.nodes import calls
from llama_stack_provider_trl_remote.nodes.calls import Behind, NodeClient, Pace
from tests.orders import write

pytestmark = pytest.mark.timeout(30)
DATA = b"0123456789"
DIGEST = hashlib.sha256(DATA).hexdigest()


class PlayedClient(NodeClient):
    """A NodeClient whose service has one file, a part of it at first."""

    def __init__(self, part: bytes = b"") -> None:
        super().__init__("http://head:8322", "t", "b", Pace(None, lambda: 0.0))
        self._identified = True
        self.part, self.whole = bytearray(part), b""
        self.sent: list[tuple[int, int]] = []
        """Offset and bytes of each PUT."""
        self.limits: list[tuple[float | None, float | None]] = []
        """Read and total of each call."""

    async def _once(self, method: str, path: str, **request: Any) -> Answer:
        self.limits.append((request.get("read"), request.get("total")))
        if method == "GET":
            return Answer(200, "application/json", b'{"files": []}')
        offset, data = int(request["params"]["offset"]), b"".join([chunk async for chunk in request["data"]])
        self.sent.append((offset, len(data)))
        if self.whole:
            return Answer(200, "application/json", b"", str(len(self.whole)))
        if offset != len(self.part):
            return Answer(409, "application/json", json.dumps({"detail": "no"}).encode(), str(len(self.part)))
        self.part += data
        if hashlib.sha256(self.part).hexdigest() == request["params"]["sha256"]:
            self.whole = bytes(self.part)
        return Answer(200, "application/json", b"", str(len(self.part)))


def upload(client: PlayedClient, file: Path) -> None:
    asyncio.run(client.upload("job-1", "final", "a.bin", DIGEST, file))


@pytest.mark.parametrize(
    ("part", "sent"), [(b"", [(0, 10)]), (DATA[:4], [(0, 10), (4, 6)]), (DATA, [(0, 10), (10, 0)])]
)
def test_a_file_goes_on_where_it_was_until_the_service_has_found_it_whole(
    tmp_path: Path, part: bytes, sent: list[tuple[int, int]]
) -> None:
    client = PlayedClient(part)
    upload(client, write(tmp_path / "a.bin", DATA))
    assert client.whole == DATA
    assert client.sent == sent


def test_a_service_that_contradicts_itself_is_not_asked_for_ever(tmp_path: Path) -> None:
    class Stubborn(PlayedClient):
        async def _once(self, method: str, path: str, **request: Any) -> Answer:
            self.sent.append((int(request["params"]["offset"]), 0))
            return Answer(409, "application/json", b'{"detail": "no"}', str(len(self.part)))

    client = Stubborn(DATA)
    with pytest.raises(Behind):
        upload(client, write(tmp_path / "a.bin", DATA))
    assert client.sent == [(0, 0), (10, 0)]


def test_the_last_piece_has_time_for_the_whole_file_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PIECE", 4)
    client = PlayedClient()
    upload(client, write(tmp_path / "a.bin", DATA))
    assert client.sent == [(0, 4), (4, 4), (8, 2)]
    assert [read for read, _ in client.limits] == [60 + size / SLOWEST_DISK for size in (4, 4, 12)]


def test_a_listing_has_time_for_all_files_to_be_read() -> None:
    client = PlayedClient()
    assert asyncio.run(client.checkpoint_files("job", "checkpoint-2")) == []
    assert client.limits == [(3600.0, 0)]


def test_a_file_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[int] = []
    sha256 = pull._sha256

    def noted(path: Path) -> str:
        read_by.append(threading.get_ident())
        return sha256(path)

    monkeypatch.setattr(pull, "_sha256", noted)
    file = {"path": "a.bin", "size": len(DATA), "sha256": DIGEST}
    asyncio.run(PlayedClient().checkpoint_file("job", "final", write(tmp_path / "a.bin", DATA), file))
    assert len(read_by) == 1
    assert read_by[0] != threading.get_ident()
