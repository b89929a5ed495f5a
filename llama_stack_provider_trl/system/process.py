"""Processes: identity, liveness, the end of a whole tree, and locks.

Standard library and psutil only: the runner imports this, and it must start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from ..errors import is_exhausted

TASK_MARK = "TRL_TASK_ID"
RUN_DIR_MARK = "TRL_RUN_DIR"
"""Environment variables that every process of a task carries. Both together name a task: two data directories on one
machine may hold jobs of the same name."""
VLLM_GPUS = "TRL_VLLM_GPUS"
"""Environment variable with the GPUs, as in CUDA_VISIBLE_DEVICES, that the vLLM of a task has for itself."""

_LINUX = sys.platform == "linux"
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PROPORTIONAL = re.compile(r"^Pss_Anon:\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^Rss(Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_PF_EXITING = 0x4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36

_PASSED_TO_CHILDREN = re.compile(
    r"""PATH | HOME | USER | LOGNAME | LANG | LANGUAGE | LC_.* | TZ | TMPDIR | TEMP | TMP | VIRTUAL_ENV | CONDA_.*
    | PYTHON.* | LD_LIBRARY_PATH | DYLD_.* | XDG_CACHE_HOME | SSL_CERT_.* | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE
    | (http|https|all|no)_proxy | (HTTP|HTTPS|ALL|NO)_PROXY
    | (CUDA|NVIDIA|NCCL|GLOO|HSA|HIP|ROCR|ROCM)_?.* | (OMP|MKL|KMP|GOMP|OPENBLAS)_.*
    | CC | CXX | CPATH | C_INCLUDE_PATH | CPLUS_INCLUDE_PATH | LIBRARY_PATH      # Triton compiles at the first step
    | (FI|OFI|UCX|RDMAV|IBV|MLX[45])_.*                                          # fabrics between machines
    | HF_.* | HUGGINGFACE_.* | HUGGING_FACE_.* | TRANSFORMERS_.* | TOKENIZERS_.* | ACCELERATE_.* | BNB_.*
    | TORCH.* | PYTORCH_.* | TRITON_.* | MALLOC_.* | GLIBC_TUNABLES | TRL_LOCK_DIR | TRL_FAULTS""",
    re.VERBOSE,
)

_PASSED_TO_COMPUTING = re.compile(
    r"""PATH | HOME | LANG | LANGUAGE | LC_.* | TZ | TMPDIR | TEMP | TMP | VIRTUAL_ENV | PYTHON.* | LD_LIBRARY_PATH
    | DYLD_.* | (OMP|MKL|KMP|GOMP|OPENBLAS)_.* | MALLOC_.* | GLIBC_TUNABLES | TOKENIZERS_PARALLELISM
    | HF_HUB_OFFLINE | TRANSFORMERS_OFFLINE""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class ProcessId:
    """A process, not just a number: a reused pid does not compare equal."""

    pid: int
    started: str
    """Opaque. Linux: boot id and clock ticks since boot, which no clock change and no reboot can repeat."""


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None where there is none, or only a zombie."""
    started = _started_on_linux(pid) if _LINUX else _started_elsewhere(pid)
    return None if started is None else ProcessId(pid, started)


def myself() -> ProcessId:
    me = identify(os.getpid())
    assert me is not None
    return me


def alive(process: ProcessId) -> bool:
    """Whether this same process runs; a zombie does not."""
    return identify(process.pid) == process


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal this same process; False where it is gone."""
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> list[ProcessId]:
    """Children of `pid`, their children and so on. Zombies are left out."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return _identified(child.pid for child in children)


def children_of(pid: int) -> list[int]:
    """Pids of the children of `pid`, zombies included."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def innermost_pid(pid: int) -> int:
    """The pid of a process in its own namespace, which may be below ours."""
    try:
        found = re.search(r"^NSpid:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:  # it has ended, or this is no Linux
        return pid
    return int(found[1].split()[-1]) if found else pid


def carries(process: ProcessId, marks: Mapping[str, str]) -> bool:
    """Whether this same process was started with these environment variables."""
    try:
        return _carries(psutil.Process(process.pid), marks) and alive(process)
    except psutil.NoSuchProcess:
        return False


def exiting(process: ProcessId) -> bool:
    """Whether this same process has begun to exit: its environment is gone, and it is no zombie yet. Linux only."""
    if not _LINUX or not alive(process):
        return False
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(stat[stat.rindex(b")") + 2 :].split()[6]) & _PF_EXITING)


def marked(marks: Mapping[str, str]) -> list[ProcessId]:
    """Processes of this user whose environment carries all of `marks`: this finds a tree whose root is gone."""
    return _identified(process.pid for process in psutil.process_iter() if _carries(process, marks))


