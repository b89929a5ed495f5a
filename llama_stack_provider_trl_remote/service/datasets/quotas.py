"""The bytes of rows that each token may have stored."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from llama_stack_provider_trl.errors import LimitReached, QuotaReached, TrlError
from llama_stack_provider_trl.jobs.inputs.row_parts import Allowance
from llama_stack_provider_trl.jobs.store.datasets import IsRegistered, RowOwners
from llama_stack_provider_trl.specs.bases import parts_of
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec
from llama_stack_provider_trl.system.files import Blob
from llama_stack_provider_trl.system.offload import in_work_thread

from ..space import Space, Use
from .blobs import Blobs

_PIECE = 4 << 20
"""Bytes of an upload between two questions."""
_OLD = 3
"""Earlier rows of a dataset which stay when it has others, for requests that have begun to read them."""
UPLOADS = 16
"""Uploads of one token at a time: each holds a connection, memory and space. Clients send one at a time."""
_RETRY_S = 5


class Quotas:
    """Limits what tokens store, and their uploads at a time. Safe to share between threads."""

    def __init__(self, owners: RowOwners, most: int) -> None:
        self._owners, self._most = owners, most
        self._lock = threading.Lock()
        self._arriving: Counter[str] = Counter()
        self._ended = 0
        """Contexts of `taking` that have ended."""
        self._uploads: Counter[str] = Counter()

    def are_counted(self, sha256: str) -> bool:
        """Whether rows count for any token."""
        return self._owners.are_counted(sha256)

    def require(self, owner: str, coming: int) -> None:
        """Require room for rows. Raises QuotaReached."""
        # The database is read last: an upload that ends in between counts twice for a moment.
        with self._lock:
            arriving = self._arriving[owner]
        self._refuse(owner, self._owners.used(owner) + arriving, coming)

    @contextmanager
    def taking(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts bytes as arriving, for as long as the context lasts. It reads the database, and
        raises QuotaReached."""
        counted, has_ended = 0, False

        def take(count: int) -> None:
            nonlocal counted
            while True:
                # The database is read without the lock, for which the event loop would wait.
                ended, used = self._ended, self._owners.used(owner)
                with self._lock:
                    if has_ended:  # a thread of a request that was cancelled
                        return
                    if self._ended != ended:  # what has ended meanwhile may be stored now, and is not in the sum
                        continue
                    # What is refused counts for no other request.
                    self._refuse(owner, used + self._arriving[owner], count)
                    self._arriving[owner] += count
                    counted += count
                    return

        try:
            yield take
        finally:
            with self._lock:
                has_ended = True
                self._forget(owner, counted)

    @contextmanager
    def granted(self, owner: str, count: int) -> Iterator[None]:
        """Count bytes as arriving, for as long as the context lasts, and refuse nothing: an earlier start has granted
        them, and what has arrived since may be stored already."""
        with self._lock:
            self._arriving[owner] += count
        try:
            yield
        finally:
            with self._lock:
                self._forget(owner, count)

    def _forget(self, owner: str, arriving: int) -> None:
        self._ended += 1
        self._arriving[owner] -= arriving
        if not self._arriving[owner]:
            del self._arriving[owner]

    @asynccontextmanager
    async def arriving(self, owner: str, announced: int) -> AsyncIterator[Callable[[int], None]]:
        """Require room for an upload; yields a function that a thread calls with the number of each part of it. Raises
        LimitReached: as many uploads as may are under way; QuotaReached: also from that function."""
        unchecked = 0

        def arrived(count: int) -> None:
            nonlocal unchecked
            unchecked += count
            if not announced and unchecked >= _PIECE:
                take(unchecked)
                unchecked = 0

        with self.uploading(owner), self.taking(owner) as take:
            await asyncio.to_thread(take, announced)
            yield arrived

    @contextmanager
    def uploading(self, owner: str) -> Iterator[None]:
        """Count an upload for as long as the context lasts. Raises LimitReached: as many as may are under way."""
        with self._lock:
            if self._uploads[owner] >= UPLOADS:
                raise LimitReached(
                    f"{owner!r} has {UPLOADS} uploads of rows under way, as many as may be: send this one again when "
                    f"one has ended, in {_RETRY_S} s at the earliest",
                    _RETRY_S,
                )
            self._uploads[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._uploads[owner] -= 1
                if not self._uploads[owner]:
                    del self._uploads[owner]

    def _refuse(self, owner: str, used: int, coming: int) -> None:
        if used + coming > self._most:
            raise QuotaReached(
                f"{owner!r} has stored {used >> 20} MiB of rows, these take {-(-coming >> 20)} MiB more, and "
                f"max_stored_mb allows {self._most >> 20}: delete datasets that are no longer needed "
                "(DELETE /v1/datasets/NAME), and jobs that have ended with them"
            )


class JobAllowance(Allowance):
    """What a request of a token may write for its jobs: what leaves the space of checkpoints, and rows within the
    quota. Not safe to share between threads.

    Attributes:
        rows: what was stored for them.
    """

    def __init__(self, space: Space, quotas: Quotas, take: Callable[[int], None]) -> None:
        self._space, self._quotas, self._take = space, quotas, take
        self.rows: dict[str, Blob] = {}

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[int], None]]:
        with self._space.arriving(Use.ordered, directory) as written:
            yield written

    def add(self, rows: Blob) -> None:
        if rows.sha256 not in self.rows and not self._quotas.are_counted(rows.sha256):
            self._take(rows.num_bytes)
            self.rows[rows.sha256] = rows

    def counted(self, specs: Iterable[JobSpec]) -> dict[str, int]:
        sizes = {sha256: rows.num_bytes for sha256, rows in self.rows.items()}
        for ref in (ref for spec in specs for _, ref in parts_of(spec, DatasetRef)):
            if ref.of_job is None and ref.sha256 not in sizes:
                with suppress(FileNotFoundError):  # the job is refused when it is stored
                    sizes[ref.sha256] = ref.path.stat().st_size
        return sizes


