"""Trainings that are forked from a process with torch: the same bytes, nothing left from the job before, and they live
when that process is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from accelerate.utils import imports as accelerate_imports
from transformers import conversion_mapping

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation
from llama_stack_provider_trl.launch.isolation import probe as probe_isolation
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.launch.torchrun import training_environment
from llama_stack_provider_trl.launch.warm import fill_caches
from llama_stack_provider_trl.launch.warm_processes import WarmProcess, WarmProcesses
from llama_stack_provider_trl.recipes import imports
from llama_stack_provider_trl.specs.job import ShardingSpec
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import child_environment
from tests.census import assert_clean
from tests.process.supervised import KINDS, World, is_forked
from tests.process.waiting import until
from tests.required import in_full
from tests.tiny import REPOSITORY, tiny_model
from tests.training import job_spec, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="every task starts cold there"),
]
JOBS = int(os.environ.get("TRL_TEST_JOBS", "4"))
"""Jobs in a row on one warm process; more by command: TRL_TEST_JOBS=200."""
NO_LIBRARIES = (
    "import sys; from llama_stack_provider_trl.launch import warm; warm.import_libraries = lambda: None; "
    "warm.main(sys.argv[1:])"
)


def without_libraries(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a warm process that imports nothing, in a tenth of a second."""
    return subprocess.Popen([argv[0], "-c", NO_LIBRARIES, *argv[3:]], **options)


