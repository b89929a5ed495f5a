from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.launch import runner
from llama_stack_provider_trl.launch.base import TaskSpec, TaskState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.ports import free_port
from llama_stack_provider_trl.launch.runner import RunnerStatus, RunnerTask
from llama_stack_provider_trl.launch.torchrun import (
    first_failure,
    interface_of,
    lock_name,
    training_argv,
    training_environment,
)
from llama_stack_provider_trl.specs.exports import ExportSpec, accounts_of
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import FileLock, myself
from tests import nvml

TASK = TaskSpec("job-1-2", Path("/data/jobs/job-1/attempts/2"), ("cpu",))
INTERFACES = {
    name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
    for name, addresses in {
        "lo": [(socket.AF_INET, "127.0.0.1")],
        "docker0": [(socket.AF_INET, "172.17.0.1")],
        "eth1": [(socket.AF_INET, "10.99.0.2"), (socket.AF_INET6, "fe80::1%eth1"), (-1, "02:fc:00:00:00:01")],
    }.items()
}


def test_accounts_reach_the_task_that_uploads_and_no_other_and_no_file(tmp_path: Path) -> None:
    spec = ExportSpec(target="gguf", upload_to="s3://models/x")
    service = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "k", "TRL_EXPORT_HUB_TOKEN": "t", "TRL_SERVICE_TOKEN": "s"}
    given = replace(TASK, run_dir=tmp_path, accounts=accounts_of(spec))
    hub = replace(TASK, accounts=accounts_of(spec.model_copy(update={"upload_to": "hf://team/x"})))
    kept = [{"k", "t", "s"}.intersection(training_environment(task, service).values()) for task in (given, hub, TASK)]
    assert kept == [{"k"}, {"t"}, set()]
    assert accounts_of(ExportSpec(target="gguf")) == ()


def test_a_task_with_accounts_is_not_forked_from_a_process_that_others_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[str]()
    warm = SimpleNamespace(start=lambda *given: started.append("warm") or 0)
    launcher = LocalLauncher({"AWS_SECRET_ACCESS_KEY": "k"}, warm=warm)  # type: ignore[arg-type]

    def cold(argv: list[str], env: dict[str, str], **given: Any) -> SimpleNamespace:
        started.append(f"cold {env['AWS_SECRET_ACCESS_KEY']}")
        return SimpleNamespace(wait=lambda timeout: 0)

    monkeypatch.setattr(subprocess, "Popen", cold)
    for name, accounts in (("one", ()), ("two", ("AWS_",))):
        (tmp_path / name).mkdir()
        launcher.start(replace(TASK, run_dir=tmp_path / name, accounts=accounts))
        assert '"k"' not in RunDir(tmp_path / name).task.read_text()
    assert started == ["warm", "cold k"]


def test_one_process_is_started_directly_with_its_spec_file() -> None:
    spec = "/data/jobs/job-1/attempts/2/spec.json"
    assert training_argv(TASK) == [sys.executable, "-m", "llama_stack_provider_trl.recipes.train", spec]


