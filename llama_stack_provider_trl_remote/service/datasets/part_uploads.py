"""Uploads in parts: a declared number of bytes arrives in files of their own, which together become rows.

    <data_dir>/uploads/upload_ID/upload.json    what was declared, and what became of it
    <data_dir>/uploads/upload_ID/part_ID        a part, all of which is on the disk

The id of a part follows from its content, so that a part which a client repeats is stored once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest, LimitReached
from llama_stack_provider_trl.system.data_dir import DataDir, read_own
from llama_stack_provider_trl.system.files import atomic_write_json, fsync_path, open_regular, private_directory
from llama_stack_provider_trl.system.offload import FairSlots, entered, storing, to_its_end

from ..http.errors import NotFound, TooLarge
from ..settings import ServiceSettings
from ..space import Use
from .blobs import Blobs, gathered
from .quotas import CountedRows, Quotas

log = logging.getLogger(__name__)
LIFETIME = 3600.0
"""Seconds after which an upload expires."""
MOST_PART = 64 << 20
"""Bytes of a part."""
MOST_PARTS = 10_000
MOST_PENDING = 64
"""Uploads that a token may have begun and not ended."""
_MOST_REFUSED = 3
"""Refused completions of an upload, after which it is cancelled: each has copied all of its bytes."""
_COMPLETING = 4
"""Uploads that are copied at a time; the completions of others wait for them."""
_MOST_ENDED = 1000
"""Uploads of a token that have ended, and are known until they expire."""
_RETRY_S = 60
_DOCUMENT = "upload.json"
_UPLOAD, _PART, _STAGED = "upload_", "part_", ".part-"
_NAME, _PART_NAME = re.compile(rf"{_UPLOAD}[0-9a-f]{{24}}"), re.compile(rf"{_PART}[0-9a-f]{{24}}")
_PIECE = 256 << 10
"""Bytes of a part that are copied at a time: 220 MiB a second, where 64 KiB are 130 and 1 MiB 290."""


class UploadRecord(BaseModel):
    """The stored document of an upload."""

    upload_id: str
    owner: str
    """Name of the token that began it: no other one may use it."""
    filename: str
    num_bytes: int
    created_at: float
    status: Literal["pending", "completed", "cancelled"] = "pending"
    part_ids: list[str] = []
    """Of a completed one, in their order."""

    @property
    def expires_at(self) -> float:
        return self.created_at + LIFETIME


class Part(NamedTuple):
    part_id: str
    created_at: float


class _Upload:
    """An upload that has not expired."""

    def __init__(self, record: UploadRecord, directory: Path) -> None:
        self.record, self.directory = record, directory
        self.reserved = ExitStack()
        """What it holds of the quota of its token."""
        self.ending = asyncio.Lock()
        """Of the request that completes or cancels it."""
        self.guard = threading.Lock()
        """Around `parts`, `is_closed` and the names of its files."""
        self.is_closed = False
        """It is being completed, or has ended: no part is added."""
        self.parts: dict[str, int] = {}
        """Id -> bytes."""
        self.refused = 0
        """Completions that were refused after its bytes had been read."""


class PartUploads:
    """The uploads in parts of a service. The declared bytes count for the token from the beginning."""

    def __init__(
        self,
        settings: ServiceSettings,
        blobs: Blobs,
        counted: CountedRows,
        quotas: Quotas,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = DataDir(settings.data_dir).uploads
        self._most_mb = settings.max_upload_mb
        self._blobs, self._counted, self._quotas, self._clock = blobs, counted, quotas, clock
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()
        self._copying = FairSlots(_COMPLETING, 1 if settings.credentials else _COMPLETING)

    def prepare(self) -> None:
        """Create the directory, and read it. Parts that a killed service has not received whole are removed. What is
        none of ours, or cannot be read, is left out. Raises OSError: there is no directory."""
        private_directory(self._directory)
        found = []
        for path in self._directory.iterdir():
            try:
                upload = self._read(path)
            except OSError as error:  # no reason to keep the service from its jobs
                log.warning("%s is left out until the next start: %s", path, error)
                continue
            if upload is not None:
                found.append(upload)
        for upload in sorted(found, key=lambda one: one.record.created_at):  # see `_forget_ended`
            if not upload.is_closed:
                upload.reserved.enter_context(self._quotas.granted(upload.record.owner, upload.record.num_bytes))
            self._uploads[upload.record.upload_id] = upload

    def _read(self, path: Path) -> _Upload | None:
        """The upload of a directory; None: it has none that goes on. Raises OSError."""
        if not _NAME.fullmatch(path.name) or not stat.S_ISDIR(path.lstat().st_mode):
            return None
        record = read_own(path / _DOCUMENT, UploadRecord.model_validate_json)
        if record is None or record.upload_id != path.name or record.expires_at <= self._clock():
            shutil.rmtree(path, ignore_errors=True)
            return None
        upload = _Upload(record, path)
        upload.is_closed = record.status != "pending"
        for entry in path.iterdir():
            is_part = _PART_NAME.fullmatch(entry.name) is not None
            status = entry.lstat()
            if is_part and not upload.is_closed and stat.S_ISREG(status.st_mode):
                upload.parts[entry.name] = status.st_size
            elif is_part or entry.name.startswith(_STAGED):
                with suppress(OSError):  # a directory, say: it goes with the upload
                    entry.unlink()
        return upload

    def tend(self) -> None:
        """Remove the uploads that have expired. Called again and again, by one thread."""
        now = self._clock()
        with self._lock:
            expired = [one for one in self._uploads.values() if one.record.expires_at <= now and not _is_busy(one)]
            for one in expired:
                del self._uploads[one.record.upload_id]
        for one in expired:
            self._remove(one)

    async def create(self, owner: str, filename: str, num_bytes: int) -> UploadRecord:
        """Begin an upload. It is on the disk when this returns. Raises TooLarge, LimitReached, QuotaReached, OSError:
        so many bytes, or so many uploads, are not possible."""
        with storing():
            return await to_its_end(self._create, owner, filename, num_bytes)

    async def add_part(self, upload_id: str, owner: str, pieces: AsyncIterator[bytes], announced: int) -> Part:
        """Store a part. It is on the disk when this returns; nothing of a part that breaks off is kept. Raises
        NotFound, InvalidRequest: there is no such upload, or it takes no such part; TooLarge, LimitReached, OSError:
        the part cannot be stored.

        Args:
            announced: bytes, as the client announces them; 0: it does not.
        """
        upload = self._of(upload_id, owner)
        self._require_open(upload)
        with storing(), self._quotas.uploading(owner):
            async with entered(self._arriving(upload, announced)) as (written, file, output):
                digest, size = await self._write(upload, output, pieces, written)
                return await to_its_end(self._keep, upload, file, output, digest, size)

    async def complete(
        self,
        upload_id: str,
        owner: str,
        part_ids: Sequence[str],
        md5: str | None,
        register: Callable[[UploadRecord, str], Awaitable[None]],
    ) -> UploadRecord:
        """Make rows of the parts. The same call again changes nothing.

        Args:
            md5: of the whole, in hexadecimal; None: not compared.
            register: is called with the upload and the digest of its stored rows, and again after a kill: it makes
                their dataset.

        Raises:
            NotFound, InvalidRequest: there is no such upload, it lacks parts, or has other bytes than declared.
            LimitReached: the token has as many uploads under way as may be.
            TooLarge, OSError: the rows cannot be stored. The upload stays as it was, as in every case; but it is
                cancelled where its bytes have been refused several times.
            The errors of `register`.
        """
        upload = self._of(upload_id, owner)
        with storing(), self._quotas.uploading(owner):
            async with upload.ending:
                if upload.record.status == "completed" and upload.record.part_ids == [*part_ids]:
                    return upload.record
                async with entered(self._closing(upload)):
                    _check_parts(upload, part_ids)
                    async with self._copying.taken():
                        await self._make_rows(upload, part_ids, md5, register)
                    ended = upload.record.model_copy(update={"status": "completed", "part_ids": [*part_ids]})
                    await to_its_end(self._end, upload, ended)
                return upload.record

    async def cancel(self, upload_id: str, owner: str) -> UploadRecord:
        """Cancel an upload, and remove its parts. Again, it changes nothing. Raises NotFound, InvalidRequest: there is
        no such upload, or it is completed."""
        upload = self._of(upload_id, owner)
        with storing():
            async with upload.ending:
                if upload.record.status != "cancelled":
                    async with entered(self._closing(upload)):
                        ended = upload.record.model_copy(update={"status": "cancelled"})
                        await to_its_end(self._end, upload, ended)
                return upload.record

    async def _make_rows(
        self,
        upload: _Upload,
        part_ids: Sequence[str],
        md5: str | None,
        register: Callable[[UploadRecord, str], Awaitable[None]],
    ) -> None:
        """Copy the parts, which count by the declared bytes until the rows do, and register what they are."""
        record = upload.record
        with self._counted.holding() as held:
            try:
                async with aclosing(self._pieces(upload, part_ids, md5)) as pieces:
                    sha256 = await self._blobs.receive(None, pieces, record.num_bytes, storing=held.add)
            except (InvalidRequest, TooLarge):
                upload.refused += 1
                if upload.refused >= _MOST_REFUSED:
                    await to_its_end(self._end, upload, record.model_copy(update={"status": "cancelled"}))
                raise
            await asyncio.to_thread(self._counted.note, sha256, record.owner)
            await register(record, sha256)

    def _create(self, owner: str, filename: str, num_bytes: int) -> UploadRecord:
        if num_bytes > self._most_mb << 20:
            raise TooLarge(f"bytes={num_bytes} is more than {self._most_mb} MiB (max_upload_mb): split the file")
        record = UploadRecord(
            upload_id=_UPLOAD + secrets.token_hex(12),
            owner=owner,
            filename=filename,
            num_bytes=num_bytes,
            created_at=self._clock(),
        )
        upload = _Upload(record, self._directory / record.upload_id)
        with self._lock:
            pending = [one for one in self._uploads.values() if one.record.owner == owner and not one.is_closed]
            if len(pending) >= MOST_PENDING:
                raise LimitReached(
                    f"{owner!r} has begun {MOST_PENDING} uploads in parts, as many as may be: complete or cancel one, "
                    "or wait until one has expired, an hour after its begin",
                    _RETRY_S,
                )
            self._uploads[record.upload_id] = upload
        try:
            upload.reserved.enter_context(self._quotas.taking(owner))(num_bytes)
            self._blobs.space.require(Use.ordered, self._directory, num_bytes)
            upload.directory.mkdir(mode=0o700)
            atomic_write_json(upload.directory / _DOCUMENT, record.model_dump())
            fsync_path(upload.directory)
            fsync_path(self._directory)
        except BaseException:
            with self._lock:
                self._uploads.pop(record.upload_id, None)
            self._remove(upload)
            raise
        self._forget_ended(owner)
        return record

    def _forget_ended(self, owner: str) -> None:
        """Remove the oldest of too many documents."""
        with self._lock:
            ended = [
                one for one in self._uploads.values() if one.record.owner == owner and one.record.status != "pending"
            ]
            old = ended[: max(0, len(ended) - _MOST_ENDED)]
            for one in old:
                del self._uploads[one.record.upload_id]
        for one in old:
            self._remove(one)

    def _of(self, upload_id: str, owner: str) -> _Upload:
        """An upload of a token. Raises NotFound."""
        with self._lock:
            upload = self._uploads.get(upload_id)
        if upload is None or upload.record.owner != owner:
            raise NotFound(
                f"no upload {upload_id[:200]!r} of this token is here (upload_id): an upload is kept for an hour; "
                "POST /openai/v1/uploads begins one",
                "upload_id",
            )
        return upload

    def _require_open(self, upload: _Upload) -> None:
        """Return if an upload takes parts. Raises InvalidRequest."""
        record = upload.record
        found: str = record.status
        if found == "pending":
            found = "expired" if record.expires_at <= self._clock() else "being completed" if upload.is_closed else ""
        if found:
            hint = f"it is {found}, and only a pending upload can be used: begin another one, POST /openai/v1/uploads"
            raise InvalidRequest("upload_id", record.upload_id, hint)

    @contextmanager
    def _closing(self, upload: _Upload) -> Iterator[None]:
        """No part is added to a pending upload, and it does not expire, while the block lasts; nor afterwards, where it
        has ended. Raises InvalidRequest."""
        with self._lock, upload.guard:
            self._require_open(upload)
            upload.is_closed = True
        try:
            yield
        finally:
            with upload.guard:
                upload.is_closed = upload.record.status != "pending"

    @contextmanager
    def _arriving(self, upload: _Upload, announced: int) -> Iterator[tuple[Callable[[int], None], Path, BinaryIO]]:
        """For a part: the function of `Space.arriving`, a new file, and that file, open."""
        with self._blobs.space.arriving(Use.ordered, self._directory, announced) as written:
            try:
                descriptor, name = tempfile.mkstemp(dir=upload.directory, prefix=_STAGED)
            except FileNotFoundError:
                self._require_open(upload)
                raise
            try:
                with open(descriptor, "wb") as output:
                    yield written, Path(name), output
            finally:
                Path(name).unlink(missing_ok=True)

    async def _write(
        self, upload: _Upload, output: BinaryIO, pieces: AsyncIterator[bytes], written: Callable[[int], None]
    ) -> tuple[str, int]:
        """Digest and bytes of a part."""
        digest, size = hashlib.sha256(), 0

        def flush(data: bytes) -> None:
            digest.update(data)
            output.write(data)
            output.flush()
            written(len(data))

        async def counted() -> AsyncGenerator[bytes]:
            nonlocal size
            async for piece in pieces:
                size += len(piece)
                if size > MOST_PART:
                    raise TooLarge(f"the part has more than {MOST_PART >> 20} MiB: send it as several parts")
                _require_room(upload, 0, size)
                yield piece

        async for data in gathered(counted()):
            await to_its_end(flush, data)
        if not size:
            raise InvalidRequest("data", "", "the part is empty: send at least one byte")
        return digest.hexdigest(), size

    def _keep(self, upload: _Upload, file: Path, output: BinaryIO, digest: str, size: int) -> Part:
        os.fsync(output.fileno())
        of_this = f"{upload.record.upload_id} {digest}"
        part_id = f"{_PART}{hashlib.sha256(of_this.encode()).hexdigest()[:24]}"
        path = upload.directory / part_id
        with upload.guard:
            self._require_open(upload)
            if part_id not in upload.parts:
                _require_room(upload, sum(upload.parts.values()), size)
                if len(upload.parts) >= MOST_PARTS:
                    hint = f"it has {MOST_PARTS} parts, as many as may be: begin another one, and send larger parts"
                    raise InvalidRequest("upload_id", upload.record.upload_id, hint)
                os.replace(file, path)
                upload.parts[part_id] = size
            created_at = path.stat().st_mtime
        fsync_path(upload.directory)
        return Part(part_id, created_at)

    async def _pieces(self, upload: _Upload, part_ids: Sequence[str], md5: str | None) -> AsyncGenerator[bytes]:
        digest = hashlib.md5(usedforsecurity=False)

        def read(file: BinaryIO) -> bytes:
            piece = file.read(_PIECE)
            if md5 is not None:
                digest.update(piece)
            return piece

        for part_id in part_ids:
            with await to_its_end(open_regular, upload.directory / part_id) as file:
                while piece := await to_its_end(read, file):
                    yield piece
        if md5 is not None and digest.hexdigest() != md5.lower():
            hint = (
                f"the parts have the md5 {digest.hexdigest()}: correct part_ids or md5, or cancel the upload and send "
                f"the file again; the upload is cancelled once {_MOST_REFUSED} such calls were refused"
            )
            raise InvalidRequest("md5", md5, hint)

    def _end(self, upload: _Upload, ended: UploadRecord) -> None:
        """Record the end of an upload, then remove its parts."""
        atomic_write_json(upload.directory / _DOCUMENT, ended.model_dump())
        fsync_path(upload.directory)
        upload.record = ended
        upload.reserved.close()
        for part_id in upload.parts:
            with suppress(OSError):  # it goes with the upload
                (upload.directory / part_id).unlink()
        upload.parts.clear()

    def _remove(self, upload: _Upload) -> None:
        with upload.guard:
            upload.is_closed = True
        upload.reserved.close()
        shutil.rmtree(upload.directory, ignore_errors=True)


def _is_busy(upload: _Upload) -> bool:
    return upload.is_closed and upload.record.status == "pending"


def _require_room(upload: _Upload, before: int, size: int) -> None:
    """Return if parts are within the declared bytes. Raises InvalidRequest."""
    declared = upload.record.num_bytes
    if before + size > declared:
        hint = (
            f"its parts would have {before + size} bytes or more, and {declared} were declared: complete it, or "
            "cancel it and begin another one"
        )
        raise InvalidRequest("upload_id", upload.record.upload_id, hint)


def _check_parts(upload: _Upload, part_ids: Sequence[str]) -> None:
    """Return if parts of an upload are there and have the declared bytes, which its token has reserved. A part is named
    as often as the file has its bytes: chunks that are equal are one part. Raises InvalidRequest."""
    for part_id in part_ids:
        if part_id not in upload.parts:
            hint = "this upload has no such part: send the ids that POST .../parts has answered"
            raise InvalidRequest("part_ids", part_id, hint)
    size, declared = sum(upload.parts[part_id] for part_id in part_ids), upload.record.num_bytes
    if size != declared:
        hint = f"these parts have {size} bytes, and {declared} were declared as bytes: send the others, or begin anew"
        raise InvalidRequest("part_ids", f"{len(part_ids)} parts", hint)
