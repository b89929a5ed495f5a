"""Jobs over several nodes: ranks that share neither a machine nor a disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.launch import torchrun
from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.warm_processes import WarmProcesses
from llama_stack_provider_trl.specs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    Prepared,
    Reason,
    iter_events,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, DpoSpec, JobSpec, OptimizerSpec, ReferenceSpec
from llama_stack_provider_trl.system.files import RunDir, damage
from tests.contract.stack import poll
from tests.forked import forked_warm_processes, start_program
from tests.ports import reserved_port
from tests.process.rank_numbers import assert_same_numbers, numbers, spec_of, trained
from tests.ranks import Ranks
from tests.required import IN_FULL, in_full
from tests.tiny import REPOSITORY
from tests.training import LORA, SFT_ROWS, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


class Meeting:
    """One rank of several, each on a node, in a process of its own (tests/meets.py)."""

    def __init__(
        self, root: Path, port: int, rank: int, interface: str, patience: float, size: int, most: float
    ) -> None:
        self.run_dir = root / f"node-{rank}"
        self.run_dir.mkdir()
        ours = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
        argv = [sys.executable, "-m", "tests.meets", str(self.run_dir), str(patience), str(most)]
        with open(self.run_dir / "log", "wb") as log:
            process = start_program(argv, os.environ, log, REPOSITORY, {**ours, **place})
            if process is None:  # a test before this one has left other conditions: it is started, and not forked
                environ = {**os.environ, **ours, **place}
                process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=REPOSITORY, env=environ)
        self.process = process

    def report(self) -> str:
        """`met`, or why not."""
        return poll(lambda: self.first_line("met", "launch_failed"), "the rank reports", timeout=60)

    def first_line(self, *beginnings: str) -> str:
        lines = (self.run_dir / "log").read_text().splitlines(keepends=True)
        return next((line.strip() for line in lines if line.startswith(beginnings) and line.endswith("\n")), "")

    def end(self) -> None:
        (self.run_dir / "end").touch()


@contextmanager
def meeting(
    root: Path, port: int, rank: int, interface: str = "lo", patience: float = 15.0, size: int = 2, most: float = 60.0
) -> Iterator[Meeting]:
    """A rank that meets the other and then waits to be ended."""
    found = Meeting(root, port, rank, interface, patience, size, most)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def at(root: Path, spec: JobSpec) -> JobSpec:
    """The same job with a node's own paths."""
    rows = root / "datasets" / spec.data.dataset.path.name
    rows.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.data.dataset.path, rows)
    paths: dict[str, Any] = {
        "checkpoint_dir": root / "checkpoints",
        "dataset": spec.data.dataset.model_copy(update={"path": rows}),
        "token_cache": root / "tokens",
    }
    if spec.reference is not None:
        paths["method"] = spec.method.with_reference(cache=root / "reference")
    return spec.changed(**paths)


def train_apart(
    ranks: Ranks, root: Path, spec: JobSpec, checkpoint: Path | None = None
) -> tuple[list[int], list[Event], list[JobSpec]]:
    """Train on two nodes whose paths have nothing in common, each with its own copy of a checkpoint to resume from.

    Returns:
        Exit codes, node 0's events, and the job as each node has it.
    """
    nodes = [root / "node-0", root / "node-1"]
    specs = [at(node, spec) for node in nodes]
    copies = [checkpoint and node / "checkpoints" / checkpoint.name for node in nodes]
    for copy in copies:
        if checkpoint and copy and not copy.exists():
            shutil.copytree(checkpoint, copy)
    other = AttemptSpec(job=specs[1], attempt=1, run_dir=nodes[1] / "run", world_size=spec.ranks, resume_from=copies[1])
    codes, events = ranks.run(nodes[0] / "run", specs[0], copies[0], elsewhere=[other])
    return codes, events, specs