class HeldRows:
    """Rows that a request stores or has found, until they are recorded or refused. `hold` is called with this and the
    digest of each."""

    def __init__(self, hold: Callable[[HeldRows, str], None]) -> None:
        self._hold = hold
        self.digests: set[str] = set()
        self.has_ended = False

    def add(self, sha256: str) -> None:
        """Hold rows, before it is known whether they are stored. Called by threads: it may wait for a transaction of
        another request."""
        self._hold(self, sha256)


class CountedRows:
    """The stored rows of a service, each with the tokens for which it counts.

    Rows that are refused, or whose last dataset is deleted, are removed, but not those that another request holds: it
    has stored or found them, and will record them.

    Args:
        owners, quotas: None: no token has a limit.

    Attributes:
        is_registered: whether a dataset has the rows of a digest; the registry sets it.
    """

    is_registered: IsRegistered

    def __init__(self, blobs: Blobs, owners: RowOwners | None = None, quotas: Quotas | None = None) -> None:
        self._blobs, self._owners, self._quotas = blobs, owners, quotas
        self._held: Counter[str] = Counter()
        self._lock, self._removing = threading.Lock(), threading.Lock()
        """The second while rows are removed, in threads only: a request that holds them afterwards finds them gone, and
        stores them again. The event loop takes the first."""

    @contextmanager
    def holding(self) -> Iterator[HeldRows]:
        """What a request holds is removed by no other one."""
        held = HeldRows(self._hold)
        try:
            yield held
        finally:
            self._drop(held, has_ended=True)

    def _hold(self, held: HeldRows, sha256: str) -> None:
        with self._removing, self._lock:
            if sha256 not in held.digests and not held.has_ended:  # else a thread of a request that was cancelled
                held.digests.add(sha256)
                self._held[sha256] += 1

    def check(self, sha256: str | None, owner: str, held: HeldRows) -> None:
        """Require room for stored rows that do not count for a token yet. Raises QuotaReached: it has as many as it
        may. The rows are removed, unless something else has them."""
        if self._owners is None or self._quotas is None or sha256 is None or self._owners.owns(sha256, owner):
            return
        try:
            self._quotas.require(owner, self._blobs.path(sha256).stat().st_size)
        except QuotaReached:
            self._discard(sha256, held)
            raise

    def count(self, sha256: str, owner: str | None, held: HeldRows) -> None:
        """Count uploaded rows for a token; None: they count for the request that waits for them. Raises QuotaReached:
        see `check`."""
        if owner is not None:
            self.check(sha256, owner, held)
            self.note(sha256, owner)

    @asynccontextmanager
    async def kept_with_its_dataset(self, sha256: str | None, owner: str, held: HeldRows) -> AsyncIterator[None]:
        """As `check`; stored rows whose registration the block refuses are removed, too."""
        await in_work_thread(self.check, sha256, owner, held)
        try:
            yield
        except TrlError:
            if sha256 is not None:
                await in_work_thread(self._discard, sha256, held)
            raise

    def note(self, sha256: str | None, owner: str, dataset_id: str = "") -> None:
        """Count stored rows for a token: uploaded ones, or those of a dataset."""
        if self._owners is not None and sha256 is not None:
            with suppress(FileNotFoundError):
                self._owners.note(sha256, owner, self._blobs.path(sha256).stat().st_size, dataset_id)

    def recount(self, datasets: Iterable[tuple[str, str, str | None]]) -> None:
        """Count the rows of registered datasets (name, token, digest) that do not count yet: the service ended, or the
        database could not be written, between the two."""
        if self._owners is not None:
            known = self._owners.registered()
            for name, owner, sha256 in datasets:
                if (sha256, name) not in known:
                    self.note(sha256, owner, name)

    def release(self, dataset_id: str) -> None:
        """Forget a dataset that was deleted, and remove its rows unless something else has them."""
        if self._owners is not None:
            for sha256 in self._owners.of_dataset(dataset_id):
                with self._removing:
                    removed = self._owners.release(dataset_id, self._blobs.path(sha256), self._is_in_use)
                if removed:
                    self._blobs.forget(sha256)

    def release_old(self, dataset_id: str, sha256: str) -> None:
        """Forget what a dataset had before its present rows, but for the last few, and remove these rows unless
        something else has them."""
        if self._owners is not None:
            old = [
                path for one in self._owners.of_dataset(dataset_id) if (path := self._blobs.path(one)).stem != sha256
            ]
            for path in sorted(old, key=_used_at)[:-_OLD]:
                with self._removing:
                    removed = self._owners.release(dataset_id, path, self._is_in_use)
                if removed:
                    self._blobs.forget(path.stem)

    def _discard(self, sha256: str, held: HeldRows) -> None:
        """Remove rows that were refused, unless something else has them."""
        if self._owners is not None:
            with self._removing:
                self._drop(held)
                self._owners.discard(self._blobs.path(sha256), self._is_in_use)

    def _drop(self, held: HeldRows, has_ended: bool = False) -> None:
        with self._lock:
            held.has_ended |= has_ended
            while held.digests:
                sha256 = held.digests.pop()
                self._held[sha256] -= 1
                if not self._held[sha256]:
                    del self._held[sha256]

    def _is_in_use(self, sha256: str) -> bool:
        return sha256 in self._held or self.is_registered(sha256)


def _used_at(path: Path) -> float:
    """Time of the last use of stored rows; 0: they are gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0
