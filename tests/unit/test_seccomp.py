"""The filter of system calls, run as the kernel runs it, for each kind of processor."""

from __future__ import annotations

import errno
import stat
import struct

import pytest

from llama_stack_provider_trl.launch.seccomp import ARCHITECTURES, Architecture, program

O_CREAT, O_TMPFILE = 0o100, 0o20200000
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17
SET_USER_ID = stat.S_ISUID | 0o755

each_architecture = pytest.mark.parametrize("name", list(ARCHITECTURES))


def run(architecture: Architecture, call: str | int, *arguments: int, audit: int | None = None) -> int:
    """The error with which a call fails; 0: it is allowed."""
    number = architecture.calls[call] if isinstance(call, str) else call
    numbers = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, audit or architecture.audit, 0, *numbers)
    code, at, loaded = program(architecture), 0, 0
    while True:
        kind, if_true, if_false, operand = struct.unpack_from("=HBBI", code, at)
        at += 8
        if kind == 0x20:
            (loaded,) = struct.unpack_from("=I", data, operand)
        elif kind == 0x06:
            return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
        else:
            holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[kind]
            at += 8 * (if_true if holds else if_false)


@each_architecture
def test_files_with_the_set_user_id_bit_are_refused_and_others_are_not(name: str) -> None:
    architecture = ARCHITECTURES[name]
    for call, place in (("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2), ("mknodat", 2)):
        assert run(architecture, call, *[0] * place, SET_USER_ID) == errno.EPERM
        assert run(architecture, call, *[0] * place, 0o2755) == 0, "directories that share a group"
    assert run(architecture, "openat", 0, 0, O_CREAT, SET_USER_ID) == errno.EPERM
    assert run(architecture, "openat", 0, 0, O_TMPFILE, SET_USER_ID) == errno.EPERM
    assert run(architecture, "openat", 0, 0, O_CREAT, 0o644) == 0
    assert run(architecture, "openat", 0, 0, 0, SET_USER_ID) == 0, "the mode is not read where nothing is created"


@each_architecture
def test_processes_and_threads_start_and_namespaces_do_not(name: str) -> None:
    architecture = ARCHITECTURES[name]
    assert run(architecture, "clone", SIGCHLD) == 0
    assert run(architecture, "clone", CLONE_NEWUSER | SIGCHLD) == errno.EPERM
    assert run(architecture, "unshare", CLONE_NEWUSER) == errno.EPERM
    assert run(architecture, "unshare", 0x400) == 0, "open files"
    assert run(architecture, "clone3") == errno.ENOSYS, "the C library then uses clone"


@each_architecture
def test_calls_of_another_abi_are_refused_and_unknown_ones_are_the_kernels_to_refuse(name: str) -> None:
    architecture = ARCHITECTURES[name]
    assert run(architecture, 1, audit=0x40000003) == errno.ENOSYS
    assert run(architecture, 0x40000000) == errno.ENOSYS
    assert run(architecture, 3) == 0
