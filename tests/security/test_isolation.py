"""A training reaches what its job names, and nothing else of the service: neither its files nor its processes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.launch import isolation as isolating
from llama_stack_provider_trl.launch.base import Ended, TaskState
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation, isolate
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.namespaces import Confined, NotIsolated, View
from llama_stack_provider_trl.launch.runner import Limits, RunnerStatus
from llama_stack_provider_trl.specs.job import DatasetRef, ShardingSpec
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import SHEBANG
from tests.forked import forked_warm_processes
from tests.isolated import isolation
from tests.process.supervised import World
from tests.process.waiting import reaches, until
from tests.security.isolated_site import REPOSITORY, Site, ran
from tests.security.isolated_site import site as site
from tests.tiny import tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

UNPRIVILEGED = 65534

ATTACKS = f"""{SHEBANG}
import ctypes, errno, json, os, pathlib, signal, sys
run_dir = pathlib.Path(sys.argv[-1]).parent
places = json.loads((run_dir / "places.json").read_text())
data, service = pathlib.Path(places["data"]), places["service"]
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}

def attempt(name, action):
    try:
        found[name] = f"reached {{action()!r}}"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def call(function, *arguments):
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "")

def some(value):
    if not value:
        raise OSError(errno.ENODATA, "")
    return value

attempt("another job's run", lambda: open(data / "jobs/other/attempts/1/spec.json").read())
attempt("another job's checkpoints", lambda: os.listdir(data / "checkpoints/other"))
attempt("the database", lambda: open(data / "jobs.sqlite3").read())
attempt("the database, by where it came from", lambda: open("../../../../jobs.sqlite3").read())
attempt("a new file beside the database", lambda: open(data / "planted", "w"))
attempt("another job's rows", lambda: open(data / "datasets/other.jsonl").read())
attempt("the settings", lambda: some(open(places["config"]).read()))
attempt("device locks", lambda: some(os.listdir(places["locks"])))
attempt("the service's environment", lambda: open(f"/proc/{{service}}/environ").read())
attempt("the service's memory", lambda: open(f"/proc/{{service}}/mem"))
attempt("a signal to the service", lambda: os.kill(service, 0))
attempt("ptrace of the service", lambda: call(libc.ptrace, 16, service, None, None))
attempt("the cover away", lambda: call(libc.umount2, os.fsencode(data), 2))
attempt("the product's code", lambda: os.close(os.open(places["code"], os.O_WRONLY)))
attempt("a setting of the kernel", lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)))
(run_dir / "found.json").write_text(json.dumps(found))
"""
REACHED = {"another job's run", "the database", "the service's environment", "a signal to the service"}
"""What a training that is not isolated reaches at least, under any user."""
REFUSED = {"ENOENT", "EACCES", "EPERM", "ESRCH", "EROFS", "ENODATA"}


# What it does not reach


def test_a_training_reaches_nothing_of_the_service_and_of_other_jobs(site: Site) -> None:
    task = site.task(ATTACKS)
    ran(site.launcher(), task)
    found = json.loads((task.run_dir / "found.json").read_text())
    # A training may write to /tmp, so also to an installation below it (docs/explanation/security.md).
    below_tmp = {"the product's code"} if REPOSITORY.is_relative_to("/tmp") else set()
    # Root may open the file that lies over the settings; it is empty.
    assert {name: how for name, how in found.items() if how not in REFUSED and name not in below_tmp} == {}
    assert os.listdir(site.data / "checkpoints/mine") == []
    assert not (site.data / "planted").exists()


def test_without_isolation_the_same_training_reaches_them(site: Site) -> None:
    task = site.task(ATTACKS)
    ran(site.launcher(isolation=NO_ISOLATION), task)
    found = json.loads((task.run_dir / "found.json").read_text())
    assert {name for name, how in found.items() if how.startswith("reached")} >= REACHED


def test_root_in_a_training_sees_no_disk_and_can_create_none(site: Site) -> None:
    launcher = site.launcher()
    if launcher._isolation.how != "root":
        pytest.skip("another user has no rights on disks")
    body = """
