"""Large blocks are kept while the machine has memory to spare, and not a moment longer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llama_stack_provider_trl import malloc
from llama_stack_provider_trl.malloc import FRUGAL, Malloc

GIB = 1 << 30


class World:
    """A machine with so much memory left, and glibc as it was told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.now, self.trimmed = 10 * GIB, 0.0, 0
        self.knobs: dict[int, int] = {}
        monkeypatch.setattr(malloc, "_libc", lambda: self)
        for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
            monkeypatch.delenv(name)
        for name, value in FRUGAL.items():
            monkeypatch.setenv(name, value)
        self.malloc = Malloc(lambda: self.left, lambda: self.now)

    def mallopt(self, knob: int, value: int) -> int:
        self.knobs[knob] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trimmed += 1
        return 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_blocks_are_kept_where_there_is_memory_to_spare(world: World) -> None:
    world.malloc.begin(4 * GIB)
    assert world.malloc.keeps
    assert world.knobs == {-4: 0, -1: -1}  # no block is mapped on its own, and the end of the heap stays


@pytest.mark.parametrize("need", [0, 4 * GIB + 1, 20 * GIB])
def test_blocks_are_given_back_where_memory_is_scarce_or_the_need_is_not_known(world: World, need: int) -> None:
    world.malloc.begin(need)
    assert not world.malloc.keeps
    assert not world.knobs
    world.left, world.now = 0, 60.0
    world.malloc.look()
    assert not world.knobs
    assert not world.trimmed


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_has_set_glibc_has_decided(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    world.malloc.begin(1)
    assert not world.malloc.is_ours
    assert not world.malloc.keeps
    assert not world.knobs


def test_a_process_that_was_not_started_frugal_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    world.malloc.begin(1)
    assert not world.malloc.is_ours
    assert not world.malloc.keeps


def test_a_c_library_with_other_knobs_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "_libc", object)  # musl, macOS
    world.malloc.begin(1)
    assert not world.malloc.is_ours
    assert not world.malloc.keeps


def test_everything_is_given_back_once_the_machine_has_little_left(world: World) -> None:
    world.malloc.begin(4 * GIB)
    world.left, world.now = 2 * GIB, 5.0
    world.malloc.look()
    assert world.malloc.keeps
    world.left, world.now = 2 * GIB - 1, 5.5  # a look takes longer than a tiny step
    world.malloc.look()
    assert world.malloc.keeps
    world.now = 6.0
    world.malloc.look()
    assert not world.malloc.keeps
    assert world.trimmed == 1
    assert world.knobs == {-4: 65536, -3: 1 << 20, -1: 128 << 10}
    world.left, world.now = 10 * GIB, 60.0
    world.malloc.look()
    assert not world.malloc.keeps
    assert world.trimmed == 1


SCRIPT = """
import ctypes, resource
from llama_stack_provider_trl.malloc import Malloc
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        block = libc.malloc(48 << 20)
        ctypes.memset(block, 1, 48 << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

room = [10 << 30]
now = [0.0]
malloc = Malloc(lambda: room[0], lambda: now[0])
frugal = pages()
malloc.begin(1 << 30)
first, kept = pages(), pages()
room[0], now[0] = 0, 10.0
malloc.look()
print(frugal, kept, pages())
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(malloc._libc(), "mallopt"), reason="glibc only")
def test_glibc_does_as_it_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **FRUGAL}, capture_output=True, text=True, check=True
    )
    frugal, kept, again = map(int, done.stdout.split())
    every_page = 4 * (48 << 20) // os.sysconf("SC_PAGESIZE")
    assert frugal >= every_page
    assert again >= every_page
    assert kept < every_page / 100