def tasks_below(directory: Path) -> dict[Path, list[ProcessId]]:
    """Every process of this user that belongs to a task whose run directory is below `directory`, by run directory."""
    found: dict[Path, list[ProcessId]] = {}
    for process in psutil.process_iter():
        run_dir = _environment(process).get(RUN_DIR_MARK)
        if run_dir and Path(run_dir).is_relative_to(directory) and (known := identify(process.pid)):
            found.setdefault(Path(run_dir), []).append(known)
    return found


def terminate(find: Callable[[], Sequence[ProcessId]], grace: float = 3.0) -> None:
    """End all processes that `find` returns: SIGTERM, then SIGKILL `grace` seconds later; returns when it finds none.

    `find` is called repeatedly, so that a process forked meanwhile is not missed. A process that the kernel
    cannot kill (state D) is waited for: its device is not free either.
    """
    for process in find():
        send_signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left := find():
        if time.monotonic() >= deadline:
            for process in left:
                send_signal(process, signal.SIGKILL)
        time.sleep(0.05)


def reap(pid: int) -> None:
    """Reap a dead child of this process; any other pid is ignored."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def become_subreaper() -> None:
    """Linux: orphans among our descendants become our children, so that `descendants` still finds them."""
    if _LINUX:
        libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Linux: receive SIGKILL from the kernel when the thread that forked us ends. To be called right after the fork.

    Args:
        parent: pid of the process that forked us; if it is gone already, this process ends too.
    """
    if _LINUX:
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def hide_from_other_processes() -> None:
    """Linux: other processes of this user, unless it is root, can no longer read our environment and memory."""
    if _LINUX:
        libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def usable_cpus() -> int:
    """CPUs that this process may use: those that it may run on, or the quota of a control group, as containers have."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _cpu_quotas())]))


def machine_memory() -> int:
    """Bytes of memory that processes here may use together: the machine's, or the limit of a control group."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_groups())])


def available_memory() -> int:
    """Bytes that processes here can still use: of the machine, or of the control group where it allows less."""
    return max(0, min([psutil.virtual_memory().available, *(limit - taken for limit, taken in _memory_groups())]))


def resident_memory() -> int:
    """Bytes of memory that this process uses."""
    return int(psutil.Process().memory_info().rss)


def limit_memory(size: int) -> None:
    """Linux: let this process, and each of its children, allocate at most `size` bytes; more is a MemoryError.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS also counts mappings of libraries that are never touched:
    torch and trl import within 2 GiB of the former (measured: 0.8 GiB resident) and not within 2 GiB of the latter.
    """
    if _LINUX:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        size = size if most == resource.RLIM_INFINITY else min(size, most)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def allocated_memory() -> int:
    """Linux: bytes that `limit_memory` counts now; 0 elsewhere."""
    try:
        found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def memory_of(processes: Iterable[ProcessId], *, exact: bool = False) -> int:
    """Bytes of memory that processes use together. Memory that they share through a tmpfs counts once, mapped files do
    not count. Elsewhere than on Linux, the sum of their resident memory.

    Args:
        exact: count pages once that a process shares with one that it forked. The kernel visits every page for it.
    """
    own = shared = 0
    for process in processes:
        try:
            if _LINUX:
                status = Path(f"/proc/{process.pid}/status").read_text()
                sizes = {name: int(size) << 10 for name, size in _RESIDENT.findall(status)}
                share = _share_of_own_pages(process.pid) if exact else None
                own += sizes.get("Anon", 0) if share is None else share
                shared = max(shared, sizes.get("Shmem", 0))
            else:
                own += psutil.Process(process.pid).memory_info().rss
        except (OSError, psutil.Error):  # it has ended
            continue
    return own + shared


def _share_of_own_pages(pid: int) -> int | None:
    """Bytes of anonymous pages, each divided by the number of processes that share it; None: not available."""
    with suppress(OSError):
        found = _PROPORTIONAL.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return int(found[1]) << 10 if found else None
    return None


