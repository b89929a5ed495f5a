"""Images as bytes and as text: which format they are of, without a library that decodes them."""

from __future__ import annotations

import base64

FORMATS = "PNG, JPEG or WebP"
MOST_BYTES = 8 << 20
"""Of an image: a row has at most 16 MiB, and base64 takes a third more."""


def media_type(data: bytes) -> str | None:
    """`image/png` and the like, by the first bytes; None: it is none of the formats that are read."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def data_uri(data: bytes) -> str | None:
    """An image as text; None: it is none of the formats that are read, or too large."""
    kind = media_type(data) if len(data) <= MOST_BYTES else None
    return None if kind is None else f"data:{kind};base64,{base64.b64encode(data).decode()}"
