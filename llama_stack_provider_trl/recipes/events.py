"""What a training process tells the world: one JSON object per line, appended to the attempt's `events.jsonl`.

The file is the only channel from a rank to the supervisor. It is append-only, a line is written by one `write`, and a
reader consumes whole lines only, so a kill -9 at any moment leaves a file that can be read to the last whole event.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Reason(StrEnum):
    """Why a job failed. The total mapping to status, retryability and advice is `jobs.states.REASONS`."""

    invalid_dataset = "invalid_dataset"
    invalid_model = "invalid_model"
    invalid_request = "invalid_request"
    launch_failed = "launch_failed"
    rank_failed = "rank_failed"
    out_of_memory = "out_of_memory"
    diverged = "diverged"
    does_not_fit = "does_not_fit"
    not_sharded = "not_sharded"
    export_failed = "export_failed"
    disk_full = "disk_full"
    hung = "hung"
    timed_out = "timed_out"
    node_lost = "node_lost"
    no_result = "no_result"
    internal = "internal"


class _Event(BaseModel):
    # Unknown keys survive: an older supervisor reads a newer recipe's file.
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    time: float = Field(default_factory=time.time)
    """Seconds since the epoch."""


class Started(_Event):
    """The process is up and has read its spec; the model is not loaded yet."""

    type: Literal["started"] = "started"
    pid: int
    device: str
    """The concrete device: cpu, cuda:0, mps."""
    versions: dict[str, str]


class Prepared(_Event):
    """Model loaded and data tokenized: training starts now."""

    type: Literal["prepared"] = "prepared"
    total_steps: int
    """Optimizer steps of the whole job."""
    start_step: int = 0
    """Optimizer steps that a checkpoint brought along: training goes on with the next one."""
    resumed_from: Path | None = None
    """That checkpoint; not the one that the attempt was given, where that is damaged."""
    num_rows: int
    """Rows that are trained on, after dropping those that cannot be."""
    trainable_parameters: int
    total_parameters: int
    effective: dict[str, Any] = Field(default_factory=dict)
    """What the recipe decided beyond the spec (attention kernel, adapted modules, truncated rows ...)."""


class Warned(_Event):
    """Something the user should know, said once; training goes on."""

    type: Literal["warning"] = "warning"
    message: str


class Preflighted(_Event):
    """What a job would do, and whether it fits: the result of a preflight, in place of training."""

    type: Literal["preflight"] = "preflight"
    fits: bool
    """Memory x 1.1 and disk."""
    message: str
    """What does not fit and the nearest that does, in a sentence."""
    data: dict[str, Any]
    """Rows, what was cut or dropped, and a histogram of lengths in tokens."""
    steps: dict[str, int]
    memory: dict[str, Any]
    disk: dict[str, Any]
    warnings: list[str]


class Progress(_Event):
    """One metric point, after optimizer step `step` (1-based). Key in the store: (job, step)."""

    type: Literal["progress"] = "progress"
    step: int
    epoch: float
    """Fraction of epochs done, 1.0 after the first."""
    metrics: dict[str, float]
    """loss (mean since the last point), learning_rate, grad_norm, tokens_per_second, and the trainer's own."""
    peak_memory_bytes: int
    """cuda: peak allocated. cpu, mps: peak resident set of the process."""


class Evaluated(_Event):
    """One pass over the validation dataset, after optimizer step `step`."""

    type: Literal["evaluated"] = "evaluated"
    step: int
    epoch: float
    metrics: dict[str, float]


class CheckpointSaved(_Event):
    """A directory that is complete on disk, fsynced and loadable. Nothing is announced before that."""

    type: Literal["checkpoint"] = "checkpoint"
    kind: Literal["step", "final", "merged"]
    step: int
    epoch: int
    """Number of the epoch in which it was saved, 1-based."""
    path: Path
    train_loss: float | None
    """Mean training loss over the optimizer steps since the previous step checkpoint (or the start)."""
    validation_loss: float | None = None
    perplexity: float | None = None
    """exp(validation_loss), SFT only."""
    verified: Literal["logits", "weights"] | None = None
    """What `final` and `merged` were compared in with the trained model after they were written: every weight bit for
    bit, or that and the logits of the model loaded from there."""
    logits_difference: float | None = None
    """How far those logits are off, as a fraction of their own scale: rounding."""


class CheckpointDamaged(_Event):
    """A step checkpoint that was announced is not what was written, and was set aside: it is listed no longer."""

    type: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    path: Path
    message: str
    """What is wrong with it, and where it is now."""


class Paused(_Event):
    """Told to stop (`control.json`): all is saved up to `step`, nothing is exported, the process ends."""

    type: Literal["paused"] = "paused"
    step: int


class Finished(_Event):
    """Everything was done and written. A job without this event did not complete, whatever its exit code."""

    type: Literal["finished"] = "finished"
    step: int


class Failed(_Event):
    """The recipe caught what ended it."""

    type: Literal["failed"] = "failed"
    rank: int = 0
    """Which of the job's processes it was."""
    reason: Reason
    message: str
    traceback: str = ""
    """The last lines of the traceback; empty where the reason alone says it."""


Event = Annotated[
    Started
    | Prepared
    | Warned
    | Preflighted
    | Progress
    | Evaluated
    | CheckpointSaved
    | CheckpointDamaged
    | Paused
    | Finished
    | Failed,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


class EventWriter:
    """Appends events to a file. Safe against kill -9.

    One process writes, rank 0; of the others only the last word (`failed`) may be in between, as one line.

    The file's modification time says when the process last got anything done: a runner ends one that stands still.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()

    def write(self, event: BaseModel, *, durable: bool = False) -> None:
        """Append one event, whole or not at all; `durable` waits until it is on disk (checkpoints, results).

        Raises:
            OSError: the disk is full.
        """
        line = event.model_dump_json().encode() + b"\n"
        with self._lock:  # checkpoints are announced by the thread that writes them
            written = os.write(self._fd, line)
            try:
                while written < len(line):  # the disk has filled up in the middle of the line
                    written += os.write(self._fd, line[written:])
            except OSError:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise
        if durable:
            os.fsync(self._fd)

    def beat(self) -> None:
        """Say that work goes on, without an event."""
        os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Silent:
    """The event writer of every rank but the first: what they would say, rank 0 says."""

    def write(self, event: BaseModel, *, durable: bool = False) -> None:
        """Say nothing."""

    def beat(self) -> None:
        """Say nothing."""


def parse_event(line: bytes) -> Event:
    """Raises ValueError (pydantic's ValidationError): it is none."""
    return _ADAPTER.validate_json(line)


def read_events(path: Path, offset: int = 0, limit: int = 1 << 20) -> tuple[list[Event], int]:
    """Read the whole lines of `path` from byte `offset` on: about `limit` bytes, and at least one line.

    Returns:
        The events and the offset after the last whole line. A line that is not an event raises pydantic's
        `ValidationError`: the file is ours, so that is a bug and not a user's mistake.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limit)
            while b"\n" not in data and (more := file.read(limit)):  # one line longer than the limit
                data += more
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return [_ADAPTER.validate_json(line) for line in data[:end].splitlines() if line], offset + end


def iter_events(path: Path) -> Iterator[Event]:
    """All events of a file that nobody writes any more."""
    offset = 0
    while True:
        events, after = read_events(path, offset)
        yield from events
        if after == offset:
            return
        offset = after
