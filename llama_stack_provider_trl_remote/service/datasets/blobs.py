"""Stores datasets as files named by their sha256: uploaded in parts, checked once per use, never held in
memory."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args
from weakref import WeakValueDictionary

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowNames, RowUse
from llama_stack_provider_trl.specs.row_verdicts import RowsVerdict, check_within
from llama_stack_provider_trl.system.data_dir import DataDir, expect_directory, read_own
from llama_stack_provider_trl.system.files import atomic_write_json, touched
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl.system.offload import FairSlots, caller_name, entered, in_work_thread, to_its_end
from llama_stack_provider_trl.system.process import child_environment

from ..http.errors import TooLarge
from ..settings import ServiceSettings
from ..space import Space, Use
from .buckets import credentials
from .children import OutOfTime, run
from .reader import too_much_memory
from .uris import BUCKET

log = logging.getLogger(__name__)
READING = "llama_stack_provider_trl_remote.service.datasets.reader"
_STAGING = ".incoming-"
_PIECE = 1 << 20
_FLUSHED = 64 << 10
"""Bytes of an upload that are held in memory: it may be slow, and many are under way."""
_WRITTEN_ALONE = _FLUSHED // 4
"""Bytes from which on a piece is written as it is, without a copy."""
_SMALL = 4 << 20
"""Bytes up to which a file is checked by a fork of the call server: a reader of its own costs a third of a second."""
_SMALL_S = 20
"""Seconds of CPU time for that."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of readers: each thread of a numeric library takes tens of MiB of their memory limit."""
_NO_VARIABLES: Mapping[str, str] = {}
_CHILDREN = 2
"""Processes that read datasets at a time."""


class Converted(NamedTuple):
    """Rows that were read from a uri, and are stored."""

    sha256: str
    num_rows: int
    stamp: str | None = None
    """Of their source, where only its reader can find it out: the commit of a hub dataset."""