def test_several_ranks_meet_at_a_port_under_torchrun() -> None:
    task = TaskSpec("a", Path("/r"), ("cpu",), ranks=2, master_port=29507, last_port=29599)
    argv = training_argv(task)
    assert argv[1:3] == ["-m", "llama_stack_provider_trl.recipes.distributed.torchrun"]
    assert {"--nproc-per-node=2", "--master-port=29507", "--last-port=29599", "--max-restarts=0"} <= set(argv)
    assert argv[-3:] == ["-m", "llama_stack_provider_trl.recipes.train", "/r/spec.json"]
    assert "--log-dir=/r/torchrun" in argv  # else a directory per attempt stays in /tmp
    assert not [part for part in argv if part.startswith(("--redirects", "--tee"))]  # ranks print where torchrun does
    environ = training_environment(task, {"OMP_NUM_THREADS": "3"})
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_nodes_meet_at_the_first_ones_address_over_the_interface_that_has_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    place = {"address": "10.99.0.2", "master_addr": "10.99.0.1", "master_port": 29507, "last_port": 29599}
    task = TaskSpec("a", Path("/r"), ("cpu",), nodes=2, node_rank=1, **place)
    argv = training_argv(task)
    assert argv[1:3] == ["-m", "llama_stack_provider_trl.recipes.distributed.torchrun"]
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=1", "--local-addr=10.99.0.2"} <= set(argv)
    assert {"--master-addr=10.99.0.1", "--master-port=29507"} <= set(argv)
    assert not [part for part in argv if part.startswith("--last-port")]
    environ = training_environment(task, {})
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    chosen = training_environment(task, {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth2"})
    assert (chosen["GLOO_SOCKET_IFNAME"], chosen["NCCL_SOCKET_IFNAME"]) == ("eth2", "ib0")


def test_an_address_that_this_machine_does_not_have_is_named_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    assert interface_of("127.0.0.2") == "lo"
    assert interface_of("fe80::1") == "eth1"
    with pytest.raises(OSError, match=r"has the address 10\.0\.0\.9: it has .*10\.99\.0\.2 \(eth1\)"):
        interface_of("10.0.0.9")


def test_ranks_of_one_node_may_choose_nccls_interface_themselves() -> None:
    task = TaskSpec("a", Path("/r"), ("cpu",), ranks=2, master_port=29507)
    assert "NCCL_SOCKET_IFNAME" not in training_environment(task, {})


def test_only_the_node_of_rank_0_watches_for_progress_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLauncher, "_spawn", lambda *_: 0)
    for node_rank, limits in ((0, (60.0, 30.0)), (1, (None, None))):
        run_dir = tmp_path / str(node_rank)
        run_dir.mkdir()
        task = TaskSpec("a", run_dir, (), nodes=2, node_rank=node_rank, time_limit=60.0, hang_timeout=30.0)
        LocalLauncher({}).start(task)
        written = RunnerTask.read(run_dir / "task.json")
        assert (written.time_limit, written.hang_timeout) == limits
        assert written.log == "torchrun.log"


def test_a_port_with_a_listener_or_that_was_given_away_is_not_free() -> None:
    # torch's store listens at every address; macOS has one of loopback's only.
    for address in ("127.0.0.1", *(("127.0.0.2",) if sys.platform == "linux" else ())):
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(OSError, match="master_port"):
                free_port(port, 1, ())
    assert free_port(port, 1, ()) == port
    with pytest.raises(OSError, match="in use"):
        free_port(port, 1, {port})


def test_torchruns_log_reports_which_rank_ended_first() -> None:
    log = (
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 26309)  (SIGTERM)\n-----\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-21_16:16:50\n"
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 26310)  (SIGKILL)\n=====\n"
    )
    assert first_failure(log) == (1, -9)
    assert first_failure("W1121 Sending process 26309 closing signal SIGTERM") is None


def test_another_interpreter_may_train() -> None:
    task = TaskSpec("a", Path("/r"), ("cpu",), python="/opt/heavy/bin/python")
    assert training_argv(task)[0] == "/opt/heavy/bin/python"


def test_processes_of_a_task_carry_its_marks_and_variables_and_no_token() -> None:
    task = TaskSpec("a-1", Path("/r"), ("cpu",), env={"MASTER_PORT": "29500"})
    environ = training_environment(task, {"PATH": "/bin", "TRL_SERVICE_TOKEN": "secret"})
    assert environ == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_MMAP_THRESHOLD_": "1048576",  # what is freed is given back: docs/how-to/preflight.md
        "MASTER_PORT": "29500",
        "TRL_TASK_ID": "a-1",
        "TRL_RUN_DIR": "/r",
    }


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_glibc_setting_of_the_user_is_the_only_one(name: str) -> None:
    environ = training_environment(TaskSpec("a-1", Path("/r"), ("cpu",)), {name: "2"})
    assert {key: value for key, value in environ.items() if key.startswith(("MALLOC", "GLIBC"))} == {name: "2"}


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cpu", None, "cpu"),
        ("mps", None, "mps"),
        ("cuda", None, "cuda"),
        ("cuda:1", None, "cuda-1"),
        ("cuda:0", "2,3", "cuda-2"),
        ("cuda:1", "2, 3", "cuda-3"),
        ("cuda:1", "", "cuda-1"),
        ("cuda:5", "2,3", "cuda-5"),
        ("cuda:0", "GPU-8d3f", "cuda-GPU-8d3f"),
    ],
)
def test_two_programs_that_mean_one_gpu_mean_one_lock(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, name: str
) -> None:
    nvml.install(monkeypatch)
    assert lock_name(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == name


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, ("GPU-aaaa-1", 1, "A"), ("GPU-bbbb-2", 1, "B"))


@pytest.mark.parametrize(
    ("device", "more"),
    [
        ("cuda:1", {}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0, GPU-bbbb-2"}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-bb"}),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_locked_by_its_uuid_whatever_a_program_calls_it(device: str, more: dict[str, str]) -> None:
    assert lock_name(device, more) == "cuda-GPU-bbbb-2"


@pytest.mark.usefixtures("two_gpus")
def test_a_number_is_no_uuid_where_cuda_counts_another_way() -> None:
    assert lock_name("cuda:1", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == "cuda-1"
    other_order = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "GPU-bb"}
    assert lock_name("cuda:0", other_order) == "cuda-GPU-bbbb-2"
    task = TaskSpec("a-1", Path("/r"), ("cuda:1",))
    assert training_environment(task, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_gpu_that_the_driver_cannot_name_goes_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, failure=nvml.NVMLError("Unknown Error"))
    assert lock_name("cuda:1", {}) == "cuda-1"
    assert lock_name("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-cccc"}) == "cuda-MIG-cccc"


