"""A training whose own code is hostile tries to get out of its namespaces, or to leave something outside of them.

What it may not see of the service is in test_isolation.py; what the service reads of its files in
test_untrusted_run_files.py.
"""

from __future__ import annotations

import json
import os
import pty
import select
import stat
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch import seccomp
from llama_stack_provider_trl.launch.base import TaskState
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from tests.fakes import SHEBANG
from tests.process.waiting import reaches, until
from tests.security.isolated_site import Site, ran, site

__all__ = ["site"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PREAMBLE = f"""{SHEBANG}
import ctypes, errno, json, os, pathlib, resource, signal, socket, struct, sys, time
run_dir = pathlib.Path(sys.argv[-1]).parent
places = json.loads((run_dir / "places.json").read_text())
data, service = places["data"], places["service"]
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def attempt(name, action):
    "In a process of its own, since some of these change the process."
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        try:
            how = f"reached {{action()!r}}"
        except OSError as error:
            how = errno.errorcode[error.errno]
        os.write(writer, how.encode()[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found[name] = file.read().decode() or "ended"
    os.wait()

def mount(source, target, kind, flags=0, options=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    checked(libc.mount(*texts, ctypes.c_ulong(flags), None if options is None else options.encode()))

def in_user_namespace(flags, action):
    def act():
        checked(libc.unshare(0x10000000 | flags))  # its user stays the owner of what root owns, mapped or not
        os.makedirs(run_dir / "mounted", exist_ok=True)
        return action(str(run_dir / "mounted"))
    return act
"""
REPORT = '\n(run_dir / "found.json").write_text(json.dumps(found))\n'

MOUNTS = """
NAMESPACE, CONTROL_GROUPS = 0x20000, 0x2000000
parent = os.path.dirname(data)

def bind(at):
    mount(parent, at, None, 4096)  # without the mounts below it, such as the cover
    return os.listdir(f"{at}/data")

def overlay(at):
    for name in ("upper", "work"):
        os.makedirs(run_dir / name, exist_ok=True)
    mount("overlay", at, "overlay", 0, f"lowerdir={parent},upperdir={run_dir}/upper,workdir={run_dir}/work")
    return os.listdir(f"{at}/data")

def groups(kind, options):
    def act(at):
        mount("groups", at, kind, 0, options)
        return os.listdir(at)
    return act

def writable(at):
    mount(None, "/", None, 32 | 4096)
    return os.close(os.open("/etc/hostname", os.O_WRONLY))

def processes(at):
    if os.fork() == 0:
        mount("proc", at, "proc")
        os.close(os.open(f"{at}/sys/kernel/core_pattern", os.O_WRONLY))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]):
        raise OSError(errno.EPERM, "")

attempt("a copy of the parent without the cover", in_user_namespace(NAMESPACE, bind))
attempt("a tree opened without the cover", in_user_namespace(
    NAMESPACE, lambda at: os.listdir(f"/proc/self/fd/{checked(libc.syscall(428, -100, parent.encode(), 1))}/data")))
attempt("the parent through an overlay", in_user_namespace(NAMESPACE, overlay))
attempt("the cover away", in_user_namespace(NAMESPACE, lambda at: checked(libc.umount2(data.encode(), 2))))
attempt("the root writable", in_user_namespace(NAMESPACE, writable))
attempt("settings of the kernel", in_user_namespace(NAMESPACE | 0x20000000, processes))
for kind, options in (("cgroup2", None), *(("cgroup", name) for name in ("memory", "freezer", "cpu", "pids"))):
    attempt(f"control groups: {kind} {options}", in_user_namespace(NAMESPACE | CONTROL_GROUPS, groups(kind, options)))
attempt("another process's namespace", lambda: checked(libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)))
attempt("a file by its handle", lambda: checked(libc.open_by_handle_at(
    os.open("/", os.O_RDONLY), struct.pack("IIII", 8, 1, 2, 0), os.O_RDONLY)))
attempt("another root", lambda: os.chroot("/tmp"))
"""

LEAVES = """
attempt("a set-user-id file", lambda: (open("left", "w").close(), os.chmod("left", 0o4755)))
attempt("the same, opened", lambda: os.open("left-2", os.O_CREAT | os.O_WRONLY, 0o4755))
attempt("the same, by descriptor", lambda: os.fchmod(os.open("left-3", os.O_CREAT | os.O_WRONLY), 0o4755))
attempt("the same, made as a node", lambda: os.mknod("left-4", 0o104755))
attempt("a disk", lambda: os.mknod("left-5", 0o60600, os.makedev(254, 0)))
attempt("a hard link out of its directory", lambda: os.link("/etc/passwd", "left-6"))
attempt("a key of the user", lambda: checked(libc.syscall(places["add_key"], b"user", b"trl-test", b"x", 1, -4)))
attempt("io_uring", lambda: checked(libc.syscall(425, 8, ctypes.create_string_buffer(120))))
"""

RIGHTS = """
attempt("a higher priority", lambda: os.nice(-1))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
    found["core dumps"] = "reached"
attempt("raw packets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("the kernel's log", lambda: checked(libc.klogctl(3, ctypes.create_string_buffer(100), 100)))
attempt("the host's name", lambda: checked(libc.sethostname(b"x", 1)))
attempt("the clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
attempt("limits of the service", lambda: resource.prlimit(service, resource.RLIMIT_NOFILE))
attempt("cores of the service", lambda: os.sched_setaffinity(service, {0}))
attempt("files of all processes", lambda: checked(libc.fanotify_init(0, 0)))
"""


def outcomes(site: Site, body: str, **more: object) -> dict[str, str]:
    """What a hostile training reached, in a run directory that is called after the job `mine`."""
    task = site.task(PREAMBLE + body + REPORT)
    places = json.loads((task.run_dir / "places.json").read_text())
    (task.run_dir / "places.json").write_text(json.dumps({**places, **more}))
    ran(site.launcher(), task)
    found: dict[str, str] = json.loads((task.run_dir / "found.json").read_text())
    assert found
    return found


def reached(found: dict[str, str]) -> dict[str, str]:
    return {name: how for name, how in found.items() if how.startswith(("reached", "ended"))}


def test_no_namespace_of_its_own_gives_a_training_a_mount_or_the_control_groups_of_the_machine(site: Site) -> None:
    assert reached(outcomes(site, MOUNTS)) == {}


def test_a_training_leaves_no_program_key_or_device_for_processes_outside(site: Site) -> None:
    add_key = seccomp.ARCHITECTURES[os.uname().machine].calls["add_key"]
    assert reached(outcomes(site, LEAVES, add_key=add_key)) == {}
    left = [path for path in (site.data / "jobs/mine/attempts/1").iterdir() if path.stat().st_mode & stat.S_ISUID]
    assert left == []


def test_a_training_has_no_right_on_the_machine_or_on_processes_outside(site: Site) -> None:
    assert reached(outcomes(site, RIGHTS)) == {}


def test_a_training_cannot_become_one_that_the_kernel_spares_when_memory_is_short(site: Site) -> None:
    if not _may_set_resources():
        pytest.skip("without CAP_SYS_RESOURCE the lowest value cannot be set")
    body = """
pathlib.Path("/proc/self/oom_score_adj").write_text("500")
attempt("spared", lambda: pathlib.Path("/proc/self/oom_score_adj").write_text("0"))
"""
    assert reached(outcomes(site, body)) == {}


def test_a_training_reads_and_writes_no_terminal_of_the_machine(site: Site) -> None:
    ours, theirs = pty.openpty()
    name = os.ttyname(theirs)
    body = f"""
attempt("the operator's terminal", lambda: os.write(os.open("{name}", os.O_RDWR | os.O_NOCTTY), b"typed"))
attempt("terminals of its own", lambda: os.ttyname(os.openpty()[1]))
"""
    try:
        found = outcomes(site, body)
        # Its own first terminal may have the name of the other one, which is still another terminal.
        assert select.select([ours], [], [], 0)[0] == []
        assert found["the operator's terminal"].startswith("E")
        assert found["terminals of its own"].startswith("reached")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_training_inherits_no_open_file_of_the_service_or_of_a_warm_process(site: Site) -> None:
    body = """
for pid in filter(str.isdigit, os.listdir("/proc")):
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if target.startswith("/") and not target.startswith((str(run_dir), "/dev/null", "/proc")):
            found[f"{pid}: {target}"] = "reached"
    if os.path.exists(f"/proc/{pid}/root{data}/jobs.sqlite3"):
        found[f"{pid}: root"] = "reached"
found["tried"] = "-"
"""
    secret = open(site.data / "jobs.sqlite3")  # noqa: SIM115
    os.set_inheritable(secret.fileno(), True)
    try:
        assert reached(outcomes(site, body)) == {}
    finally:
        secret.close()


def _may_set_resources() -> bool:
    capabilities = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())["CapEff"]
    return bool(int(capabilities, 16) >> 24 & 1)


# Its init: a process of the same user in the same namespace, which it may trace

TRACES_INIT = """
links = {int(name): os.readlink(f"/proc/1/fd/{name}") for name in os.listdir("/proc/1/fd")}
channel = next(number for number, target in links.items() if target.startswith("socket:"))
pidfd = checked(libc.syscall(434, 1, 0))
stolen = socket.socket(fileno=checked(libc.syscall(438, pidfd, channel, 0)))
for text in places["texts"]:
    stolen.send(text.encode())
time.sleep(600)
"""


@pytest.mark.parametrize("text", ["no json", '{"status": "x"}', "[]", '{"status": 1e99}', "[" * 60_000])
def test_a_training_that_writes_to_its_runner_in_place_of_its_init_is_ended_and_reported(site: Site, text: str) -> None:
    task = site.task(PREAMBLE + TRACES_INIT)
    places = json.loads((task.run_dir / "places.json").read_text())
    (task.run_dir / "places.json").write_text(json.dumps({**places, "texts": [text]}))
    launcher = site.launcher()
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited, 30)
    assert seen.exit_code == 1, (seen, RunDir(task.run_dir).log.read_text())
    until(lambda: not process.marked({process.TASK_MARK: task.task_id}))