@pytest.fixture(scope="module")
def together(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, list[Event]]:
    """The job on two ranks of one node."""
    root = tmp_path_factory.mktemp("together")
    spec = spec_of(root, "sft", 2, save_steps=2)
    return spec, trained(ranks, root, spec)


def below(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]


def test_two_nodes_without_a_common_disk_train_and_save_what_one_does_and_continue(
    ranks: Ranks, together: tuple[JobSpec, list[Event]], tmp_path: Path
) -> None:
    spec, expected = together
    codes, events, (here, there) = train_apart(ranks, tmp_path / "whole", spec)
    assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
    assert numbers(events) == numbers(expected)
    saved = of_kind(events, CheckpointSaved)
    assert [event.path for event in saved] == [
        here.checkpoint_dir / name for name in ("checkpoint-2", "checkpoint-4", "final")
    ]
    assert below(there.checkpoint_dir) == []
    for event in saved:
        assert damage(event.path) is None
        of_one = spec.checkpoint_dir / event.path.name
        assert below(event.path) == below(of_one)
        assert (event.path / "model.safetensors").read_bytes() == (of_one / "model.safetensors").read_bytes()
    AutoModelForCausalLM.from_pretrained(here.checkpoint_dir / "final")

    codes, resumed, _ = train_apart(ranks, tmp_path / "again", spec, here.checkpoint_dir / "checkpoint-4")
    assert codes == [0, 0], [event.message for event in of_kind(resumed, Failed)]
    assert of_kind(resumed, Prepared)[0].start_step == 4
    assert numbers(resumed) == numbers(expected)[4:]


@pytest.mark.parametrize(
    ("algorithm", "strategy", "changes"),
    [
        pytest.param(
            "dpo", "FULL_SHARD", {"method": DpoSpec(reference=ReferenceSpec(precompute=True))}, id="precomputed"
        ),
        *in_full(
            pytest.param("dpo", "HYBRID_SHARD", {"ranks": 4}, id="hybrid"),
            pytest.param("sft", "NO_SHARD", {"lora": LORA}, id="ddp-lora"),
        ),
    ],
)
def test_whatever_is_sharded_is_saved_whole(
    ranks: Ranks, tmp_path: Path, algorithm: str, strategy: str, changes: dict[str, Any]
) -> None:
    number = changes.get("ranks", 2)
    others = {name: value for name, value in changes.items() if name != "ranks"}
    spec = spec_of(tmp_path, algorithm, number, strategy, save_steps=2, **others)
    expected = trained(ranks, tmp_path, spec)
    codes, events, (here, there) = train_apart(ranks, tmp_path, spec)
    assert codes == [0] * number, [event.message for event in of_kind(events, Failed)]
    assert_same_numbers(numbers(events), numbers(expected))
    assert below(there.checkpoint_dir) == []
    checkpoint = here.checkpoint_dir / "checkpoint-4"
    assert damage(checkpoint) is None
    assert below(checkpoint) == below(spec.checkpoint_dir / "checkpoint-4")
    codes, resumed, _ = train_apart(ranks, tmp_path / "again", spec, checkpoint)
    assert codes == [0] * number, [event.message for event in of_kind(resumed, Failed)]
    assert numbers(resumed) == numbers(events)[4:]


def test_the_best_checkpoint_is_taken_from_the_disk_that_has_it(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        "sft",
        2,
        save_steps=2,
        validation_rows=SFT_ROWS[:5],
        best_checkpoint="eval_loss",
        optimizer=OptimizerSpec(learning_rate=1.0, warmup_steps=6),  # makes it worse and worse
    )
    codes, events, (here, _) = train_apart(ranks, tmp_path, spec)
    assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
    final = of_kind(events, CheckpointSaved)[-1]
    assert final.step < 6
    names = ("final", f"checkpoint-{final.step}")
    found, best = (load_file(here.checkpoint_dir / name / "model.safetensors") for name in names)
    assert all(torch.equal(found[name], best[name]) for name in best)


