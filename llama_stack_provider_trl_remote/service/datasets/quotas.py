"""The bytes of rows that each token may have stored."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from llama_stack_provider_trl.errors import LimitReached, QuotaReached, TrlError
from llama_stack_provider_trl.jobs.row_owners import IsRegistered, RowOwners
from llama_stack_provider_trl.system.offload import in_work_thread

from .blobs import Blobs

_PIECE = 4 << 20
"""Bytes of an upload between two questions."""
UPLOADS = 16
"""Uploads of one token at a time: each holds a connection, memory and space. Clients send one at a time."""
_RETRY_S = 5


class Quotas:
    """Limits what tokens store, and their uploads at a time. Safe to share between threads.

    Args:
        most: bytes of one token.
    """

    def __init__(self, owners: RowOwners, most: int) -> None:
        self._owners, self._most = owners, most
        self._lock = threading.Lock()
        self._arriving: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()

    def require(self, owner: str, coming: int) -> None:
        """Require room for rows. Raises QuotaReached."""
        used = self._owners.used(owner) + self._arriving.get(owner, 0)
        if used + coming > self._most:
            raise QuotaReached(
                f"{owner!r} has stored {used >> 20} MiB of rows, these take {-(-coming >> 20)} MiB more, and "
                f"max_stored_mb allows {self._most >> 20}: delete datasets that are no longer needed "
                "(DELETE /v1/datasets/NAME), and jobs that have ended with them"
            )

    @contextmanager
    def arriving(self, owner: str, announced: int) -> Iterator[Callable[[int], None]]:
        """Require room for an upload; yields a function that is called with the number of each part of it.

        Raises:
            LimitReached: as many uploads as may are under way.
            QuotaReached: also from that function.
        """
        counted, unchecked = announced, 0

        def take(count: int) -> None:
            nonlocal counted
            with self._lock:
                self.require(owner, count)
                self._arriving[owner] += count
            counted += count

        def arrived(count: int) -> None:
            nonlocal unchecked
            unchecked += count
            if not announced and unchecked >= _PIECE:
                take(unchecked)
                unchecked = 0

        with self._lock:
            if self._uploads[owner] >= UPLOADS:
                raise LimitReached(
                    f"{owner!r} has {UPLOADS} uploads of rows under way, as many as may be: send this one again when "
                    f"one has ended, in {_RETRY_S} s at the earliest",
                    _RETRY_S,
                )
            self.require(owner, announced)
            self._uploads[owner] += 1
            self._arriving[owner] += announced
        try:
            yield arrived
        finally:
            with self._lock:
                self._uploads[owner] -= 1
                if not self._uploads[owner]:
                    del self._uploads[owner]
                self._arriving[owner] -= counted
                if not self._arriving[owner]:
                    del self._arriving[owner]


class CountedRows:
    """The stored rows of a service, each with the tokens for which it counts.

    Args:
        owners, quotas: None: no token has a limit.

    Attributes:
        is_registered: whether a dataset has the rows of a digest; the registry sets it.
    """

    is_registered: IsRegistered

    def __init__(self, blobs: Blobs, owners: RowOwners | None = None, quotas: Quotas | None = None) -> None:
        self._blobs, self._owners, self._quotas = blobs, owners, quotas

    def check(self, sha256: str | None, owner: str) -> None:
        """Require room for stored rows that do not count for a token yet.

        Raises:
            QuotaReached: it has as many as it may. The rows are removed, unless something else has them.
        """
        if self._owners is None or self._quotas is None or sha256 is None or self._owners.owns(sha256, owner):
            return
        try:
            self._quotas.require(owner, self._blobs.path(sha256).stat().st_size)
        except QuotaReached:
            self._owners.discard(self._blobs.path(sha256), self.is_registered)
            raise

    @asynccontextmanager
    async def kept_with_its_dataset(self, sha256: str | None, owner: str) -> AsyncIterator[None]:
        """As `check`; stored rows whose registration the block refuses are removed, too."""
        await in_work_thread(self.check, sha256, owner)
        try:
            yield
        except TrlError:
            if self._owners is not None and sha256 is not None:
                await in_work_thread(self._owners.discard, self._blobs.path(sha256), self.is_registered)
            raise

    def note(self, sha256: str | None, owner: str, dataset_id: str = "") -> None:
        """Count stored rows for a token: uploaded ones, or those of a dataset."""
        if self._owners is not None and sha256 is not None:
            with suppress(FileNotFoundError):
                self._owners.note(sha256, owner, self._blobs.path(sha256).stat().st_size, dataset_id)

    def release(self, dataset_id: str) -> None:
        """Forget a dataset that was deleted, and remove its rows unless something else has them."""
        if self._owners is not None:
            for sha256 in self._owners.of_dataset(dataset_id):
                if self._owners.release(dataset_id, self._blobs.path(sha256), self.is_registered):
                    self._blobs.forget(sha256)
