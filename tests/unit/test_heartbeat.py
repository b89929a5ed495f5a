"""A process that works between steps sends heartbeats, a process that waits does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_stack_provider_trl.recipes.distributed import heartbeat as module
from llama_stack_provider_trl.recipes.distributed.heartbeat import heartbeat
from llama_stack_provider_trl.specs.events import EventWriter, NullEventWriter
from llama_stack_provider_trl.system.process import work_done

PATIENCE = 20.0


class Writer(EventWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.heartbeats = 0

    def heartbeat(self) -> None:
        super().heartbeat()
        self.heartbeats += 1


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[float, int]]], threading.Event]:
    """Replays the work done by each poll; the event is set after the last one."""
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.001)

    def play(done: list[tuple[float, int]]) -> threading.Event:
        ended, values = threading.Event(), iter(done)

        def work(pid: int | None) -> tuple[float, int]:
            try:
                return next(values)
            except StopIteration:
                ended.set()
                return done[-1]

        monkeypatch.setattr(module, "work_done", work)
        return ended

    return play


@pytest.mark.parametrize(
    ("done", "heartbeats"),
    [
        pytest.param([(5.0, 100)] * 5, 0, id="waits"),
        pytest.param([(5.0, 100), (5.0, 900), (5.0, 1700)], 0, id="moves-next-to-nothing"),
        pytest.param([(5.0, 0), (6.0, 0), (6.0, 0), (7.0, 0)], 2, id="computes"),
        pytest.param([(5.0, 0), (5.0, 2 << 20), (5.0, 2 << 20)], 1, id="reads"),
    ],
)
def test_work_since_the_last_poll_is_a_heartbeat(
    polls: Callable[[list[tuple[float, int]]], threading.Event],
    tmp_path: Path,
    done: list[tuple[float, int]],
    heartbeats: int,
) -> None:
    ended, writer = polls(done), Writer(tmp_path / "events.jsonl")
    with heartbeat(writer):
        assert ended.wait(PATIENCE)
    assert writer.heartbeats == heartbeats
    writer.close()


def test_work_of_a_child_of_any_rank_is_a_heartbeat(
    polls: Callable[[list[tuple[float, int]]], threading.Event], tmp_path: Path
) -> None:
    ended, writer = polls([(5.0, 0), (6.0, 0)]), Writer(tmp_path / "events.jsonl")
    with heartbeat(NullEventWriter(writer), 1):
        assert ended.wait(PATIENCE)
    assert writer.heartbeats == 1
    writer.close()


def test_of_several_ranks_only_the_first_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "work_done", lambda pid: pytest.fail("work was polled"))
    with heartbeat(NullEventWriter()):
        pass


def test_bytes_that_are_read_count_wherever_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    before = work_done()
    file.read_bytes()
    after = work_done()
    assert after[0] >= before[0]
    assert after[1] - before[1] >= 3 << 20 or after[1] == 0  # macOS does not report it


def test_the_work_of_a_child_is_that_of_its_processes_and_nothing_once_it_is_gone() -> None:
    """The child waits for one of its own, which works: a vLLM over several devices loads its weights so."""
    worker = [sys.executable, "-c", "sum(range(10**7)); input()"]
    child = subprocess.Popen(["sh", "-c", '"$@"; exit', "sh", *worker], stdin=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    while work_done(child.pid)[0] < 0.05:
        assert time.monotonic() < deadline
    assert child.stdin is not None
    child.stdin.close()
    child.wait(PATIENCE)
    assert work_done(child.pid) == (0.0, 0)
