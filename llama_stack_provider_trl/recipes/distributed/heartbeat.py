"""Signs of life where no step is made: a runner ends a training that shows none for `hang_timeout`.

A large model on a slow disk, millions of rows to tokenize, a checkpoint of hundreds of gigabytes: each may take longer
than that and is no hang. Who hangs takes no CPU time and moves no bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...specs.events import EventWriter, NullEventWriter
from ...system.process import work_done

POLL_INTERVAL = 10.0
"""Seconds between two looks."""
_CPU = 0.05
"""Of one core: idle threads of torch and Python stay below."""
_BYTES = 1 << 20


@contextmanager
def heartbeat(writer: EventWriter) -> Iterator[None]:
    """While this is open, `writer` beats whenever this process has worked since the last look. Not for training itself,
    where only steps count."""
    if isinstance(writer, NullEventWriter):
        yield
        return
    over = threading.Event()

    def watch() -> None:
        before = work_done()
        while not over.wait(POLL_INTERVAL):
            now = work_done()
            if now[0] - before[0] > _CPU * POLL_INTERVAL or now[1] - before[1] > _BYTES:
                writer.heartbeat()
            before = now

    thread = threading.Thread(target=watch, name="shows that it lives", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
