"""Filters the system calls of an isolated program and of all that it starts (seccomp).

The namespaces decide what it sees. The filter refuses calls that give it capabilities in a namespace of its own, with
which root mounts the machine's control groups, and those that leave something for processes outside. Linux on x86_64
and aarch64; standard library and ctypes only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from dataclasses import dataclass

_CLONE_NAMESPACES = 0x7E020000 | 0x80
"""All flags of clone and unshare that create a namespace."""
_CLONE_NEWTIME = 0x80
"""A part of the exit signal in clone."""
_CREATES = os.O_CREAT | 0o20000000
"""O_CREAT and the bit of O_TMPFILE that is no O_DIRECTORY: without them the mode of an open means nothing."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_OTHER_ABI = 0x40000000
"""Lowest number of the x32 calls on x86_64."""
_SET_FILTER, _SPECULATION_ALLOWED = 1, 4


@dataclass(frozen=True)
class RefusedCall:
    """A system call that fails with `error` where each of the arguments has a bit of its mask; always without masks."""

    call: str
    error: int = errno.EPERM
    masks: tuple[tuple[int, int], ...] = ()


REFUSED = (
    # A user namespace gives root all capabilities in it: enough to mount control groups, and to limit or freeze those
    # of the service.
    RefusedCall("unshare", masks=((0, _CLONE_NAMESPACES),)),
    RefusedCall("clone", masks=((0, _CLONE_NAMESPACES & ~_CLONE_NEWTIME),)),
    RefusedCall(
        "clone3", errno.ENOSYS
    ),  # its flags are in memory, which a filter cannot read: the C library uses clone
    RefusedCall("setns"),
    # A file with the set-user-id bit in /tmp gives the rights of the training's user, outside of all namespaces, to
    # each user of the machine.
    *(RefusedCall(call, masks=((1, stat.S_ISUID),)) for call in ("chmod", "fchmod", "mknod", "creat")),
    *(RefusedCall(call, masks=((2, stat.S_ISUID),)) for call in ("fchmodat", "fchmodat2", "mknodat")),
    RefusedCall("open", masks=((1, _CREATES), (2, stat.S_ISUID))),
    RefusedCall("openat", masks=((2, _CREATES), (3, stat.S_ISUID))),
    RefusedCall("openat2", errno.ENOSYS),  # as clone3
    # Keys belong to the user, in all namespaces.
    *(RefusedCall(call) for call in ("add_key", "request_key", "keyctl")),
    # Needed by no training. io_uring makes calls that no filter sees.
    *(RefusedCall(call, errno.ENOSYS) for call in ("io_uring_setup", "io_uring_enter", "io_uring_register")),
    *(RefusedCall(call) for call in ("bpf", "perf_event_open", "userfaultfd")),
)


@dataclass(frozen=True)
class Architecture:
    """Numbers that the kernel has on one kind of processor."""

    audit: int
    seccomp: int
    calls: dict[str, int]
    """Calls that are absent do not exist there."""


_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
    "openat2": 437,
    "fchmodat2": 452,
}
ARCHITECTURES = {
    "x86_64": Architecture(
        0xC000003E,
        317,
        {
            "open": 2,
            "clone": 56,
            "creat": 85,
            "chmod": 90,
            "fchmod": 91,
            "mknod": 133,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "openat": 257,
            "mknodat": 259,
            "fchmodat": 268,
            "unshare": 272,
            "perf_event_open": 298,
            "setns": 308,
            "bpf": 321,
            "userfaultfd": 323,
            **_EVERYWHERE,
        },
    ),
    "aarch64": Architecture(
        0xC00000B7,
        277,
        {
            "mknodat": 33,
            "fchmod": 52,
            "fchmodat": 53,
            "openat": 56,
            "unshare": 97,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "clone": 220,
            "perf_event_open": 241,
            "setns": 268,
            "bpf": 280,
            "userfaultfd": 282,
            **_EVERYWHERE,
        },
    ),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls() -> None:
    """Filter the calls of this process and its children from now on; it may gain no privileges (no_new_privs).

    Without effect on other processors than those of `ARCHITECTURES`. Raises OSError: the kernel has no filters.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or sys.maxsize < 1 << 32:
        return
    code = program(architecture)
    given = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    # Without the flag, kernels before 5.16 switch off a speculation that trainings on CPUs profit from.
    for flags in (_SPECULATION_ALLOWED, 0):
        if libc.syscall(architecture.seccomp, _SET_FILTER, flags, ctypes.byref(given)) == 0:
            return
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def program(architecture: Architecture) -> bytes:
    """The filter as the kernel's instructions."""
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, architecture.audit, 1, 0),
        _refuse(errno.ENOSYS),  # calls of a 32-bit program have other numbers
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _OTHER_ABI, 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for refused in REFUSED:
        if refused.call in architecture.calls:
            body = _body(refused)
            code += [_instruction(_EQUAL, architecture.calls[refused.call], 0, len(body)), *body]
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _body(refused: RefusedCall) -> list[bytes]:
    body = []
    for place, (argument, mask) in enumerate(refused.masks):
        left = 2 * (len(refused.masks) - place - 1) + 1  # to the instruction that allows
        body += [_instruction(_LOAD, _ARGUMENTS_AT + 8 * argument), _instruction(_ANY_BIT, mask, 0, left)]
    return [*body, _refuse(refused.error), *([_instruction(_RETURN, _ALLOW)] if refused.masks else [])]


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
