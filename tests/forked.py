"""Processes without their imports: forked from one process that has made them, for a whole pytest process.

    with forked_warm_processes() as warm:     # of a launcher in the test's own process
    python -m tests.forked MODULE ARGUMENTS   # a server whose launchers fork theirs, with `environment()`
    start_server(SERVICE, argv, ...)          # such a server, itself forked from one that has imported what it does
    start_talking(RECIPES, MODULE, environ)   # a program with pipes that runs trainings

A server may be in network, host name and mount namespaces of its own: what is forked for it joins them.

What is forked is the product's own warm process, in the environment that the launcher gives it: only the interpreter's
start and the imports are skipped. Where it would import with another environment or other limits it is started as
usual. What is forked ends with the process that forks it, and that with pytest, whose workers share it.
The tests of the warm process itself, in tests/process/test_warm_start.py, fork none.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NoReturn

from llama_stack_provider_trl.launch import warm_processes
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.torchrun import training_environment
from llama_stack_provider_trl.launch.warm import ARROW
from llama_stack_provider_trl.launch.warm_processes import WarmProcess, WarmProcesses
from llama_stack_provider_trl.specs import schema
from llama_stack_provider_trl.system import fork
from llama_stack_provider_trl.system.process import die_with_parent
from tests.traces import shared_traces

REPOSITORY = Path(__file__).resolve().parents[1]
VARIABLE = "TESTS_FORKED"
"""Variable of a server: the socket of the process that it forks from."""
DIRECTORY = "TESTS_FORKED_DIRECTORY"
"""Variable of the workers of pytest: where they find the processes that they fork from, of which they share each."""
_PIPE = "lives"
"""There: the pipe that is open for writing as long as these processes are to live."""
_STARTED = "started"
"""There: a line for each process that could not be forked."""
SERVICE = ("llama_stack_provider_trl_remote.service.server",)
LLAMA_STACK = (
    "llama_stack.cli.stack.run",
    "llama_stack.core.server.server",
    "llama_stack_provider_trl.post_training",
)
OGX = ("ogx.cli.stack.run", "ogx.core.server.server", "llama_stack_provider_trl_remote.external_api")
RECIPES = ("tests.imported_recipes",)
"""What a server of this kind imports, in any case or almost so."""
_LATER: Mapping[str, Sequence[str]] = {
    "llama_stack": (
        *(
            "uvicorn.loops.auto",
            "uvicorn.protocols.http.auto",
            "uvicorn.protocols.websockets.auto",
            "uvicorn.lifespan.on",
        ),
        *("llama_stack.cli.llama", "llama_stack.providers.inline.datasetio.localfs.datasetio"),
        *("llama_stack.providers.utils.sqlstore.sqlalchemy_sqlstore", "llama_stack.providers.utils.kvstore.sqlite"),
        *(
            "sqlalchemy.dialects.sqlite",
            "llama_stack.providers.registry.inference",
            "llama_stack.core.routers.inference",
        ),
        *(
            "llama_stack.core.routers.datasets",
            "llama_stack.core.routers.eval_scoring",
            "llama_stack.core.routers.safety",
        ),
        *("llama_stack.core.routers.tool_runtime", "llama_stack.core.routers.vector_io", "pydantic.v1"),
        *("llama_stack.core.routing_tables.benchmarks", "llama_stack.core.routing_tables.toolgroups"),
        "llama_stack.core.routing_tables.vector_stores",
    ),
}
"""Package of a server -> what it imports while it starts, which takes as long as all else of a start. Releases may lack
some of it."""
_OWN = ("TRL_", "TESTS_", "PYTEST_", "LLAMA_STACK_PORT")
"""Beginnings of variables that servers read when they start, and not while they import."""
_SITE = REPOSITORY / "tests" / "site"
_WITHOUT_EFFECT = (REPOSITORY, REPOSITORY / "benchmarks", _SITE)
"""On PYTHONPATH: what trainings import of these is installed in the environment that runs the tests."""
_WITHOUT_CONSEQUENCE = ("PYTHONDONTWRITEBYTECODE", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY")
"""Variables that change no number."""
_SET_BY_TRAININGS = ("FSDP_CPU_RAM_EFFICIENT_LOADING",)
"""Variables that accelerate sets where a job is sharded, also in the process of a test: tests after it fork from the
same process as those before it."""
_REQUEST_BYTES = 1 << 18
_ABOVE_ALL = 1000
"""File descriptors from here on are those of a request until they have the numbers that it names."""


@contextmanager
def forked_warm_processes() -> Iterator[WarmProcesses]:
    """Warm processes for launchers in this process. That for the present environment is ready."""
    spawn = partial(_fork_or_start, _imported())
    warm = WarmProcesses(lambda python, environ: WarmProcess(python, environ, spawn))
    warm.prepare(None, _common())
    deadline = time.monotonic() + 20
    while not warm.pids():
        assert time.monotonic() < deadline, "the forked warm process is not ready"
        time.sleep(0.01)
    try:
        yield warm
    finally:
        warm.close()


def environment(*, with_site: bool = False) -> dict[str, str]:
    """Variables of a server that is started with `python -m tests.forked`, or of a program that starts servers
    (`with_site`: tests/site)."""
    return {VARIABLE: _imported(), **({"PYTHONPATH": str(_SITE)} if with_site else {})}


def _common() -> dict[str, str]:
    """The environment of tasks on the CPU, without what is different for each."""
    return training_environment(TaskSpec("", Path("/"), ("cpu",)), os.environ)


def start_server(
    imports: Sequence[str], argv: Sequence[str], output: IO[bytes], cwd: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A server in a session of its own, `[python, "-m", "tests.forked", ...]`; the Python may be that of a release.

    Args:
        imports: `SERVICE`, `LLAMA_STACK` or `OGX`.
        output: the file of its log.
    """
    outside = _outside(environ)
    request = {"argv": argv, "environ": dict(environ), "cwd": str(cwd), "conditions": outside}
    path = _serving(tuple(imports), tuple(outside.items()), argv[0])
    found: Any = _request(path, request, [output.fileno()])
    assert found is not None, "the environment is that of the process that forks"
    return found  # type: ignore[no-any-return] - it has what tests use of Popen


