"""Controls glibc's malloc: whether a training process keeps large blocks for the next step, or frees each; how many
arenas the threads of a service have."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from functools import cache

from .process import available_memory, resident_memory

FRUGAL = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Settings of a training process at its start. Blocks of 1 MiB and more are mapped individually and unmapped when
freed, which the memory estimate relies on. By default glibc raises this limit to 32 MiB and keeps holes between
activations of different sizes: 2.5 GiB against 4.1 (LoRA, h768 x 8, 4 x 768 tokens), 3.4 against 5.6 (h512 x 8, 8 x
1024). But every page of every block is zeroed again at every step: 16.8 s a step against 10.6, and 27 s against
18.6."""
SPARE = 1.75
"""Blocks are kept where the machine has this many times the estimate left. With all of them kept, the first of these
jobs took 1.9 times the memory (4.8 GiB after 5 steps and after 8) and 9.1 s a step; where rows have one length it is
1.15 times, and a step of two ranks takes 10.9 s in place of 17.0 (100M parameters, 4 x 512 tokens each)."""
ENOUGH = 0.5
"""Blocks are freed where less than this many times the estimate is left, for other programs and for checkpoints. What a
step needs is in the blocks that are kept."""
SECONDS = 1.0
"""Seconds between two measurements of free memory; one takes a tenth of a millisecond."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # malloc.h
_DEFAULT_TRIM, _DEFAULT_MMAPS, _NEVER = 128 << 10, 1 << 16, -1
_IS_MMAPPED = 2
"""A bit of the word before a block, which holds its size."""
_LARGEST, _SMALLEST = 1 << 30, int(FRUGAL["MALLOC_MMAP_THRESHOLD_"])


def environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Settings for a training process at its start; empty where the environment has its own."""
    return {} if _settings(environ) else FRUGAL


def share_arenas() -> None:
    """Have all threads of this process take their blocks from one arena. By default each has its own, and keeps what it
    frees; the threads of a service wait for disks and for each other, and seldom for the lock of an arena.

    Does nothing where the C library has no such setting, or where the environment has one.
    """
    if hasattr(_libc(), "mallopt") and not _settings(os.environ):
        _set(_ARENA_MAX, 1)


def give_back() -> None:
    """Return the pages between the blocks that are in use to the system: after its imports a process keeps those of
    what it has compiled and read.

    Does nothing where the C library has no such call.
    """
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


class Malloc:
    """Keeps large blocks while the machine has free memory. For the thread that trains.

    It does nothing where the C library has no such settings (musl, macOS), or where the environment sets glibc's
    otherwise than `FRUGAL` does: the user's setting takes precedence.

    Args:
        available: returns the bytes of memory that this machine has left.
    """

    def __init__(
        self, available: Callable[[], int] = available_memory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.keeps = self.is_ours = False
        self._need = 0.0
        self._available, self._clock = available, clock
        self._measured_at = clock()

    def begin(self, need: int) -> None:
        """Decide before the first step whether blocks are kept.

        Args:
            need: bytes that all ranks of the job on this machine are estimated to take together; 0: not known.
        """
        self._need = need
        self.is_ours = (
            _settings(os.environ) == FRUGAL and hasattr(_libc(), "mallopt") and hasattr(_libc(), "malloc_trim")
        )
        self.keeps = self.is_ours and 0 < need * SPARE <= self._available()
        if self.keeps:
            _set(_MMAP_MAX, 0)
            _set(_TRIM_THRESHOLD, _NEVER)

    def poll(self) -> bool:
        """Free all kept blocks, and every later one at once, if other processes need the memory or this process has
        grown.

        Returns whether it did."""
        if not self.keeps or (now := self._clock()) - self._measured_at < SECONDS:
            return False
        self._measured_at = now
        if self._available() >= self._need * ENOUGH:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Free all kept blocks, and every later one at once: the estimate of the phase after the last step assumes
        that."""
        if self.keeps:
            self.keeps = False
            _set(_MMAP_MAX, _DEFAULT_MMAPS)
            _set(_MMAP_THRESHOLD, _SMALLEST)
            _set(_TRIM_THRESHOLD, _DEFAULT_TRIM)
            _libc().malloc_trim(0)
            _fill_holes(resident_memory() + int(self._need))


def _fill_holes(most: int) -> None:
    """Allocate the large holes of the heap and never touch them: glibc uses a hole before it maps a block, and its
    pages stay resident after that. Measured with 64 blocks of 8 MiB below a live one: 544 MiB resident after another
    step without this, 32 with it; it takes less than a millisecond and no memory.

    Args:
        most: bytes to allocate; there are no holes beyond them.
    """
    size, taken = _LARGEST, 0
    while size >= _SMALLEST and taken < most:
        block = _libc().malloc(size)
        if not block:
            size //= 2
        elif ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
            _libc().free(block)
            size //= 2
        else:
            taken += size


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of glibc's malloc in an environment."""
    return {name: environ[name] for name in environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


def _set(knob: int, value: int) -> None:
    _libc().mallopt(knob, value)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    return libc