def environment(**added: str) -> dict[str, str]:
    return child_environment(os.environ, {"PYTHONPATH": str(REPOSITORY), **added})


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[WarmProcesses]:
    """Warm processes without libraries, the first of them ready. Their launcher ignores a signal, as under nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    warm = WarmProcesses(lambda python, environ: WarmProcess(python, environ, without_libraries))
    warm.prepare(None, environment())
    until(warm.pids)
    yield warm
    warm.close()
    signal.signal(signal.SIGHUP, handler)


def probe(warm: WarmProcesses, directory: Path, environ: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """What a program inherits that is forked from a warm process."""
    found = directory / "found.json"
    found.unlink(missing_ok=True)
    with open(directory / "output", "ab") as output:
        exit_code = warm.start(
            None, ["-m", "tests.warm_probe", str(found), *arguments], environ, directory, output.fileno()
        )
    assert exit_code == 7, (directory / "output").read_text()
    return dict(json.loads(found.read_text()))


def test_a_fork_has_what_exec_would_give_it_and_nothing_of_the_job_before(empty: WarmProcesses, tmp_path: Path) -> None:
    first = probe(empty, tmp_path, environment(TRL_TASK_ID="a", TRL_RUN_DIR="/a", NCCL_SOCKET_IFNAME="eth0"))
    umask = os.umask(0o027)
    try:
        second = probe(empty, tmp_path, environment(TRL_TASK_ID="b", TRL_RUN_DIR="/b"))
    finally:
        os.umask(umask)
    assert second["environ"] == environment(TRL_TASK_ID="b", TRL_RUN_DIR="/b")
    assert set(second["shown_environ"][:2]) == {"TRL_RUN_DIR=/b", "TRL_TASK_ID=b"}  # by which its processes are found
    assert set(second["shown_environ"]) == {f"{name}={value}" for name, value in second["environ"].items()}
    assert second["shown_command"] == [f"{sys.executable} -m tests.warm_probe {tmp_path / 'found.json'}"]
    assert second["argv"][1:] == [str(tmp_path / "found.json")]
    assert second["files"] == ["0", "1", "2", "3"]  # the last one lists the others
    assert (first["umask"], second["umask"]) == (umask, 0o027)
    assert second["cwd"] == str(tmp_path)
    assert second["session"]
    assert first["python_random"] != second["python_random"]
    cold = tmp_path / "cold.json"
    subprocess.run([sys.executable, "-m", "tests.warm_probe", str(cold)], env=environment(), cwd=tmp_path, check=False)
    same = ("signals", "nice")
    assert {name: second[name] for name in same} == {name: json.loads(cold.read_text())[name] for name in same}


def test_a_fork_of_a_fork_inherits_nothing_that_the_first_has_changed(empty: WarmProcesses, tmp_path: Path) -> None:
    first = probe(empty, tmp_path, environment())
    nested = probe(empty, tmp_path, environment(), "nested")
    same = ("environ", "files", "signals", "session", "nice", "shown_command")
    assert {name: nested[name] for name in same} == {name: first[name] for name in same}


def test_its_memory_does_not_grow_with_the_tasks(empty: WarmProcesses, tmp_path: Path) -> None:
    (pid,) = empty.pids()
    resident = []
    for _ in range(20):
        probe(empty, tmp_path, environment(NCCL_SOCKET_IFNAME="x" * 10_000))
        resident.append(psutil.Process(pid).memory_info().rss)
    assert resident[-1] - resident[2] < 256 << 10, resident
    assert empty.pids() == [pid]


@pytest.mark.parametrize("is_importing", [False, True])
def test_it_ends_with_its_launcher(is_importing: bool, tmp_path: Path) -> None:
    mark = tmp_path / "importing"
    libraries = f"open({str(mark)!r}, 'w').close()" + ("; import time; time.sleep(60)" if is_importing else "")
    script = (
        "import os, subprocess, sys, time\n"
        "from llama_stack_provider_trl.launch.warm_processes import WarmProcess\n"
        "begin = lambda argv, **options: subprocess.Popen([argv[0], '-c', sys.argv[1], *argv[3:]], **options)\n"
        "one = WarmProcess(sys.executable, dict(os.environ), begin)\n"
        f"while not ({is_importing} or one.is_ready): time.sleep(0.01)\n"
        "print(one.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, NO_LIBRARIES.replace("lambda: None", f"lambda: exec({libraries!r})")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        until(mark.exists)
        assert process.identify(pid) is not None
        launcher.kill()
    until(lambda: process.identify(pid) is None)


def test_one_that_is_stopped_or_killed_is_replaced(empty: WarmProcesses, tmp_path: Path) -> None:
    (stopped,) = empty.pids()
    os.kill(stopped, signal.SIGSTOP)
    argv = ["-m", "tests.warm_probe", str(tmp_path / "found.json")]
    with open(tmp_path / "output", "ab") as output:
        for _ in range(2):
            assert empty.start(None, argv, environment(), tmp_path, output.fileno()) is None
    empty.replace_ended()
    (replaced,) = until(empty.pids)
    assert replaced != stopped
    os.kill(replaced, signal.SIGKILL)
    until(lambda: process.identify(replaced) is None)
    empty.replace_ended()
    (last,) = until(empty.pids)
    assert last != replaced
    probe(empty, tmp_path, environment())


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcesses]:
    """The real one. The launchers of this module share it. What replaces it when it was killed has no task, and imports
    nothing."""
    spawns = itertools.chain([subprocess.Popen], itertools.repeat(without_libraries))
    warm = WarmProcesses(lambda python, environ: WarmProcess(python, environ, next(spawns)))
    yield warm
    warm.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: WarmProcesses) -> Iterator[World]:
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setenv(faults.VARIABLE, str(directory))
    found = probe_isolation()
    isolation = Isolation(found.how, "", (tmp_path,)) if found.how else NO_ISOLATION
    launcher = LocalLauncher(isolation=isolation, warm=warm)
    launcher.warm_up(None)
    world = World(tmp_path, launcher)
    yield world
    process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
    world.store.close()


def hold(world: World, point: str) -> RunnerStatus:
    (world.root / "faults" / point).write_text("hold")
    world.until((world.root / "faults" / f"{point}.taken").exists)
    status = RunnerStatus.read(RunDir(world.store.get("job").run_dir or Path()).runner_status)
    assert status is not None
    return status


def spec_of(world: World) -> Path:
    return RunDir(world.store.get("job").run_dir or Path()).spec


def test_random_numbers_and_threads_of_a_fork_are_those_of_a_new_process(
    world: World, warm: WarmProcesses, tmp_path: Path
) -> None:
    until(warm.pids, 60)
    environ = training_environment(TaskSpec("", Path("/"), ("cpu",)), os.environ)
    first, second = (probe(warm, tmp_path, {**environ, "OMP_NUM_THREADS": count}) for count in ("1", "2"))
    assert (first["torch_threads"], second["torch_threads"]) == (1, 2)
    for name in ("torch_random", "numpy_random", "fingerprint", "python_random"):
        assert first[name] != second[name]  # a new process takes the system's entropy
    assert not first["cuda_initialized"]


def test_many_jobs_leave_nothing_in_the_warm_process(world: World, warm: WarmProcesses) -> None:
    (pid,) = until(warm.pids, 60)
    warm_process = psutil.Process(pid)
    found: list[tuple[int, int, int]] = []
    for number, kind in zip(range(JOBS), itertools.cycle(KINDS)):
        world.add(f"job-{number}", kind, n_epochs=1)
        world.finish(f"job-{number}")
        memory = warm_process.memory_info().rss
        found.append((memory, warm_process.num_fds(), warm_process.num_threads()))
    memory, *counts = zip(*found[1:], strict=True)
    print(f"resident MiB of the warm process: {[round(size / (1 << 20), 1) for size in memory]}")  # pytest -rP
    assert max(memory) - min(memory) < 1 << 20
    assert [set(count) for count in counts] == [{counts[0][0]}, {1}]
    assert warm.pids() == [pid]


@pytest.mark.parametrize("ranks", [2, *in_full(1)])
def test_warm_and_cold_attempts_give_the_same_bytes_and_a_dead_warm_process_disturbs_none(
    world: World, warm: WarmProcesses, ranks: int
) -> None:
    changes: dict[str, Any] = {"num_threads": None, "n_epochs": 2}
    changes |= {"ranks": 2, "sharding": ShardingSpec(), "batch_size": 1} if ranks == 2 else {}
    launcher = world.launcher
    assert isinstance(launcher, LocalLauncher)
    launcher._warm = None
    world.add("cold", "dpo-full", **changes)
    world.finish("cold")
    launcher._warm = warm
    until(warm.pids, 60)
    world.add("job", "dpo-full", **changes)
    status = hold(world, "step-4")
    assert is_forked(status)
    assert status.trainer is not None
    trainer = psutil.Process(status.trainer.pid)
    if probe_isolation().how:
        assert os.readlink(f"/proc/{trainer.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    killed = trainer if ranks == 1 else trainer.children()[1]
    assert killed.cmdline()[-2:] == ["llama_stack_provider_trl.recipes.train", str(spec_of(world))]
    killed.kill()
    again = hold(world, "step-7")
    assert is_forked(again)
    for pid in warm.pids():
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        if ranks == 2:
            os.kill(pid, signal.SIGKILL)
    (world.root / "faults" / "step-7.go").touch()
    world.finish("job")
    first, second = world.store.attempts("job")
    assert (first.start_step, second.start_step) == (0, 3)
    assert ("rank 1 was killed by SIGKILL" if ranks == 2 else "killed by SIGKILL") in first.message
    assert world.outcome("job") == world.outcome("cold")
    assert_clean(world.root)


def test_the_table_of_renamed_weights_is_compiled_before_any_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    fill_caches()
    assert conversion_mapping._checkpoint_conversion_mapping_cache


def test_what_is_kept_of_transformers_models_is_what_it_reads(tmp_path: Path) -> None:
    from transformers.utils import import_utils

    models = Path(import_utils.__file__).parent.parent / "models"
    expected = import_utils.create_import_structure_from_path(models)
    module: Any = ModuleType(import_utils.__name__)
    module.__file__ = import_utils.__file__
    module.create_import_structure_from_path = import_utils.create_import_structure_from_path
    imports.keep_structure(module, tmp_path)
    assert module.create_import_structure_from_path(models) == expected  # read, and kept
    module.create_import_structure_from_path = lambda path: pytest.fail("read again")
    imports.keep_structure(module, tmp_path)
    assert module.create_import_structure_from_path(models) == expected
    assert len(list(tmp_path.iterdir())) == 1


def test_a_training_looks_for_each_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, looked = accelerate_imports._is_package_available, Counter[str]()

    def counted(name: str, *others: Any) -> bool | None:
        looked[" ".join([name, *others])] += 1
        return look(name, *others)

    model = tiny_model()  # made here, if no test has made it before
    monkeypatch.setattr(accelerate_imports, "_is_package_available", counted)
    for _ in range(2):
        assert run(tmp_path, job_spec(tmp_path, model, max_steps_per_epoch=1))[0] == 0
    # Not once for both: a library that is hidden from one training may be used by another.
    assert max(looked.values()) == looked["deepspeed"] == 2, looked
