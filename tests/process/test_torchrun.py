"""torchrun with two ranks under the real launcher: whatever of it is killed, the job resumes from its checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.launch.torchrun import TORCHRUN
from llama_stack_provider_trl.specs.events import Reason, Started, iter_events
from llama_stack_provider_trl.specs.job import ShardingSpec
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import ProcessId
from tests import forked
from tests.census import assert_clean
from tests.forked import forked_warm_processes
from tests.process.supervised import World, is_forked
from tests.required import FULL, IN_FULL, in_full
from tests.training import of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
TWO_RANKS = {"ranks": 2, "sharding": ShardingSpec(), "batch_size": 1}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setenv(faults.VARIABLE, str(directory))
    with forked_warm_processes() as warm:
        world = World(tmp_path, LocalLauncher(warm=warm))
        yield world
        process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
        world.store.close()


def held_at(world: World, point: str) -> tuple[RunDir, RunnerStatus]:
    """Let the job run until a rank stands at `point`."""
    (world.root / "faults" / point).write_text("hold")
    world.until((world.root / "faults" / f"{point}.taken").exists)
    paths = RunDir(world.store.get("job").run_dir or Path())
    status = RunnerStatus.read(paths.runner_status)
    assert status is not None
    return paths, status


def rank_processes(paths: RunDir) -> tuple[ProcessId, ProcessId]:
    (started,) = of_kind(iter_events(paths.events), Started)
    pids = sorted((int(path.name) for path in paths.stacks.iterdir()), key=lambda pid: pid != started.pid)
    first, second = (process.identify(pid) for pid in pids)
    assert first is not None
    assert second is not None
    return first, second


def test_no_socket_of_a_job_listens_beyond_this_machine(world: World) -> None:
    world.add("job", "dpo-full", **TWO_RANKS)
    _, status = held_at(world, "step-1")
    assert status.trainer is not None
    torchrun = psutil.Process(status.trainer.pid)
    listening = {
        one.pid: {socket.laddr.ip for socket in one.net_connections("inet") if socket.status == psutil.CONN_LISTEN}
        for one in [torchrun, *torchrun.children(recursive=True)]
    }
    assert listening[torchrun.pid] == {"127.0.0.1"}
    assert set().union(*listening.values()) == {"127.0.0.1"}
    world.store.request_cancel("job")
    world.until(lambda: world.state("job") is JobState.cancelled, 10)


def torchrun(directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of our torchrun with two ranks of the module `rank` of this directory. It is forked, and
    forks the ranks, which import torch otherwise, as it does."""
    argv = [sys.executable, "-m", TORCHRUN, "--master-addr=127.0.0.1", *arguments, "--nnodes=1", "--nproc-per-node=2"]
    argv += ["-m", "rank"]
    added = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    with (directory / "log").open("wb") as log:
        process = forked.start_program(argv, os.environ, log, directory, added)
        if process is None:  # a test before this one has left other conditions
            environ = {**os.environ, **added}
            process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=directory, env=environ)
        try:
            process.wait(120)
        finally:
            process.kill()
            process.wait()
    return process.returncode, (directory / "log").read_text()


