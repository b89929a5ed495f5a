"""glibc's malloc in a training process: does it keep large blocks for the next step, or give each back at once?"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache

from .process import available_memory

FRUGAL = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""How a training process starts: blocks of 1 MiB and more are mapped one by one and given back once freed, which is
what the memory estimate counts on. Left alone glibc raises this limit to 32 MiB and keeps holes between activations of
different sizes: 2.5 GiB against 4.1 (LoRA, h768 x 8, 4 x 768 tokens), 3.4 against 5.6 (h512 x 8, 8 x 1024). But every
page of every block is zeroed anew at every step: 16.8 s a step against 10.6, and 27 s against 18.6."""
SPARE = 2.5
"""Blocks are kept where the machine has so many times the estimate left: with all of them kept the first of these jobs
took 1.9 times the memory (4.8 GiB after 5 steps and after 8) and 9.1 s a step."""
ENOUGH = 0.5
"""They are given back again where less than so many times the estimate is left."""
SECONDS = 1.0
"""Between two looks at what is left, which takes a tenth of a millisecond."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
_DEFAULT_TRIM, _DEFAULT_MMAPS, _NEVER = 128 << 10, 1 << 16, -1


class Malloc:
    """Keeps large blocks while the machine has memory to spare.

    Does nothing where the C library has other knobs (musl, macOS), or where the environment sets glibc's otherwise than
    `FRUGAL` does: then somebody has decided.

    Args:
        room: bytes that this machine has left.
    """

    def __init__(self, room: Callable[[], int] = available_memory, clock: Callable[[], float] = time.monotonic) -> None:
        self.keeps = self.is_ours = False
        self._need = 0.0
        self._room, self._clock = room, clock
        self._looked = clock()

    def begin(self, need: int) -> None:
        """Decide before the first step.

        Args:
            need: bytes that all ranks of the job on this machine are estimated to take together; 0: not known.
        """
        self._need = need
        self.is_ours = _is_ours()
        self.keeps = self.is_ours and 0 < need * SPARE <= self._room()
        if self.keeps:
            _set(_MMAP_MAX, 0)
            _set(_TRIM_THRESHOLD, _NEVER)

    def look(self) -> None:
        """Give everything back, and from now on at once, if others want the memory or this process has grown."""
        if not self.keeps or (now := self._clock()) - self._looked < SECONDS:
            return
        self._looked = now
        if self._room() < self._need * ENOUGH:
            self.end()

    def end(self) -> None:
        """Give everything back, and from now on at once: what comes after the last step was estimated so."""
        if self.keeps:
            self.keeps = False
            _set(_MMAP_MAX, _DEFAULT_MMAPS)
            _set(_MMAP_THRESHOLD, int(FRUGAL["MALLOC_MMAP_THRESHOLD_"]))
            _set(_TRIM_THRESHOLD, _DEFAULT_TRIM)
            _libc().malloc_trim(0)


def _is_ours() -> bool:
    told = {name: os.environ[name] for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return told == FRUGAL and hasattr(_libc(), "mallopt") and hasattr(_libc(), "malloc_trim")


def _set(knob: int, value: int) -> None:
    _libc().mallopt(knob, value)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
