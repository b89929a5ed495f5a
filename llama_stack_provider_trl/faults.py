"""Points at which a test can stop, kill or slow down a process of the product. Without TRL_FAULTS nothing happens.

TRL_FAULTS names a directory. A test arms the point `step-3` by a file of that name whose text is an action; the first
process that comes by takes it (the file becomes `step-3.taken`) and acts, once, whoever comes by later. The points are
the calls of `reach` in the recipes, the runner and the supervisor; tests/README.md lists them.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

VARIABLE = "TRL_FAULTS"


def reach(point: str) -> None:
    """Act on what a test armed for `point`.

    `kill`: SIGKILL to this process. `stop`: SIGSTOP. `stall`: sleep for ever. `hold`: wait for a file `<point>.go`.
    `delay SECONDS`. `full`: raise what a full disk raises. `error`: raise RuntimeError. `memory`: raise MemoryError.
    `exit STATUS`: leave at once.
    """
    directory = os.environ.get(VARIABLE)
    if directory:
        armed = Path(directory, point)
        try:
            action = armed.read_text().split()
            armed.rename(armed.with_name(f"{point}.taken"))
        except FileNotFoundError:
            return
        _act(point, action, armed)


def _act(point: str, action: list[str], armed: Path) -> None:
    match action:
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["stall"]:
            while True:
                time.sleep(3600)
        case ["hold"]:
            while not armed.with_name(f"{point}.go").exists():
                time.sleep(0.01)
        case ["delay", seconds]:
            time.sleep(float(seconds))
        case ["full"]:
            raise OSError(errno.ENOSPC, f"No space left on device (fault at {point})")
        case ["error"]:
            raise RuntimeError(f"fault at {point}")
        case ["memory"]:
            raise MemoryError(f"fault at {point}")
        case ["exit", status]:
            os._exit(int(status))
        case _:
            raise ValueError(f"{armed}: no such action: {' '.join(action)}")
