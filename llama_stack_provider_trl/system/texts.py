"""Text of users as it is parsed: UTF-8 with or without a byte order mark, and JSON in which no object has a key twice.

Python's own parser keeps the last of two equal keys. The check takes a tenth to a quarter of the time of parsing.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Any

_BOM = b"\xef\xbb\xbf"
_OTHER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_BEGINNING = 128
"""Bytes of a text that show an encoding without a mark."""
_NO_JSON = re.compile(r"(True|False|None|NULL|TRUE|FALSE|nan|inf|undefined)\b")
"""Names of other languages for values of JSON."""


class DuplicateKey(ValueError):
    """Raised when an object, or a mapping of YAML, has a key twice; names the key."""

    def __init__(self, key: str, where: str = "in one object") -> None:
        self.key = key
        super().__init__(f"the key {_shown(key)} is there twice {where}: leave one of them out")


def json_digest(value: Any) -> str:
    """The sha256 of a value of JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def decoded(data: bytes) -> str:
    """UTF-8 as text, without its byte order mark. Raises ValueError: it is another encoding, which is named where its
    beginning shows it."""
    refuse_encoding(data)
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error


def refuse_encoding(data: bytes) -> None:
    """Return if a text, or its first bytes, do not begin as UTF-16 or UTF-32. Raises ValueError: names the encoding."""
    for mark, name in _OTHER_MARKS:
        if data.startswith(mark):
            raise ValueError(f"it is {name} text, expected UTF-8: save it as UTF-8")
    if name := _unmarked(data[:_BEGINNING]):
        raise ValueError(f"it is {name} text without a byte order mark, expected UTF-8: save it as UTF-8")


def _unmarked(start: bytes) -> str:
    """The encoding of a text without a mark, by which of its bytes are zero; empty: UTF-8, or none."""
    count = start.count(0)
    if count < 2 or count * 16 < len(start):
        return ""
    zeros = {place for place in range(4) if 0 in start[place::4]}
    if zeros <= {0, 2} or zeros <= {1, 3}:
        return "UTF-16"
    return "UTF-32" if zeros in ({0, 1, 2}, {1, 2, 3}) else ""


def parse_json(text: str | bytes, *, any_digits: bool = False) -> Any:
    """JSON as objects.

    Args:
        any_digits: an integer of more digits than Python reads is an object, such as `{"number": "5000 digits"}`, in
            place of a ValueError: a column of a row that is not read may have any value.

    Raises:
        ValueError: it is not JSON, or not UTF-8; names the likely cause.
        DuplicateKey: an object has a key twice.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes | bytearray):
        text = decoded(bytes(text))
    try:
        return _DECODER.decode(text)
    except DuplicateKey:
        raise
    except json.JSONDecodeError as error:
        if cause := _cause(text, error):
            raise json.JSONDecodeError(f"{error.msg} ({cause})", text, error.pos) from error
        raise
    except ValueError:
        if not any_digits:
            raise
        return _ANY_DIGITS.decode(text)  # not at first: a call for each integer takes longer than to parse it


def _cause(text: str, error: json.JSONDecodeError) -> str:
    """What a person or a program most likely did to make a text no JSON; empty: its place does not show it."""
    rest = text[error.pos :].strip()
    if error.msg.startswith("Invalid control character"):
        return "a line end or tab within text: write it as \\n or \\t"
    if error.msg.startswith("Invalid \\"):
        return "write a backslash within text twice"
    if not rest or error.msg.startswith("Unterminated string"):
        return "it is cut off, or continues in another line" if text.strip() else "it is empty"
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments"
    is_last = rest[0] in "]}" and text[: error.pos].rstrip().endswith(",")
    if is_last or rest == "," or error.msg.startswith("Illegal trailing comma"):
        return "a comma follows the last value: leave it out"
    if error.msg == "Extra data":
        return "further values follow: write one per line, or a list of them" if rest[0] in "{[," else ""
    if rest[0] in "'\u2018\u2019\u201c\u201d":
        return 'other quotes than ": write it with json.dumps'
    name = _NO_JSON.match(rest)
    return f"{name[1]} is not JSON: write true, false or null, or text in quotes" if name else ""


def counted(number: int, what: str) -> str:
    """A number with what it counts: 1 row, 2 rows."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def beginning_of(value: Any) -> str:
    """A value as Python writes it, of which 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


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