def test_a_nodes_own_damaged_copy_is_set_aside_there_and_no_other(
    ranks: Ranks, together: tuple[JobSpec, list[Event]], tmp_path: Path
) -> None:
    spec, _ = together
    copy = tmp_path / "node-1" / "checkpoints" / "checkpoint-4"
    shutil.copytree(spec.checkpoint_dir / "checkpoint-4", copy)
    with open(copy / "model.safetensors", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"??")
    codes, events, (here, there) = train_apart(ranks, tmp_path, spec, spec.checkpoint_dir / "checkpoint-4")
    assert codes == [1, 1]
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.rank_failed
    assert f"the copy of checkpoint-4 on {socket.gethostname()} is damaged (model.safetensors" in failed.message
    assert of_kind(events, CheckpointDamaged) == []
    assert [path.name for path in there.checkpoint_dir.iterdir()] == ["checkpoint-4.stale-1"]
    assert (here.checkpoint_dir / "checkpoint-4").is_dir()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcesses]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with forked_warm_processes() as warm:
        yield warm


def until_all_exited(launcher: LocalLauncher, tasks: list[TaskSpec], seconds: float = 240.0) -> list[Observation]:
    deadline = time.monotonic() + seconds
    while any(launcher.poll(task).state is not TaskState.exited for task in tasks):
        assert time.monotonic() < deadline, [launcher.poll(task) for task in tasks]
        time.sleep(0.1)
    return [launcher.poll(task) for task in tasks]


@IN_FULL  # CI: one node in test_torchrun.py; two machines of which one dies in tests/cluster/test_machines.py
@pytest.mark.parametrize("fault", ["kill", "", "error"])
def test_torchrun_on_two_nodes(tmp_path: Path, port: int, warm: WarmProcesses, fault: str) -> None:
    armed = tmp_path / "faults"
    armed.mkdir()
    (armed / "step-2").write_text(fault)
    spec = spec_of(tmp_path, "sft", 2)
    launcher, tasks = LocalLauncher(warm=warm), []
    for number in range(2):
        node = tmp_path / f"node-{number}"
        run_dir = node / "run"
        run_dir.mkdir(parents=True)
        attempt = AttemptSpec(job=at(node, spec), attempt=1, run_dir=run_dir, world_size=2)
        RunDir(run_dir).spec.write_text(attempt.model_dump_json())
        env = {faults.VARIABLE: str(armed)} if fault and number == 1 else {}
        tasks.append(TaskSpec("job-1", run_dir, (), nodes=2, node_rank=number, master_port=port, env=env))
        launcher.start(tasks[-1])
    try:
        first, second = until_all_exited(launcher, tasks)
    finally:
        for task in tasks:
            launcher.cancel(task)
    events, others = (list(iter_events(RunDir(task.run_dir).events)) for task in tasks)
    if not fault:
        assert (first.exit_code, second.exit_code) == (0, 0)
        assert of_kind(events, Finished)
        assert others == []
        assert (tasks[0].run_dir.parent / "checkpoints" / "final" / "model.safetensors").exists()
        return
    assert not of_kind(events, Finished) + of_kind(events, Failed)  # it knows nothing that node 1 does not know better
    assert first.exit_code == 1
    if fault == "error":
        (failed,) = of_kind(others, Failed)
        assert (failed.rank, failed.reason) == (1, Reason.rank_failed)
        assert "fault at step-2" in failed.message
    else:
        assert (second.rank, second.exit_code) == (1, -signal.SIGKILL)