def start_program(
    argv: Sequence[str], environ: Mapping[str, str], log: IO[bytes], cwd: Path, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes] | None:
    """`[sys.executable, ..., "-m", MODULE, ...]`, which imports what a training does, in a session of its own.

    Args:
        environ: its environment. Modules are found in `cwd`, and not on its PYTHONPATH.
        more: variables that no import reads.

    Returns:
        None: its environment is another than that of the process that forks.
    """
    imported_with = training_environment(TaskSpec("", Path("/"), ("cpu",)), environ)
    wanted = json.loads(json.dumps(_conditions(argv[0], imported_with)))
    request = {"argv": argv, "environ": {**environ, **(more or {})}, "cwd": str(cwd), "conditions": wanted}
    found: Any = _request(os.environ.get(VARIABLE) or _imported(), request, [log.fileno()])
    return found  # type: ignore[no-any-return] - as `start_server`


def start_talking(imports: Sequence[str], module: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """`python -m MODULE` with pipes to its input and output, in a session of its own.

    Args:
        imports: modules of which `RECIPES` has those of a training with quantization.
    """
    outside = _outside({**environ, **ARROW})
    argv = [sys.executable, "-m", module]
    request = {"argv": argv, "environ": dict(environ), "cwd": str(REPOSITORY), "conditions": outside, "streams": True}
    path = _serving(tuple(imports), tuple(outside.items()))
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    found: Any = _request(path, request, [sys.__stderr__.fileno(), theirs_in, theirs_out])
    for descriptor in (theirs_in, theirs_out):
        os.close(descriptor)
    assert found is not None, "the environment is that of the process that forks"
    found.stdin, found.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
    return found  # type: ignore[no-any-return] - as `start_server`


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that imports may read."""
    later = (*_OWN, *_SET_BY_TRAININGS)
    left = {name: value for name, value in environ.items() if not name.startswith(later)}
    return dict(sorted(left.items()))


@cache
def _imported() -> str:
    """The socket of the process that has imported torch."""
    return _serving((), tuple({**dict(warm_processes.conditions(sys.executable, _common())[1]), **ARROW}.items()))


@cache
def _serving(imports: tuple[str, ...], environ: tuple[tuple[str, str], ...], python: str = sys.executable) -> str:
    """The socket of a process that has imported these modules, or a training's: one for all who share the directory."""
    directory = os.environ.get(DIRECTORY) or _own_directory()
    share = {VARIABLE: _imported()} if imports in (SERVICE, LLAMA_STACK, OGX) and python == sys.executable else {}
    key = json.dumps([imports, environ, python]).encode()
    path = f"{directory}/{hashlib.sha256(key).hexdigest()[:12]}"
    with open(f"{path}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            # Does not wait for a writer: without one this run is over.
            lives = os.open(f"{directory}/{_PIPE}", os.O_RDONLY | os.O_NONBLOCK)
            with open(lives, "rb") as lives_pipe:
                process = subprocess.Popen(
                    [python, "-m", "tests.forked", "--serve", path, "-" * 1024, *imports],
                    stdin=lives_pipe,
                    stdout=subprocess.PIPE,
                    cwd=REPOSITORY,
                    env={**dict(environ), **share, fork.ROOM: "-" * fork.ROOM_BYTES},
                )
            assert process.stdout is not None
            with process.stdout as output:
                assert output.readline() == b"ready\n"
            process.returncode = 0  # it is not waited for: it ends with the directory
    return path


@contextmanager
def shared_directory() -> Iterator[str]:
    """A directory for the processes that fork, for this process and those that it starts with `DIRECTORY`. What forks
    there, and what it has forked, ends when this is closed, or when this process ends."""
    with tempfile.TemporaryDirectory(prefix="tests-forked-") as directory:
        os.mkfifo(pipe := f"{directory}/{_PIPE}")
        writer = os.open(pipe, os.O_RDWR)
        try:
            yield directory
        finally:
            os.close(writer)


@cache
def _own_directory() -> str:
    kept = ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(shared_directory())


class _Forked:
    """What is used of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self._connection = connection

    def poll(self) -> int | None:
        if self.returncode is None and self._ends(0.0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._ends(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            data = self._connection.recv(_REQUEST_BYTES)
            self._connection.close()
            self.returncode = int(json.loads(data)) if data else -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its status is on the way
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ends(self, timeout: float | None) -> bool:
        return bool(select.select([self._connection], [], [], timeout)[0])


def _fork_or_start(path: str, argv: list[str], **options: Any) -> Any:
    """As `subprocess.Popen`, with the options that a WarmProcess gives it."""
    wanted = json.loads(json.dumps(_conditions(argv[0], options["env"])))
    request = {"argv": argv, "environ": options["env"], "cwd": options["cwd"], "conditions": wanted}
    channel, *others = options["pass_fds"]
    assert not others
    request["channel"] = channel
    return _request(path, request, [options["stderr"].fileno(), channel]) or subprocess.Popen(argv, **options)


def _request(path: str, request: Mapping[str, Any], files: Sequence[int]) -> _Forked | None:
    """What is forked as requested, with these files; None: that process is gone, or has imported something else."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
        connection.sendmsg(
            [json.dumps(request).encode()],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))],
        )
        pid = json.loads(connection.recv(_REQUEST_BYTES) or b"0")
    except OSError as error:
        _record(path, f"no process to fork from: {error}")
        pid = 0
    if pid:
        return _Forked(pid, connection)
    connection.close()
    return None


