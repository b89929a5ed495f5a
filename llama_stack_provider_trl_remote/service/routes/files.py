"""Files as answers: whole, or the range of bytes that was requested; and events as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Header
from starlette.responses import Response

from ..security.streams import CountedStream
from ..views.checkpoints import Opener, requested_range

OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
LINES = {"application/x-ndjson": {"schema": {"type": "string"}}}
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The end of the log"}
}
RangeHeader = Annotated[str | None, Header(alias="Range", description="One range of bytes, such as bytes=100-")]
IfRange = Annotated[str | None, Header(description="An ETag: the range counts only if it is still the file's")]
STREAM = "text/event-stream"
Accept = Annotated[str | None, Header(include_in_schema=False)]
LastEventId = Annotated[str | None, Header(description="As `after`, for a stream that continues")]
_PIECE = 1 << 18


def file_answers(content: dict[str, Any] = OCTETS, whole: str = "The whole file") -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose answer is a `file_response`."""
    return {
        200: {"content": content, "description": whole},
        206: {"content": content, "description": "The bytes that Range asks for"},
    }


class EventStream(CountedStream):
    """Server-sent events."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        super().__init__(parts, media_type=STREAM, headers={"Cache-Control": "no-store"})


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
