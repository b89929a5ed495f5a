"""On PYTHONPATH, with `forked.environment()`: programs that other programs start fork their warm processes.

The services and agents of tests/cluster are started by the shipped scripts, the checks of benchmarks/gpu.py by itself.
Of those, what imports torch is itself forked.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_HERE = Path(__file__).parent
_BENCHMARKS = _HERE.parents[1] / "benchmarks"
_CHECK = "--child"
_PROGRAMS = ("llama_stack_provider_trl_remote", _CHECK)
"""In the command line: a service or an agent, a check."""
_IMPORT_TORCH = ("gpu_checks.speed:masks", "gpu_checks.peak_memory:estimate")
"""Checks."""


def _fork_warm_processes() -> None:
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    paths.remove(str(_HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]  # as trainings are started everywhere
    sys.path.insert(0, str(_HERE.parents[1]))
    import tests.forked  # noqa: F401

    if _CHECK in sys.orig_argv:
        _fork_trainers()
        if not {*_IMPORT_TORCH}.isdisjoint(sys.orig_argv):
            _fork_this()
    del sys.path[0]


def _fork_trainers() -> None:
    """Those that a check starts without a launcher, and what makes its models."""
    sys.path.insert(0, str(_BENCHMARKS))
    from gpu_checks import inputs, jobs

    del sys.path[0]
    started, run = jobs.start_trainer, inputs.run_this

    def start_trainer(arguments: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> Any:
        from tests.forked import start_program

        argv = [sys.executable, "-W", "ignore", "-m", "gpu_checks.trainer", *arguments]
        return start_program(argv, environ, log, _BENCHMARKS) or started(arguments, environ, log)

    def run_this(arguments: Sequence[str]) -> tuple[int, str]:
        from tests.forked import start_program

        argv = [sys.executable, "-W", "ignore", "-m", "gpu_checks.inputs", *arguments]
        with tempfile.TemporaryFile() as log:
            if not (found := start_program(argv, os.environ, log, _BENCHMARKS)):
                return run(arguments)
            exit_code = found.wait()
            log.seek(0)
            return exit_code, log.read().decode(errors="replace")

    jobs.start_trainer, inputs.run_this = start_trainer, run_this


def _fork_this() -> None:
    """Have a fork do what this process would do, and end as it ends."""
    from tests.forked import start_program

    at = sys.orig_argv.index(str(_BENCHMARKS / "gpu.py"))
    argv = [sys.executable, "-m", "tests.forked", *sys.orig_argv[at:]]
    if found := start_program(argv, os.environ, sys.stderr.buffer, _BENCHMARKS):
        os._exit(found.wait() & 0xFF)


if any(argument in _PROGRAMS for argument in sys.orig_argv):
    _fork_warm_processes()