def test_device_locks_lie_in_one_place_whatever_tmpdir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path("/tmp") == runner.LOCKS
    monkeypatch.setattr(runner, "LOCKS", tmp_path)
    monkeypatch.setattr(runner, "_own_places", lambda: [tmp_path / "own"])
    monkeypatch.delenv("TRL_LOCK_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    assert runner.device_locks() == [tmp_path / f"llama-stack-trl-{os.getuid()}" / "devices"]
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    assert runner.device_locks() == [tmp_path / "locks"]


def test_a_gpu_task_sees_its_own_gpu_only() -> None:
    task = TaskSpec("a-1", Path("/r"), ("cuda:1",))
    assert training_environment(task, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert training_environment(task, {"CUDA_VISIBLE_DEVICES": "4,6"})["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "4,6"}])
def test_a_task_on_the_cpu_sees_no_gpu(environ: dict[str, str]) -> None:
    assert training_environment(TASK, environ)["CUDA_VISIBLE_DEVICES"] == ""


def test_torchs_allocator_grows_segments_on_gpus_unless_the_operator_has_chosen() -> None:
    gpu = TaskSpec("a-1", Path("/r"), ("cuda:1",))
    assert training_environment(gpu, {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in training_environment(TASK, {})
    chosen = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert training_environment(gpu, chosen)["PYTORCH_ALLOC_CONF"] == chosen["PYTORCH_ALLOC_CONF"]
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    assert "PYTORCH_ALLOC_CONF" not in training_environment(gpu, older)


def test_what_the_launcher_writes_the_runner_reads(tmp_path: Path) -> None:
    task = RunnerTask("a-1", Path("/run/dir"), ("cpu", "cuda-0"), ("python", "-m", "x"), 30.0)
    task.write(tmp_path / "task.json")
    assert RunnerTask.read(tmp_path / "task.json") == task
    assert (tmp_path / "task.json").stat().st_mode & 0o777 == 0o600


def test_what_the_runner_writes_the_launcher_reads(tmp_path: Path) -> None:
    path = tmp_path / "runner.json"
    assert RunnerStatus.read(path) is None
    for status in (
        RunnerStatus("a-1", myself(), TaskState.waiting, detail="waiting for device cpu"),
        RunnerStatus("a-1", myself(), TaskState.exited, trainer=myself(), exit_code=-9),
        RunnerStatus("a-1", None, TaskState.exited, launch_error="no such file"),
    ):
        status.write(path)
        assert RunnerStatus.read(path) == status


@pytest.fixture
def order(tmp_path: Path) -> Iterator[RunDir]:
    """A task that a runner is starting, under another lock than the one of this process."""
    paths, umask = RunDir(tmp_path), os.umask(0o022)
    RunnerTask("job-1-1", tmp_path, (), ("true",), 1.0).write(paths.task)
    yield paths
    os.umask(umask)


def test_a_second_runner_of_a_task_ends_when_the_first_one_has_reported(
    order: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher kills the first one of a task without that file: on a busy machine a warm process answers late."""
    first, waited = FileLock(order.runner_lock), []
    assert first.acquire("the first runner")

    def report_later(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            RunnerStatus("job-1-1", runner=myself(), state=TaskState.waiting).write(order.runner_status)

    monkeypatch.setattr(runner.time, "sleep", report_later)
    monkeypatch.setattr(runner, "_detach", lambda: pytest.fail("the task is started twice"))
    runner.main([str(order.task)])
    assert len(waited) == 3
    first.release()


def test_a_second_runner_does_not_wait_for_one_that_never_reports(
    order: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, waited = FileLock(order.runner_lock), list[float]()
    assert first.acquire("runner, pid 7")

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert sum(waited) < 30, "the launcher ends it, and its log is empty"

    monkeypatch.setattr(runner.time, "sleep", wait)
    monkeypatch.setattr(runner, "_detach", lambda: pytest.fail("the task is started twice"))
    with pytest.raises(SystemExit) as ended:
        runner.main([str(order.task)])
    assert ended.value.code == 1
    assert (
        "another process (runner, pid 7) holds runner.lock of task job-1-1 and has not written runner.json for 25 s: "
        "end that process; the task is started again"
    ) in caplog.text
    assert len(waited) < 250
    first.release()


def test_a_second_runner_starts_the_task_where_the_first_one_was_killed(
    order: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start() -> int:
        raise Started

    first = FileLock(order.runner_lock)
    assert first.acquire("the first runner")
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: first.release())
    monkeypatch.setattr(runner, "_detach", start)
    with pytest.raises(Started):
        runner.main([str(order.task)])
