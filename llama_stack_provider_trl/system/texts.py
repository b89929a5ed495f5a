"""Text of users as it is parsed: UTF-8 with or without a byte order mark, and JSON in which no object has a key twice.

Python's own parser keeps the last of two equal keys. The check takes a tenth to a quarter of the time of parsing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_BOM = b"\xef\xbb\xbf"
_OTHER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class DuplicateKey(ValueError):
    """Raised when an object, or a mapping of YAML, has a key twice; names the key."""

    def __init__(self, key: str, where: str = "in one object") -> None:
        self.key = key
        super().__init__(f"the key {_shown(key)} is there twice {where}: leave one of them out")


def decoded(data: bytes) -> str:
    """UTF-8 as text, without its byte order mark.

    Raises:
        ValueError: it is another encoding, which is named where its byte order mark names it.
    """
    for mark, name in _OTHER_MARKS:
        if data.startswith(mark):
            raise ValueError(f"it is {name} text, expected UTF-8: save it as UTF-8")
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def parse_json(text: str | bytes, *, any_digits: bool = False) -> Any:
    """JSON as objects.

    Args:
        any_digits: an integer of more digits than Python reads is an object, such as `{"number": "5000 digits"}`, in
            place of a ValueError: a column of a row that is not read may have any value.

    Raises:
        ValueError: it is not JSON, or not UTF-8.
        DuplicateKey: an object has a key twice.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes | bytearray):
        text = decoded(bytes(text))
    try:
        return _DECODER.decode(text)
    except (json.JSONDecodeError, DuplicateKey):
        raise
    except ValueError:
        if not any_digits:
            raise
        return _ANY_DIGITS.decode(text)  # not at first: a call for each integer takes longer than to parse it


def first_duplicate(keys: list[Any]) -> Any:
    """The first of several keys that is among those before it; None: all differ."""
    seen = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DuplicateKey(first_duplicate([key for key, _ in pairs]))
    return found


def _shown(key: str) -> str:
    return repr(key if len(key) <= 100 else f"{key[:99]}…")


def _whole_number(text: str) -> int | dict[str, str]:
    digits = len(text.removeprefix("-"))
    return int(text) if digits <= sys.get_int_max_str_digits() else {"number": f"{digits} digits"}


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_ANY_DIGITS = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole_number)
