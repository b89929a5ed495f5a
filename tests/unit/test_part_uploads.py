"""Uploads in parts: nothing of a part that breaks off, within the declared bytes and the quota, until an hour has
passed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, LimitReached, QuotaReached
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service.datasets import part_uploads
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.part_uploads import LIFETIME, PartUploads, UploadRecord
from llama_stack_provider_trl_remote.service.datasets.quotas import UPLOADS, CountedRows, Quotas
from llama_stack_provider_trl_remote.service.http.errors import NotFound, TooLarge
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import FakeClock

HEAD, TAIL = b'{"text": "a"}\n', b'{"text": "b"}\n'


class Uploads:
    """The uploads of a service that may be killed."""

    def __init__(self, root: Path, store: Store) -> None:
        self.root, self.store, self.clock = root, store, FakeClock()
        self.registered: list[tuple[str, str]] = []
        self.quota = 2 << 20
        self.start()

    def start(self) -> None:
        settings = ServiceSettings(data_dir=self.root, max_upload_mb=1)
        self.quotas = Quotas(self.store.rows, self.quota)
        self.blobs = Blobs(settings)
        self.blobs.prepare()
        counted = CountedRows(self.blobs, self.store.rows, self.quotas)
        counted.is_registered = lambda sha256: True
        self.parts = PartUploads(settings, self.blobs, counted, self.quotas, self.clock)
        self.parts.prepare()

    def create(self, size: int = len(HEAD + TAIL), owner: str = "a") -> str:
        return asyncio.run(self.parts.create(owner, "rows.jsonl", size)).upload_id

    def add(self, upload_id: str, data: bytes, owner: str = "a", *, breaks: bool = False) -> str:
        async def pieces() -> AsyncIterator[bytes]:
            yield data
            if breaks:
                raise ConnectionError

        return asyncio.run(self.parts.add_part(upload_id, owner, pieces(), 0)).part_id

    def complete(self, upload_id: str, *part_ids: str, md5: str | None = None, owner: str = "a") -> UploadRecord:
        async def register(upload: UploadRecord, sha256: str) -> None:
            self.registered.append((upload.upload_id, sha256))

        return asyncio.run(self.parts.complete(upload_id, owner, part_ids, md5, register))

    def cancel(self, upload_id: str) -> UploadRecord:
        return asyncio.run(self.parts.cancel(upload_id, "a"))

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "uploads").rglob("*") if path.is_file())

    def room(self) -> int:
        """Bytes that the token may store besides."""
        for count in (2 << 20, (2 << 20) - len(HEAD + TAIL)):
            try:
                self.quotas.require("a", count)
            except QuotaReached:
                continue
            return count
        return 0


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[Uploads]:
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        yield Uploads(tmp_path, store)


def test_parts_become_rows_in_the_order_of_their_ids_and_are_stored_once(uploads: Uploads) -> None:
    upload = uploads.create()
    tail, head = uploads.add(upload, TAIL), uploads.add(upload, HEAD)
    assert uploads.add(upload, TAIL) == tail  # repeated by a client that has no answer
    assert len(uploads.files()) == 3
    done = uploads.complete(upload, head, tail, md5=hashlib.md5(HEAD + TAIL).hexdigest().upper())
    digest = hashlib.sha256(HEAD + TAIL).hexdigest()
    assert (done.status, uploads.registered) == ("completed", [(upload, digest)])
    assert uploads.blobs.path(digest).read_bytes() == HEAD + TAIL
    assert uploads.files() == ["upload.json"]
    assert uploads.store.rows.used("a") == len(HEAD + TAIL) == (2 << 20) - uploads.room()
    assert uploads.complete(upload, head, tail) == done
    assert len(uploads.registered) == 1
    for call in (
        lambda: uploads.complete(upload, tail, head),
        lambda: uploads.add(upload, b"x"),
        lambda: uploads.cancel(upload),
    ):
        with pytest.raises(InvalidRequest, match="it is completed"):
            call()


def test_what_does_not_equal_the_declaration_is_refused_and_the_upload_goes_on(uploads: Uploads) -> None:
    upload = uploads.create()
    with pytest.raises(NotFound):
        uploads.add(upload, HEAD, owner="b")
    head = uploads.add(upload, HEAD)
    with pytest.raises(InvalidRequest, match=r"14 bytes, and 28 were declared"):
        uploads.complete(upload, head)
    with pytest.raises(InvalidRequest, match="no such part"):
        uploads.complete(upload, head, "part_gone")
    with pytest.raises(InvalidRequest, match="29 bytes or more, and 28 were declared"):
        uploads.add(upload, TAIL + b"x")
    with pytest.raises(InvalidRequest, match="the part is empty"):
        uploads.add(upload, b"")
    tail = uploads.add(upload, TAIL)
    with pytest.raises(InvalidRequest, match="the parts have the md5"):
        uploads.complete(upload, head, tail, md5="0" * 32)
    assert not list((uploads.root / "datasets").glob("*.jsonl"))
    assert uploads.complete(upload, head, tail).status == "completed"


def test_chunks_that_are_equal_are_one_part_that_is_named_twice(uploads: Uploads) -> None:
    upload = uploads.create(2 * len(HEAD))
    head = uploads.add(upload, HEAD)
    assert uploads.add(upload, HEAD) == head
    with pytest.raises(InvalidRequest, match="42 bytes, and 28 were declared"):
        uploads.complete(upload, head, head, head)
    assert uploads.complete(upload, head, head).status == "completed"


def test_an_upload_whose_bytes_are_refused_again_and_again_is_cancelled(uploads: Uploads) -> None:
    upload = uploads.create()
    parts = uploads.add(upload, HEAD), uploads.add(upload, TAIL)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="cancelled once 3 such calls were refused"):
            uploads.complete(upload, *parts, md5="0" * 32)
    with pytest.raises(InvalidRequest, match="it is cancelled"):
        uploads.complete(upload, *parts)
    assert uploads.files() == ["upload.json"]
    assert uploads.room() == 2 << 20


def test_a_part_that_breaks_off_leaves_nothing_and_a_kill_loses_no_whole_one(uploads: Uploads) -> None:
    upload = uploads.create()
    head = uploads.add(upload, HEAD)
    with pytest.raises(ConnectionError):
        uploads.add(upload, TAIL, breaks=True)
    assert uploads.files() == sorted([head, "upload.json"])
    (uploads.root / "uploads" / upload / ".part-left").write_bytes(b"half")
    uploads.start()
    assert uploads.files() == sorted([head, "upload.json"])
    assert uploads.room() == (2 << 20) - len(HEAD + TAIL)  # the declared bytes count again
    done = uploads.complete(upload, head, uploads.add(upload, TAIL))
    uploads.start()
    assert uploads.complete(upload, *done.part_ids) == done


def test_a_kill_between_the_rows_and_the_answer_makes_the_same_file_again(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads.quota = len(HEAD + TAIL) + 1  # less than the rows and the declared bytes together
    uploads.start()
    upload = uploads.create()
    parts = uploads.add(upload, HEAD), uploads.add(upload, TAIL)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uploads.parts, "_end", killed)
    with pytest.raises(KeyboardInterrupt):
        uploads.complete(upload, *parts)
    uploads.start()
    with pytest.raises(QuotaReached):
        uploads.create(2)
    uploads.complete(upload, *parts)
    first, second = uploads.registered
    assert first == second
    assert uploads.store.rows.used("a") == len(HEAD + TAIL)


def test_an_upload_counts_for_its_token_until_it_is_cancelled_or_expires(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TooLarge, match="max_upload_mb"):
        uploads.create((1 << 20) + 1)
    first, second = uploads.create(1 << 20), uploads.create(1 << 20)
    with pytest.raises(QuotaReached):
        uploads.create(1)
    uploads.add(first, HEAD)
    assert uploads.cancel(first).status == uploads.cancel(first).status == "cancelled"
    with pytest.raises(InvalidRequest, match="it is cancelled"):
        uploads.add(first, HEAD)
    monkeypatch.setattr(part_uploads, "MOST_PENDING", 1)
    with pytest.raises(LimitReached):
        uploads.create(1)
    uploads.add(second, HEAD)
    uploads.clock.advance(LIFETIME)
    with pytest.raises(InvalidRequest, match="it is expired"):
        uploads.add(second, TAIL)
    uploads.parts.tend()
    assert not list((uploads.root / "uploads").iterdir())
    assert uploads.room() == 2 << 20
    with pytest.raises(NotFound):
        uploads.add(second, TAIL)


def test_parts_count_among_the_uploads_of_a_token(uploads: Uploads) -> None:
    upload = uploads.create()

    async def many() -> None:
        never = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            await never.wait()
            yield b"x"

        adding = [asyncio.create_task(uploads.parts.add_part(upload, "a", slow(), 0)) for _ in range(UPLOADS)]
        await asyncio.sleep(0)
        with pytest.raises(LimitReached, match="uploads of rows under way"):
            await uploads.parts.add_part(upload, "a", slow(), 0)
        for task in adding:
            task.cancel()
        await asyncio.gather(*adding, return_exceptions=True)

    asyncio.run(many())
    assert uploads.files() == ["upload.json"]


def test_completions_count_among_the_uploads_of_a_token_and_a_few_copy_at_a_time(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [uploads.create(1) for _ in range(UPLOADS + 1)]
    parts = [uploads.add(upload, b"x") for upload in begun]
    copying, most = 0, 0

    async def many() -> None:
        may_end = asyncio.Event()

        async def receive(*_: object, **__: object) -> str:
            nonlocal copying, most
            copying += 1
            most = max(most, copying)
            await may_end.wait()
            copying -= 1
            return hashlib.sha256(b"x").hexdigest()

        async def register(upload: UploadRecord, sha256: str) -> None:
            pass

        monkeypatch.setattr(uploads.blobs, "receive", receive)
        pairs = zip(begun, parts, strict=True)
        calls = [uploads.parts.complete(upload, "a", [part], None, register) for upload, part in pairs]
        last = calls.pop()
        completing = [asyncio.create_task(call) for call in calls]
        while copying < part_uploads._COMPLETING:
            await asyncio.sleep(0.01)
        with pytest.raises(LimitReached, match="uploads of rows under way"):
            await last
        may_end.set()
        assert {record.status for record in await asyncio.gather(*completing)} == {"completed"}

    asyncio.run(asyncio.wait_for(many(), 30))
    assert most == part_uploads._COMPLETING


def test_what_is_no_upload_and_no_part_keeps_no_service_from_starting(uploads: Uploads) -> None:
    upload = uploads.create()
    head = uploads.add(upload, HEAD)
    directory = uploads.root / "uploads" / upload
    (directory / "part_x").write_bytes(TAIL)
    (directory / ".part-left" / "deep").mkdir(parents=True)
    (directory / ("part_" + "0" * 24)).mkdir()
    (directory / ("part_" + "1" * 24)).symlink_to("/etc/hostname")
    (directory.parent / ("upload_" + "0" * 24)).write_text("a file")
    (directory.parent / "notes").mkdir()
    uploads.start()
    for odd in ("part_x", "part_" + "0" * 24, "part_" + "1" * 24):
        with pytest.raises(InvalidRequest, match="no such part"):
            uploads.complete(upload, head, odd)
    assert uploads.complete(upload, head, uploads.add(upload, TAIL)).status == "completed"


def test_an_upload_that_cannot_be_read_is_left_out(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = uploads.create(), uploads.create()
    read_own = part_uploads.read_own

    def reading(path: Path, parse: Callable[[bytes], UploadRecord]) -> UploadRecord | None:
        if broken in str(path):
            raise OSError(5, "Input/output error")
        return read_own(path, parse)

    monkeypatch.setattr(part_uploads, "read_own", reading)
    uploads.start()
    with pytest.raises(NotFound):
        uploads.add(broken, HEAD)
    assert uploads.add(whole, HEAD)
