"""Losses of products in 8 bits against those of fp32, on real rows: the same job with `float8`, and in another order.

    .venv/bin/python benchmarks/float8.py --json float8.json

All jobs have compiled blocks, whose graphs eager kernels compute: no C++ is compiled, and losses are what is measured.
A CPU emulates the products in fp32, from numbers that are rounded to 8 bits as on a GPU. The job in another order of
rows shows how far apart losses are for no reason. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from training_inputs import conversational_rows

from llama_stack_provider_trl.specs.events import Evaluated, Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from tests.ranks import Ranks, forked_ranks
from tests.tiny import tiny_decoder
from tests.training import job_spec, of_kind

WITHIN = 0.01
"""Share of the held-out loss in fp32 by which that with products in 8 bits may be higher."""
HELD_OUT = 96
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FP32, FLOAT8, OTHER_ORDER = "fp32", "float8", "fp32, another order of rows"
VARIANTS: dict[str, dict[str, Any]] = {FP32: {}, FLOAT8: {"float8": "always"}, OTHER_ORDER: {"seed": 7}}
Result = dict[str, Any]


def main() -> int:
    options = parse_options()
    report = begin("torch", "transformers", "trl", "torchao", options=options)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="float8-") as scratch, forked_ranks() as ranks:
        report["runs"] = {
            name: measured(ranks, spec_of(Path(scratch, str(number)), options, changes), name)
            for number, (name, changes) in enumerate(VARIANTS.items())
        }
    missed = print_report(report["runs"])
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="to begin with (a random Llama of 1M parameters)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rows", type=int, default=896, help="that are trained on in an epoch, at most 896")
    parser.add_argument("--batch", type=int, default=16, help="rows of an optimizer step")
    parser.add_argument("--tokens", type=int, default=128, help="of a row at most")
    return parser.parse_args()


def spec_of(folder: Path, options: argparse.Namespace, changes: dict[str, Any]) -> JobSpec:
    rows = list(conversational_rows("sft"))
    random.Random(0).shuffle(rows)
    fields: dict[str, Any] = {
        "rows": rows[HELD_OUT : HELD_OUT + options.rows],
        "validation_rows": rows[:HELD_OUT],
        "compile_blocks": "always",
        "batch_size": options.batch,
        "n_epochs": options.epochs,
        "train_on_input": True,  # the prompt of some rows is all that fits
        "max_seq_length": options.tokens,
        "keep_last": 1,
        "optimizer": OptimizerSpec(learning_rate=options.learning_rate, warmup_steps=20, scheduler="cosine"),
    }
    return job_spec(folder, options.model or tiny_decoder("llama", **SIZES), **{**fields, **changes})


def measured(ranks: Ranks, spec: JobSpec, name: str) -> Result:
    """The losses of a job: of each step, and of the held-out rows at the end of each epoch."""
    began = time.monotonic()
    run_dir = spec.checkpoint_dir.parent / "run"
    codes, events = ranks.run(run_dir, spec, before="tests.process.compiling.compile_once_to_eager_kernels")
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {[event.message for event in of_kind(events, Failed)]}")
    held_out = {event.step: event.metrics["eval_loss"] for event in of_kind(events, Evaluated)}
    found = {
        "record": of_kind(events, Prepared)[0].effective["float8"],
        "losses": [event.metrics["loss"] for event in of_kind(events, Progress)],
        "held_out": list(held_out.values()),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(f"  {name}: held-out loss {found['held_out'][-1]:.4f}, {found['seconds']} s ({found['record']})", flush=True)
    return found


def print_report(runs: dict[str, Result]) -> bool:
    """Print the losses of each epoch; returns whether those with products in 8 bits are too high."""
    epochs = len(runs[FP32]["held_out"])
    print(f"\n| loss | {' | '.join(f'{name} | against fp32' if name != FP32 else name for name in runs)} |")
    print("|---|" + "---|" * (2 * len(runs) - 1))
    for epoch in range(epochs):
        for kind in ("training", "held out"):
            values = [_loss(run, kind, epoch, epochs) for run in runs.values()]
            apart = [f"{values[0]:.4f}", *(f"{value:.4f} | {value / values[0] - 1:+.2%}" for value in values[1:])]
            print(f"| {kind}, epoch {epoch + 1} | {' | '.join(apart)} |")
    pairs = list(zip(runs[FP32]["losses"], runs[FLOAT8]["losses"], strict=True))
    most = max(abs(other / one - 1) for one, other in pairs)
    print(f"\nlosses of {len(pairs)} steps: float8 at most {most:.2%} from fp32")
    return runs[FLOAT8]["held_out"][-1] > runs[FP32]["held_out"][-1] * (1 + WITHIN)


def _loss(run: Result, kind: str, epoch: int, epochs: int) -> float:
    if kind == "held out":
        return float(run["held_out"][epoch])
    losses, steps = run["losses"], len(run["losses"]) // epochs
    return float(sum(losses[epoch * steps : (epoch + 1) * steps]) / steps)


if __name__ == "__main__":
    sys.exit(main())
