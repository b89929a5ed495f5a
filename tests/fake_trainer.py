"""Plays the program that trains, for servers without torch: their `train_python` is `fake_trainer(directory)`.

The real supervisor starts it by the real launcher; it writes events, which the supervisor reads as it does real ones,
and a directory per checkpoint, a step every 0.02 s, one step per epoch. Jobs whose name contains `held` stop before
their last step until their run directory has a file `go`. Those whose name contains `slow` take half a second per step.
Those whose name contains `real` are trained by this environment's own interpreter, and so is every other use of an
interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

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
    job = json.loads(spec.read_text())["job"]
    name, steps, home = job["job_uuid"], job["train"]["n_epochs"], Path(job["checkpoint_dir"])
    events = os.open(spec.parent / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _write(events, "started", pid=os.getpid(), device=job["device"], versions={})
    rows = job["data"]["dataset"]["num_rows"]
    _write(events, "prepared", total_steps=steps, num_rows=rows, trainable_parameters=1, total_parameters=1)
    for step in range(1, steps + 1):
        while step == steps and "held" in name and not (spec.parent / "go").exists():
            time.sleep(STEP)
        time.sleep(SLOW_STEP if "slow" in name else STEP)
        values = {"metrics": {"loss": 1.0 / step}, "peak_memory_bytes": 0, "tokens_seen": step * 10}
        _write(events, "progress", step=step, epoch=float(step), **values)
        if step == 1:
            _save(events, home, "step", step, f"checkpoint-{step}")
    _save(events, home, "final", steps, "final")
    _write(events, "finished", step=steps)


def _save(events: int, home: Path, kind: str, step: int, name: str) -> None:
    path = home / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    values = {"path": str(path), "train_loss": 1.0 / step, "write_seconds": 0.2}
    _write(events, "checkpoint", kind=kind, step=step, epoch=step, **values)


def _write(events: int, kind_of_event: str, **values: Any) -> None:
    """An event of specs/events.py, whose models take 0.2 s of CPU time to import."""
    os.write(events, json.dumps({"time": time.time(), "type": kind_of_event, **values}).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
