"""A training program without training, for tests of what stands before it: real events, small checkpoints.

`python` stands in for an interpreter (`train_python`) whose trainings are this file. A job whose name begins with
`held` stops before its third step until its run directory has a file `go`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TRAINER = "llama_stack_provider_trl.recipes.train"
STEPS = 4
"""Of one epoch."""


def python(directory: Path) -> Path:
    """An executable in `directory` that is this interpreter, but for the trainings."""
    path = directory / "fake-python"
    fake = f'if [ "$1 $2" = "-m {TRAINER}" ]; then exec "{sys.executable}" -S "{__file__}" "$3"; fi'
    path.write_text(f'#!/bin/sh\n{fake}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def main(spec_path: Path) -> None:
    spec = json.loads(spec_path.read_text())
    job, run_dir = spec["job"], spec_path.parent
    total, directory = job["n_epochs"] * STEPS, Path(job["checkpoint_dir"])
    with open(run_dir / "events.jsonl", "a", buffering=1) as events:

        def say(event: str, /, **fields: Any) -> None:
            events.write(json.dumps({"type": event, "time": time.time(), **fields}) + "\n")

        def save(kind: str, name: str, step: int) -> None:
            (directory / name).mkdir(parents=True)
            (directory / name / "config.json").write_text("{}")
            path = str(directory / name)
            say("checkpoint", kind=kind, step=step, epoch=-(-step // STEPS), path=path, train_loss=1 / step)

        say("started", pid=os.getpid(), device="cpu", versions={})
        parameters = {"num_rows": 8, "trainable_parameters": 1, "total_parameters": 1}
        say("prepared", total_steps=total, **parameters)
        for step in range(1, total + 1):
            while step == 3 and job["job_uuid"].startswith("held") and not (run_dir / "go").exists():
                time.sleep(0.02)
            metrics = {"loss": 1 / step, "tokens_per_second": 100.0}
            say("progress", step=step, epoch=step / STEPS, metrics=metrics, peak_memory_bytes=1 << 20)
            if step == 2:
                save("step", "checkpoint-2", step)
        save("final", "final", total)
        say("finished", step=total)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
