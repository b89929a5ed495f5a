"""Speed of whole trainings on real rows: ours on each of its paths, TRL as users call it, and a bare loop.

    .venv/bin/python -m benchmarks.training --algorithm both --json training.json --plot training

Rows are not padded to one length beforehand, so what differs is what each variant makes of them. Every round measures
each variant once, in an order of its own; each measurement is a fresh process, forked from one that has only imported
the libraries. All have the same model, rows, order of rows, effective batch and number of optimizer steps; the first
losses and the held-out loss at the end are compared. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import begin, finish, parser_of, spread
from recipe_throughput import SAME_LOSS, enter_environment, import_libraries, in_child
from training_inputs import data_file, model_of, prepare_inputs
from training_variants import Clock, run_stock, time_training, train_bare
from training_variants import run_ours as train_ours

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import Algorithm

Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    kind: str
    """ours, trl or bare."""
    algorithms: tuple[str, ...] = ("sft", "dpo")
    accumulation: int = 1
    """Micro steps of an optimizer step, whose rows they divide."""
    is_cached: bool = False
    """The reference's log-probabilities are there when training begins."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of JobSpec, or of TRL's arguments."""

    def rows(self, options: argparse.Namespace) -> int:
        """Rows of a micro step."""
        return int(options.batch) if self.accumulation == 1 else 1


BASELINE = "TRL"
VARIANTS = {
    "ours": Variant("ours"),
    "ours, cached reference": Variant("ours", ("dpo",), is_cached=True),
    "ours, padded": Variant("ours", fields={"padding_free": False}),
    "ours, micro batches of 1": Variant("ours", accumulation=-1),
    "ours, micro batches of 1 merged": Variant("ours", accumulation=-1, fields={"merge_micro_batches": "always"}),
    BASELINE: Variant("trl"),
    "TRL, micro batches of 1": Variant("trl", accumulation=-1),
    "TRL, precomputed reference": Variant("trl", ("dpo",), is_cached=True, fields={"precompute_ref_log_probs": True}),
    "TRL, micro batches of 1, precomputed": Variant(
        "trl", ("dpo",), accumulation=-1, is_cached=True, fields={"precompute_ref_log_probs": True}
    ),
    "bare loop": Variant("bare"),
}
"""In TRL 1.16 DPO has no packing, and SFT's packing and padding_free need flash attention to keep rows apart."""
HELD_OUT = 16
"""Rows after those that are trained on."""


def main() -> None:
    options = parse_options()
    enter_environment(options)
    import_libraries()
    import torch  # noqa: F401

    report = begin(
        *("torch", "transformers", "trl"),
        options=options,
        data=[str(data_file(name)) for name in _algorithms(options)],
        threads=options.threads,
        malloc=options.allocator,
    )
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        for algorithm in _algorithms(options):
            folder = Path(scratch) / algorithm
            folder.mkdir()
            report[algorithm] = measure_algorithm(folder, algorithm, options)
    finish(report, options.json)
    if options.plot:
        plot(report, options.plot)


def _algorithms(options: argparse.Namespace) -> tuple[Algorithm, ...]:
    return ("sft", "dpo") if options.algorithm == "both" else (options.algorithm,)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--algorithm", choices=("sft", "dpo", "both"), default="both")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of one measurement")
    parser.add_argument("--batch", type=int, default=4, help="rows (sft) or pairs (dpo) per optimizer step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--model", type=Path, help="a checkpoint; left out: a random Llama of 10M parameters")
    parser.add_argument("--full-rows", action="store_true", help="every row is as long as --max-length")
    parser.add_argument("--allocator", choices=("tuned", "default"), default="tuned", help="glibc malloc's settings")
    parser.add_argument("--seed", type=int, default=0, help="decides the rows, the order within rounds, the bootstrap")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="writes OUT.png and OUT.svg; needs matplotlib")
    parser.set_defaults(device="cpu", logging_steps=1, lora=0)
    options = parser.parse_args()
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: expected a directory with config.json")
    return options


# --- Rounds -----------------------------------------------------------------------------------------------------------


