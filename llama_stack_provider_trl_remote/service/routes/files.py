"""Files as answers: whole, or the range of bytes that was requested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from ..security.streams import CountedStream
from ..views.checkpoints import Opener, requested_range

OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
LINES = {"application/x-ndjson": {"schema": {"type": "string"}}}
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The end of the log"}
}
_PIECE = 1 << 18


def file_response(
    opener: Opener,
    size: int,
    sha256: str,
    wanted: str | None,
    if_range: str | None = None,
    media_type: str = "application/octet-stream",
) -> Response:
    """A file; its ETag is its sha256. Raises OutOfRange.

    Args:
        opener: opens it, once the answer begins.
        if_range: an ETag: the range counts only if it is still the file's.
    """
    etag = f'"{sha256}"'
    part = requested_range(wanted, size) if if_range in (None, etag) else None
    start, stop = part or (0, size)
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 200 if part is None else 206
    return CountedStream(_pieces(opener, start, stop), status, headers=headers, media_type=media_type)


async def _pieces(opener: Opener, start: int, stop: int) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(opener) as file:
        file.seek(start)
        while start < stop:
            piece = await asyncio.to_thread(file.read, min(_PIECE, stop - start))
            if not piece:
                return
            start += len(piece)
            yield piece
