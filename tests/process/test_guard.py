"""What an agent has started ends with the starter of its guard, in whatever way that one ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llama_stack_provider_trl.system.process import identify
from llama_stack_provider_trl_remote.nodes.pools.guard import LOCK, remove_left
from tests.contract.stack import poll

GUARD = "llama_stack_provider_trl_remote.nodes.pools.guard"
AGENT = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
detached = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
signal.signal(signal.SIGUSR1, lambda *_: (print("left", flush=True), os._exit(0)))
with open(sys.argv[1], "a") as pids:
    pids.write(f"{os.getpid()} {detached.pid}\\n")
time.sleep(600)
"""


class Starter:
    """A guard, as a bundle starts it, of an agent that has started a process in a session of its own."""

    def __init__(self, root: Path) -> None:
        self.home, self.pids = root / "agents" / "a", root / "pids"
        command = [sys.executable, "-c", AGENT, str(self.pids)]
        self.guard = subprocess.Popen(
            [sys.executable, "-m", GUARD, json.dumps({"home": str(self.home), "command": command})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.agents(1)

    def agents(self, count: int) -> list[tuple[int, int]]:
        """Pids of the agents that were started, each with what it has started."""
        poll(lambda: self.pids.exists() and self.pids.read_text().count("\n") == count, "the agent runs", timeout=20)
        return [(int(line.split()[0]), int(line.split()[1])) for line in self.pids.read_text().splitlines()]

    def alive(self) -> list[int]:
        found = [int(pid) for pid in self.pids.read_text().split()]
        return [pid for pid in found if identify(pid)]

    def report(self) -> dict[str, object]:
        assert self.guard.stdout is not None
        return dict(json.loads(self.guard.stdout.readline()))


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    found = Starter(tmp_path)
    yield found
    for stream in (found.guard.stdin, found.guard.stdout):
        assert stream is not None
        stream.close()
    poll(lambda: not found.alive(), "all has ended", timeout=20)
    found.guard.wait(60)


def test_everything_ends_with_the_starter_and_the_directory_is_removed(starter: Starter) -> None:
    """The guard has left the process tree before: its first process has ended, and what it started lives."""
    assert starter.guard.wait(60) == 0
    assert len(starter.alive()) == 2
    assert starter.guard.stdin is not None
    starter.guard.stdin.close()
    assert starter.report()["status"] == -signal.SIGTERM
    assert not starter.alive()
    assert not starter.home.exists()


def test_an_agent_that_is_killed_is_started_again_and_one_that_leaves_is_not(starter: Starter) -> None:
    ((first, detached),) = starter.agents(1)
    psutil.Process(first).kill()
    assert starter.agents(2)[1][0] != first
    assert detached in starter.alive()  # a training continues without its agent
    assert starter.guard.stdin is not None
    starter.guard.stdin.write("leave\n")
    starter.guard.stdin.flush()
    assert starter.report() == {"status": 0, "message": "left"}
    assert not starter.alive()


def test_directories_of_killed_guards_of_this_machine_are_removed_and_others_stay(
    starter: Starter, tmp_path: Path
) -> None:
    parent = starter.home.parent
    own = (starter.home / LOCK).read_text()
    for name, holder in (("killed", own), ("elsewhere", "process 7 of n7 another-boot")):
        (parent / name).mkdir()
        (parent / name / LOCK).write_text(holder)
    (parent / "foreign").mkdir()
    remove_left(parent)
    assert {path.name for path in parent.iterdir()} == {"a", "elsewhere", "foreign"}


def test_an_agent_that_has_just_been_started_leaves_at_once(starter: Starter) -> None:
    """It dies of the signal for which it has no handler yet, and is not started again."""
    assert starter.guard.stdin is not None
    ((first, _),) = starter.agents(1)
    psutil.Process(first).kill()
    starter.guard.stdin.write("leave\n" * 3)
    starter.guard.stdin.flush()
    assert starter.report()["status"] == 0
    assert len(starter.agents(1)) == 1