def measure_algorithm(folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of an algorithm: the runs, and their summary."""
    tokens = in_child(folder / "setup", partial(prepare, folder, algorithm, options))["tokens"]
    variants = {name: one for name, one in VARIANTS.items() if algorithm in one.algorithms}
    variants = {name: one for name, one in variants.items() if not options.variants or name in options.variants}
    if any(one.kind == "ours" and one.is_cached for one in variants.values()):
        in_child(folder / "cache", partial(fill_cache, folder, options))
    runs: list[Result] = []
    for number in range(options.rounds):
        for name in random.Random(f"{options.seed}-{number}").sample(list(variants), len(variants)):
            run = folder / f"{number}-{name.replace(' ', '-')}"
            result = in_child(run, partial(measure, variants[name], folder, algorithm, options))
            shutil.rmtree(run)
            runs.append({"round": number, "variant": name, **result})
            print(
                f"  {algorithm} round {number + 1}/{options.rounds} {name:38} wall {result['wall_s']:7.2f} s  "
                f"cpu {result['cpu_s']:7.2f} s  peak {result['peak_mb']:6.0f} MB",
                flush=True,
            )
    check_same_work(runs, SAME_LOSS[options.dtype])
    summary = summarize(runs, tokens, options)
    print_summary(algorithm, summary, options)
    return {"runs": runs, "summary": summary, "real_tokens": tokens}


def prepare(folder: Path, algorithm: Algorithm, options: argparse.Namespace, out: Path) -> None:
    """Write the model, the rows that every variant trains on, and the held-out rows after them."""
    steps = options.steps + -(-HELD_OUT // options.batch)
    more = argparse.Namespace(**{**vars(options), "steps": steps, "sample_rows": True})
    prepare_inputs(folder, algorithm, more, out)
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    trained = options.steps * options.batch
    (folder / "rows.jsonl").write_text("".join(lines[:trained]))
    (folder / "held_out.jsonl").write_text("".join(lines[trained : trained + HELD_OUT]))
    columns = ("input_ids",) if algorithm == "sft" else ("prompt_ids", "chosen_ids", "prompt_ids", "rejected_ids")
    rows = _prepared(folder / "rows.jsonl", folder, algorithm, options)
    tokens = sum(len(row[column]) for row in rows for column in columns)
    out.write_text(json.dumps(json.loads(out.read_text()) | {"tokens": tokens}))


def check_same_work(runs: list[Result], tolerance: float) -> None:
    """Hold all runs to the losses of TRL: of every optimizer step, and of held-out rows at the end.

    Raises:
        AssertionError: a variant has learnt something else.
    """
    first = next((run for run in runs if run["variant"] == BASELINE), runs[0])
    for run in runs:
        pairs = [*zip(run["losses"], first["losses"], strict=True), (run["held_out"], first["held_out"])]
        worst = max(abs(one - two) / abs(two) for one, two in pairs)
        assert worst < tolerance, f"{run['variant']}: a loss differs from {first['variant']} by {worst:.1e} (relative)"


def summarize(runs: list[Result], tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of each variant, and its ratios to the TRL variants within each round."""
    summary: dict[str, Any] = {}
    names = list(dict.fromkeys(run["variant"] for run in runs))
    by_round = {name: {run["round"]: run for run in runs if run["variant"] == name} for name in names}
    for name in names:
        own = list(by_round[name].values())
        wall = statistics.median(run["wall_s"] for run in own)
        summary[name] = {
            **{key: statistics.median(run[key] for run in own) for key in ("cpu_s", "peak_mb", "first_step_s")},
            "wall_s": wall,
            "rows_per_s": options.steps * options.batch / wall,
            "tokens_per_s": tokens / wall,
            "held_out": statistics.median(run["held_out"] for run in own),
            "speed_against": {
                other: spread([by_round[other][run["round"]]["wall_s"] / run["wall_s"] for run in own])
                for other in names
                if VARIANTS[other].kind != "ours" and other != name
            },
            "memory_against": {
                other: statistics.median(run["peak_mb"] / by_round[other][run["round"]]["peak_mb"] for run in own)
                for other in names
                if VARIANTS[other].kind != "ours" and other != name
            },
        }
    return summary


def print_summary(algorithm: str, summary: dict[str, Any], options: argparse.Namespace) -> None:
    unit = "pairs/s" if algorithm == "dpo" else "rows/s"
    print(f"\n{algorithm.upper()}: medians of {options.rounds} rounds, {options.steps} steps of {options.batch}")
    print(f"| variant | {unit} | real tokens/s | cpu s | peak MB above the import | first step s | held-out loss |")
    print("|---|---|---|---|---|---|---|")
    for name, row in summary.items():
        print(
            f"| {name} | {row['rows_per_s']:.3f} | {row['tokens_per_s']:.0f} | {row['cpu_s']:.2f} | "
            f"{row['peak_mb']:.0f} | {row['first_step_s']:.2f} | {row['held_out']:.4f} |"
        )
    others = [name for name in summary if VARIANTS[name].kind != "ours"]
    print(f"\n| speed (median, min to max within rounds) and peak memory against | {' | '.join(others)} |")
    print(f"|---|{'---|' * len(others)}")
    for name, row in summary.items():
        cells = []
        for other in others:
            if speed := row["speed_against"].get(other):
                memory = row["memory_against"][other]
                cells.append(f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f}), {memory:.2f}")
            else:
                cells.append("")
        print(f"| {name} | {' | '.join(cells)} |")


