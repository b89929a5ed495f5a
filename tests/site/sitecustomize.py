"""On PYTHONPATH, with `forked.environment()`: programs that other programs start fork their warm processes.

The services and agents of tests/cluster are started by the shipped scripts, the checks of benchmarks/gpu.py by itself.
Of those, what imports torch is itself forked; of services and agents, those with `SERVER` in their environment.
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
_REMOTE = "llama_stack_provider_trl_remote"
_PROGRAMS = (_REMOTE, _CHECK)
"""In the command line: a service or an agent, a check."""
SERVER = "TESTS_FORKED_SERVER"
"""Variable of a service or an agent: as JSON the socket of the process that it is forked from, and the variables with
which that one has imported."""
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


def _become_forked() -> None:
    """Have a fork with the same command line be the service or the agent, pass on signals, and end as it ends. It joins
    the namespaces that this process is in."""
    import array
    import json
    import signal
    import socket

    path, conditions = json.loads(os.environ.pop(SERVER))
    del os.environ["PYTHONPATH"]  # of which this directory is all
    argv = [sys.executable, "-m", "tests.cluster.forked_server", *sys.orig_argv[2:]]
    request = {"argv": argv, "environ": dict(os.environ), "cwd": os.getcwd(), "conditions": conditions}
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until it is known whom they are for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        log = array.array("i", [sys.__stderr__.fileno()])
        connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, log)])
        pid = int(json.loads(connection.recv(1024)))
        if not pid:
            raise SystemExit("the process to fork from has imported with another environment")
        for number in numbers:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        status = int(json.loads(connection.recv(1024)))
    if status < 0:
        if -status in numbers:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


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


if SERVER in os.environ and sys.orig_argv[1:3] == ["-m", _REMOTE] and sys.orig_argv[3] in ("serve", "agent"):
    _become_forked()
elif any(argument in _PROGRAMS for argument in sys.orig_argv):
    os.environ.pop(SERVER, None)
    _fork_warm_processes()