import os, stat
disks = [path for base, _, names in os.walk("/dev") for path in (os.path.join(base, name) for name in names)
         if stat.S_ISBLK(os.lstat(path).st_mode)]
try:
    os.mknod("/tmp/trl-test-disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    disks.append("made")
except PermissionError:
    pass
print(disks)
"""
    task = site.task(f"{SHEBANG}{body}")
    ran(launcher, task)
    assert RunDir(task.run_dir).log.read_text() == "[]\n"


def test_a_namespace_of_its_own_gives_a_training_no_way_back(site: Site) -> None:
    body = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
libc.unshare(0x10000000 | 0x20000)
for path in ("{site.data}", "/proc", "/"):
    libc.umount2(path.encode(), 2)
print(os.path.exists("{site.data}/jobs.sqlite3"), os.path.exists("/proc/{site.service}"))
"""
    task = site.task(f"{SHEBANG}{body}")
    ran(site.launcher(), task)
    assert RunDir(task.run_dir).log.read_text() == "False False\n"


def test_a_runner_file_that_names_the_service_gets_it_no_signal(site: Site) -> None:
    body = """
import json, os, time
path = "runner.json"
while json.load(open(path))["state"] != "running":
    time.sleep(0.02)
forged = json.load(open(path)) | {"runner": json.load(open("victim.json"))}
open("new", "w").write(json.dumps(forged))
os.rename("new", path)
time.sleep(600)
"""
    launcher, task = site.launcher(), site.task(f"{SHEBANG}{body}")
    victim = process.identify(site.service)
    assert victim is not None
    (task.run_dir / "victim.json").write_text(json.dumps({"pid": victim.pid, "started": victim.started}))
    launcher.start(task)

    def forged() -> bool:
        status = RunnerStatus.read(RunDir(task.run_dir).runner_status)
        return status is not None and status.runner == victim

    until(forged)
    launcher.cancel(task)
    until(lambda: not process.marked({process.TASK_MARK: task.task_id}))
    assert process.alive(victim)


# What it reaches


def test_a_training_reaches_what_its_job_names_and_what_its_user_caches(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, outside, earlier = (
        site.data / "hf",
        site.root / "models" / "a",
        site.data / "checkpoints" / "other" / "final",
    )
    for directory in (cache, outside, earlier):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(directory.name)
    monkeypatch.setenv("HF_HOME", str(cache))
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = f"""
import multiprocessing.shared_memory, os, pathlib, socket, tempfile
spec = open("spec.json").read()
checkpoints = pathlib.Path("{site.data}/checkpoints/mine")
(checkpoints / "saved").write_text("saved")
(checkpoints / "saved").rename(checkpoints / "final")
pathlib.Path("{cache}/downloaded").write_text("weights")
print(open("{site.data}/datasets/mine.jsonl").read())
print(open("{cache}/config.json").read(), open("{outside}/config.json").read(), open("{earlier}/config.json").read())
try:
    open("{earlier}/config.json", "w")
except OSError as error:
    print(error.strerror)
with tempfile.TemporaryFile() as file:
    file.write(b"scratch")
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=10)
memory.close()
memory.unlink()
socket.create_connection(("127.0.0.1", {server.getsockname()[1]})).close()
print(os.path.exists(f"/proc/{{os.getpid()}}/status"))
"""
        rows = DatasetRef(dataset_id="mine", path=site.data / "datasets/mine.jsonl", sha256="0" * 64, num_rows=1)
        task = site.task(f"{SHEBANG}{body}", dataset=rows, model=str(earlier))
        ran(site.launcher(), task)
    log = RunDir(task.run_dir).log.read_text().splitlines()
    assert log == ['{"prompt": "rows"}', "hf a final", "Read-only file system", "True"]
    assert (site.data / "checkpoints/mine/final").read_text() == "saved"
    assert (cache / "downloaded").read_text() == "weights"


@pytest.mark.parametrize("field", ["model", "adapter"])
@pytest.mark.parametrize("model", ["jobs/other/attempts/1", "jobs", "", "datasets"])
def test_a_job_that_names_our_own_directories_as_its_model_does_not_see_them(
    site: Site, model: str, field: str
) -> None:
    for directory in ("jobs/other/attempts/1", "jobs", "", "datasets"):
        (site.data / directory / "config.json").write_text("{}")
    named = site.data / model
    given: dict[str, Any] = {field: str(named) if field == "model" else {"model": str(named), "use": "continue"}}
    task = site.task(f"{SHEBANG}\nimport os\nprint(os.path.exists('{named}/config.json'))", **given)
    ran(site.launcher(), task)
    assert RunDir(task.run_dir).log.read_text() == "False\n"


def test_directories_that_an_operator_has_moved_behind_a_symbolic_link_are_hidden_and_reached_likewise(
    site: Site,
) -> None:
    elsewhere = site.root / "other-disk"
    elsewhere.mkdir()
    shutil.move(site.data / "jobs", elsewhere / "jobs")
    (site.data / "jobs").symlink_to(elsewhere / "jobs")
    (site.root / "alias").symlink_to(site.data)
    aliased = Site(site.root, site.service)
    body = f"""
import os
print(os.path.exists("{elsewhere}/jobs/other"), os.path.exists("{site.root}/alias/jobs/other"))
print(os.path.exists("{site.root}/alias/jobs/mine/attempts/1/spec.json"), os.path.exists("spec.json"))
"""
    task = aliased.task(f"{SHEBANG}{body}")
    ran(LocalLauncher(isolation=isolation(site.root / "alias")), task)
    assert RunDir(task.run_dir).log.read_text().splitlines() == ["False False", "True True"]


def test_a_data_directory_in_shared_memory_is_reached_by_its_trainings(site: Site) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        there = Site(Path(root), site.service)
        shutil.copytree(site.data, there.data)
        task = there.task(f"{SHEBANG}\nprint(open('spec.json').read()[:1])\n")
        ran(LocalLauncher(isolation=isolation(there.data)), task)
        assert RunDir(task.run_dir).log.read_text() == "{\n"


def test_a_command_that_is_isolated_keeps_its_output_and_its_exit_status(site: Site) -> None:
    isolated = isolation(site.data)
    script = f"cat {site.data}/datasets/mine.jsonl; cat {site.data}/datasets/other.jsonl || exit 7"
    argv = isolated.command(["/bin/sh", "-c", script], Path("/"), os.environ, read=[site.data / "datasets/mine.jsonl"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, '{"prompt": "rows"}')
    argv = isolated.command(["/bin/sh", "-c", "kill -9 $$"], Path("/"), os.environ)
    assert subprocess.run(argv, timeout=60).returncode == 128 + signal.SIGKILL
    with open(site.data / "jobs.sqlite3", "rb") as file:
        given = (file.fileno(),)
        reader = [sys.executable, "-c", f"import os; os.write(1, os.read({given[0]}, 100))"]
        argv = isolated.command(reader, Path("/"), os.environ, keep=given)
        assert subprocess.run(argv, stdout=subprocess.PIPE, pass_fds=given, timeout=60).stdout == b"jobs"


@pytest.mark.parametrize("is_isolated", [True, False])
def test_a_reader_converts_the_file_that_it_was_given(site: Site, is_isolated: bool) -> None:
    files = site.root / "files"
    files.mkdir()
    (files / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    settings = ServiceSettings(data_dir=site.data, dataset_roots=(files,), device="cpu")
    blobs = Blobs(settings, isolation(site.data) if is_isolated else NO_ISOLATION)
    blobs.prepare()
    with open(files / "rows.jsonl", "rb") as file:
        read = asyncio.run(blobs.convert(str(files / "rows.jsonl"), file.fileno()))
    assert read is not None
    assert read.num_rows == 1
    assert asyncio.run(blobs.holds(read.sha256))


# Limits


def test_a_training_that_takes_more_memory_than_its_limit_is_ended_and_reports_it(site: Site) -> None:
    launcher = site.launcher(limits=Limits(memory_bytes=100 << 20))
    task = site.task(f"{SHEBANG}\nimport time\nhoard = bytearray(os_bytes := 300 << 20)\ntime.sleep(600)")
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited, 30)
    assert seen.ended is Ended.out_of_memory
    assert "max_training_memory_gb is 0.1" in seen.detail


def test_a_training_on_reserved_cores_that_takes_more_memory_than_it_reserved_is_ended(site: Site) -> None:
    launcher = site.launcher(limits=Limits(memory_bytes=4 << 30))
    body = f"{SHEBANG}\nimport time\nhoard = bytearray(300 << 20)\ntime.sleep(600)"
    task = replace(site.task(body, resources={"reserve_cpus": 1, "memory_gb": 0.2}), devices=("cpu:0",))
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited, 30)
    assert seen.ended is Ended.out_of_memory
    assert "its reserved resources.memory_gb is 0.2" in seen.detail


def test_a_training_that_starts_more_processes_than_its_limit_is_ended_and_reports_it(site: Site) -> None:
    launcher = site.launcher(limits=Limits(processes=20))
    body = "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        time.sleep(600)\ntime.sleep(600)"
    task = site.task(f"{SHEBANG}\n{body}")
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited, 30)
    assert seen.ended is Ended.too_many_processes
    assert "max_training_processes is 20" in seen.detail
    until(lambda: not process.marked({process.TASK_MARK: task.task_id}))


# The setting


def test_isolation_that_is_required_and_cannot_be_had_refuses_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolating, "probe", lambda: Isolation(why_not="a user namespace: Operation not permitted"))
    with pytest.raises(InvalidRequest, match=r"isolation='required'.*a user namespace: Operation not permitted"):
        isolate("required", [tmp_path])
    assert not isolate("auto", [tmp_path]).how
    assert "trainings are not isolated: a user namespace" in caplog.text
    assert isolate("off", [tmp_path]) == NO_ISOLATION