# --- One measurement, in a child --------------------------------------------------------------------------------------


def measure(variant: Variant, folder: Path, algorithm: Algorithm, options: argparse.Namespace, out: Path) -> None:
    """Train once; writes the result and ends the process after the last step."""
    import torch
    from transformers.trainer_utils import set_seed

    torch.set_num_threads(options.threads)
    set_seed(42)
    began, before = time.perf_counter(), _peak_mb()
    report = partial(report_run, out, folder, algorithm, options, began, before)
    if variant.kind == "bare":
        return report(*train_bare(folder, algorithm, options))
    time_training(lambda trainer, clock, losses: report(trainer.model, clock, losses))
    if variant.kind == "ours":
        run_ours(variant, folder, algorithm, options, out.parent)
    else:
        batches = {
            "per_device_train_batch_size": (micro := variant.rows(options)),
            "gradient_accumulation_steps": options.batch // micro,
        }
        run_stock(folder, algorithm, options, out.parent, **batches, **variant.fields)
    raise RuntimeError("train() was never called")


def report_run(
    out: Path,
    folder: Path,
    algorithm: Algorithm,
    options: argparse.Namespace,
    began: float,
    before_mb: float,
    model: Any,
    clock: Clock,
    losses: list[float],
) -> None:
    peak = _peak_mb()
    start, first, end = clock.readings[0], clock.readings[1], clock.readings[-1]
    result = {
        "wall_s": end[1] - start[1],
        "cpu_s": end[0] - start[0],
        "first_step_s": first[1] - began,
        "peak_mb": peak - before_mb,
        "page_faults": end[2] - start[2],
        "losses": losses,
        "held_out": held_out_loss(model, folder, algorithm, options),
    }
    out.write_text(json.dumps(result))


def held_out_loss(model: Any, folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> float:
    """Negative log-probability per token of held-out answers (of pairs: the chosen ones), a row at a time."""
    import torch
    import torch.nn.functional as F

    total, count = 0.0, 0
    model.eval()
    for row in _prepared(folder / "held_out.jsonl", folder, algorithm, options):
        if algorithm == "dpo":
            ids, start = row["prompt_ids"] + row["chosen_ids"], len(row["prompt_ids"])
            labels = [-100] * start + row["chosen_ids"]
        else:
            ids, labels = row["input_ids"], row["labels"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        total += float(F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        count += sum(label != -100 for label in labels[1:])
    return total / count


def run_ours(variant: Variant, folder: Path, algorithm: Algorithm, options: argparse.Namespace, run_dir: Path) -> None:
    """The training process of a job with the defaults of requests."""
    from llama_stack_provider_trl.specs.job import ReferenceSpec

    reference = ReferenceSpec(precompute=True, cache=folder / "reference") if variant.is_cached else None
    batches = {"batch_size": (micro := variant.rows(options)), "gradient_accumulation_steps": options.batch // micro}
    train_ours(folder, algorithm, options, run_dir, reference, **batches, **variant.fields)


def fill_cache(folder: Path, options: argparse.Namespace, out: Path) -> None:
    """Have a job compute the reference's log-probabilities, and end it before its first step."""
    from transformers import Trainer

    def end(trainer: Any, *args: Any, **kwargs: Any) -> None:
        out.write_text("{}")
        os._exit(0)

    Trainer.train = end
    run_ours(VARIANTS["ours, cached reference"], folder, "dpo", options, out.parent)


# --- Rows and surroundings --------------------------------------------------------------------------------------------


def _prepared(path: Path, folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    from llama_stack_provider_trl.recipes.data.prepare import read_examples, tokenize_dpo, tokenize_sft

    tokenizer = AutoTokenizer.from_pretrained(model_of(folder))
    if algorithm == "sft":
        return tokenize_sft(read_examples(path, "sft"), tokenizer, options.max_length).collect()[0]
    return tokenize_dpo(read_examples(path, "dpo"), tokenizer, options.max_length).collect()[0]


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plot(report: dict[str, Any], out: Path) -> None:
    """Bars of the speed of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    algorithms = [name for name in ("sft", "dpo") if name in report]
    figure, axes = pyplot.subplots(len(algorithms), 1, figsize=(9, 3 * len(algorithms)), squeeze=False)
    for axis, algorithm in zip(axes[:, 0], algorithms, strict=True):
        summary = report[algorithm]["summary"]
        names = list(summary)[::-1]
        colors = ["tab:blue" if VARIANTS[name].kind == "ours" else "tab:gray" for name in names]
        axis.barh(names, [summary[name]["rows_per_s"] for name in names], color=colors)
        axis.set_xlabel("pairs per second" if algorithm == "dpo" else "rows per second")
        axis.set_title(algorithm.upper())
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(suffix), dpi=150)


if __name__ == "__main__":
    main()
