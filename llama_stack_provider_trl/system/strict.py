"""Takes from this process all system calls but those that computing needs: no files, no network, no other processes.

What is open stays open, but is neither read nor written, except for a connected socket (`sendto`). Linux on x86_64 and
aarch64; standard library and ctypes only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import NamedTuple

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_SECCOMP_FILTER, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 2, 22, 38


class _Processor(NamedTuple):
    audit: int
    calls: dict[str, int]
    """Those that are allowed."""


_ARCHITECTURES = {
    "x86_64": _Processor(
        0xC000003E,
        {
            "mmap": 9,
            "mprotect": 10,
            "munmap": 11,
            "brk": 12,
            "rt_sigaction": 13,
            "rt_sigprocmask": 14,
            "rt_sigreturn": 15,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "getpid": 39,
            "sendto": 44,
            "exit": 60,
            "gettimeofday": 96,
            "getrusage": 98,
            "times": 100,
            "sigaltstack": 131,
            "gettid": 186,
            "time": 201,
            "futex": 202,
            "clock_gettime": 228,
            "clock_getres": 229,
            "exit_group": 231,
            "getrandom": 318,
        },
    ),
    "aarch64": _Processor(
        0xC00000B7,
        {
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "clock_gettime": 113,
            "clock_getres": 114,
            "sched_yield": 124,
            "sigaltstack": 132,
            "rt_sigaction": 134,
            "rt_sigprocmask": 135,
            "rt_sigreturn": 139,
            "times": 153,
            "getrusage": 165,
            "gettimeofday": 169,
            "getpid": 172,
            "gettid": 178,
            "sendto": 206,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "mmap": 222,
            "mprotect": 226,
            "madvise": 233,
            "getrandom": 278,
        },
    ),
}


class _FilterCode(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def can_be_strict() -> bool:
    return sys.platform == "linux" and platform.machine() in _ARCHITECTURES and sys.maxsize > 1 << 32


def only_compute() -> None:
    """Refuse all other calls of this process from now on, with EPERM. There is no way back. Raises OSError: the machine
    has no such filters."""
    if not can_be_strict():
        raise OSError(errno.ENOSYS, f"{sys.platform} on {platform.machine()} has no filter of system calls here")
    code = _program(_ARCHITECTURES[platform.machine()])
    given = _FilterCode(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, argument, more in ((_PR_SET_NO_NEW_PRIVS, 1, None), (_PR_SET_SECCOMP, _SECCOMP_FILTER, given)):
        pointer = ctypes.byref(more) if more is not None else 0
        if libc.prctl(option, argument, pointer, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _program(architecture: _Processor) -> bytes:
    numbers = sorted(architecture.calls.values())
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, architecture.audit, 0, len(numbers) + 1),
        _instruction(_LOAD, _NUMBER_AT),
        *(_instruction(_EQUAL, number, len(numbers) - at, 0) for at, number in enumerate(numbers)),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _instruction(operation: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, on_true, on_false, value)
