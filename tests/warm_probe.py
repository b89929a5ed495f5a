"""A program for forks of a warm process: writes what it inherits to a file, then changes all of it.

python -m tests.warm_probe FILE [nested]

`nested`: it changes all of it first, and has a fork of its own write the file, as a runner forks a rank.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system import fork


def inherited() -> dict[str, Any]:
    """The state of this process that a job before it could have left behind."""
    found = {
        "environ": dict(os.environ),
        "shown_environ": Path("/proc/self/environ").read_bytes().decode().rstrip("\0").split("\0"),
        "shown_command": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0").split("\0"),
        "argv": sys.argv,
        "files": sorted(os.listdir("/proc/self/fd")),
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "umask": os.umask(0),
        "cwd": str(Path.cwd()),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "python_random": random.random(),
        "session": os.getsid(0) == os.getpid(),
        "modules": len(sys.modules),
    }
    if "torch" in sys.modules:
        import datasets.fingerprint
        import numpy
        import torch

        found |= {
            "torch_random": torch.rand(3).tolist(),
            "numpy_random": float(numpy.random.rand()),
            "fingerprint": datasets.fingerprint.generate_random_fingerprint(),
            "torch_threads": torch.get_num_threads(),
            "cuda_initialized": torch.cuda.is_initialized(),
        }
    return found


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.open(os.devnull, os.O_RDONLY)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    random.seed(1)
    os.chdir("/")


if __name__ == "__main__":
    if sys.argv[2:]:
        environ = dict(os.environ)
        leave_traces()
        signal.signal(signal.SIGTERM, lambda *_: None)
        sys.exit(fork.start([sys.executable, "-m", "tests.warm_probe", sys.argv[1]], environ=environ).wait())
    Path(sys.argv[1]).write_text(json.dumps(inherited()))
    leave_traces()
    sys.exit(7)
