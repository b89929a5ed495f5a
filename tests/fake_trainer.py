"""Plays the program that trains, for servers without torch: their `train_python` is `fake_trainer(directory)`.

The real supervisor starts it by the real launcher; it writes real events and a directory per checkpoint, a step every
0.02 s, one step per epoch. Jobs whose name contains `held` stop before their last step until their run directory has a
file `go`. Those whose name contains `slow` take half a second per step. Those whose name contains `real` are trained by
this environment's own interpreter, and so is every other use of an interpreter.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

TRAINS = ("llama_stack_provider_trl.recipes.train", "llama_stack_provider_trl.recipes.distributed.torchrun")
STEP, SLOW_STEP = 0.02, 0.5


def fake_trainer(directory: Path) -> Path:
    """Write the interpreter that plays."""
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    program.chmod(0o755)
    return program


def main(arguments: list[str]) -> None:
    spec = Path(arguments[-1])
    if arguments[:1] != ["-m"] or arguments[1] not in TRAINS or "real" in spec.parts[-4]:
        os.execv(sys.executable, [sys.executable, *arguments])
    from llama_stack_provider_trl.specs.events import EventWriter, Finished, Prepared, Progress, Started
    from llama_stack_provider_trl.specs.job import AttemptSpec
    from llama_stack_provider_trl.system.files import RunDir

    attempt = AttemptSpec.model_validate_json(spec.read_text())
    job, steps = attempt.job, attempt.job.n_epochs
    events = EventWriter(RunDir(spec.parent).events)
    events.write(Started(pid=os.getpid(), device=job.device, versions={}))
    rows = job.dataset.num_rows
    events.write(Prepared(total_steps=steps, num_rows=rows, trainable_parameters=1, total_parameters=1))
    for step in range(1, steps + 1):
        while step == steps and "held" in job.job_uuid and not (spec.parent / "go").exists():
            time.sleep(STEP)
        time.sleep(SLOW_STEP if "slow" in job.job_uuid else STEP)
        events.write(
            Progress(
                step=step, epoch=float(step), metrics={"loss": 1.0 / step}, peak_memory_bytes=0, tokens_seen=step * 10
            )
        )
        if step == 1:
            events.write(_checkpoint(job.checkpoint_dir, "step", step, f"checkpoint-{step}"), durable=True)
    events.write(_checkpoint(job.checkpoint_dir, "final", steps, "final"), durable=True)
    events.write(Finished(step=steps), durable=True)


def _checkpoint(home: Path, kind: str, step: int, name: str):  # type: ignore[no-untyped-def]
    from llama_stack_provider_trl.specs.events import CheckpointSaved

    path = home / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    return CheckpointSaved(kind=kind, step=step, epoch=step, path=path, train_loss=1.0 / step, write_seconds=0.2)


if __name__ == "__main__":
    main(sys.argv[1:])
