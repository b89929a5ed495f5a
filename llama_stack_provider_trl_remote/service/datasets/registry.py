"""The service's own dataset registry: one small JSON document per dataset, with rows as blobs."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote
from uuid import uuid4
from weakref import WeakValueDictionary

from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobConflict, StoreError
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowNames, RowsOrigin, RowUse
from llama_stack_provider_trl.specs.names import STORED
from llama_stack_provider_trl.specs.row_files import ENDINGS, ROW_READERS, ending_of
from llama_stack_provider_trl.specs.work import OF_JOB
from llama_stack_provider_trl.system.beneath import open_beneath, path_of
from llama_stack_provider_trl.system.data_dir import DataDir, expect_directory, read_own
from llama_stack_provider_trl.system.files import (
    atomic_write_json,
    fsync_path,
    open_regular,
    put_lines,
    put_rows,
    read_regular,
)
from llama_stack_provider_trl.system.json_rows import encoded
from llama_stack_provider_trl.system.offload import caller_name, in_work_thread

from ..http.dataset_bodies import BlobSource, Dataset, RegisterDataset, RowsSource, UriSource
from ..http.errors import Conflict, NotFound, TooLarge
from ..http.places import ListPlace
from ..settings import ServiceSettings
from ..space import Use
from .blobs import Blobs, Converted
from .index import DatasetIndex
from .quotas import CountedRows, HeldRows
from .registration import StoredRows
from .uris import BUCKET, HUB, HUB_FORM, Readable, bucket_files, hub_dataset, is_within, split_uri

log = logging.getLogger(__name__)
FIELD = "training_config.data_config.dataset_id"
_RAY = "ray"
_PIECE = 1 << 20
_PAGE_BYTES = 4 << 20
"""Bytes from which on a page ends before its limit."""


class Entry(BaseModel):
    """The stored document of a dataset."""

    dataset: Dataset
    registered_at: float
    sha256: str | None = None
    """Digest and number of the rows; None: a uri that no job has requested yet."""
    num_rows: int | None = None
    stamp: str | None = None
    """Size and time of the file from which the rows were read, commit of the hub, or digest of a bucket's list."""
    created_by: str = ""
    """Name of the token that registered it."""
    grows: str | None = None
    """The mark of its growth, where `add_row` began it: no request can set it."""


class Growth(NamedTuple):
    """What a dataset that grows row by row may have."""

    mark: str
    """Kind of its rows: no other dataset grows. It is also a key of its metadata, whose value is true."""
    most_rows: int
    most_bytes: int


class ClusterFiles(Protocol):
    """Files that only the machines of a cluster have."""

    def find(self, uri: str) -> object:
        """Check a uri. Raises InvalidRequest."""

    async def read(self, uri: str) -> str:
        """Store the rows of a uri; returns their digest. Raises TrlError."""


