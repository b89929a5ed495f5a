"""Heartbeats between training steps: a runner ends a training that sends none for `hang_timeout`.

Loading a large model from a slow disk, tokenizing millions of rows or writing a checkpoint of hundreds of gigabytes may
take longer than that. A process that hangs takes no CPU time and moves no bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...specs.events import EventWriter, NullEventWriter
from ...system.process import work_done

POLL_INTERVAL = 10.0
"""Seconds between two measurements of the work done."""
_CPU = 0.05
"""Share of one core. Idle threads of torch and Python stay below it."""
_BYTES = 1 << 20


@contextmanager
def heartbeat(writer: EventWriter, pid: int | None = None) -> Iterator[None]:
    """While this is open, send a heartbeat whenever a process has worked since the last poll.

    Not for training itself, where each step sends one.

    Args:
        pid: of a child that works for this process; None: this process. Only its child's work counts of a rank beyond
            the first, which itself takes CPU time while it waits for another rank.
    """
    if pid is None and isinstance(writer, NullEventWriter):
        yield
        return
    send = writer.heartbeat if pid is None else writer.heartbeat_of_child
    over = threading.Event()

    def watch() -> None:
        before = work_done(pid)
        while not over.wait(POLL_INTERVAL):
            now = work_done(pid)
            if now[0] - before[0] > _CPU * POLL_INTERVAL or now[1] - before[1] > _BYTES:
                send()
            before = now

    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
