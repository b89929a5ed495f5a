"""Large blocks are kept while the machine has memory to spare, and not a moment longer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from llama_stack_provider_trl.system import malloc
from llama_stack_provider_trl.system.malloc import FRUGAL, Malloc, give_back, share_arenas
from llama_stack_provider_trl_remote.service import server

GIB = 1 << 30


class World:
    """A machine with so much memory left, and glibc as it was configured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.now, self.trimmed = 7 * GIB, 0.0, 0
        self.knobs: dict[int, int] = {}
        monkeypatch.setattr(malloc, "_libc", lambda: self)
        for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
            monkeypatch.delenv(name)
        for name, value in FRUGAL.items():
            monkeypatch.setenv(name, value)
        self.subject = Malloc(lambda: self.left, lambda: self.now)

    def mallopt(self, knob: int, value: int) -> int:
        self.knobs[knob] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trimmed += 1
        return 1

    def malloc(self, size: int) -> None:
        """No holes here."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_blocks_are_kept_where_there_is_memory_to_spare(world: World) -> None:
    world.subject.begin(4 * GIB)
    assert world.subject.keeps
    assert world.knobs == {-4: 0, -1: -1}  # no block is mapped on its own, and the end of the heap stays


@pytest.mark.parametrize("need", [0, 4 * GIB + 1, 20 * GIB])
def test_blocks_are_given_back_where_memory_is_scarce_or_the_need_is_not_known(world: World, need: int) -> None:
    world.subject.begin(need)
    assert not world.subject.keeps
    assert not world.knobs
    world.left, world.now = 0, 60.0
    world.subject.poll()
    assert not world.knobs
    assert not world.trimmed


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_glibc_setting_of_the_user_takes_precedence(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    world.subject.begin(1)
    assert not world.subject.is_ours
    assert not world.subject.keeps
    assert not world.knobs


def test_a_process_that_was_not_started_frugal_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    world.subject.begin(1)
    assert not world.subject.is_ours
    assert not world.subject.keeps


def test_a_c_library_with_other_knobs_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "_libc", object)  # musl, macOS
    world.subject.begin(1)
    assert not world.subject.is_ours
    assert not world.subject.keeps


def test_everything_is_given_back_once_the_machine_has_little_left(world: World) -> None:
    world.subject.begin(4 * GIB)
    world.left, world.now = 2 * GIB, 5.0
    assert not world.subject.poll()
    assert world.subject.keeps
    world.left, world.now = 2 * GIB - 1, 5.5  # a poll takes longer than a tiny step
    assert not world.subject.poll()
    assert world.subject.keeps
    world.now = 6.0
    assert world.subject.poll()
    assert not world.subject.keeps
    assert world.trimmed == 1
    assert world.knobs == {-4: 65536, -3: 1 << 20, -1: 128 << 10}
    world.left, world.now = 7 * GIB, 60.0
    assert not world.subject.poll()
    assert not world.subject.keeps
    assert world.trimmed == 1


def test_everything_is_given_back_once_at_the_end(world: World) -> None:
    world.subject.begin(4 * GIB)
    world.subject.end()
    world.subject.end()
    assert not world.subject.keeps
    assert world.trimmed == 1
    assert world.knobs == {-4: 65536, -3: 1 << 20, -1: 128 << 10}


SCRIPT = """
import ctypes, os, resource
from llama_stack_provider_trl.system.malloc import Malloc, _libc
libc = _libc()
EACH, NUMBER = 8 << 20, 24
pins = []

def step(pin=False):
    blocks = []
    for _ in range(NUMBER):
        blocks.append(libc.malloc(EACH))
        ctypes.memset(blocks[-1], 1, EACH)
    if pin:
        pins.append(libc.malloc(100_000))  # an optimizer's state: what lies below cannot go back as a whole
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def taken(pin=False):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return step(pin) - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

room, now = [10 << 30], [0.0]
malloc = Malloc(lambda: room[0], lambda: now[0])
base = resident()
frugal = taken()
after_frugal = resident() - base
malloc.begin(1 << 30)
first, kept = taken(pin=True), taken()
after_kept = resident() - base
room[0], now[0] = 0, 10.0
malloc.poll()
after_poll = resident() - base
again = taken()
print(frugal, after_frugal, kept, after_kept, after_poll, again, resident() - base)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(malloc._libc(), "mallopt"), reason="glibc only")
def test_glibc_follows_its_tunables() -> None:
    """In pages: those that a step had to be given, and those that are resident after it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **FRUGAL}, capture_output=True, text=True, check=True
    )
    frugal, after_frugal, kept, after_kept, after_poll, again, at_last = map(int, done.stdout.split())
    every_page = 24 * (8 << 20) // os.sysconf("SC_PAGESIZE")
    few, most = every_page // 20, every_page * 19 // 20
    assert frugal >= most
    assert after_frugal < few
    assert kept < few
    assert after_kept >= most
    assert after_poll < few
    assert again >= most
    assert at_last < few


def test_the_threads_of_a_service_share_an_arena_unless_the_environment_has_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    share_arenas()
    assert world.knobs == {}
    for name in FRUGAL:
        monkeypatch.delenv(name)
    share_arenas()
    assert world.knobs == {-8: 1}  # M_ARENA_MAX


HOLES = """
import ctypes
from llama_stack_provider_trl.system.malloc import _libc, give_back
libc = _libc()
EACH, NUMBER = 20_000, 2_000

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

blocks = [libc.malloc(EACH) for _ in range(NUMBER)]
for block in blocks:
    ctypes.memset(block, 1, EACH)
for block in blocks[:-1]:  # the last one keeps the heap from becoming shorter
    libc.free(block)
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(malloc._libc(), "malloc_trim"), reason="glibc only")
def test_what_was_freed_between_blocks_that_stay_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2_000 * 20_000 * 9 // 10 // os.sysconf("SC_PAGESIZE")


def test_a_c_library_that_gives_nothing_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "_libc", object)
    give_back()


def test_a_service_returns_what_it_has_freed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count() -> None:
        calls.append("returned")
        if len(calls) == 3:
            raise InterruptedError

    monkeypatch.setattr(server, "give_back", count)
    monkeypatch.setattr(server, "_RETURN_SECONDS", 0)
    with pytest.raises(InterruptedError):
        asyncio.run(server._return_memory())
    assert len(calls) == 3