def test_ranks_meet_at_the_next_port_where_another_program_took_the_first(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    pathlib.Path('met').write_text(f'{dist.get_world_size()} {os.environ[\"MASTER_PORT\"]}')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, output = torchrun(tmp_path, f"--master-port={port}", f"--last-port={port + 20}")
        assert status == 0, output
        world_size, met_at = map(int, (tmp_path / "met").read_text().split())
        assert world_size == 2
        assert port < met_at <= port + 20
        status, output = torchrun(tmp_path, f"--master-port={port}")
        assert status != 0
        assert "Address already in use" in output


def test_whatever_of_torchrun_is_killed_the_job_continues_from_its_checkpoint(world: World) -> None:
    world.add("whole", "dpo-full", **TWO_RANKS)
    world.finish("whole")
    world.add("job", "dpo-full", **TWO_RANKS)
    for attempt, (point, victims) in enumerate(
        [
            ("step-4", ["rank 1"]),
            ("step-7", ["runner", "torchrun"]),
            *in_full(("step-10", ["runner"]), ("step-13", ["torchrun"])),
        ],
        start=1,
    ):
        paths, status = held_at(world, point)
        assert is_forked(status)
        world.until(lambda attempt=attempt: len(world.store.checkpoints("job")) == attempt)
        first, second = rank_processes(paths)
        processes = {"rank 0": first, "rank 1": second, "torchrun": status.trainer, "runner": status.runner}
        for victim in victims:  # torchrun may be gone already: the kernel ends it with its runner
            process.send_signal(processes[victim], signal.SIGKILL)  # type: ignore[arg-type]
        world.until(lambda attempt=attempt: world.store.get("job").attempt == attempt + 1, 30)
        for one in processes.values():
            world.until(lambda one=one: one is None or not process.alive(one), 10)
    world.finish("job")
    attempts = world.store.attempts("job")
    assert [attempt.start_step for attempt in attempts] == [0, 3, 6, 9, 12][: 5 if FULL else 3]
    assert "rank 1 was killed by SIGKILL" in attempts[0].message
    assert world.outcome("job") == world.outcome("whole")
    assert_clean(world.root)


def test_the_rank_that_failed_is_named_with_the_end_of_its_traceback(world: World) -> None:
    (world.root / "faults" / "step-4").write_text("error")
    world.add("job", "dpo-full", **TWO_RANKS, retries=0)
    world.until(lambda: world.state("job") is JobState.failed)
    job = world.store.get("job")
    assert job.reason is Reason.rank_failed
    assert "fault at step-4" in job.message
    assert "End of the traceback" in job.message
    assert_clean(world.root)


def test_the_rank_that_found_the_disk_full_decides_the_reason_even_if_it_is_second(world: World) -> None:
    (world.root / "faults" / "saving-3").write_text("full")
    (world.root / "faults" / "unsaved-0").write_text("delay 1")
    world.add("job", "dpo-full", **TWO_RANKS, retries=0)
    world.until(lambda: world.state("job") is JobState.failed)
    job = world.store.get("job")
    assert job.reason is Reason.disk_full, job.message
    assert_clean(world.root)


def test_a_pause_and_a_cancel_reach_every_rank(world: World) -> None:
    world.add("job", "dpo-full", **TWO_RANKS)
    world.until(lambda: world.store.get("job").progress.step > 1)
    world.store.request_pause("job")
    world.until(lambda: world.state("job") is JobState.paused)
    paused_at = world.store.get("job").progress.step
    assert_clean(world.root)
    world.store.request_resume("job")
    held_at(world, f"saving-{(paused_at // 3 + 2) * 3}")
    assert world.store.attempts("job")[-1].start_step == paused_at
    world.store.request_cancel("job")
    world.until(lambda: world.state("job") is JobState.cancelled, 5)
    assert_clean(world.root)


@IN_FULL  # CI: a process that hangs, with its stack, in test_engine_local.py
def test_a_rank_that_hangs_is_found_and_both_stacks_are_reported(world: World) -> None:
    world.supervisor._attempts._hang_timeout = 12.0
    world.add("job", "dpo-full", **TWO_RANKS, retries=0)
    paths, _ = held_at(world, "step-4")
    _, second = rank_processes(paths)
    os.kill(second.pid, signal.SIGSTOP)
    (world.root / "faults" / "step-4.go").touch()
    world.until(lambda: world.state("job") is JobState.failed)
    job = world.store.get("job")
    assert job.reason is Reason.hung
    assert "torch/distributed" in job.message
    assert_clean(world.root)


@pytest.mark.parametrize("has_option", [True, False])
def test_a_limit_of_the_shutdown_is_passed_to_a_torchrun_that_has_one(
    has_option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_stack_provider_trl.recipes.distributed import torchrun

    parser = argparse.ArgumentParser()
    if has_option:
        parser.add_argument("--shutdown-timeout")
    given: list[list[str]] = []
    monkeypatch.setattr(torchrun.run, "get_args_parser", lambda: parser)
    monkeypatch.setattr(torchrun.run, "main", given.append)
    options = ["--master-addr=127.0.0.1", "--master-port=1", "--node-rank=1", "--shutdown-timeout=2", "-m", "x", "spec"]
    torchrun.main(options)
    assert ("--shutdown-timeout=2" in given[0], given[0][-3:]) == (has_option, ["-m", "x", "spec"])
