"""On PYTHONPATH, with `forked.environment()`: programs that other programs start fork their warm processes.

The services and agents of tests/cluster are started by the shipped scripts, the checks of benchmarks/gpu.py by itself.
"""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_PROGRAMS = ("llama_stack_provider_trl_remote", "--child")
"""In the command line: a service or an agent, a check."""


def _fork_warm_processes() -> None:
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    paths.remove(str(_HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]  # as trainings are started everywhere
    sys.path.insert(0, str(_HERE.parents[1]))
    import tests.forked  # noqa: F401

    del sys.path[0]


if any(argument in _PROGRAMS for argument in sys.orig_argv):
    _fork_warm_processes()