@pytest.mark.parametrize("node_rank", [1, *in_full(0)])
def test_torchruns_that_do_not_meet_end_with_a_sentence(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, warm: WarmProcesses, node_rank: int
) -> None:
    monkeypatch.setattr(torchrun, "GATHERING_SECONDS", 1)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    launcher, task = (
        LocalLauncher(warm=warm),
        TaskSpec("job-1", run_dir, (), nodes=2, node_rank=node_rank, master_port=port),
    )
    launcher.start(task)
    try:
        (seen,) = until_all_exited(launcher, [task], 60)
    finally:
        launcher.cancel(task)
    (failed,) = iter_events(RunDir(run_dir).events)
    assert isinstance(failed, Failed)
    assert (seen.exit_code, failed.reason) == (1, Reason.launch_failed)
    assert f"of 2 nodes did not meet at 127.0.0.1 port {port} within 1 s" in failed.message


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_ranks_of_several_nodes_measure_the_link_when_they_meet(tmp_path: Path, port: int) -> None:
    """Three in a ring; all have the number of the slowest link."""
    with ExitStack() as stack:
        ring = [stack.enter_context(meeting(tmp_path, port, rank, size=3)) for rank in range(3)]
        assert [one.report() for one in ring] == ["met"] * 3
        links = {poll(lambda one=one: one.first_line("link"), "the link", timeout=10) for one in ring}
        assert len(links) == 1
        assert float(links.pop().removeprefix("link ")) > 10, "Mbit/s on loopback"
        for one in ring:
            one.end()


def failures(root: Path, rank: int) -> list[Failed]:
    return of_kind(iter_events(RunDir(root / f"node-{rank}").events), Failed)


def test_a_rank_that_answers_no_longer_ends_the_others_by_name(tmp_path: Path, port: int) -> None:
    # A process may wait for a second where others load the machine.
    with meeting(tmp_path, port, 0, patience=5) as first, meeting(tmp_path, port, 1, patience=5) as second:
        assert (first.report(), second.report()) == ("met", "met")
        second.process.send_signal(signal.SIGSTOP)
        assert first.process.wait(60) == 1
    (failed,) = failures(tmp_path, 0)
    assert failed.reason is Reason.node_lost
    assert f"rank 1 on {socket.gethostname()} has not answered rank 0" in failed.message


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["killed", "at-its-end"])
def test_a_rank_that_loses_its_peer_ends_without_a_reason_of_its_own(
    tmp_path: Path, port: int, number: int | None
) -> None:
    # A process needs more than a second to its end where others load the machine.
    with meeting(tmp_path, port, 0) as first, meeting(tmp_path, port, 1) as second:
        assert (first.report(), second.report()) == ("met", "met")
        if number:
            second.process.send_signal(number)
        else:
            second.end()
        assert first.process.wait(60) == 1
    assert failures(tmp_path, 0) == []


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, port: int) -> None:
    events = RunDir(tmp_path / "node-0").events
    with meeting(tmp_path, port, 0, most=5) as first:
        found = first.report()
        beaten = events.stat().st_mtime
    assert found.startswith("launch_failed rank 0 on ")
    assert "of 2 ranks these did not come: 1" in found
    assert beaten > events.with_name("began").stat().st_mtime + 2.0  # it waited for 5 s, and was no hang meanwhile


@IN_FULL  # CI: torchruns that do not meet, a rank that does not come
def test_a_rendezvous_address_without_a_listener_is_named(tmp_path: Path, port: int) -> None:
    with meeting(tmp_path, port, 1, most=5) as second:
        found = second.report()
    assert found.startswith("launch_failed rank 1 on ")
    assert f"cannot reach rank 0 at 127.0.0.1 port {port}" in found
    assert f"open TCP port {port} and" in found


def test_ranks_that_meet_at_the_store_and_not_by_gloo_report_it(tmp_path: Path, port: int) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(meeting(tmp_path, port, rank, interface, patience=3))
            for rank, interface in enumerate(("lo", "none0"))
        ]
        found = [rank.report() for rank in both]
    assert f"rank 1 on {socket.gethostname()} does not reach all of rank 0 on" in found[1]
    assert "over none0" in found[1]
    assert "rank 0" in found[0]
