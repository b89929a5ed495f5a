"""Shows on a terminal that a command waits, and for how long: a preflight or an evaluation takes minutes."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from llama_stack_provider_trl.system.console import redraw

from .terminal import duration

_EVERY = 1.0


@contextmanager
def waiting(what: str, stream: TextIO | None = None, every: float = _EVERY) -> Iterator[None]:
    """For as long as the block lasts, a line on standard error has the time since it began. Off a terminal nothing is
    printed.

    Args:
        what: what is waited for, such as `preflight`.
        every: seconds between two lines.
    """
    shown_on = stream or sys.stderr
    if not shown_on.isatty():
        yield
        return
    ended, drawn = threading.Event(), 0
    began = time.monotonic()

    def draw() -> None:
        nonlocal drawn
        while not ended.wait(every):
            line = f"{what} ... {duration(round(time.monotonic() - began))}"
            redraw(shown_on, drawn, [line], _columns())
            drawn = 1

    thread = threading.Thread(target=draw, name="trl-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        redraw(shown_on, drawn, [], _columns())


def _columns() -> int:
    return shutil.get_terminal_size().columns - 1