class Blobs:
    """Manages the files of `<data_dir>/datasets`."""

    def __init__(
        self, settings: ServiceSettings, isolation: Isolation = NO_ISOLATION, space: Space | None = None
    ) -> None:
        self.space = space or Space(settings.min_free_disk_mb << 20)
        self._isolation = isolation
        self.directory = DataDir(settings.data_dir).datasets
        self._settings = settings
        self._children = FairSlots(_CHILDREN, 1 if settings.credentials else _CHILDREN)
        self._small = Limited(_SMALL_S, settings.reader_memory_mb << 20)
        self._checking: WeakValueDictionary[tuple[str, Path], asyncio.Lock] = WeakValueDictionary()
        """Of the callers and files whose check is under way: its holder waits for the turn of its caller, which must
        not delay others."""

    def prepare(self) -> None:
        """Create the directory, and remove unfinished uploads of a service that was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(f"{_STAGING}*"):
            shutil.rmtree(path, ignore_errors=True)

    def path(self, sha256: str) -> Path:
        return self.directory / f"{sha256}.jsonl"

    async def holds(self, sha256: str) -> bool:
        """Whether these rows are stored here; the caller has time to use them. Raises StoreError."""
        return await asyncio.to_thread(self._holds, sha256)

    def _holds(self, sha256: str) -> bool:
        if touched(self.path(sha256)):
            return True
        expect_directory(self.directory)
        return False

    def forget(self, sha256: str) -> None:
        """Remove the verdicts about rows that were removed."""
        for use in get_args(RowUse):
            for data_format in (*get_args(DataFormat), "any"):
                self.path(sha256).with_name(f"{sha256}.{use}-{data_format}.json").unlink(missing_ok=True)

    async def receive(
        self,
        sha256: str | None,
        pieces: AsyncIterator[bytes],
        announced: int,
        arrived: Callable[[int], object] = lambda count: None,
        storing: Callable[[str], object] = lambda digest: None,
    ) -> str:
        """Store a body. Nothing of a body that ends early or has another digest is kept. Returns its digest. Raises
        InvalidRequest: it has another digest; TooLarge: it has too many rows; OSError: the disk is full.

        Args:
            sha256: the digest that it must have; None: any.
            arrived: is called by a thread with the number of bytes of each part.
        """
        async with entered(self._arriving(announced)) as (written, file, output):
            found = await self._write(output, pieces, lambda count: (arrived(count), written(count)))
            if sha256 not in (None, found):
                raise InvalidRequest(
                    "sha256", sha256, f"the digest of the body is {found}: nothing was kept, send it again"
                )
            await in_work_thread(storing, found)
            await in_work_thread(self.keep, file, found)
            return found

    async def receive_file(
        self,
        ending: str,
        pieces: AsyncIterator[bytes],
        announced: int,
        arrived: Callable[[int], object] = lambda count: None,
        storing: Callable[[str], object] = lambda digest: None,
    ) -> Converted:
        """Store the rows of a body that is a file of any format; the file itself is not kept. Raises InvalidRows,
        TooLarge, OSError: see `convert`.

        Args:
            ending: of the file's name, which names its format.
        """
        async with entered(self._arriving(announced)) as (written, file, output):

            def write(piece: bytes) -> None:
                output.write(piece)
                output.flush()
                arrived(len(piece))
                written(len(piece))

            async for data in gathered(pieces):
                await to_its_end(write, data)
            with open(file, "rb") as source:
                found = await self.convert(f"upload{ending}", source.fileno(), storing)
        assert found is not None  # no stamp was given that it could have
        return found

    async def count(self, sha256: str) -> int:
        """Number of rows that are stored under a digest."""
        return await in_work_thread(_count_lines, self.path(sha256))

    async def convert(
        self,
        uri: str,
        file: int | None = None,
        storing: Callable[[str], object] = lambda digest: None,
        known: str | None = None,
    ) -> Converted | None:
        """Store the rows of a file, a hub dataset or files of a bucket. Raises InvalidRows: it cannot be read, or not
        in time, or not within `reader_memory_mb`; TooLarge: it has too many rows, or they or its files take more than
        `max_upload_mb`; OSError: the disk is full. Returns None where they have the stamp `known`.

        Args:
            file: descriptor of the file; it stays open. None: the uri is one of the hub or a bucket.
            known: stamp of the rows that are stored already, of a uri without a file.
        """
        async with entered(self._converting()) as (staging, spare):
            limits = map(str, (self._settings.max_rows, self._settings.max_upload_mb, spare))
            added = credentials(os.environ) if uri.startswith(f"{BUCKET}://") else {}
            answer = await self._child(
                staging, "convert", uri, str(staging), *limits, known or "", file=file, write=[staging], added=added
            )
            if "same" in answer:
                return None
            if "too_many" in answer:
                raise self._too_many()
            if "too_large" in answer:
                limit, what = self._settings.max_upload_mb, answer.get("what") or "the rows of the dataset take"
                raise TooLarge(f"{what} more than {limit} MiB (max_upload_mb): split it")
            if "disk_full" in answer:
                raise OSError(errno.ENOSPC, f"reading {uri}: {answer['disk_full']}")
            if "error" in answer:
                raise InvalidRows(answer["error"])
            rows = staging / f"{answer['sha256']}.jsonl"
            await in_work_thread(storing, answer["sha256"])
            await in_work_thread(self.keep, rows, answer["sha256"])
            return Converted(answer["sha256"], answer["num_rows"], answer.get("stamp"))

    async def checked(
        self,
        dataset_id: str,
        sha256: str,
        use: RowUse,
        data_format: DataFormat | None,
        names: RowNames | None = None,
    ) -> tuple[DatasetRef, list[str]]:
        """A stored file that fits a use, with warnings. It is checked once: the verdict is kept beside it, unless the
        rows are read under names of the request. Raises InvalidRows: naming the first bad row."""
        path = self.path(sha256)
        kept = path.with_name(f"{sha256}.{use}-{data_format or 'any'}.json")
        # One check at a time: a repeated POST, of a client that has waited too long, reuses the first one's verdict.
        lock = self._checking.setdefault((caller_name(), kept), asyncio.Lock())
        async with lock:
            verdict = await in_work_thread(_read_verdict, kept) if names is None else None
            if verdict is None:
                verdict = await self._check(path, use, data_format, names)
                if names is None:
                    await in_work_thread(self._keep_verdict, kept, verdict)
        if verdict["error"] is not None:
            raise InvalidRows(f"dataset {dataset_id!r}, {verdict['error']}")
        ref = DatasetRef(dataset_id=dataset_id, path=path, sha256=sha256, num_rows=verdict["num_rows"])
        return ref, verdict["warnings"]

    def _keep_verdict(self, kept: Path, verdict: RowsVerdict) -> None:
        try:
            self.check_space(0)
            atomic_write_json(kept, {"version": __version__, **verdict})
        except OSError as error:  # the rows are checked again at their next use
            log.warning("the verdict about %s is not kept: %s", kept.name, error)

    def check_count(self, num_rows: int) -> None:
        """Refuse a file with too many rows. Raises TooLarge."""
        if num_rows > self._settings.max_rows:
            raise self._too_many()

    async def _check(
        self, path: Path, use: RowUse, data_format: DataFormat | None, names: RowNames | None
    ) -> RowsVerdict:
        if (await asyncio.to_thread(path.stat)).st_size <= _SMALL:
            return await in_work_thread(check_within, self._small, path, use, data_format, names)
        named = "" if names is None else names.model_dump_json()
        answer = await self._child(Path("/"), "check", str(path), use, data_format or "", named, read=[path])
        if "num_rows" not in answer:  # a failure of the reader, and no verdict about the rows: not to be kept
            raise InvalidRows(answer["error"])
        return RowsVerdict(num_rows=answer["num_rows"], warnings=answer["warnings"], error=answer["error"])

    async def _write(self, output: BinaryIO, pieces: AsyncIterator[bytes], written: Callable[[int], object]) -> str:
        digest, num_rows, last = hashlib.sha256(), 0, b"\n"

        def flush(data: bytes) -> None:
            digest.update(data)
            output.write(data)
            output.flush()
            written(len(data))

        async def counted() -> AsyncIterator[bytes]:
            nonlocal num_rows, last
            async for piece in pieces:
                num_rows += piece.count(b"\n")
                last = piece[-1:] or last
                self.check_count(num_rows + (last != b"\n"))
                yield piece

        async for data in gathered(counted()):
            await to_its_end(flush, data)
        return digest.hexdigest()

    async def _child(
        self,
        cwd: Path,
        *arguments: str,
        file: int | None = None,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        added: Mapping[str, str] = _NO_VARIABLES,
    ) -> dict[str, Any]:
        """Run `reading` in the training interpreter.

        It gets no token of ours, may access only the files that it is to read or write, and is killed at its time
        limit.

        Args:
            file: descriptor that it gets as its last argument.
            added: variables that it gets beside those of a training.
        """
        python = self._settings.train_python or Path(sys.executable)
        environment = child_environment(os.environ, {**_ONE_THREAD, **added})
        argv = [str(python), "-m", READING, *arguments]
        limit = self._settings.convert_timeout
        memory = self._settings.reader_memory_mb
        given = () if file is None else (file,)
        command = self._isolation.command(
            [*argv, str(memory), *map(str, given)], cwd, environment, read=read, write=write, keep=given
        )
        async with self._children.taken():
            try:
                done = await run(command, cwd=cwd, environ=environment, limit=limit, descriptors=given)
            except OutOfTime as error:
                raise InvalidRows(f"reading it took more than {limit:.0f} s (convert_timeout)") from error
        try:
            answer: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        except (ValueError, IndexError):
            if done.exit_code == -signal.SIGABRT:  # a library in C++ or Rust whose allocation failed
                return {"error": too_much_memory(memory)}
            return {"error": f"its reader ended with {done.exit_code}: {done.errors or 'no message'}"}
        return answer

    def check_space(self, announced: int) -> None:
        """Require free space for what a client orders. Raises OSError: see `Space.require`."""
        self.space.require(Use.ordered, self.directory, announced)

    def keep(self, file: Path, sha256: str) -> None:
        """Move a file of rows, on this file system, to its digest's name."""
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        os.replace(file, self.path(sha256))
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def _arriving(self, announced: int) -> Iterator[tuple[Callable[[int], None], Path, BinaryIO]]:
        """For a body: the function of `Space.arriving`, a new file, and that file, open."""
        with self.space.arriving(Use.ordered, self.directory, announced) as written, self._staging() as staging:
            file = staging / "rows"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as output:
                yield written, file, output

    @contextmanager
    def _converting(self) -> Iterator[tuple[Path, int]]:
        """For a reader: a new directory, and the MiB that it leaves free on the disk."""
        self.check_space(0)
        reserve, _ = self.space.reserve(self.directory)
        with self._staging() as staging:
            yield staging, self._settings.min_free_disk_mb + -(-reserve >> 20)

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self.directory, prefix=_STAGING))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _too_many(self) -> TooLarge:
        limit = self._settings.max_rows
        return TooLarge(f"the dataset has more than {limit} rows (max_rows): split it")


async def gathered(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes of an upload in parts that are worth a thread to write them."""
    waiting = bytearray()
    async for piece in pieces:
        if not waiting and len(piece) >= _WRITTEN_ALONE:
            yield piece
            continue
        waiting += piece
        if len(waiting) >= _FLUSHED:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            count += piece.count(b"\n")
            last = piece[-1:]
    return count + (last != b"\n")


def _read_verdict(path: Path) -> RowsVerdict | None:
    """The stored verdict; None: there is none, or another release made it."""
    return read_own(path, _parsed_verdict)


def _parsed_verdict(data: bytes) -> RowsVerdict | None:
    found = json.loads(data)
    if found["version"] != __version__:
        return None
    return RowsVerdict(num_rows=found["num_rows"], warnings=found["warnings"], error=found["error"])
