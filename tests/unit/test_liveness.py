"""Who works is alive between steps, and who waits is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_stack_provider_trl.recipes.distributed import heartbeat as liveness
from llama_stack_provider_trl.recipes.distributed.heartbeat import shown_alive
from llama_stack_provider_trl.specs.events import EventWriter, Silent
from llama_stack_provider_trl.system.process import work_done

PATIENCE = 20.0


class Writer(EventWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.beats, self.beaten = 0, threading.Event()

    def beat(self) -> None:
        super().beat()
        self.beats += 1
        self.beaten.set()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[float, int]]], threading.Event]:
    """Plays what a process has done at each look; the event is set when all has been looked at."""
    monkeypatch.setattr(liveness, "LOOK", 0.001)

    def play(done: list[tuple[float, int]]) -> threading.Event:
        ended, looks = threading.Event(), iter(done)

        def look() -> tuple[float, int]:
            try:
                return next(looks)
            except StopIteration:
                ended.set()
                return done[-1]

        monkeypatch.setattr(liveness, "work_done", look)
        return ended

    return play


@pytest.mark.parametrize(
    ("done", "beats"),
    [
        pytest.param([(5.0, 100)] * 5, 0, id="waits"),
        pytest.param([(5.0, 100), (5.0, 900), (5.0, 1700)], 0, id="moves-next-to-nothing"),
        pytest.param([(5.0, 0), (6.0, 0), (6.0, 0), (7.0, 0)], 2, id="computes"),
        pytest.param([(5.0, 0), (5.0, 2 << 20), (5.0, 2 << 20)], 1, id="reads"),
    ],
)
def test_work_since_the_last_look_is_a_sign_of_life(
    looked: Callable[[list[tuple[float, int]]], threading.Event],
    tmp_path: Path,
    done: list[tuple[float, int]],
    beats: int,
) -> None:
    ended, writer = looked(done), Writer(tmp_path / "events.jsonl")
    with shown_alive(writer):
        assert ended.wait(PATIENCE)
    assert writer.beats == beats
    writer.close()


def test_of_several_ranks_the_first_one_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "work_done", lambda: pytest.fail("nobody looks"))
    with shown_alive(Silent()):
        pass


def test_bytes_that_are_read_count_wherever_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    before = work_done()
    file.read_bytes()
    after = work_done()
    assert after[0] >= before[0]
    assert after[1] - before[1] >= 3 << 20 or after[1] == 0  # macOS does not say
