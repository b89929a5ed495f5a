"""How much faster two ranks train than one process, where the rest goes, and how many bytes they exchange.

    .venv/bin/python benchmarks/scaling.py --json scaling.json

Every process has one thread, so two ranks have twice the processors of one process. All runs of a round train the same
model on as many tokens per optimizer step. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import REPOSITORY, begin, finish, parser_of, spread

sys.path.insert(0, str(REPOSITORY))

from gpu_checks.inputs import HUNDRED_M, TEN_M
from gpu_checks.jobs import Job, Outcome, largest_difference, spec
from gpu_checks.setting import Setting

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import JobSpec

SHAPES = (HUNDRED_M.name, TEN_M.name)
TARGETS = {"DDP": 0.85, "FSDP2": 0.75}
"""Efficiency of two ranks at 4,096 tokens a step."""
TARGET_TOKENS = 4096
SAME_LOSS = 1e-4
"""Relative difference of losses above which two runs do not train the same thing."""
WARM_UP = 2
"""Optimizer steps that are not measured: until every kept block of memory has its pages (2 s of the second step)."""
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")

Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One way to train on the rows of a step."""

    ranks: int = 1
    strategy: str = "NO_SHARD"
    share: int = 1
    """It trains on this part of the rows: 2 for a half."""
    beside: int = 1
    """Jobs at once."""


VARIANTS = {
    "one process": Variant(),
    "half of the rows": Variant(share=2),
    "half, two jobs at once": Variant(share=2, beside=2),
    "DDP": Variant(2),
    "FSDP2": Variant(2, "FULL_SHARD"),
    "FSDP2, SHARD_GRAD_OP": Variant(2, "SHARD_GRAD_OP"),
}
"""By name; the first one is the baseline."""


def main() -> int:
    options = parse_options()
    report = begin("torch", "transformers", "trl", options=options)
    report["runs"] = []
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
        setting = Setting(Path(scratch, "jobs"), Path(scratch, "models"), is_dry_run=True)  # on the CPU, in fp32
        make_model(setting.models, options.model)
        os.environ["TRL_LOCK_DIR"] = str(Path(scratch, "locks"))  # a service on this machine does not make jobs wait
        for number in range(options.rounds):
            report["runs"] += measure_round(setting, number, options)
    report["efficiency"] = efficiencies(report["runs"])
    missed = print_report(report, options)
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=SHAPES, default="100M")
    parser.add_argument("--step-tokens", type=int, default=TARGET_TOKENS, help="tokens of an optimizer step, all ranks")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row")
    parser.add_argument("--accumulation", type=int, default=1, help="micro steps of an optimizer step")
    parser.add_argument("--steps", type=int, default=4, help=f"optimizer steps; the first {WARM_UP} are not measured")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    if options.steps <= WARM_UP or options.step_tokens % (2 * options.tokens * options.accumulation):
        parser.error(f"expected {WARM_UP + 1} steps or more, and micro steps of which each rank gets whole rows")
    return options


def make_model(folder: Path, name: str) -> None:
    """In a process of its own: this one keeps torch out of its memory."""
    argv = [f"--folder={folder / name}", f"--shape={name}", "--device=cpu"]
    argv = [sys.executable, "-W", "ignore", "-m", "gpu_checks.inputs", *argv]
    subprocess.run(argv, cwd=Path(__file__).parent, check=True)


# --- Runs -------------------------------------------------------------------------------------------------------------


def measure_round(setting: Setting, number: int, options: argparse.Namespace) -> list[Result]:
    """Every variant once; every other round in the opposite order."""
    names = options.variants if number % 2 == 0 else options.variants[::-1]
    found = {}
    for name in names:
        found[name] = {"round": number, "variant": name, **measure(setting, number, name, options)}
        print(
            f"  round {number + 1}/{options.rounds} {name:22}  step {found[name]['step_s']:7.3f} s  "
            f"loopback {found[name]['bytes_per_step'] / 1e6:8.1f} MB a step",
            flush=True,
        )
    whole = [found[name] for name in options.variants if VARIANTS[name].share == 1]
    for one in whole[1:]:
        if largest_difference(one["losses"], whole[0]["losses"]) > SAME_LOSS:
            raise RuntimeError(f"{one['variant']} has losses {one['losses']}, and not {whole[0]['losses']}")
    return list(found.values())


