"""What tests fork ends with the process that forks it, and that with pytest: a killed run leaves nothing behind."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llama_stack_provider_trl.system import fork
from tests import forked
from tests.required import in_full
from tests.tiny import REPOSITORY

pytestmark = pytest.mark.process

SLEEPING = """
import os, sys, time
from tests import ranks, zygote
ranks.train_and_exit = zygote.train_and_exit = lambda spec, rank=0: time.sleep(600)
"""
ZYGOTE = SLEEPING + "print(zygote._fork('spec', ''), flush=True)\nsys.stdin.read()\n"
RANKS = (
    SLEEPING
    + """
pids = [ranks._fork("spec", rank, 2, 2, 1, {}, "", "") for rank in (0, 1)]
print(*pids, flush=True)
ranks._wait(pids)
"""
)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = {**os.environ, **environ}
        started.append(subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, env=env, **pipes))
        return started[-1]

    yield begin
    for process in started:
        with process:
            process.kill()


def assert_ended(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=20)
    for process in left:
        process.kill()
    assert not left


@pytest.mark.parametrize(
    ("program", "end"),
    [
        pytest.param(ZYGOTE, "without pytest", id="zygote-without-pytest"),
        pytest.param(RANKS, "killed", id="ranks-killed"),
        *in_full(
            pytest.param(ZYGOTE, "killed", id="zygote-killed"),
            pytest.param(RANKS, "without pytest", id="ranks-without-pytest"),
        ),
    ],
)
def test_trainings_end_with_the_process_that_forks_them(
    start: Callable[..., subprocess.Popen[bytes]], program: str, end: str
) -> None:
    process = start("-W", "ignore", "-c", program)
    assert process.stdin is not None
    assert process.stdout is not None
    children = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert children
    assert all(child.is_running() for child in children)
    if end == "killed":
        process.kill()
    else:
        process.stdin.close()  # as the kernel does when pytest is killed
    process.wait(60)
    assert_ended(children)


@pytest.mark.parametrize("end", ["killed", "without pytest"])
def test_servers_end_with_the_process_that_forks_them(
    start: Callable[..., subprocess.Popen[bytes]], end: str, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    arguments = ["-m", "tests.forked", "--serve", str(path), "-" * 1024, "json"]
    process = start(*arguments, **{fork.ROOM: "-" * fork.ROOM_BYTES})
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (tmp_path / "sleeping.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(600)\n")
    argv = [sys.executable, "-m", "tests.forked", str(tmp_path / "sleeping.py")]
    environ = dict(os.environ)
    request = {"argv": argv, "environ": environ, "cwd": str(REPOSITORY), "conditions": forked._outside(environ)}
    be_killed_while_it_answers(path, json.dumps(request).encode())
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as output:
        found = forked._request(str(path), json.loads(json.dumps(request)), [writer])
        os.close(writer)
        assert found is not None
        server = psutil.Process(found.pid)
        assert select.select([output], [], [], 20)[0]
        assert output.readline() == b"started\n"
        if end == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.close()
        process.wait(60)
        assert_ended([server])
    found._connection.close()


def be_killed_while_it_answers(path: Path, request: bytes) -> None:
    """As tests kill services: before their request, before the answer, and before they have read it."""
    for requests, waits in ((False, False), (True, False), (True, True)) * 2:  # the second time it must still be there
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, open(os.devnull, "wb") as nothing:
            connection.connect(str(path))
            if requests:
                descriptors = array.array("i", [nothing.fileno()])
                connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            if waits:
                assert select.select([connection], [], [], 20)[0]


STARTS = """
import sys
from tests import forked
print(forked._serving(("json",), ()), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_workers_fork_from_one_process_which_outlives_its_starter_and_ends_with_the_run(
    start: Callable[..., subprocess.Popen[bytes]], end: str
) -> None:
    run = start(
        "-c", "import sys; from tests import forked\nwith forked.shared_directory() as d: print(d, flush=True); input()"
    )
    assert run.stdin is not None
    assert run.stdout is not None
    directory = run.stdout.readline().decode().strip()
    workers = [start("-c", STARTS, **{forked.DIRECTORY: directory}) for _ in range(2)]
    paths = {worker.stdout.readline().decode().strip() for worker in workers if worker.stdout is not None}
    (path,) = paths
    (process,) = [one for one in psutil.process_iter() if path in _command(one)]
    for worker in workers:
        worker.kill()
        worker.wait(20)
    assert forked._request(path, {"conditions": None}, []) is None, "it answers, and refuses"
    assert [reason.partition(":")[0] for reason in forked.started(directory)] == ["other conditions"]
    assert process.is_running()
    if end == "killed":
        run.kill()
    else:
        run.stdin.write(b"\n")
        run.stdin.flush()
    run.wait(20)
    assert_ended([process])


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
