"""How long training pauses for a step checkpoint, and what memory it takes, on a model of about 100M parameters.

    .venv/bin/python benchmarks/checkpoints.py --json out.json

Trains once with checkpoints in the background, as jobs do, and once waiting for each of them; every figure is read from
the events that a job writes. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import REPOSITORY, begin, finish, parser_of

TARGET = 5.0
"""Percent of the time of 100 steps that one checkpoint may cost."""
FORWARDED = ("steps", "save-steps", "batch", "tokens", "threads")
FIRST = 5
"""Steps left out at the beginning: memory is taken and pages are touched for the first time."""


def main() -> None:
    options = parse_options()
    if options.child:
        return train(options)
    report = begin("torch", "transformers", "trl", "safetensors", options=options)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.scratch) as scratch:
        work = Path(scratch)
        for mode in ("background", "waiting"):
            arguments = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in FORWARDED]
            subprocess.run(
                [sys.executable, "-W", "ignore", __file__, f"--child={mode}", f"--scratch={work}", *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if not options.verbose else None,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)},
            )
            report[mode] = figures(work / mode)
            print_figures(mode, report[mode])
    percent = report["background"]["stall_percent_of_100_steps"]
    finish(report, options.json)
    if statistics.median(percent) >= TARGET:
        sys.exit(
            f"the target is missed: a checkpoint costs {statistics.median(percent):.1f} % of 100 steps, not {TARGET} %"
        )


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=20, help="optimizer steps between checkpoints")
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written; left out: the temporary directory")
    parser.add_argument("--verbose", action="store_true", help="show what the trainings print")
    parser.add_argument("--child", choices=("background", "waiting"), help=argparse.SUPPRESS)
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """One job in this process."""
    sys.path.insert(0, str(REPOSITORY))
    from training_inputs import train_tokenizer

    from llama_stack_provider_trl.recipes.checkpoint import step as checkpoints
    from llama_stack_provider_trl.recipes.train import main as train_main
    from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, JobSpec, OptimizerSpec
    from llama_stack_provider_trl.system.files import RunDir, put_rows
    from tests.tiny import save_llama

    root = options.scratch / options.child
    root.mkdir()
    model = options.scratch / "model"
    if not model.is_dir():
        save_llama(
            model,
            train_tokenizer(),
            vocab_size=16384,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=12,
            tie_word_embeddings=True,
        )
    text = "What is the time? " * options.tokens
    blob = put_rows(root, [{"prompt": str(row), "completion": text} for row in range(options.steps * options.batch)])
    spec = JobSpec.of(
        job_uuid="benchmark",
        model=str(model),
        output_name="benchmark",
        checkpoint_dir=root / "checkpoints",
        dataset=DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows),
        n_epochs=1,
        batch_size=options.batch,
        max_seq_length=options.tokens,
        dtype="fp32",
        optimizer=OptimizerSpec(learning_rate=1e-5),
        save_steps=options.save_steps,
        device="cpu",
        num_threads=options.threads,
    )
    if options.child == "waiting":
        save = checkpoints.Saver.save

        def save_and_wait(self: checkpoints.Saver, *args: Any) -> None:
            save(self, *args)
            self.wait()

        checkpoints.Saver.save = save_and_wait  # type: ignore[method-assign]
    paths = RunDir(root)
    paths.spec.write_text(AttemptSpec(job=spec, attempt=1, run_dir=root).model_dump_json())
    if train_main(["train", str(paths.spec)]):
        raise SystemExit("the training failed; --verbose shows why")


def figures(root: Path) -> dict[str, Any]:
    """Step times from one job's events. A step's time is from the metric point before to its own."""
    sys.path.insert(0, str(REPOSITORY))
    from llama_stack_provider_trl.specs.events import CheckpointSaved, Progress, iter_events
    from llama_stack_provider_trl.system.files import RunDir

    events = list(iter_events(RunDir(root).events))
    points = [event for event in events if isinstance(event, Progress)]
    saved = [event for event in events if isinstance(event, CheckpointSaved) and event.kind == "step"]
    at = {point.step: point.time for point in points}
    took = {step: at[step] - at[step - 1] for step in at if step - 1 in at and step > FIRST}
    # A checkpoint begins after its step's metric point; it delays every step that begins before it is there.
    beside = {event.step: [step for step in took if step > event.step and at[step - 1] < event.time] for event in saved}
    in_the_way = {step for steps in beside.values() for step in steps}
    usual = statistics.median(took[step] for step in took if step not in in_the_way)
    stalls = [sum(took[step] - usual for step in steps) for steps in beside.values()]
    first = saved[0].step
    return {
        "checkpoint_mb": round(sum(path.stat().st_size for path in saved[-1].path.rglob("*") if path.is_file()) / 1e6),
        "checkpoints": len(saved),
        "step_s": round(usual, 3),
        "step_beside_a_checkpoint_s": round(statistics.median(took[step] for step in in_the_way), 3),
        "written_after_s": [round(event.time - at[event.step], 2) for event in saved],
        "stall_s": [round(stall, 2) for stall in stalls],
        "stall_percent_of_100_steps": [round(stall / usual, 2) for stall in stalls],  # 100 stall / (100 usual)
        "peak_mb_before": round(max(point.peak_memory_bytes for point in points if point.step <= first) / 1e6),
        "peak_mb": round(points[-1].peak_memory_bytes / 1e6),
    }


def print_figures(mode: str, found: dict[str, Any]) -> None:
    print(f"\n{mode}: {found['checkpoints']} checkpoints of {found['checkpoint_mb']} MB, step {found['step_s']} s")
    for name in ("step_beside_a_checkpoint_s", "written_after_s", "stall_s", "stall_percent_of_100_steps"):
        print(f"  {name}: {found[name]}")
    print(f"  peak resident memory: {found['peak_mb_before']} MB before the first, {found['peak_mb']} MB after all")


if __name__ == "__main__":
    main()
