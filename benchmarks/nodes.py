"""What a job pays for its machines being joined to a service: one and two agents beside plain torchrun.

    .venv/bin/python benchmarks/nodes.py --json out.json

Network namespaces of this machine stand in for machines, so it needs root and Linux. Every round trains the same job
four times: as a job of a service on one agent and on two, and started by torchrun alone in the same namespaces. The
training processes run at nice 10 everywhere, one thread each. Takes about 8 minutes on two cores that do nothing else.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from machine import REPOSITORY, begin, finish, parser_of, spread
from training_inputs import save_random_llama

sys.path.insert(0, str(REPOSITORY))

from llama_stack_provider_trl.launch.torchrun import TORCHRUN, TRAINER
from llama_stack_provider_trl.system.files import RunDir, tail
from llama_stack_provider_trl.system.malloc import FRUGAL
from llama_stack_provider_trl.system.process import TASK_MARK
from tests.cluster.bed import Bed, Machine, why_not
from tests.contract.stack import SFT

if TYPE_CHECKING:
    from tests.contract.payloads import Json

OURS, PLAIN = "agents", "torchrun"
TARGET = 0.95
"""Speed against plain torchrun, median of the rounds."""
FIRST = 5
"""Steps left out at the beginning: memory is taken and pages are touched for the first time."""
SAME_LOSS = 1e-3
"""Relative difference of a step's losses above which two runs do not compute the same thing."""
NICE = 10
"""Of plain torchrun's trainings: that of a job's."""
PLAIN_TORCHRUN = "torch.distributed.run"
PORT = 29400
"""Where plain torchrun's ranks meet."""
JOB = "benchmark"
LABEL = "benchmark=nodes"
"""Of the workers: the service's own machine is to train nothing."""


def main() -> None:
    options = parse_options()
    if lacking := why_not():
        sys.exit(lacking)
    report = begin("torch", "transformers", "trl", options=options)
    report["runs"] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `timeout`: leave no machine behind
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        work = Path(scratch)
        make_model(work / "model")
        for number in range(options.rounds):
            for nodes in options.nodes:
                report["runs"] += measure_pair(work, number, nodes, options)
    report["summary"] = summarize(report["runs"])
    print_summary(report["summary"], options)
    finish(report, options.json)
    slow = [row["nodes"] for row in report["summary"] if row["speed"]["median"] < TARGET]
    sys.exit(f"the target is missed with {' and '.join(map(str, slow))} agents" if slow else 0)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="+", choices=(1, 2), default=(1, 2), help="agents of the job")
    parser.add_argument("--steps", type=int, default=45, help=f"optimizer steps; the first {FIRST} are not measured")
    parser.add_argument("--save-steps", type=int, default=15, help="optimizer steps between checkpoints")
    parser.add_argument("--batch", type=int, default=2, help="rows per rank and step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per row")
    parser.add_argument(
        "--same-malloc", action="store_true", help="give plain torchrun's glibc our launcher's settings"
    )
    options = parser.parse_args()
    if not FIRST < options.save_steps < options.steps:
        parser.error(f"expected {FIRST} < --save-steps < --steps, so that a checkpoint is written while it is measured")
    return options