def work_done(pid: int | None = None) -> tuple[float, int]:
    """CPU seconds that a process has used so far, and bytes that it has read and written (0 on macOS). None: this one;
    a child is counted with its own children; of one that has ended, (0, 0)."""
    try:
        process = psutil.Process(pid)
        family = [process] if pid is None else [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0, 0
    seconds, moved = zip(*map(_work_of, family), strict=True)
    return sum(seconds), sum(moved)


def _work_of(process: psutil.Process) -> tuple[float, int]:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0, 0
    try:
        moved = process.io_counters()
    except (AttributeError, psutil.Error):
        return times.user + times.system, 0
    # Mapped files count in read_bytes only, the page cache in read_chars only.
    return times.user + times.system, sum(moved[2:])


def _own_groups() -> dict[str, str]:
    """Controllers, "" of version 2, -> the control group of this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}


def _upwards(root: Path, group: str) -> list[Path]:
    """The directories of a control group, and of those around it."""
    return [place for place in (root / group, *(root / group).parents) if place.is_relative_to(root)]


def _cpu_quotas() -> Iterator[float]:
    """CPUs that each control group (version 2 and 1) allows this process together with the others in it."""
    own = _own_groups()
    for root, group, files in (
        (_CONTROL_GROUPS, own.get("", ""), ("cpu.max",)),
        (
            *(_CONTROL_GROUPS / "cpu", next((path for name, path in own.items() if "cpu" in name.split(",")), "")),
            ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
        ),
    ):
        for place in _upwards(root, group):
            with contextlib.suppress(OSError, ValueError):  # no such file: the root; "max" is no number: no quota
                quota, period = (int(text) for name in files for text in (place / name).read_text().split())
                if quota > 0:  # -1: none
                    yield quota / period


def _memory_groups() -> Iterator[tuple[int, int]]:
    """For each control group (version 2 and 1) that limits this process: the limit, and its memory that cannot be
    reclaimed, in bytes. Files in the page cache can be reclaimed; those in a tmpfs cannot."""
    own = _own_groups()
    if not own:
        return
    # A container sees its own group as the root, at any path on the host.
    for root, group, limits, usage, cached in (
        (_CONTROL_GROUPS, own.get("", ""), ("memory.max", "memory.high"), "memory.current", r"(?:in)?active_file"),
        (
            *(_CONTROL_GROUPS / "memory", own.get("memory", ""), ("memory.limit_in_bytes",), "memory.usage_in_bytes"),
            r"total_(?:in)?active_file",
        ),
    ):
        for place in _upwards(root, group):
            if (limit := _smallest(place, limits)) is not None:
                yield limit, _taken(place, usage, cached, limit)


def _smallest(group: Path, names: Iterable[str]) -> int | None:
    found = []
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # no such file: the root; no number: no limit
            found.append(int((group / name).read_text()))
    return min(found, default=None)


def _taken(group: Path, usage: str, cached: str, limit: int) -> int:
    try:
        taken = int((group / usage).read_text())
        given_way = re.findall(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return limit  # unknown: none can be relied on
    return taken - sum(map(int, given_way))


def child_environment(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training process: the allow-listed part of `environ`, and `added`.

    The service's own tokens are not on the list. HF_TOKEN is: private models of the hub need it.
    """
    allowed = {name: value for name, value in environ.items() if _PASSED_TO_CHILDREN.fullmatch(name)}
    return {**allowed, **added}


def computing_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that computes for requests, and needs no network: a request's own source can read
    it, and addresses of proxies and of mirrors may have passwords."""
    return {name: value for name, value in environ.items() if _PASSED_TO_COMPUTING.fullmatch(name)}


def without_modules(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program of another interpreter, which imports none of the modules of this one."""
    return {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class FileLock:
    """A lock on a file, held until released or until this process ends in any way.

    The file is never removed. While the lock is held, the file names the holder, so that a waiting process can report
    it.

    Args:
        shared: any number of processes may hold it that do the same; the file names the last of them.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path = path
        self._mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self, holder: str) -> bool:
        """Take the lock if it is free, without waiting; `holder` is the text for other processes. Raises OSError: the
        file cannot be opened. ELOOP: it is a symbolic link, whose target would be overwritten."""
        assert self._fd is None, f"{self.path} is already held by this object"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, self._mode | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        self.describe(holder)
        return True

    def describe(self, holder: str) -> None:
        """Replace the text for other processes, while the lock is held."""
        assert self._fd is not None, f"{self.path} is not held by this object"
        with suppress(OSError):  # on a full disk the lock is held without a name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder.encode(), 0)

    def holder(self) -> str:
        """The last text in the file: the holder, if `acquire` has just returned False."""
        try:
            return self.path.read_text(errors="replace").strip() or "an unnamed process"
        except FileNotFoundError:
            return "no process"

    def release(self) -> None:
        if self._fd is not None:
            with suppress(OSError):  # a read-only disk
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def _identified(pids: Iterable[int]) -> list[ProcessId]:
    return [found for pid in pids if (found := identify(pid)) is not None]


def _carries(process: psutil.Process, marks: Mapping[str, str]) -> bool:
    environ = _environment(process)
    return all(environ.get(name) == value for name, value in marks.items())


def _environment(process: psutil.Process) -> dict[str, str]:
    """The environment with which a process was started; empty if access is denied."""
    try:
        return process.environ()
    except psutil.Error:
        return {}
    except OSError as error:
        if is_exhausted(error):
            raise  # an unreadable process would count as gone
        return {}


def _started_on_linux(pid: int) -> str | None:
    # psutil's create_time() is a wall clock time: it moves when the clock is set.
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, ticks = fields[0], fields[19]
    return None if state in (b"Z", b"X") else f"{_boot_id()}:{int(ticks)}"


def _started_elsewhere(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
