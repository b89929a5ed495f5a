"""Runs a program in mount and process namespaces of its own, which show it the paths of a `View` only.

    python -m llama_stack_provider_trl.launch.namespaces --keep=DESCRIPTORS VIEW [COMMAND ...]

The program becomes a child of a small init, process 1 of its namespace: when the init ends, the kernel ends the rest.
Root creates the namespaces directly; another user creates a user namespace first. Linux, standard library and ctypes
only: the runner imports this, and it must start in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..system import fork
from ..system.mounts import MountTable
from ..system.process import children_of, die_with_parent, innermost_pid, libc
from .seccomp import filter_calls

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_NOATIME, _MS_NODIRATIME, _MS_BIND, _MS_REC, _MS_SLAVE, _MS_RELATIME = 1024, 2048, 4096, 1 << 14, 1 << 19, 1 << 21
_KEPT_FLAGS = {
    "nosuid": _MS_NOSUID,
    "nodev": _MS_NODEV,
    "noexec": _MS_NOEXEC,
    "noatime": _MS_NOATIME,
    "nodiratime": _MS_NODIRATIME,
    "relatime": _MS_RELATIME,
}
"""Options of a mount that a remount must repeat: the kernel would drop them, or refuse the remount."""
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 1, 24, 38, 47, 4
_CAP_DAC_OVERRIDE, _CAP_IPC_LOCK = 1, 14
_KEPT_CAPABILITIES = (_CAP_DAC_OVERRIDE, _CAP_IPC_LOCK)
"""Root's trainings still read models of other users, and pin memory for RDMA. They have no capability that reaches a
mount, another process or a device node; DAC_READ_SEARCH would open any file by its handle."""
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522
_DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty", "shm", "mqueue", "hugepages*", "fd", "stdin"),
    *(
        "stdout",
        "stderr",
        "core",
        "nvidia*",
        "nvmap",
        "nvhost*",
        "dri",
        "kfd",
        "accel*",
        "dxg",
        "infiniband",
        "gdrdrv*",
    ),
    *("knem", "xpmem", "hfi1*", "cxi*"),
)
"""Entries of /dev that a training of root sees: those of accelerators and fast networks, and no disk."""
_WRITABLE_DEVICES = ("shm", "mqueue", "hugepages*")
"""Directories among them."""
_TERMINALS = "/dev/pts"
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Entries of /proc that change the machine for a process of root: read-only, as in containers."""


KEEP = "--keep="
"""Option with the numbers of open files that the command inherits, separated by commas."""


class NotIsolated(OSError):
    """Raised when the machine, or the user's rights on it, do not allow the namespaces; names the step that failed."""


@dataclass(frozen=True)
class View:
    """The file system as a program sees it: all paths that its user may read, except `covers` and `blanks`; it writes
    below `write` only. Every path is absolute, and only those of `links` have symbolic links on them."""

    covers: tuple[str, ...] = ()
    """Directories that are hidden, except for the paths of `read` and `write` below them."""
    blanks: tuple[str, ...] = ()
    """Files that are hidden."""
    read: tuple[str, ...] = ()
    """Paths below a cover: visible, and read-only."""
    write: tuple[str, ...] = ()
    """Paths that may be written, below a cover or elsewhere."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links below a cover that paths pass through, and their targets."""
    cwd: str = "/"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        links = tuple((path, target) for path, target in data["links"])
        named = {name: tuple(data[name]) for name in ("covers", "blanks", "read", "write")}
        return cls(**named, links=links, cwd=data["cwd"])


