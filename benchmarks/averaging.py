"""Periodic averaging against DDP at the same tokens: held-out loss, and bytes between the ranks (root, Linux, `ip`).

    .venv/bin/python benchmarks/averaging.py --json averaging.json

Four ranks of one thread train the tiny model of the tests on the same rows in the same order, in a network namespace of
their own, whose loopback counts every byte that they exchange: of gradients or weights, of metrics, evaluations and the
final export. The last averaged run is repeated with one worker killed in the middle: it resumes on three. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from training_inputs import conversational_rows, data_file

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import CheckpointSaved, Evaluated, Failed, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.ranks import Ranks, forked_ranks
from tests.tiny import tiny_model
from tests.training import job_spec

WITHIN = 0.02
"""Share of DDP's held-out loss by which that of an averaged run may be higher."""
LESS_TRAFFIC = 15
HELD_OUT = 96
STEP = 16
"""Rows of an optimizer step, over all workers."""
SAVE_EVERY = 5
"""Averages from one checkpoint to the next."""
_INSIDE = "TRL_BENCHMARK_IN_NAMESPACE"
LOOPBACK = Path("/proc/self/net/dev")
Result = dict[str, Any]


def main() -> int:
    options = parse_options()
    if _INSIDE not in os.environ:
        return in_namespace()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    report = begin("torch", "transformers", "trl", options=options)
    report["runs"] = []
    check_steps(options)
    outer = [outer_of(text, options.interval) for text in options.outer]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="averaging-") as scratch:
        folder = Path(scratch)
        os.environ[faults.VARIABLE] = str(folder / "faults")
        (folder / "faults").mkdir()
        with forked_ranks() as ranks:
            base = base_of(ranks, folder / "base", options)
            for number, averaging in enumerate([None, *outer]):
                report["runs"].append(measured(ranks, folder / f"run-{number}", base, averaging, options))
            if options.kill:
                report["runs"].append(with_a_loss(ranks, folder, base, outer[-1], options))
    missed = print_report(report)
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--interval", type=int, default=20, help="optimizer steps between two averages")
    parser.add_argument(
        "--outer",
        nargs="+",
        default=["0.7,0.9"],
        metavar="RATE,MOMENTUM",
        help="outer steps; the targets are those of the last one, which also loses a worker",
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--base-epochs", type=int, default=12, help="of the model that they begin with")
    parser.add_argument("--from-scratch", action="store_true", help="begin with random weights")
    parser.add_argument("--rows", type=int, default=896, help="that are trained on in an epoch, at most 896")
    parser.add_argument("--tokens", type=int, default=128, help="of a row at most")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="leave out the run that loses a worker")
    options = parser.parse_args()
    if options.workers < 2 or STEP % options.workers:
        parser.error("expected 2, 4, 8 or 16 --workers: a step has 16 rows")
    return options


