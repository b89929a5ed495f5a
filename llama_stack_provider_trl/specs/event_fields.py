"""Types of fields of events, which a training writes: bounded, so that what is stored, shown and traversed later is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

LAST_TIME = 253_402_300_799.0
"""The last second of the year 9999, which is the last that `datetime` can hold."""
_MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_KEY = 256
MAX_TEXT = 65_536
_MAX_MESSAGE = 16_384
MAX_ANSWERS = 16
"""Answers of a set of samples."""
MAX_ANSWER = 8192
"""Characters of one."""
MAX_ROLLOUT = 8
"""Answers of a rollout, and turns of its prompt."""
MAX_CALLS = 4
"""Calls of such a turn."""
MAX_REWARDS = 32
"""Rewards of such an answer. With all bounds a rollout fits into a line of events, however its texts are escaped."""
MAX_INTEGER = 2**63 - 1
"""The largest integer that a database column holds."""


def cut(limit: int, *, end: bool = False) -> BeforeValidator:
    """Shortens a text to `limit` characters instead of refusing the event: the first ones, or the last (`end`)."""

    def shorten(text: Any) -> Any:
        if not isinstance(text, str) or len(text) <= limit:
            return text
        return text[-limit:] if end else f"{text[: limit - 1]}…"

    return BeforeValidator(shorten)


def bounded[Value](value: Value) -> Value:
    """Refuses free-form JSON that exceeds what is stored, shown and traversed later."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    count = 0
    while waiting:
        found, depth = waiting.pop()
        count += 1
        if depth > _MAX_DEPTH or count > MAX_VALUES:
            raise ValueError(f"at most {_MAX_DEPTH} levels and {MAX_VALUES} values are expected")
        if isinstance(found, dict):
            if any(isinstance(key, str) and len(key) > MAX_KEY for key in found):
                raise ValueError(f"a key has more than {MAX_KEY} characters")
            waiting += [(item, depth + 1) for item in found.values()]
        elif isinstance(found, list | tuple):
            waiting += [(item, depth + 1) for item in found]
        elif isinstance(found, int) and abs(found) > MAX_INTEGER:
            raise ValueError("an integer has more than 63 bits")
        elif isinstance(found, str) and len(found) > MAX_TEXT:
            raise ValueError(f"a text has more than {MAX_TEXT} characters")
    return value


def _usable(path: Path) -> Path:
    if "\0" in str(path) or len(str(path)) > 4096:
        raise ValueError("a path has at most 4096 characters, none of them NUL")
    return path


Seconds = Annotated[float, Field(ge=0, le=LAST_TIME, allow_inf_nan=False)]
"""Since the epoch, up to the year 9999."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Of steps, rows, parameters: JSON's readers hold integers up to 2**53 without loss."""
Epochs = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Name = Annotated[str, Field(max_length=MAX_KEY)]
Message = Annotated[str, cut(_MAX_MESSAGE)]
Metrics = Annotated[dict[Name, float], Field(max_length=256)]
Tree = Annotated[dict[str, Any], AfterValidator(bounded)]
UsablePath = Annotated[Path, AfterValidator(_usable)]
