"""Stores rows that callers upload, within what each of them may store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from llama_stack_provider_trl.system.offload import storing

from .blobs import Blobs, Converted
from .quotas import CountedRows, Quotas


class RowUploads:
    """Receives rows by their digest. Nothing is kept of a body that breaks off or has another digest."""

    def __init__(self, blobs: Blobs, counted: CountedRows, quotas: Quotas) -> None:
        self._blobs, self._counted, self._quotas = blobs, counted, quotas

    async def store(
        self, sha256: str, stream: Callable[[], AsyncIterator[bytes]], size: int, owner: str | None
    ) -> bool:
        """Store a body of rows. Returns whether they are new: the body of others is not read.

        Args:
            size: as the client announces it; 0: it does not.
            owner: the token for which they count; None: for that of the request that waits for them.
        """
        with self._counted.holding() as held:
            await asyncio.to_thread(held.add, sha256)
            if is_known := await self._blobs.holds(sha256):
                await asyncio.to_thread(self._counted.count, sha256, owner, held)
        if is_known:
            return False
        # When they are here, and not while a slow client sends them.
        with storing(), self._counted.holding() as held:
            if owner is None:
                await self._blobs.receive(sha256, stream(), size, storing=held.add)
                return True
            async with self._quotas.arriving(owner, size) as arrived:
                await self._blobs.receive(sha256, stream(), size, arrived, held.add)
            await asyncio.to_thread(self._counted.count, sha256, owner, held)
        return True

    async def add(self, pieces: AsyncIterator[bytes], size: int, owner: str) -> str:
        """Store rows whose digest is not known before they are here. Returns it.

        Args:
            size: as the client announces it; 0: it does not.
        """
        with storing(), self._counted.holding() as held:
            async with self._quotas.arriving(owner, size) as arrived:
                sha256 = await self._blobs.receive(None, pieces, size, arrived, held.add)
            await asyncio.to_thread(self._counted.count, sha256, owner, held)
        return sha256

    async def add_file(self, ending: str, pieces: AsyncIterator[bytes], size: int, owner: str) -> Converted:
        """Store the rows of a file of another format, which the reader of datasets converts. Raises InvalidRows,
        TooLarge, OSError: see `Blobs.receive_file`; LimitReached, QuotaReached: see `Quotas.arriving`.

        Args:
            ending: of its name, such as `.csv.gz`: one of `row_files.ROW_READERS`.
            size: as the client announces it; 0: it does not.
        """
        with self._counted.holding() as held:
            async with self._quotas.arriving(owner, size) as arrived:
                found = await self._blobs.receive_file(ending, pieces, size, arrived, held.add)
            await asyncio.to_thread(self._counted.count, found.sha256, owner, held)
        return found
