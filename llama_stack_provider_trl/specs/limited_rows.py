"""Reads stored rows in a process with limits, where requests are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidRows
from ..system.limited import Limited, LimitExceeded


def read_within[Found](
    limits: Limited, read: Callable[..., Iterator[Found]], path: Path, *arguments: Any, doing: str, advice: str
) -> Found:
    """What `read(path, *arguments)` yields, once, in another process. Raises InvalidRows: it takes more than the limits
    allow; LimitReached: too many files are read, or the machine is too busy; OSError: the file cannot be read, or there
    can be no further process.

    Args:
        doing: what it does, as the beginning of the sentence about a limit.
        advice: how that sentence ends.
    """
    try:
        (found,) = limits.call(read, path, *arguments, before=_load)
    except LimitExceeded as error:
        most = f"{limits.seconds} s or {limits.memory >> 20} MiB of memory"
        raise InvalidRows(f"{doing} takes more than {most}: {advice}") from error
    except RuntimeError as error:
        raise OSError(f"{path.name} cannot be read: {error}") from error
    one: Found = found
    return one


def _load() -> None:
    from . import rows  # noqa: F401