def measure(setting: Setting, number: int, name: str, options: argparse.Namespace) -> Result:
    variant = VARIANTS[name]
    jobs = [
        job(setting, f"{name}-{number}-{which}".replace(" ", "-").replace(",", ""), variant, options)
        for which in range(variant.beside)
    ]
    started = [Job(setting, one) for one in jobs]
    exchanged = []
    for steps in (WARM_UP, options.steps):
        for one in started:
            one.until(lambda events, steps=steps: sum(event.type == "progress" for event in events) >= steps)
        exchanged.append(int(LOOPBACK.read_text()))
    outcomes = [one.wait() for one in started]
    for outcome in outcomes:
        if not outcome.finished:
            raise RuntimeError(f"{name}: {outcome.problem}")
    return {
        "step_s": statistics.mean(step_seconds(outcome) for outcome in outcomes),
        "bytes_per_step": (exchanged[1] - exchanged[0]) / (options.steps - WARM_UP),
        "losses": outcomes[0].losses,
    }


def job(setting: Setting, name: str, variant: Variant, options: argparse.Namespace) -> JobSpec:
    """Rows of equal length; the first ones of all variants are the same."""
    from llama_stack_provider_trl.specs.job import DatasetRef, ShardingSpec
    from llama_stack_provider_trl.system.files import put_rows

    per_step = options.step_tokens // options.tokens // variant.share
    text = "What is the time? " * options.tokens
    rows = [{"prompt": str(row), "completion": text} for row in range(options.steps * per_step)]
    blob = put_rows(setting.folder / name / "rows", rows)
    made = spec(
        setting,
        name,
        setting.models / options.model,
        tokens=options.tokens,
        ranks=variant.ranks,
        batch_size=per_step // variant.ranks // options.accumulation,
        gradient_accumulation_steps=options.accumulation,
        gradient_sync="auto",
        sharding=ShardingSpec(strategy=variant.strategy) if variant.ranks > 1 else None,
        shuffle=False,
        preflight="refuse",  # as by default: malloc keeps blocks where the estimate allows it
    )
    dataset = DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)
    return made.changed(dataset=dataset)


def step_seconds(outcome: Outcome) -> float:
    """Mean over the steps after `WARM_UP`, from metric point to metric point."""
    times = [step.time for step in outcome.steps][WARM_UP - 1 :]
    return (times[-1] - times[0]) / (len(times) - 1)


# --- The report -------------------------------------------------------------------------------------------------------


def efficiencies(runs: list[Result]) -> dict[str, dict[str, float]]:
    """Speed of two ranks over twice that of one process, by variant, each round by itself."""
    step = {(run["round"], run["variant"]): run["step_s"] for run in runs}
    baseline = next(iter(VARIANTS))
    return {
        name: spread([step[number, baseline] / 2 / seconds for (number, one), seconds in step.items() if one == name])
        for name, variant in VARIANTS.items()
        if variant.ranks == 2 and any(run["variant"] == name for run in runs)
    }


def print_report(report: Result, options: argparse.Namespace) -> list[str]:
    """Print the tables; returns the missed targets."""
    seconds = {
        name: statistics.median(run["step_s"] for run in report["runs"] if run["variant"] == name)
        for name in options.variants
    }
    traffic = {
        name: statistics.median(run["bytes_per_step"] for run in report["runs"] if run["variant"] == name)
        for name in options.variants
    }
    print(f"\n| {options.model}, {options.step_tokens} tokens a step | s a step | efficiency | MB a step |")
    print("|---|---|---|---|")
    for name in options.variants:
        found = report["efficiency"].get(name)
        shown = f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})" if found else ""
        print(f"| {name} | {seconds[name]:.2f} | {shown} | {traffic[name] / 1e6:.0f} |")
    if set(options.variants) == set(VARIANTS):
        print_breakdown(seconds)
    is_target = options.step_tokens == TARGET_TOKENS and options.model == "100M"
    found = report["efficiency"]
    missed = [name for name, least in TARGETS.items() if is_target and name in found and found[name]["median"] < least]
    for name in missed:
        print(f"{name}: {found[name]['median']:.3f}, at least {TARGETS[name]} was the target")
    return missed


def print_breakdown(seconds: dict[str, float]) -> None:
    """Where a step of two ranks takes longer than half of one process's, in seconds."""
    whole, half, beside = (seconds[name] for name in list(VARIANTS)[:3])
    print("\n| s of a step | not divided by two | processors slow each other down | exchange and waiting |")
    print("|---|---|---|---|")
    for name in (name for name, variant in VARIANTS.items() if variant.ranks == 2):
        print(f"| {name} | {half - whole / 2:.2f} | {beside - half:.2f} | {seconds[name] - beside:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