def _record(path: str, reason: str) -> None:
    """Add a line to `started`, of the directory of this socket."""
    with suppress(OSError), open(Path(path).with_name(_STARTED), "a") as file:
        file.write(reason.replace("\n", " ") + "\n")


def started(directory: str) -> list[str]:
    """Why processes were started that would have been forked: their imports take 4 s of CPU time each."""
    file = Path(directory, _STARTED)
    return file.read_text().splitlines() if file.exists() else []


def _conditions(python: str, environ: Mapping[str, str]) -> Any:
    left_out = {*ARROW, fork.ROOM, *_WITHOUT_CONSEQUENCE, *_SET_BY_TRAININGS}
    left = {name: value for name, value in environ.items() if name not in left_out}
    paths = left.pop("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and Path(path) not in _WITHOUT_EFFECT]
    if others:
        left["PYTHONPATH"] = os.pathsep.join(others)
    return warm_processes.conditions(python, left)


def _serve(path: str, imports: Sequence[str]) -> None:
    """Fork a process for each connection, until standard input ends.

    Args:
        imports: modules of a server; none: those of a training.
    """
    from llama_stack_provider_trl.launch import warm
    from llama_stack_provider_trl.system.process import resident_memory

    share = ExitStack()
    own = _outside(os.environ) if imports else json.loads(json.dumps(_conditions(sys.executable, os.environ)))
    before = {name: value for name, value in os.environ.items() if name not in ARROW}
    if imports:
        for module in imports:
            importlib.import_module(module)
        for module in _LATER.get(imports[0].partition(".")[0], ()):
            with suppress(ImportError):
                importlib.import_module(module)
        schema.schema_digest()  # which each server would compute at its start
        _probe_isolation()
    else:
        warm.import_libraries()
        share.enter_context(shared_traces())
    for name in (VARIABLE, *ARROW, fork.ROOM):
        os.environ.pop(name, None)
    fork.prepare(before, resident_memory())
    warm._end_threads()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    running: dict[socket.socket, tuple[int, int]] = {}
    """Connection of a forked process -> pid and descriptor of it."""
    while True:
        waited = [sys.stdin, listener, *running, *(descriptor for _, descriptor in running.values())]
        readable = select.select(waited, [], [])[0]
        if sys.stdin in readable:
            return
        if listener in readable:
            connection = listener.accept()[0]
            if pid := _fork(connection, own, path):
                running[connection] = pid, os.pidfd_open(pid)
        for connection, (pid, descriptor) in list(running.items()):
            if connection in readable:
                with suppress(ConnectionResetError):  # its launcher is gone, and has not read the answer
                    connection.recv(_REQUEST_BYTES)  # to be killed, or its launcher is gone
                os.kill(pid, 9)
            elif descriptor not in readable:
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(descriptor)
            del running[connection]
            with connection, suppress(OSError):
                connection.send(json.dumps(status).encode())


def _probe_isolation() -> None:
    """Find out how this machine isolates trainings, for which each server would start a Python. Where it cannot, each
    server tries for itself."""
    from llama_stack_provider_trl.launch import isolation

    found = isolation.probe()
    if found.how:
        isolation.probe = lambda: found


def _fork(connection: socket.socket, own: Any, path: str) -> int:
    """Fork a process as requested; 0: the request needs another one than this, or its process was killed."""
    files = array.array("i")
    try:
        data, ancillary, *_ = connection.recvmsg(_REQUEST_BYTES, socket.CMSG_SPACE(3 * files.itemsize))
    except ConnectionResetError:
        data, ancillary = b"", []
    if not data:
        connection.close()
        return 0
    for _, _, content in ancillary:
        files.frombytes(content)
    request = json.loads(data)
    pid = 0
    if request["conditions"] == own:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            _become(request, _peer(connection), *files)
    for file in files:
        os.close(file)
    if not pid:
        _record(path, _difference(request["conditions"], own))
    with suppress(OSError):  # killed since: the end of its connection ends what it had forked
        connection.send(json.dumps(pid).encode())
    if not pid:
        connection.close()
    return pid


def _difference(wanted: Any, own: Any) -> str:
    different = []
    if isinstance(wanted, dict) and isinstance(own, dict):
        names = wanted.keys() | own.keys()
        return f"other variables: {sorted(name for name in names if wanted.get(name) != own.get(name))}"
    are_lists = isinstance(wanted, list) and isinstance(own, list)
    for theirs, ours in zip(wanted, own, strict=True) if are_lists else [(wanted, own)]:
        if isinstance(theirs, list) and isinstance(ours, list):
            different += [[one for one in theirs if one not in ours], [one for one in ours if one not in theirs]]
        elif theirs != ours:
            different.append([theirs, ours])
    return f"other conditions: {different}"


def _peer(connection: socket.socket) -> int:
    """The pid of who has connected."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _join_namespaces(pid: int) -> None:
    """Join the namespaces of a process that this one is not in."""
    for name in ("net", "uts", "mnt"):  # after the last one, /proc may be another
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            with open(theirs) as namespace:
                os.setns(namespace.fileno())


def _become(request: Mapping[str, Any], peer: int, log: int, *channel: int) -> NoReturn:
    try:
        os.setsid()
        _join_namespaces(peer)
        log, *channels = (fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE_ALL) for file in (log, *channel))
        numbers = [request["channel"]] if "channel" in request else []
        for number in numbers:
            os.dup2(channels[0], number)
        nothing = os.open(os.devnull, os.O_RDWR)
        streams = channels if "streams" in request else [nothing, nothing if channels else log]
        for target, source in enumerate((*streams, log)):
            os.dup2(source, target)
        fork.close_files(numbers)
        os.chdir(request["cwd"])
        fork.become(request["argv"], request["environ"])
    finally:
        os._exit(1)


def _share() -> None:
    """Have all launchers of this process fork their warm processes."""
    if WarmProcesses.__module__ != warm_processes.__name__:
        return  # a fork of one that has

    class Forked(WarmProcesses):
        def __init__(self) -> None:
            path = os.environ[VARIABLE]
            super().__init__(lambda python, environ: WarmProcess(python, environ, partial(_fork_or_start, path)))

    warm_processes.WarmProcesses = Forked  # type: ignore[misc]


if VARIABLE in os.environ:  # in the processes that multiprocessing starts, too, which import the main module once more
    _share()

if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2], sys.argv[4:])
    else:
        del sys.argv[0]
        if os.path.isfile(sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