def make_model(path: Path) -> None:
    """In a process of its own: this one keeps torch out of its memory, and off the cores."""
    made = subprocess.run(
        [sys.executable, __file__, "--model", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if made.returncode:
        raise RuntimeError(made.stdout.decode())


# --- Runs -------------------------------------------------------------------------------------------------------------


def measure_pair(work: Path, number: int, nodes: int, options: argparse.Namespace) -> list[Json]:
    """Ours and plain torchrun one after the other; every other round the other way round."""
    kinds = (OURS, PLAIN) if number % 2 == 0 else (PLAIN, OURS)
    runs = {}
    for kind in kinds:
        root = work / f"{number}-{nodes}-{kind}"
        with Bed(root) as bed:
            train = train_ours if kind == OURS else train_plain
            runs[kind] = {"round": number, "nodes": nodes, "kind": kind, **train(bed, work, nodes, options)}
        shutil.rmtree(root)
        run = runs[kind]
        print(
            f"  round {number + 1}/{options.rounds} {nodes} x {kind:8}  step {run['step_s']:.3f} s  "
            f"{run['tokens_per_s']:6.0f} tokens/s  ranks {run['cpu']['ranks']:.2f} CPU s a step",
            flush=True,
        )
    check_same_work(runs[OURS], runs[PLAIN])
    return [runs[kind] for kind in kinds]


def train_ours(bed: Bed, work: Path, nodes: int, options: argparse.Namespace) -> Json:
    """A service and its agents, started by the shipped script; a job on these agents over HTTP."""
    head, workers = bed.machine("head"), [bed.machine(f"worker-{number}") for number in range(nodes)]
    head.serve()
    for worker in workers:
        worker.join(head, "--label", LABEL)
    bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 120)
    rows = rows_of(options, nodes)
    body = {"dataset_id": "rows", "purpose": "post-training/messages", "source": {"type": "rows", "rows": rows}}
    done(bed.post("/datasets", body))
    bed.wait_for_nodes(*(worker.name for worker in workers))
    done(bed.post(SFT, request_of(work, nodes, options)))
    run_dir = RunDir(head.data_dir / "jobs" / JOB / "attempts" / "1")
    # Rank 0's node knows a step first; which one that is is seen by who writes.
    theirs = [RunDir(worker.data_dir / "jobs" / JOB / "attempts" / "1").events for worker in workers]
    run = watch(bed, [*theirs, run_dir.events], options.steps, lambda: _still_trains(bed))
    status = bed.wait_for_end(JOB)
    if status["status"] != "completed" or status["resources_allocated"]["attempt"] != 1:
        raise RuntimeError(f"the job did not go through in one attempt: {status}")
    placed = sorted(place.rpartition("/")[0] for place in status["resources_allocated"]["device"].split(","))
    if placed != [worker.name for worker in workers]:
        raise RuntimeError(f"the job was placed on {placed}")
    keep_as_plain(work, run_dir, nodes)
    return finished(run, run_dir.events, nodes, options)


def train_plain(bed: Bed, work: Path, nodes: int, options: argparse.Namespace) -> Json:
    """torchrun by hand on each machine, with directories of its own, and nothing of ours but the training process."""
    workers = [bed.machine(f"worker-{number}") for number in range(nodes)]
    for node_rank, worker in enumerate(workers):
        run_dir = RunDir(worker.root / "run")
        run_dir.root.mkdir()
        spec = json.loads(kept_spec(work, nodes).read_text())
        spec["run_dir"] = str(run_dir.root)
        spec["job"]["checkpoint_dir"] = str(worker.root / "checkpoints")
        run_dir.spec.write_text(json.dumps(spec))
        start_torchrun(worker, workers[0], node_rank, nodes, run_dir, same_malloc=options.same_malloc)
    events = RunDir(workers[0].root / "run").events
    run = watch(bed, [events], options.steps, lambda: all(_lives(worker) for worker in workers))
    for worker in workers:
        assert worker.process is not None
        if worker.process.wait(300):
            raise RuntimeError(f"torchrun failed\n{worker.log_tail()}\n{tail(RunDir(worker.root / 'run').log)}")
    return finished(run, events, nodes, options)


def start_torchrun(
    worker: Machine, first: Machine, node_rank: int, nodes: int, run_dir: RunDir, *, same_malloc: bool
) -> None:
    trainer = ["-m", TRAINER, str(run_dir.spec)]
    if nodes == 1:
        # With torchrun's variables accelerate would wrap the only process into DDP, and it would be slower than ours.
        ranked = [part for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") for part in ("-u", name)]
        trainer = ["--no-python", "env", *ranked, sys.executable, *trainer]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TRL_", "MALLOC_"))},
        **(FRUGAL if same_malloc else {}),
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with open(worker.log, "ab") as output:
        worker.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", worker.namespace, "nice", "-n", str(NICE)),
                *(sys.executable, "-m", PLAIN_TORCHRUN),
                *(f"--nnodes={nodes}", f"--node-rank={node_rank}", "--nproc-per-node=1"),
                *(f"--master-addr={first.address}", f"--master-port={PORT}", f"--local-addr={worker.address}"),
                *trainer,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )


def rows_of(options: argparse.Namespace, nodes: int) -> list[Json]:
    """One epoch; every row is cut to the same length."""
    text = "What is the time? " * options.tokens
    return [{"prompt": str(row), "completion": text} for row in range(options.steps * options.batch * nodes)]


def request_of(work: Path, nodes: int, options: argparse.Namespace) -> Json:
    name, _, value = LABEL.partition("=")
    return {
        "job_uuid": JOB,
        "model": str(work / "model"),
        "checkpoint_dir": "results",
        "training_config": {
            "n_epochs": 1,
            "dtype": "fp32",
            "data_config": {"dataset_id": "rows", "batch_size": options.batch, "shuffle": False},
            "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-5, "weight_decay": 0.0, "num_warmup_steps": 0},
        },
        "hyperparam_search_config": {},
        "logger_config": {},
        "provider_options": {
            "max_seq_length": options.tokens,
            "save_steps": options.save_steps,
            "resources": {"nodes": nodes, "labels": {name: value}},
            "retries": 0,
        },
    }


def kept_spec(work: Path, nodes: int) -> Path:
    return work / f"spec-{nodes}.json"


def keep_as_plain(work: Path, run_dir: RunDir, nodes: int) -> None:
    """The environment of the service's training processes, for plain torchrun's."""
    spec = json.loads(run_dir.spec.read_text())
    rows = work / f"rows-{nodes}.jsonl"
    shutil.copy(spec["job"]["dataset"]["path"], rows)
    spec["job"]["dataset"]["path"] = str(rows)
    kept_spec(work, nodes).write_text(json.dumps(spec))


def done(answer: Any) -> None:
    if not answer.ok:
        raise RuntimeError(f"{answer.request.method} {answer.request.url} was answered {answer.text[:2000]}")


def _still_trains(bed: Bed) -> bool:
    return bed.status(JOB)["status"] in ("scheduled", "in_progress")


def _lives(worker: Machine) -> bool:
    return worker.process is not None and worker.process.poll() is None


# --- What is measured -------------------------------------------------------------------------------------------------


def watch(bed: Bed, files: Sequence[Path], steps: int, lives: Callable[[], bool]) -> Json:
    """CPU seconds of everything on the machines while the measured steps go by.

    Args:
        files: events; a step counts once one of them has it.
    """
    deadline, polled = time.monotonic() + 600, time.monotonic()
    began: tuple[float, dict[str, dict[int, float]]] | None = None
    while True:
        step = max((point["step"] for events in files for point in points(events)), default=0)
        if began is None and step >= FIRST:
            began = time.monotonic(), cpu_seconds(bed)
        if began is not None and step >= steps:
            took, after = time.monotonic() - began[0], cpu_seconds(bed)
            break
        if time.monotonic() - polled > 10:  # rarely: each poll loads the service
            polled = time.monotonic()
            if not lives() or polled > deadline:
                logs = "\n".join(one.log_tail() for one in bed.machines)
                raise RuntimeError(f"step {step} of {steps}, and it trains no longer\n{logs}")
        time.sleep(0.25)
    spent = {
        role: sum(seconds - began[1][role].get(pid, 0.0) for pid, seconds in of_role.items())
        for role, of_role in after.items()
    }
    return {"watched_s": took, "cpu_s": spent}


def cpu_seconds(bed: Bed) -> dict[str, dict[int, float]]:
    """User and system time by role and pid: the service, the agents, the ranks, and what is beside these (runners,
    torchrun)."""
    found: dict[str, dict[int, float]] = {"service": {}, "agents": {}, "ranks": {}, "launchers": {}}
    for one in bed.machines:
        for pid in one.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                found[role_of(process, one)][pid] = times.user + times.system
    return found


def role_of(process: psutil.Process, where: Machine) -> str:
    arguments = process.cmdline()
    by_torchrun = TORCHRUN in arguments or PLAIN_TORCHRUN in arguments
    if TRAINER in arguments and not by_torchrun:
        return "ranks"
    if by_torchrun or TASK_MARK in process.environ():
        return "launchers"
    return "service" if where.name == "head" else "agents"


def points(events: Path) -> list[Json]:
    """Metric points, one per step."""
    return [event for event in read(events) if event["type"] == "progress"]


def read(events: Path) -> Iterator[Json]:
    with suppress(FileNotFoundError):
        for line in events.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


def finished(run: Json, events: Path, nodes: int, options: argparse.Namespace) -> Json:
    """The figures of a run that is over, by the times of the training process's own events."""
    at = {point["step"]: point for point in points(events)}
    took = at[options.steps]["time"] - at[FIRST]["time"]
    measured = options.steps - FIRST
    threads = {event["effective"]["threads"] for event in read(events) if event["type"] == "prepared"}
    if threads != {1}:
        raise RuntimeError(f"it trained with {threads} threads")
    saved = [event for event in read(events) if event["type"] == "checkpoint" and event["kind"] == "step"]
    shares = {role: seconds / run["watched_s"] for role, seconds in run["cpu_s"].items() if role != "ranks"}
    return {
        "step_s": took / measured,
        "median_step_s": statistics.median(
            at[step]["time"] - at[step - 1]["time"] for step in range(FIRST + 1, options.steps + 1)
        ),
        "tokens_per_s": measured * options.batch * options.tokens * nodes / took,
        "cpu": {**shares, "ranks": run["cpu_s"]["ranks"] / measured},
        "saved": [event["step"] for event in saved],
        "losses": [at[step]["metrics"]["loss"] for step in sorted(at)],
    }


def check_same_work(ours: Json, plain: Json) -> None:
    """Hold both to the same losses at every step, and to the same checkpoints.

    Raises:
        AssertionError: they did not do the same work, so their times cannot be compared.
    """
    pairs = list(zip(ours["losses"], plain["losses"], strict=True))
    worst = max(abs(one - other) / abs(other) for one, other in pairs)
    assert worst < SAME_LOSS, f"losses with {ours['nodes']} agents differ from torchrun's by {worst:.1e} (relative)"
    assert ours["saved"] == plain["saved"], f"checkpoints of steps {ours['saved']} and {plain['saved']}"


# --- Figures ----------------------------------------------------------------------------------------------------------


def summarize(runs: list[Json]) -> list[Json]:
    """Medians, and our speed against plain torchrun's from the pairs within each round."""
    rows = []
    for nodes in dict.fromkeys(run["nodes"] for run in runs):
        of = {kind: [run for run in runs if run["nodes"] == nodes and run["kind"] == kind] for kind in (OURS, PLAIN)}
        plain = {run["round"]: run for run in of[PLAIN]}
        rows.append(
            {
                "nodes": nodes,
                **{
                    kind: {
                        **{name: _median(of[kind], name) for name in ("step_s", "median_step_s", "tokens_per_s")},
                        "cpu": {name: _median([run["cpu"] for run in of[kind]], name) for name in of[kind][0]["cpu"]},
                    }
                    for kind in of
                },
                "speed": spread([plain[run["round"]]["step_s"] / run["step_s"] for run in of[OURS]]),
                "saved": of[OURS][0]["saved"],
            }
        )
    return rows


def _median(rows: list[Json], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def print_summary(summary: list[Json], options: argparse.Namespace) -> None:
    print(
        f"\nmedians of {options.rounds} rounds; steps {FIRST + 1} to {options.steps}, with checkpoints of steps "
        f"{', '.join(map(str, summary[0]['saved']))} written, and uploaded by agents"
    )
    print("| | step, s | median step | tokens/s | CPU s a step | service | agents | launchers | speed | target |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in summary:
        speed = row["speed"]
        met = "" if speed["median"] >= TARGET else " **missed**"
        against = f"{speed['median']:.3f} ({speed['min']:.3f} to {speed['max']:.3f}) | >= {TARGET}{met}"
        print(f"| torchrun, {row['nodes']} rank(s) | {_cells(row[PLAIN])} | 1 | |")
        print(f"| {row['nodes']} agent(s) | {_cells(row[OURS])} | {against} |")
    print("CPU s a step: of all ranks. service, agents, launchers (runner, torchrun): CPU time in percent of one core")


def _cells(own: Json) -> str:
    figures = [f"{own['step_s']:.3f}", f"{own['median_step_s']:.3f}", f"{own['tokens_per_s']:.0f}"]
    shares = [f"{own['cpu'][role]:.1%}" for role in ("service", "agents", "launchers")]
    return " | ".join([*figures, f"{own['cpu']['ranks']:.3f}", *shares])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        save_random_llama(Path(sys.argv[2]))
    else:
        main()
