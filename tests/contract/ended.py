"""A job that has ended, written into a data directory as a training would have left it."""

from __future__ import annotations

from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Event,
    EventWriter,
    Finished,
    Prepared,
    Progress,
    Started,
    read_events,
)
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import RunDir
from tests.fakes import job_spec


def add_ended_job(data_dir: Path) -> None:
    """Add the job `ended`, with everything that the calls can show: events, logs, metrics, a checkpoint."""
    checkpoint = data_dir / "checkpoints" / "ended" / "final"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.bin").write_bytes(bytes(1000))
    run_dir = RunDir(data_dir / "jobs" / "ended" / "attempts" / "1")
    run_dir.root.mkdir(parents=True)
    run_dir.log.write_text("one line\nanother line\n")
    (run_dir.root / "torchrun.log").write_text("a line of torchrun\n")
    events: list[Event] = [
        Started(pid=1, device="cpu", versions={}),
        Prepared(total_steps=2, num_rows=4, trainable_parameters=1, total_parameters=1),
        Progress(step=1, epoch=0.5, metrics={"loss": 2.5, "grad_norm": 0.5}, peak_memory_bytes=1),
        CheckpointSaved(kind="final", step=2, epoch=1, path=checkpoint, train_loss=2.5),
        Finished(step=2),
    ]
    writer = EventWriter(run_dir.events)
    for event in events:
        writer.write(event)
    writer.close()
    store = Store(data_dir / DATABASE)
    store.add_job(job_spec("ended", checkpoint_dir=checkpoint.parent), "digest", ["something the user should know"])
    store.launch("ended", 1, "cpu", run_dir.root)
    store.apply_events("ended", 1, *read_events(run_dir.events, 0, 1 << 20))
    store.transition("ended", 1, JobState.in_progress, JobState.completed)
    store.close()
