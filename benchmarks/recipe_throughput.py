"""Training speed of our recipe, of TRL's own trainer, and of a bare PyTorch loop, on the same batches.

    .venv/bin/python benchmarks/recipe_throughput.py --algorithm both --json out.json

Every round measures each variant once, in an order of its own; each measurement is a fresh process, forked from one
that has only imported the libraries. What is measured is the training loop: `trainer.train()`, or the whole of the bare
loop. Reading rows, tokenizing and loading weights come before it and are not counted. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from machine import REPOSITORY, begin, finish, parser_of, spread
from training_inputs import data_file, prepare_inputs
from training_variants import AGAIN, BARE, CAREFUL, OURS, STOCK, WARMUP_STEPS, Result, measure

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import Algorithm

SAME_LOSS = {"fp32": 1e-3, "bf16": 1e-2}
"""Relative difference of the first losses above which the variants do not compute the same thing. In bf16 the bare
loop's head rounds otherwise than TRL's chunked one."""
SHOWN_LOSSES = 5
TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}
"""glibc keeps freed memory. By default it returns large blocks, and every step pays page faults to get them again."""


def main() -> None:
    options = parse_options()
    enter_environment(options)
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="recipe-throughput-") as scratch:
        work = Path(scratch)
        report = begin(
            *("torch", "transformers", "trl"),
            options=options,
            data=[str(data_file(name)) for name in chosen_algorithms(options)],
            threads=options.threads,
            malloc=options.allocator,
        )
        for algorithm in chosen_algorithms(options):
            folder = work / algorithm
            folder.mkdir()
            in_child(folder / "setup", partial(prepare_inputs, folder, algorithm, options))
            runs = measure_rounds(folder, algorithm, options)
            report[algorithm] = {"runs": runs, "summary": summarize(runs)}
            print_losses(runs)
            print_summary(algorithm, runs, report[algorithm]["summary"])
    finish(report, options.json)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--algorithm", choices=("sft", "dpo", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of one measurement")
    parser.add_argument("--batch", type=int, default=4, help="rows (sft) or pairs (dpo) per step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--logging-steps", type=int, default=1, help="our provider's default is 1, TRL's is 10")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--model", type=Path, help="a checkpoint; left out: a random Llama of 10M parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--full-rows", action="store_true", help="every row is as long as --max-length")
    parser.add_argument("--allocator", choices=("tuned", "default"), default="tuned", help="glibc malloc's settings")
    parser.add_argument("--control", action="store_true", help="measure stock TRL twice: its ratio to itself is noise")
    parser.add_argument(
        "--careful", action="store_true", help="measure ours with the padding mask and the LoRA input casts too"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters; no bare loop then")
    parser.add_argument("--seed", type=int, default=0, help="decides the order within rounds and the bootstrap")
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} warmup steps")
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: expected a directory with config.json")
    return options


def chosen_algorithms(options: argparse.Namespace) -> tuple[Algorithm, ...]:
    return ("sft", "dpo") if options.algorithm == "both" else (options.algorithm,)


def enter_environment(options: argparse.Namespace) -> None:
    """Start this program again with the variables that libraries and malloc read only at their start."""
    wanted = {
        "OMP_NUM_THREADS": str(options.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **(TUNED_MALLOC if options.allocator == "tuned" else {}),
    }
    unwanted = () if options.allocator == "tuned" else tuple(name for name in os.environ if name.startswith("MALLOC_"))
    if any(os.environ.get(name) != value for name, value in wanted.items()) or unwanted:
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**kept, **wanted})


def import_libraries() -> None:
    """All that a measurement needs, so that no child pays for an import. Nothing here may compute with torch."""
    sys.path.insert(0, str(REPOSITORY))
    # As in a job that quantizes nothing. They would also open CUDA, which no forked child could use then.
    for name in ("bitsandbytes", "torchao"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name in (
        "torch._dynamo",  # torch's optimizers import it at their first step
        "trl.trainer.dpo_trainer",
        "trl.trainer.sft_trainer",
        "llama_stack_provider_trl.recipes.session",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise write to, and so copy, every page of the parent's objects


# --- Children ---------------------------------------------------------------------------------------------------------


def in_child(folder: Path, work: Callable[[Path], None]) -> Result:
    """Run `work(result_file)` in a forked process; what it prints goes to `folder/log`.

    Raises:
        RuntimeError: the child failed; the message ends in its log.
    """
    folder.mkdir()
    result, log = folder / "result.json", folder / "log"
    sys.stdout.flush()
    with warnings.catch_warnings():
        # pyarrow and others keep idle threads; no lock of theirs is held here, where nothing has used them yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_and_exit(work, result, log)
    _, status = os.waitpid(pid, 0)
    if status or not result.exists():
        ending = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{folder.name} ended with status {os.waitstatus_to_exitcode(status)}:\n{ending}")
    return json.loads(result.read_text())


def _run_and_exit(work: Callable[[Path], None], result: Path, log: Path) -> NoReturn:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        work(result)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


# --- Rounds and figures -----------------------------------------------------------------------------------------------


def measure_rounds(folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> list[Result]:
    """Each round: every variant once, in an order drawn for this round."""
    optional = {BARE: not options.lora, AGAIN: options.control, CAREFUL: options.careful}
    variants = [STOCK, OURS, *(name for name, is_requested in optional.items() if is_requested)]
    runs = []
    for number in range(options.rounds):
        order = random.Random(f"{options.seed}-{number}").sample(variants, len(variants))
        for variant in order:
            run = folder / f"{number}-{variant.replace(' ', '-')}"
            result = in_child(run, partial(measure, variant, folder, algorithm, options))
            shutil.rmtree(run)
            runs.append({"round": number, "variant": variant, **result})
            print(
                f"  {algorithm} round {number + 1}/{options.rounds} {variant:12} cpu {result['cpu_s']:7.2f} s  "
                f"wall {result['wall_s']:7.2f} s  {result['tokens'] / result['wall_s']:7.0f} tokens/s",
                flush=True,
            )
        check_same_work(runs, SAME_LOSS[options.dtype])
    return runs


def check_same_work(runs: list[Result], tolerance: float) -> None:
    """Hold all runs to the same batches and the same first losses.

    Raises:
        AssertionError: the variants did not do the same work, so their times cannot be compared.
    """
    stock = next(run for run in runs if run["variant"] == STOCK)
    for run in runs:
        assert run["batches"] == stock["batches"], f"{run['variant']} was fed other batches than {STOCK}"
        worst = loss_difference(run, stock)
        assert worst < tolerance, f"{run['variant']}: loss differs from {STOCK} by {worst:.1e} (relative)"


def loss_difference(run: Result, other: Result) -> float:
    """The largest relative difference among the first losses. One near 0, as DPO's on rows that are soon learnt, counts
    as a hundredth of the first."""
    pairs = list(zip(run["losses"], other["losses"], strict=True))[:SHOWN_LOSSES]
    least = abs(other["losses"][0]) / 100
    return max(abs(one - two) / max(abs(two), least) for one, two in pairs)


def summarize(runs: list[Result]) -> dict[str, Any]:
    """Medians per variant, and speed against stock TRL from the pairs within each round."""
    summary: dict[str, Any] = {}
    stock = {run["round"]: run for run in runs if run["variant"] == STOCK}
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == variant]
        summary[variant] = {
            "cpu_s": statistics.median(run["cpu_s"] for run in own),
            "wall_s": statistics.median(run["wall_s"] for run in own),
            "steady_tokens_per_s": statistics.median(run["steady_tokens"] / run["steady_wall_s"] for run in own),
            "steady_tokens_per_cpu_s": statistics.median(run["steady_tokens"] / run["steady_cpu_s"] for run in own),
            "page_faults": statistics.median(run["page_faults"] for run in own),
            "peak_rss_mb": statistics.median(run["peak_rss_mb"] for run in own),
            "peak_gpu_mb": statistics.median(run["peak_gpu_mb"] for run in own),
            "speed_against_stock": {
                figure: spread([stock[run["round"]][figure] / run[figure] for run in own])
                for figure in ("cpu_s", "wall_s", "steady_cpu_s", "steady_wall_s")
            },
        }
    return summary


# --- Printing ---------------------------------------------------------------------------------------------------------


def print_losses(runs: list[Result]) -> None:
    first = {run["variant"]: run for run in reversed(runs)}
    for variant, run in sorted(first.items()):
        losses = " ".join(f"{loss:.6f}" for loss in run["losses"][:SHOWN_LOSSES])
        print(f"  first losses, {variant:12}{losses}  (within {loss_difference(run, first[STOCK]):.0e} of stock)")
    print(f"  the same batches in all {len(runs)} runs")


def print_summary(algorithm: Algorithm, runs: list[Result], summary: dict[str, Any]) -> None:
    rounds = 1 + max(run["round"] for run in runs)
    print(f"\n{algorithm.upper()}: medians of {rounds} rounds, {runs[0]['steps']} steps, {runs[0]['tokens']} tokens")
    print(f"{'':13}{'cpu s':>8}{'wall s':>8}{'tokens/s':>10}{'per cpu s':>11}{'faults':>9}{'peak MB':>9}")
    for variant in (STOCK, OURS, CAREFUL, BARE, AGAIN):
        if row := summary.get(variant):
            print(
                f"{variant:13}{row['cpu_s']:8.2f}{row['wall_s']:8.2f}{row['steady_tokens_per_s']:10.0f}"
                f"{row['steady_tokens_per_cpu_s']:11.0f}{row['page_faults']:9.0f}{row['peak_rss_mb']:9.0f}"
            )
    print("Speed against stock TRL, from the pairs within rounds (above 1: faster than stock)")
    print(f"{'':13}{'':26}{'median':>8}{'min':>8}{'max':>8}   90% of the median")
    titles = {
        "cpu_s": "cpu, whole loop",
        "wall_s": "wall, whole loop",
        "steady_cpu_s": f"cpu, after {WARMUP_STEPS} steps",
        "steady_wall_s": f"wall, after {WARMUP_STEPS} steps",
    }
    for variant in (OURS, CAREFUL, BARE, AGAIN):
        for figure, title in titles.items() if variant in summary else ():
            row = summary[variant]["speed_against_stock"][figure]
            print(
                f"{variant:13}{title:26}{row['median']:8.3f}{row['min']:8.3f}{row['max']:8.3f}"
                f"   {row['low90']:.3f} to {row['high90']:.3f}"
            )


if __name__ == "__main__":
    main()