class Confined:
    """A program in namespaces, and its init, as their parent sees them. Raises NotIsolated: the namespaces cannot be
    created; OSError: the program cannot be started."""

    def __init__(
        self,
        view: View,
        argv: Sequence[str],
        prepare: Callable[[], None],
        output: int | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.privileged = _allow_namespaces()
        """Whether no user namespace was needed."""
        self.returncode: int | None = None
        """Exit status of the program, once it has ended; negative: minus the signal that ended it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.init = os.fork()
        if self.init == 0:
            _Init(view, argv, prepare, output, keep, theirs).run(self.privileged)
        theirs.close()
        self._channel = ours
        first = self._receive()
        if first is None or "error" in first:
            os.waitpid(self.init, 0)
            raise _error(first or {"error": "its init ended at once", "isolation": True})
        self._channel.setblocking(False)
        self.pid = self._outer_pid(first["pid"]) if first["pid"] else self.init
        """Process id of the program in its parent's namespace."""

    def fileno(self) -> int:
        """Readable when the program has ended."""
        return self._channel.fileno()

    def poll_report(self) -> int | None:
        """The program's exit code once its init has reported it. Does not wait, and reaps no process."""
        if self.returncode is None:
            try:
                last = self._receive()
                if last is not None:
                    self.returncode = os.waitstatus_to_exitcode(last["status"])
            except BlockingIOError:
                pass
            except (ValueError, TypeError, KeyError, RecursionError):
                self.returncode = 1  # the program may trace its init, and write to us in its place
        return self.returncode

    def _receive(self) -> dict[str, Any] | None:
        data = self._channel.recv(65536)
        return json.loads(data) if data else None

    def _outer_pid(self, pid: int) -> int:
        inside = [child for child in children_of(self.init) if innermost_pid(child) == pid]
        return inside[0] if inside else self.init  # it has ended already


def _error(report: Mapping[str, Any]) -> OSError:
    if report.get("isolation"):
        return NotIsolated(report.get("errno", 0), report["error"])
    return OSError(report.get("errno", 0), report["error"])


def _allow_namespaces() -> bool:
    """Make the next child of this process the first of a new process namespace; False: in a user namespace."""
    if _unshare(_CLONE_NEWPID) == 0:
        return True
    if ctypes.get_errno() not in (errno.EPERM, errno.EACCES):
        raise NotIsolated(ctypes.get_errno(), f"a process namespace: {os.strerror(ctypes.get_errno())}")
    uid, gid = os.geteuid(), os.getegid()
    _checked(_unshare(_CLONE_NEWUSER), "a user namespace")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        raise NotIsolated(error.errno, f"the user ids of a user namespace: {error.strerror}") from error
    _checked(_unshare(_CLONE_NEWPID), "a process namespace in a user namespace")
    return False


@dataclass
class _Init:
    """Process 1 of the namespace: builds the view, starts the program, reaps until no process is left."""

    view: View
    argv: Sequence[str]
    prepare: Callable[[], None]
    output: int | None
    keep: Sequence[int]
    channel: socket.socket

    def run(self, privileged: bool) -> NoReturn:
        status = 1
        try:
            self._detach()
            _build(self.view, privileged)
            # Before: what a process with the right to it has set, one without it cannot set back (oom_score_adj).
            self.prepare()
            _drop_privileges(_KEPT_CAPABILITIES if privileged else ())
            status = self._run_program()
        except NotIsolated as error:
            self._send(error=error.strerror, errno=error.errno, isolation=True)
        except BaseException as error:
            self._send(error=f"{type(error).__name__}: {error}", isolation=True)
        finally:
            os._exit(status)

    def _detach(self) -> None:
        """Set up the program's part of our parent's state, and end with it."""
        signal.set_wakeup_fd(-1)
        # SIGTERM is for the program: the kernel does not deliver it to a process 1 without a handler.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *self.keep, self.channel.fileno(), *([] if self.output is None else [self.output])})
        for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
            os.closerange(low + 1, high)
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if select.select([self.channel], [], [], 0)[0]:
            os._exit(1)  # our parent was gone before

    def _run_program(self) -> int:
        if not self.argv:
            self._send(pid=0)
            self._send(status=0)
            return 0
        streams: dict[str, int] = {}  # else those of our parent
        if self.output is not None:
            streams = {"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": subprocess.STDOUT}
        program: subprocess.Popen[bytes] | fork.ForkedProgram
        try:
            if self.output is not None and fork.can_become(self.argv):
                program = fork.start(self.argv, output=self.output)
            else:
                program = subprocess.Popen(self.argv, start_new_session=True, pass_fds=self.keep, **streams)  # type: ignore[call-overload]
        except OSError as error:
            self._send(error=error.strerror, errno=error.errno)
            return 1
        self._send(pid=program.pid)
        while True:
            try:
                pid, ended = os.waitpid(-1, 0)
            except ChildProcessError:
                return 0
            if pid == program.pid:
                program.returncode = os.waitstatus_to_exitcode(ended)
                self._send(status=ended)

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # the reader has ended
            self.channel.send(json.dumps(message).encode())


def _build(view: View, privileged: bool) -> None:
    """Builds the mounts of a view, in a mount namespace of this process's own."""
    _checked(_unshare(_CLONE_NEWNS), "a mount namespace")
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)
    covers = [path for path in view.covers if os.path.isdir(path)]
    named = sorted({*view.write, *view.read} - {"/"})
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in named if os.path.exists(path)}
    hidden = {path for path in opened if any(_is_below(path, cover) for cover in covers)}
    for path in opened.keys() - hidden:
        _bind(opened[path], path)
    for cover in covers:
        _mount("tmpfs", cover, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0700,size=16m")
    for path, target in view.links:
        _make_directory(os.path.dirname(path))
        os.symlink(target, path)
    for path in sorted(hidden):
        _bind(opened[path], path)
    for fd in opened.values():
        os.close(fd)
    _blank(view.blanks, covers)
    writable = {path: True for path in opened if path in view.write and path not in view.read}
    writable |= dict.fromkeys([*covers, *(path for path in opened if path in view.read)], False)
    writable |= dict.fromkeys(_own_devices() if privileged else _bound_devices(), True)
    writable |= {_TERMINALS: _own_terminals()}
    _own_proc()
    writable |= {"/proc": True, **{f"/proc/{name}": False for name in _KERNEL_SETTINGS}}
    _protect(writable)
    os.chdir(view.cwd)


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/")


def _bind(fd: int, path: str) -> None:
    """Mount an open file at a path, which is created where a cover hides it."""
    if not os.path.lexists(path):
        _make_directory(os.path.dirname(path))
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)