def test_a_training_that_cannot_be_isolated_does_not_start(site: Site) -> None:
    task = site.task(f"{SHEBANG}\nprint('ran')")
    launcher = site.launcher(isolation=replace(isolation(site.data), directories=(site.data, Path("/proc"))))
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited)
    assert "the training cannot be isolated" in seen.launch_error
    assert "isolation=off" in seen.launch_error
    assert "ran" not in RunDir(task.run_dir).log.read_text()


# Another user, through a user namespace


AS_UNPRIVILEGED = """
cat {data}/jobs.sqlite3 && echo reached the database
cat {config} && echo reached the settings
ls {data}/jobs | grep other && echo reached another job
cat /proc/{service}/environ && echo reached the environment
kill -0 {service} && echo reached the service
umount {data} 2>&1 && echo reached what is covered
true > {data}/mine/written || echo did not reach its own directory
(true > {config}) && echo reached the settings
[ "$(grep CapPrm /proc/1/status | cut -f2)" = 0000000000000000 ] || echo reached a capability
echo $(stat -c %u /proc/self) > {data}/mine/done
exit 3
"""


def test_a_user_without_rights_isolates_trainings_through_a_user_namespace(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("it takes root to become two users")
    isolation()
    data, config = tmp_path / "data", tmp_path / "config"
    for path in (data / "jobs" / "other", data / "mine"):
        path.mkdir(parents=True)
    for path in (data / "jobs.sqlite3", config):
        path.write_text("secret")
    for path in [*tmp_path.parents[:3], tmp_path, *tmp_path.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o055)
        if path.is_relative_to(tmp_path):
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
    output = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    child = os.fork()
    if child == 0:
        service, found = 0, 98
        try:
            os.setgroups([])
            os.setgid(UNPRIVILEGED)
            os.setuid(UNPRIVILEGED)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, as a process is that was started by this user
            service = os.fork()
            if service == 0:
                signal.pause()
            script = AS_UNPRIVILEGED.format(data=data, config=config, service=service)
            view = View((str(data),), (str(config),), (), (str(data / "mine"), "/tmp"), (), str(data / "mine"))
            program = Confined(view, ["/bin/sh", "-c", script], lambda: None, output)
            while program.poll_report() is None:
                select.select([program], [], [])
            found = program.poll_report() or 0
        except NotIsolated:
            found = 99
        finally:
            if service:
                os.kill(service, signal.SIGKILL)
            os._exit(found)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 99:
        pytest.skip("user namespaces are not allowed here")
    assert "reached" not in (tmp_path / "log").read_text().replace("did not reach its own", "reached")
    assert (status, (data / "mine" / "done").read_text()) == (3, f"{UNPRIVILEGED}\n")
    assert (data / "mine" / "written").exists()
    assert config.read_text() == "secret"


# Real trainings


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setenv(faults.VARIABLE, str(directory))
    with forked_warm_processes() as warm:
        world = World(tmp_path, LocalLauncher(isolation=isolation(tmp_path), warm=warm))
        yield world
        process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
        world.store.close()


def finish(world: World, name: str) -> None:
    world.until(lambda: world.state(name) in (JobState.completed, JobState.failed), 200)
    assert world.state(name) is JobState.completed, world.store.get(name).message


def test_jobs_on_a_model_of_the_cache_and_on_an_earlier_result_train_isolated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(world.launcher, LocalLauncher)
    warm = world.launcher._warm
    world.launcher._warm = None  # a warm process has imported the libraries with another cache
    cache = world.root / "hf"
    repository = cache / "hub" / "models--tests--tiny"
    shutil.copytree(tiny_model(), repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    with monkeypatch.context() as cached:
        cached.setenv("HF_HOME", str(cache))
        cached.setattr("tests.process.supervised.tiny_model", lambda: "tests/tiny")
        world.add("first", "sft-full", n_epochs=1)
        finish(world, "first")
    world.launcher._warm = warm
    result = world.spec("first").checkpoint_dir / "final"
    monkeypatch.setattr("tests.process.supervised.tiny_model", lambda: result)
    world.add("second", "dpo-full", n_epochs=1)
    finish(world, "second")


def test_of_two_isolated_ranks_one_is_killed_and_named_and_the_job_continues(world: World) -> None:
    world.add("job", "dpo-full", ranks=2, sharding=ShardingSpec(), batch_size=1)
    (world.root / "faults" / "step-4").write_text("kill")
    finish(world, "job")
    first, _ = world.store.attempts("job")
    assert "was killed by SIGKILL" in first.message


def test_kill_9_of_the_runner_ends_an_isolated_torchrun_and_its_ranks(world: World) -> None:
    world.add("job", "dpo-full", ranks=2, sharding=ShardingSpec(), batch_size=1)
    (world.root / "faults" / "step-2").write_text("hold")
    world.until((world.root / "faults" / "step-2.taken").exists, 200)
    run_dir = world.store.get("job").run_dir
    assert run_dir is not None
    status = RunnerStatus.read(RunDir(run_dir).runner_status)
    assert status is not None
    assert status.runner is not None
    assert status.trainer is not None
    assert "torchrun" in " ".join(psutil.Process(status.trainer.pid).cmdline())
    marks = {process.RUN_DIR_MARK: str(run_dir)}
    assert len(process.marked(marks)) >= 5, "the runner, the init, torchrun, two ranks"
    os.kill(status.runner.pid, signal.SIGKILL)
    until(lambda: not process.marked(marks))