def steps_of(options: argparse.Namespace) -> int:
    """Optimizer steps of a run, of the rows that there are."""
    rows = len(list(conversational_rows("sft"))) - HELD_OUT
    return int(options.epochs * -(-min(options.rows, max(rows, 0)) // STEP))


def check_steps(options: argparse.Namespace) -> None:
    """End the program where the steps are too few for a worker to be lost between two averages in the middle."""
    steps, needed = steps_of(options), options.interval * (SAVE_EVERY + 1)
    if steps < needed:
        sys.exit(
            f"averaging.py: the rows of {data_file('sft')} make {steps} steps, expected {needed} at least: name a "
            "directory with `data/instruct_999.jsonl` in TRL_SHARED_DIR, or set more --epochs or a smaller --interval"
        )


def outer_of(text: str, interval: int) -> AveragingSpec:
    rate, momentum = map(float, text.split(","))
    return AveragingSpec(interval=interval, outer_learning_rate=rate, outer_momentum=momentum, nesterov=momentum > 0)


def name_of(averaging: AveragingSpec | None) -> str:
    if averaging is None:
        return "DDP"
    return f"every {averaging.interval}, outer {averaging.outer_learning_rate:g}, {averaging.outer_momentum:g}"


def in_namespace() -> int:
    """This program again, in a network namespace of its own."""
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        sys.exit("averaging.py counts bytes in a network namespace: expected root, `unshare` and `ip`")
    return subprocess.call(["unshare", "--net", sys.executable, *sys.argv], env={**os.environ, _INSIDE: "1"})


def base_of(ranks: Ranks, folder: Path, options: argparse.Namespace) -> Path:
    """The model that all runs begin with: random weights, or trained in one process on the rows of the DPO data."""
    if options.from_scratch:
        return tiny_model()
    rows = [
        {"prompt": row["prompt"], "completion": row[answer]}
        for row in conversational_rows("dpo")
        for answer in ("chosen", "rejected")
    ]
    spec = job_spec(
        folder,
        tiny_model(),
        rows=rows,
        train_on_input=True,
        batch_size=STEP,
        n_epochs=options.base_epochs,
        max_seq_length=options.tokens,
        logging_steps=100,
        optimizer=OptimizerSpec(learning_rate=5e-3, warmup_steps=20, scheduler="cosine"),
    )
    events = trained(ranks, folder / "run", spec)
    points = [event for event in events if isinstance(event, Progress)]
    print(f"  the base model: {points[-1].step} steps, loss {points[-1].metrics['loss']:.4f}", flush=True)
    return spec.checkpoint_dir / "final"


def spec_of(folder: Path, base: Path, averaging: AveragingSpec | None, options: argparse.Namespace) -> JobSpec:
    rows = list(conversational_rows("sft"))
    random.Random(0).shuffle(rows)
    return job_spec(
        folder,
        base,
        rows=rows[HELD_OUT : HELD_OUT + options.rows],
        validation_rows=rows[:HELD_OUT],
        ranks=options.workers,
        sharding=ShardingSpec(strategy="NO_SHARD"),
        averaging=averaging,
        batch_size=STEP // options.workers,
        n_epochs=options.epochs,
        train_on_input=True,  # the prompt of some rows is all that fits
        max_seq_length=options.tokens,
        logging_steps=options.interval,
        save_steps=options.interval * SAVE_EVERY if averaging else None,
        keep_last=1,
        optimizer=OptimizerSpec(learning_rate=options.learning_rate, warmup_steps=options.interval, scheduler="cosine"),
        num_threads=1,
    )


def measured(
    ranks: Ranks, folder: Path, base: Path, averaging: AveragingSpec | None, options: argparse.Namespace
) -> Result:
    spec = spec_of(folder, base, averaging, options).changed(save_steps=None)
    before, began = exchanged(), time.monotonic()
    events = trained(ranks, folder / "run", spec)
    seconds = time.monotonic() - began
    return shown(name_of(averaging), events, (exchanged() - before) / options.workers, seconds)


def with_a_loss(
    ranks: Ranks, folder: Path, base: Path, averaging: AveragingSpec, options: argparse.Namespace
) -> Result:
    """Kill a worker before an average in the middle of the run, and resume on one worker less."""
    folder = folder / "lost"
    spec = spec_of(folder, base, averaging, options)
    save_steps = int(spec.train.save_steps or 0)
    killed_at = max(1, round(steps_of(options) / 2 / save_steps)) * save_steps + options.interval - 1
    (folder.parent / "faults" / f"step-{killed_at}").write_text("kill")
    before, began = exchanged(), time.monotonic()
    codes, events = ranks.run(folder / "run", spec)
    assert any(codes), "the worker was not killed"
    saved = [event for event in events if isinstance(event, CheckpointSaved) and event.kind == "step"]
    print(f"  a worker was killed at step {killed_at}; the others resume from step {saved[-1].step}", flush=True)
    more = trained(ranks, folder / "again", spec, saved[-1].path, world_size=options.workers - 1)
    seconds = time.monotonic() - began
    return shown(f"{name_of(averaging)}, 1 lost", more, (exchanged() - before) / options.workers, seconds)


def trained(ranks: Ranks, run_dir: Path, spec: JobSpec, resume_from: Path | None = None, **how: Any) -> list[Any]:
    codes, events = ranks.run(run_dir, spec, resume_from, **how)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {[event.message for event in events if isinstance(event, Failed)]}")
    return events


def exchanged() -> int:
    """Bytes that were sent over loopback in this namespace."""
    (line,) = (line for line in LOOPBACK.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def shown(name: str, events: list[Any], bytes_per_rank: float, seconds: float) -> Result:
    points = [event for event in events if isinstance(event, Progress)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    result = {
        "run": name,
        "steps": points[-1].step,
        "tokens": points[-1].tokens_seen,
        "train_loss": points[-1].metrics["loss"],
        "held_out_loss": evaluations[-1].metrics["eval_loss"],
        "held_out_losses": [event.metrics["eval_loss"] for event in evaluations],
        "bytes_per_rank": bytes_per_rank,
        "seconds": round(seconds, 1),
    }
    print(
        f"  {name:34} held-out loss {result['held_out_loss']:.4f}  {bytes_per_rank / 1e6:8.1f} MB per rank  "
        f"{seconds:6.0f} s",
        flush=True,
    )
    return result


def print_report(report: Result) -> list[str]:
    """Print the table and what misses its target; returns the latter."""
    ddp, chosen = report["runs"][0], report["runs"][len(report["options"]["outer"]) :]
    print("\n| run | steps | tokens | held-out loss | against DDP | MB per rank | less traffic |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for run in report["runs"]:
        more = run["held_out_loss"] / ddp["held_out_loss"] - 1
        less = ddp["bytes_per_rank"] / run["bytes_per_rank"]
        print(
            f"| {run['run']} | {run['steps']} | {run['tokens']} | {run['held_out_loss']:.4f} | {more:+.1%} | "
            f"{run['bytes_per_rank'] / 1e6:.1f} | {less:.1f} x |"
        )
        if run is chosen[0] and less < LESS_TRAFFIC:
            missed.append(f"{run['run']}: {less:.1f} times less traffic, expected {LESS_TRAFFIC}")
        if run in chosen and more > WITHIN:
            missed.append(f"{run['run']}: the held-out loss is {more:.1%} higher, expected at most {WITHIN:.0%}")
    for line in missed:
        print(f"missed: {line}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