class DatasetRegistry:
    """Registers datasets, and reads their rows for jobs.

    Args:
        cluster: reads `ray://` uris; None: they are refused.
        maker: in its context, which yields the job that is to make a dataset of this name, no further job takes one.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        blobs: Blobs,
        cluster: ClusterFiles | None = None,
        maker: Callable[[str], AbstractContextManager[str | None]] = lambda dataset_id: nullcontext(),
        counted: CountedRows | None = None,
    ) -> None:
        self._blobs, self._cluster, self._maker, self._counted = blobs, cluster, maker, counted or CountedRows(blobs)
        self._counted.is_registered = lambda sha256: self._index.has_rows(sha256)
        self._roots = tuple(root.resolve() for root in settings.dataset_roots)
        self._buckets = settings.dataset_buckets
        self._data_dir = DataDir(settings.data_dir)
        self._directory = self._data_dir.registry
        self._most = settings.max_datasets
        self._registering = threading.RLock()
        self._known: DatasetIndex | None = None
        """None: not read yet. No other process writes the documents."""
        self._reading: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Of the callers and datasets that are read at the moment: as `Blobs` has them for checks."""
        self._growing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of the datasets that get a row at the moment."""

    def prepare(self) -> None:
        """Create the directory, and read it: the only time. Raises OSError, StoreError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        found = self._read_all()
        self._known = DatasetIndex(found)
        self._counted.recount((place.name, created_by, sha256) for place, created_by, sha256 in found)

    async def register(
        self,
        body: RegisterDataset,
        stored: StoredRows | None = None,
        created_by: str = "",
        *,
        grows: str | None = None,
        reserved: Mapping[str, Any] = MappingProxyType({}),
    ) -> Dataset:
        """Register a dataset; repeating the same registration changes nothing. Raises InvalidRequest: a source that
        cannot be read from here; Conflict: the name is taken by another dataset, or a job is to make one of this name.

        Args:
            stored: its rows, where they were too many for this process.
            grows: mark of its growth; None: it does not grow.
            reserved: metadata under keys that no request can set.
        """
        if body.dataset_id is None:
            body.dataset_id = f"dataset-{uuid4()}"
        if body.dataset_id.startswith(OF_JOB):
            hint = f"{OF_JOB}NAME means the rows that the job NAME makes: choose another name"
            raise InvalidRequest("dataset_id", body.dataset_id, hint)
        with self._counted.holding() as held:
            update = {"created_by": created_by, "grows": grows}
            entry = (await self._entry(body, stored, held)).model_copy(update=update)
            entry.dataset.metadata.update(reserved)
            return await self._registered(entry, held)

    async def _registered(self, entry: Entry, held: HeldRows) -> Dataset:
        dataset_id = entry.dataset.identifier
        async with self._counted.kept_with_its_dataset(entry.sha256, entry.created_by, held):
            known = await in_work_thread(self._claim, entry)
            if known is None:
                return shown(entry)
            if _content(known) != _content(entry):
                raise Conflict(
                    f"dataset {dataset_id!r} exists already with another content: choose another dataset_id, or "
                    f"DELETE /v1/datasets/{dataset_id} first (jobs that use it keep their rows)"
                )
            return shown(known)

    def register_made(
        self, dataset_id: str, rows: Path, made: Mapping[str, object], job_uuid: str, created_by: str
    ) -> None:
        """Register rows that a job has made; repeating the same registration changes nothing. Raises InvalidRequest:
        the file is missing, or has another digest or other rows than reported, or more than a dataset may have;
        JobConflict: the name is taken by another dataset; StoreError: they cannot be stored.

        Args:
            made: sha256 and num_rows, as the job has reported them.
        """
        count = made.get("num_rows") if isinstance(made, Mapping) else None
        try:
            self._blobs.check_count(count if isinstance(count, int) else 0)
        except TooLarge as error:
            hint = f"{error}; the rows of this job are in {rows}: register parts of them"
            raise InvalidRequest("output.dataset_id", dataset_id, hint) from error
        with self._counted.holding() as held:
            try:
                with open_regular(rows) as file:
                    size = os.fstat(file.fileno()).st_size
                    self._blobs.space.require(Use.checkpoint, self._blobs.directory, size)  # a job's result
                    blob = put_lines(self._blobs.directory, iter(partial(file.read, _PIECE), b""), storing=held.add)
            except FileNotFoundError as error:
                raise InvalidRequest("output.dataset_id", dataset_id, f"{rows}, the job's rows, is gone") from error
            except OSError as error:
                raise StoreError(f"dataset {dataset_id!r} cannot be stored: {error}") from error
            if made != {"sha256": blob.sha256, "num_rows": blob.num_rows}:
                raise InvalidRequest(
                    "output.dataset_id", dataset_id, f"{rows} was changed after the job had written it"
                )
            dataset = Dataset(
                identifier=dataset_id,
                provider_resource_id=dataset_id,
                purpose="post-training/messages",
                source=RowsSource(type="rows", rows=[]),
                metadata={"job_uuid": job_uuid},
            )
            entry = Entry(
                dataset=dataset,
                registered_at=time.time(),
                sha256=blob.sha256,
                num_rows=blob.num_rows,
                created_by=created_by,
            )
            known = self._claim(entry, is_made=True)
            if known is not None and _content(known) != _content(entry):
                raise JobConflict(
                    f"dataset {dataset_id!r} was registered with another content meanwhile; the rows of this job are "
                    f"in {rows}: register them under another name"
                )

    async def add_row(self, dataset_id: str, row: dict[str, Any], growth: Growth, created_by: str) -> int:
        """Add a row to a dataset that grows, which its first row creates. It is on the disk when this returns. The same
        row again changes nothing. Returns the number of rows.

        Args:
            created_by: name of the caller's token; the rows count for the one that added the first row.

        Raises:
            InvalidRequest: no dataset can have this name.
            Conflict: another dataset has it, or is made under it; or this one has as many rows as it may.
            QuotaReached, StoreError, OSError: the row cannot be stored.
        """
        async with self._growing.setdefault(dataset_id, asyncio.Lock()):
            known = await in_work_thread(self._read, dataset_id)
            if known is None:
                source = RowsSource(type="rows", rows=[row])
                body = RegisterDataset(dataset_id=dataset_id, source=source, metadata={growth.mark: True})
                await self.register(body, created_by=created_by, grows=growth.mark)
                return 1
            if known.grows != growth.mark or known.sha256 is None:
                hint = f"it was not begun by the first of its {growth.mark}: choose another name"
                raise Conflict(f"dataset {dataset_id!r} has other rows, {hint}")
            with self._counted.holding() as held:
                return await in_work_thread(self._grown, known, row, growth, held)

    def _grown(self, known: Entry, row: dict[str, Any], growth: Growth, held: HeldRows) -> int:
        """Store the rows of a dataset with one more. Returns their number."""
        name, before = known.dataset.identifier, self._blobs.path(known.sha256 or "")
        try:
            data = read_regular(before, growth.most_bytes)
            line = encoded(row, data.count(b"\n"))
            if data and not data.endswith(b"\n"):
                data += b"\n"
            if data.startswith(line) or b"\n" + line in data:
                return data.count(b"\n")
            if data.count(b"\n") >= growth.most_rows or len(data) + len(line) > growth.most_bytes:
                raise _full(name, growth)
            self._blobs.check_space(len(data) + len(line))
            blob = put_lines(self._blobs.directory, (data, line), storing=held.add)
        except FileNotFoundError as error:
            raise Conflict(f"the rows of dataset {name!r} are gone: choose another name, or delete it first") from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise _full(name, growth) from error
            raise StoreError(f"dataset {name!r} cannot be stored: {error}") from error
        with self._registering:
            if self._read(name) != known:
                raise Conflict(f"dataset {name!r} was changed meanwhile: send this again")
            self._counted.check(blob.sha256, known.created_by, held)
            self._write(known.model_copy(update={"sha256": blob.sha256, "num_rows": blob.num_rows}))
            self._sync(name)  # before the rows that it had are removed
            self._counted.note(blob.sha256, known.created_by, name)
            self._counted.release_old(name, blob.sha256)
        return blob.num_rows

    def _claim(self, entry: Entry, *, is_made: bool = False) -> Entry | None:
        """Register a dataset whose name is free; returns the one that has it, if it is not. Raises Conflict: a job is
        to make a dataset of this name, or the token has as many as it may.

        Args:
            is_made: it is the one that a job was to make.
        """
        name = entry.dataset.identifier
        with self._registering:
            known = self._read(name)
            if known is None:
                if not is_made and self._index.count(entry.created_by) >= self._most:
                    raise Conflict(
                        f"{entry.created_by or 'this caller'!r} has registered {self._most} datasets, and max_datasets "
                        "allows no more: delete some that no job needs (DELETE /v1/datasets/NAME)"
                    )
                with nullcontext() if is_made else self._maker(name) as maker:
                    if maker is not None:
                        raise Conflict(
                            f"job {maker!r} is to make a dataset of the name {name!r}: choose another dataset_id, or "
                            "cancel that job first"
                        )
                    self._write(entry)
                if entry.grows is not None:  # its first row is on the disk when it is answered
                    self._sync(name)
            # Repeated where the database could not be written before.
            self._counted.note((known or entry).sha256, (known or entry).created_by, name)
            return known

    def get(self, dataset_id: str) -> Dataset:
        """Find a dataset. Raises NotFound."""
        return shown(self.entry(dataset_id))

    def entry(self, dataset_id: str) -> Entry:
        """The stored document of a dataset. Raises NotFound."""
        entry = self._read(dataset_id)
        if entry is None:
            raise _unknown(dataset_id)
        return entry

    def places(self, prefix: str) -> list[ListPlace]:
        """Time of registration and name of each dataset whose name begins so, oldest first."""
        return [place for place in self._index.after(None) if place.name.startswith(prefix)]

    def count(self, dataset_id: str, growth: Growth) -> int:
        """The number of rows of a dataset that grows; 0, too, where none has this name and mark. Raises StoreError."""
        entry = self._read(dataset_id)
        return 0 if entry is None or entry.grows != growth.mark else entry.num_rows or 0

    def holds(self, dataset_id: str) -> bool:
        """Whether a name is registered. It takes no lock: its holder may wait for the caller's transaction to end.

        Raises StoreError."""
        if self._path(dataset_id).exists():
            return True
        expect_directory(self._directory)
        return False

    def names(self, limit: int = 1000) -> list[str]:
        """Names of the datasets that were registered last, oldest first."""
        return [place.name for place in self._index.after(None)[-limit:]]

    def page(self, limit: int, after: str | None = None) -> bytes:
        """Datasets as JSON, oldest first: a `ListDatasetsResponse`. It has at most `limit` datasets and a few MiB.
        Raises InvalidRequest: `after` is no cursor; StoreError: the directory is not there.

        Args:
            after: `next` of the page before; None: the first page.
        """
        expect_directory(self._directory)
        begin = None if after is None else ListPlace.of_cursor(after)
        places = self._index.after(begin)
        found: list[bytes] = []
        size, last = 0, None
        for number, place in enumerate(places):
            if number == limit or size > _PAGE_BYTES:
                last = places[number - 1].cursor
                break
            try:
                entry = self._read(place.name)
            except StoreError as error:
                log.warning("dataset %r is left out of a list: %s", place.name, error)
                continue
            if entry is not None:  # it was deleted meanwhile
                found.append(shown(entry).model_dump_json().encode())
                size += len(found[-1])
        return b'{"data":[' + b",".join(found) + b'],"next":' + json.dumps(last).encode() + b"}"

    def delete(self, dataset_id: str) -> None:
        """Delete a dataset, with its rows unless jobs or other tokens have them. Raises NotFound, StoreError."""
        with self._registering:
            is_known = self.holds(dataset_id)
            self._index.remove(dataset_id)
            self._path(dataset_id).unlink(missing_ok=True)
            self._counted.release(dataset_id)  # and what the database could not release before
        if not is_known:
            raise _unknown(dataset_id)

    async def fetch(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        """The rows of a registered dataset for a job. Raises InvalidRequest: no such dataset, it cannot be read any
        more, or a row cannot be trained on."""
        entry, sha256 = await self._with_rows(dataset_id)
        ref, warnings = await self.fetch_blob(dataset_id, sha256, use, data_format, names)
        return ref.model_copy(update={"origin": _origin(entry)}), warnings

    async def rows_of(self, dataset_id: str, field: str = FIELD, *, is_current: bool = True) -> str:
        """The digest of the rows of a registered dataset, which are stored here, and unchecked. Raises InvalidRequest:
        no such dataset, or it cannot be read any more.

        Args:
            field: of the request that names the dataset.
            is_current: ask the source of a uri whether it has changed; else the source is read only where no rows of it
                are stored.
        """
        if not is_current:
            known = await in_work_thread(self._read, dataset_id)
            if known is not None and known.sha256 is not None and await self._blobs.holds(known.sha256):
                return known.sha256
        _, sha256 = await self._with_rows(dataset_id, field)
        return sha256

    async def _with_rows(self, dataset_id: str, field: str = FIELD) -> tuple[Entry, str]:
        """A registered dataset, and the digest of its rows, as `rows_of`."""
        entry = await in_work_thread(self._read, dataset_id)
        if entry is None:
            hint = "no dataset of this name is registered here: POST /v1/datasets registers one"
            raise InvalidRequest(field, dataset_id, hint)
        if isinstance(entry.dataset.source, UriSource):
            # One reader at a time: the second job of a dataset reuses the rows that the first job's POST has stored.
            lock = self._reading.setdefault((caller_name(), dataset_id), asyncio.Lock())
            async with lock:
                entry = await self._current(entry, entry.dataset.source.uri)
        assert entry.sha256 is not None
        if not await self._blobs.holds(entry.sha256):
            raise _gone(dataset_id, entry.sha256, field)
        return entry, entry.sha256

    async def fetch_blob(
        self,
        dataset_id: str,
        sha256: str,
        use: RowUse,
        data_format: DataFormat | None,
        names: RowNames | None = None,
    ) -> tuple[DatasetRef, list[str]]:
        """The result of `fetch`, for a digest."""
        if not await self._blobs.holds(sha256):
            hint = f"its rows ({sha256}) are not stored here: send them with PUT /v1/blobs/{sha256}"
            raise InvalidRequest(FIELD, dataset_id, hint)
        try:
            return await self._blobs.checked(dataset_id, sha256, use, data_format, names)
        except (OSError, InvalidRows) as error:
            if await self._blobs.holds(sha256):
                raise
            raise _gone(dataset_id, sha256) from error  # another request has deleted the dataset meanwhile

    async def _entry(self, body: RegisterDataset, stored: StoredRows | None, held: HeldRows) -> Entry:
        assert body.dataset_id is not None
        metadata = {**(body.metadata or {}), **({"dataset_type": body.dataset_type} if body.dataset_type else {})}
        sha256 = num_rows = None
        source: RowsSource | UriSource | BlobSource = body.source
        match body.source:
            case RowsSource() if stored is not None:
                sha256, num_rows = stored.sha256, stored.num_rows
                await in_work_thread(self._keep, body.dataset_id, stored, held)
                source = RowsSource(type="rows", rows=[])
            case RowsSource(rows=rows):
                self._blobs.check_count(len(rows))
                sha256, num_rows = await in_work_thread(self._put, body.dataset_id, rows, held)
                source = RowsSource(type="rows", rows=[])
            case BlobSource(sha256=digest):
                await in_work_thread(held.add, digest)
                if not await self._blobs.holds(digest):
                    raise InvalidRequest("source.sha256", digest, "PUT the rows to /v1/blobs/{sha256} first")
                sha256, num_rows = digest, await self._count(body.dataset_id, digest)
            case UriSource(uri=uri):
                with await in_work_thread(self._readable, uri):
                    pass
        dataset = Dataset(
            identifier=body.dataset_id,
            provider_resource_id=body.dataset_id,
            purpose=body.purpose,
            source=source,
            metadata=metadata,
        )
        return Entry(dataset=dataset, registered_at=time.time(), sha256=sha256, num_rows=num_rows)

    async def _count(self, dataset_id: str, sha256: str) -> int:
        try:
            return await self._blobs.count(sha256)
        except OSError as error:
            raise StoreError(f"the rows of dataset {dataset_id!r} cannot be read: {error}") from error

    def _keep(self, dataset_id: str, stored: StoredRows, held: HeldRows) -> None:
        held.add(stored.sha256)
        with _storing(dataset_id):
            self._blobs.check_space(0)
            self._blobs.keep(stored.path, stored.sha256)

    def _put(self, dataset_id: str, rows: list[dict[str, Any]], held: HeldRows) -> tuple[str, int]:
        with _storing(dataset_id):
            self._blobs.check_space(0)
            blob = put_rows(self._blobs.directory, rows, storing=held.add)
        return blob.sha256, blob.num_rows

    async def _current(self, entry: Entry, uri: str) -> Entry:
        """The entry with the current rows of its uri."""
        with await in_work_thread(self._readable, uri) as found, self._counted.holding() as held:
            known = await in_work_thread(self._read, entry.dataset.identifier) or entry
            is_stored = bool(known.sha256 and await self._blobs.holds(known.sha256))
            if is_stored and known.stamp == found.stamp:
                return known
            try:
                read = await self._converted(found, held, known.stamp if is_stored and found.stamp is None else None)
            except InvalidRows as error:
                raise InvalidRows(f"dataset {entry.dataset.identifier!r} ({uri}), {error}") from error
            if read is None:
                return known
            changes = {"sha256": read.sha256, "num_rows": read.num_rows, "stamp": found.stamp or read.stamp}
            current = known.model_copy(update=changes)
            await in_work_thread(self._replace, known, current, held)
            return current

    def _replace(self, known: Entry, current: Entry, held: HeldRows) -> None:
        """Store a dataset's current rows, unless it was deleted while they were read, or its name has another one."""
        with self._registering:
            if self._read(known.dataset.identifier) == known:
                self._counted.check(current.sha256, current.created_by, held)
                self._write(current)
                self._counted.note(current.sha256, current.created_by, current.dataset.identifier)
                if current.sha256 is not None:
                    self._sync(current.dataset.identifier)  # before the rows that it had are removed
                    self._counted.release_old(current.dataset.identifier, current.sha256)

    async def _converted(self, found: Readable, held: HeldRows, known: str | None) -> Converted | None:
        """Store the rows. None: they have the stamp `known`."""
        if found.stamp != _RAY or self._cluster is None:
            return await self._blobs.convert(found.name, found.file, held.add, known)
        sha256 = await self._cluster.read(found.name)
        await in_work_thread(held.add, sha256)
        return Converted(sha256, await self._blobs.count(sha256))

    def _readable(self, uri: str) -> Readable:
        """Open the source of a uri. Raises InvalidRequest."""
        scheme, separator, _ = uri.partition("://")
        if scheme in HUB:
            return Readable(uri, hub_dataset(uri).commit)
        if scheme == BUCKET:
            self._refuse_bucket(uri)
            return Readable(uri, None)
        if scheme == _RAY and self._cluster is not None:
            self._cluster.find(uri)
            return Readable(uri, _RAY)
        if (separator and scheme != "file") or not (separator or uri.startswith("/")):
            hint = (
                "expected an absolute path or file:// below one of the configured dataset_roots, "
                f"{HUB_FORM}, s3://BUCKET/PATH below one of the configured dataset_buckets, or ray:///PATH of a "
                "configured Ray cluster; or send the rows themselves"
            )
            raise InvalidRequest("source.uri", uri, hint)
        return self._file(uri, Path(unquote(split_uri(uri).path) if separator else uri))

    def _refuse_bucket(self, uri: str) -> None:
        """Return if a uri lies below a configured path of a bucket. Raises InvalidRequest."""
        files = bucket_files(uri)
        if not any(is_within(files, bucket_files(allowed)) for allowed in self._buckets):
            allowed = ", ".join(self._buckets) or "none is configured"
            hint = f"it must lie below one of the configured dataset_buckets ({allowed}); or send the rows themselves"
            raise InvalidRequest("source.uri", uri, hint)
        if not files.is_directory and ending_of(files.path) not in ROW_READERS:
            hint = f"expected a file name that ends in {ENDINGS}, or a directory that ends in a slash"
            raise InvalidRequest("source.uri", uri, hint)

    def _file(self, uri: str, path: Path) -> Readable:
        """Open a file below its root. It is opened once: later changes of the path have no effect."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequest("source.uri", uri, f"it cannot be looked up: {error}") from error
        root = next((root for root in self._roots if real != root and real.is_relative_to(root)), None)
        if root is None or self._data_dir.is_ours(real):
            raise self._outside(uri)
        if ending_of(real.name) not in ROW_READERS:
            raise InvalidRequest("source.uri", uri, f"expected a file name that ends in {ENDINGS}")
        try:
            file = open_beneath(root, real.relative_to(root))
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):
                raise self._outside(uri) from error
            raise InvalidRequest("source.uri", uri, f"the file cannot be read: {error.strerror}") from error
        if self._data_dir.is_ours(path_of(file, real)):  # a directory on the path was exchanged meanwhile
            os.close(file)
            raise self._outside(uri)
        status = os.fstat(file)
        return Readable(str(real), f"{status.st_size}-{status.st_mtime_ns}", file)

    def _outside(self, uri: str) -> InvalidRequest:
        roots = ", ".join(map(str, self._roots)) or "none is configured"
        hint = f"files must lie below one of the configured dataset_roots ({roots}); or send the rows themselves"
        return InvalidRequest("source.uri", uri, hint)

    def _path(self, dataset_id: str) -> Path:
        # A name may have any character, a file name may not.
        return self._directory / f"{hashlib.sha256(dataset_id.encode()).hexdigest()}.json"

    def _read(self, dataset_id: str) -> Entry | None:
        entry = self._parsed(self._path(dataset_id))
        if entry is None and dataset_id not in self._index:
            expect_directory(self._directory)
        elif entry is None:
            with self._registering:
                if not self.holds(dataset_id):  # set aside or removed since the directory was read
                    self._index.remove(dataset_id)
        return entry

    def _parsed(self, path: Path) -> Entry | None:
        """The entry of a file; None: there is none, or it was damaged, and the dataset can be registered again."""
        try:
            return read_own(path, partial(Entry.model_validate_json, context=STORED))
        except OSError as error:
            raise StoreError(f"{path} cannot be read at the moment: {error}") from error

    def _write(self, entry: Entry) -> None:
        path = self._path(entry.dataset.identifier)
        try:
            atomic_write_json(path, json.loads(entry.model_dump_json()))
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error}") from error
        self._index.add(ListPlace(entry.registered_at, entry.dataset.identifier), entry.created_by, entry.sha256)

    def _sync(self, dataset_id: str) -> None:
        """Return when the names of the documents are on the disk. Raises StoreError."""
        with _storing(dataset_id):
            fsync_path(self._directory)

    @property
    def _index(self) -> DatasetIndex:
        if self._known is None:
            self._known = DatasetIndex(self._read_all())
        return self._known

    def _read_all(self) -> list[tuple[ListPlace, str, str | None]]:
        found = []
        for path in self._directory.glob("*.json"):
            try:
                read = self._parsed(path)
            except StoreError as error:
                log.warning("%s", error)
                continue
            if read is not None:
                found.append((ListPlace(read.registered_at, read.dataset.identifier), read.created_by, read.sha256))
        return found


def shown(entry: Entry) -> Dataset:
    """A dataset as an answer: number and digest stand for its rows."""
    source = entry.dataset.source
    is_on_hub = isinstance(source, UriSource) and source.uri.partition("://")[0] in HUB
    known = {
        "num_rows": entry.num_rows,
        "sha256": entry.sha256,
        "commit": entry.stamp if is_on_hub else None,
        "created_by": entry.created_by or None,
    }
    metadata = {**entry.dataset.metadata, **{name: value for name, value in known.items() if value is not None}}
    return entry.dataset.model_copy(update={"metadata": metadata})


@contextmanager
def _storing(dataset_id: str) -> Iterator[None]:
    """Raise StoreError in place of an error of the system."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"dataset {dataset_id!r} cannot be stored: {error}") from error


def _origin(entry: Entry) -> RowsOrigin | None:
    """Whence the rows of a uri are; None: a request has sent them."""
    source = entry.dataset.source
    return RowsOrigin(uri=source.uri, version=entry.stamp) if isinstance(source, UriSource) else None


def _content(entry: Entry) -> tuple[Any, ...]:
    source = entry.dataset.source
    what = source.uri if isinstance(source, UriSource) else entry.sha256
    return source.type, what, entry.dataset.purpose, entry.dataset.metadata


def _gone(dataset_id: str, sha256: str, field: str = FIELD) -> InvalidRequest:
    return InvalidRequest(field, dataset_id, f"its rows ({sha256}) are gone: register it again, with its rows")


def _full(dataset_id: str, growth: Growth) -> Conflict:
    most = f"{growth.most_rows} rows, or {growth.most_bytes >> 20} MiB"
    return Conflict(f"dataset {dataset_id!r} may have {most}, and this would be more: choose another name")


def _unknown(dataset_id: str) -> NotFound:
    return NotFound(f"dataset {dataset_id!r} not found: GET /v1/datasets lists those that are registered")
