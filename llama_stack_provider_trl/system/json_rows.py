"""Writes rows as lines of JSON, whatever their columns hold: a column that no shape reads does not decide whether the
others can be trained on.

A value that JSON lacks becomes an object with its kind and its text, such as `{"date": "2024-01-02"}`, which is no
text to any reader: where a column with one is read, the row is refused with the column's name. NaN is null, as it is an
absent value in a column.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from ..errors import InvalidRows

_OPTIONS: dict[str, Any] = {"allow_nan": False, "check_circular": False, "separators": (",", ":")}
_ENCODE = json.JSONEncoder(ensure_ascii=False, **_OPTIONS).encode
_ENCODE_ASCII = json.JSONEncoder(**_OPTIONS).encode
"""Writes half of a surrogate pair, which UTF-8 cannot."""
_MOST_BITS = 10_000
"""Of an integer: Python reads and writes 4300 digits."""
_SHOWN = 200
STAND_INS = frozenset({"binary", "date", "decimal", "duration", "number", "time", "timestamp"})
"""Kinds of values that JSON lacks: the only key of the objects that stand for them."""


def encoded(row: dict[str, Any], number: int) -> bytes:
    """A row as a line of JSON. A column that is NaN is left out. Raises InvalidRows: it is not an object, contains
    itself, or is nested too deeply; names the row."""
    if not isinstance(row, dict):
        raise InvalidRows(f"found {type(row).__name__}, expected an object with named columns", row=number)
    present = row
    for value in row.values():
        if isinstance(value, float) and value != value:
            present = {name: one for name, one in row.items() if not (isinstance(one, float) and one != one)}
            break
    try:
        return _ENCODE(present).encode() + b"\n"
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        return _ENCODE_ASCII(_writable(present)).encode() + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRows(
            f"cannot be written as JSON ({error}); columns: {sorted(map(str, row))}", row=number
        ) from error


def _writable(value: Any) -> Any:
    """The value with what JSON lacks written as objects. Raises RecursionError."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < _MOST_BITS else {"number": f"{value.bit_length()} bits"}
    if isinstance(value, float):
        return (None if value != value else {"number": str(value)}) if not math.isfinite(value) else value
    if isinstance(value, Mapping):
        held = value.get("bytes")
        if isinstance(held, bytes) and value.keys() <= {"bytes", "path"} and (uri := data_uri(held)):
            return {"bytes": uri, "path": None}  # an image, as Parquet files of `datasets` have them
        return {str(key): _writable(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_writable(one) for one in value]
    if isinstance(value, bytes | bytearray | memoryview):  # not the bytes: they may be more than a row may have
        return {"binary": f"{len(value)} bytes"}
    if isinstance(value, datetime):
        return {"timestamp": value.isoformat()} if value == value else None  # pandas' NaT
    for kind, name in ((date, "date"), (time, "time"), (timedelta, "duration"), (Decimal, "decimal")):
        if isinstance(value, kind):
            return {name: value.isoformat() if isinstance(value, date | time) else str(value)}
    if callable(plain := getattr(value, "tolist", None)) and not isinstance(found := plain(), type(value)):
        return _writable(found)  # numbers and arrays of numpy
    return None if type(value).__name__ == "NAType" else {type(value).__name__: str(value)[:_SHOWN]}


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