def _make_directory(path: str) -> None:
    os.makedirs(path, mode=0o755, exist_ok=True)


def _blank(files: Sequence[str], covers: Sequence[str]) -> None:
    """Replace files by an empty one that no process may open."""
    files = [path for path in files if os.path.lexists(path) and not os.path.isdir(path)]
    if not files or not covers:
        return
    empty = os.path.join(covers[0], ".hidden")
    os.close(os.open(empty, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0))
    fd = os.open(empty, os.O_PATH | os.O_CLOEXEC)
    for path in files:
        _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND)
    os.close(fd)
    os.unlink(empty)


def _own_devices() -> list[str]:
    """Mount a /dev of our own with `_DEVICES`; returns its directories that may be written."""
    names = [name for name in os.listdir("/dev") if any(fnmatch.fnmatch(name, known) for known in _DEVICES)]
    links = {name: os.readlink(f"/dev/{name}") for name in names if os.path.islink(f"/dev/{name}")}
    opened = {name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in names if name not in links}
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0755,size=1m")
    for name, fd in opened.items():
        _bind(fd, f"/dev/{name}")
        os.close(fd)
    for name, target in links.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir(_TERMINALS)
    os.symlink("pts/ptmx", "/dev/ptmx")
    return [f"/dev/{name}" for name in opened if any(fnmatch.fnmatch(name, known) for known in _WRITABLE_DEVICES)]


def _bound_devices() -> list[str]:
    """Mount the machine's writable directories of /dev separately."""
    names = [name for name in os.listdir("/dev") if any(fnmatch.fnmatch(name, known) for known in _WRITABLE_DEVICES)]
    found = [path for name in names if os.path.isdir(path := f"/dev/{name}") and not os.path.islink(path)]
    for path in found:
        _mount(path, path, None, _MS_BIND | _MS_REC)
    return found


