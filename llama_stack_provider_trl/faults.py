"""Points at which a test can stop, kill or slow down a process of the product. They have no effect without TRL_FAULTS.

TRL_FAULTS names a directory. A test arms the point `step-3` by a file of that name whose text is an action; the first
process that reaches the point takes it (the file becomes `step-3.taken`) and acts. It acts once only. The points are
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
    """Act on the fault that a test has armed for `point`.

    `kill`: SIGKILL to this process. `stop`: SIGSTOP. `stall`: sleep forever. `hold`: wait for a file `<point>.go`.
    `delay SECONDS`. `full`: raise the error of a full disk. `error`: raise RuntimeError. `memory`: raise MemoryError.
    `exit STATUS`: exit immediately.
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