def _own_terminals() -> bool:
    """Mount terminals of our own over those of the machine, which its user could read and write as their owner.

    Returns whether there are any: a kernel without namespaces of terminals has none for us."""
    if not os.path.isdir(_TERMINALS):
        return False
    try:
        _mount("devpts", _TERMINALS, "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    except NotIsolated:
        _mount("tmpfs", _TERMINALS, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0755,size=4k")
        return False
    if os.path.exists("/dev/ptmx") and not os.path.islink("/dev/ptmx"):
        _mount(f"{_TERMINALS}/ptmx", "/dev/ptmx", None, _MS_BIND)
    return True


def _own_proc() -> None:
    """Mount a /proc that shows this process namespace only. Mounts below the old one, such as the masks of a container
    or an NVIDIA driver's settings, are repeated below the new one."""
    below = {point: os.open(point, os.O_PATH | os.O_CLOEXEC) for point in _mounts() if point.startswith("/proc/")}
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    with suppress(OSError):
        # Trainings on one machine then rarely have the same pid, which libraries use in names of temporary files.
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(1000 + int.from_bytes(os.urandom(2)) // 4))
    for point, fd in below.items():
        with suppress(OSError):
            _mount(f"/proc/self/fd/{fd}", point, None, _MS_BIND | _MS_REC)
        os.close(fd)
    for path in (f"/proc/{name}" for name in _KERNEL_SETTINGS):
        if os.path.exists(path):
            _mount(path, path, None, _MS_BIND | _MS_REC)


def _protect(writable: Mapping[str, bool]) -> None:
    """Make every mount read-only except those at or below a writable path; the nearest one decides."""
    for point, options in _mounts().items():
        above = [path for path in writable if point == path or _is_below(point, path)]
        if (above and writable[max(above, key=len)]) or "ro" in options:
            continue
        flags = sum(flag for name, flag in _KEPT_FLAGS.items() if name in options)
        try:
            _mount(None, point, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)
        except OSError:
            # Hidden below another mount, or another user's (FUSE): it cannot be reached from this process.
            if point == "/":
                raise


def _mounts() -> dict[str, frozenset[str]]:
    """Mount points of this namespace, and the options of the uppermost mount on each."""
    return {str(mount.point): mount.options for mount in MountTable.read().mounts}


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _drop_privileges(keep: Sequence[int]) -> None:
    """Drop all other capabilities, and filter system calls, for this process and its children.

    Those of a user namespace reach nothing that its user does not. A trainer that was forked with them would have what
    a program that it starts has not, such as vLLM, which the kernel then keeps from the trainer's memory.
    """
    kept = sum(1 << number for number in keep)
    _checked(libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    libc().prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(_LAST_CAPABILITY + 1):
        if number not in keep and libc().prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break  # the kernel has no more
            _checked(-1, "dropping capabilities")
    header, had = _Header(_CAPABILITY_VERSION_3, 0), (_Capabilities * 2)()
    _checked(libc().capget(ctypes.byref(header), ctypes.byref(had)), "reading capabilities")
    left = had[0].permitted & kept
    sets = (_Capabilities * 2)(_Capabilities(left, left, 0), _Capabilities(0, 0, 0))
    _checked(libc().capset(ctypes.byref(header), ctypes.byref(sets)), "dropping capabilities")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        filter_calls()
    except OSError as error:
        raise NotIsolated(error.errno, f"filtering system calls: {error.strerror}") from error


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    done = libc().mount(*arguments, ctypes.c_ulong(flags), None if data is None else data.encode())
    _checked(done, f"mounting {target}")


def _unshare(flags: int) -> int:
    return int(libc().unshare(flags))


def _checked(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise NotIsolated(number, f"{what}: {os.strerror(number)}")


def main(arguments: Sequence[str]) -> int:
    """Run COMMAND in a view and return its exit status, or 128 and the signal that ended it.

    Without a command, build the view and print its kind: `root` or `user namespace`."""
    keep = [int(number) for number in arguments[0].removeprefix(KEEP).split(",") if number]
    view, argv = View.from_json(json.loads(arguments[1])), arguments[2:]
    die_with_parent(os.getppid())
    try:
        program = Confined(view, argv, lambda: None, keep=keep)
    except NotIsolated as error:
        print(f"not isolated: {error.strerror or error}", file=sys.stderr)
        return 125
    except OSError as error:
        print(f"{argv[0]}: {error.strerror or error}", file=sys.stderr)
        return 127
    if not argv:
        print("root" if program.privileged else "user namespace")
        return 0
    while (exit_code := program.poll_report()) is None:
        select.select([program], [], [])
        if os.waitpid(program.init, os.WNOHANG)[0]:
            exit_code = program.poll_report()
            break
    return 137 if exit_code is None else exit_code if exit_code >= 0 else 128 - exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
