"""The events of a training process: one JSON object per line, appended to the attempt's `events.jsonl`.

The file is the only channel from a rank to the supervisor. It is append-only, and each line is written by one `write`.
Readers consume whole lines only, so after a kill -9 the file can be read up to the last whole event.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from ..system.files import open_regular
from .event_fields import (
    MAX_ANSWER,
    MAX_ANSWERS,
    MAX_CALLS,
    MAX_KEY,
    MAX_REWARDS,
    MAX_ROLLOUT,
    MAX_TEXT,
    MAX_VALUES,
    Bytes,
    Count,
    Epochs,
    Message,
    Metrics,
    Name,
    Rate,
    Seconds,
    Tree,
    UsablePath,
    bounded,
    cut,
)

LINE_BYTES = 2 << 20
"""Bytes of the longest line that is read as an event; `prepared` with 18,000 adapted modules has 1.1 MiB."""
_MOST_RANKS = 4096
_CHECKPOINT: dict[str, JsonValue] = {"checkpoint": True}
"""Marks a field that holds the path of a checkpoint. On another machine it has another path."""


class Reason(StrEnum):
    """Why a job failed. The total mapping to status, retryability and advice is `jobs.decisions.states.REASONS`."""

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
    not_promoted = "not_promoted"
    disk_full = "disk_full"
    hung = "hung"
    timed_out = "timed_out"
    node_lost = "node_lost"
    predecessor_failed = "predecessor_failed"
    no_trial_completed = "no_trial_completed"
    no_proposal = "no_proposal"
    no_result = "no_result"
    internal = "internal"


class _Event(BaseModel):
    # Unknown keys survive: an older supervisor reads a newer recipe's file.
    # Built when the first one is read or written: a Llama Stack that trains nothing has none.
    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)

    time: Seconds = Field(default_factory=time.time)
    """Seconds since the epoch."""

    @model_validator(mode="after")
    def _bound_unknown_keys(self) -> Self:
        if self.model_extra:
            bounded(self.model_extra)
        return self


class Started(_Event):
    """The process is up and has read its spec; the model is not loaded yet."""

    type: Literal["started"] = "started"
    pid: Annotated[int, Field(ge=0, le=2**31)]
    device: Name
    """The concrete device: cpu, cuda:0, mps."""
    versions: Annotated[dict[Name, Name], Field(max_length=256)]


class Tokenizing(_Event):
    """Rows are being tokenized, before training."""

    type: Literal["tokenizing"] = "tokenizing"
    rows: Count
    """Rows that are done, of all datasets of the job."""
    total_rows: Count

    def values(self) -> ProgressValues:
        """What this has for the status."""
        return ProgressValues(tokenized_rows=self.rows, total_rows=self.total_rows)


class Prepared(_Event):
    """Model loaded and data tokenized: training starts now."""

    type: Literal["prepared"] = "prepared"
    total_steps: Count
    """Optimizer steps of the whole job."""
    start_step: Count = 0
    """Optimizer steps done in the checkpoint that training resumes from."""
    resumed_from: UsablePath | None = Field(None, json_schema_extra=_CHECKPOINT)
    """That checkpoint. Where the one given to the attempt is damaged, it is an earlier one."""
    num_rows: Count
    """Rows that are trained on, or the pairs or sequences that are made of them, without the dropped ones."""
    tokens_seen: Count | None = None
    """Tokens of the steps in that checkpoint, as `Progress` counts them; other jobs may have done them."""
    trainable_parameters: Count
    total_parameters: Count
    effective: Tree = Field(default_factory=dict)
    """What the recipe decided beyond the spec (attention kernel, adapted modules, truncated rows ...)."""


class Warned(_Event):
    """A warning for the user, written once; training continues."""

    type: Literal["warning"] = "warning"
    message: Message


class Preflighted(_Event):
    """The result of a preflight: what a job would do, and whether it fits."""

    type: Literal["preflight"] = "preflight"
    fits: bool
    """Memory x 1.1 and disk."""
    message: Message
    """What does not fit, and the nearest job that does, as a sentence."""
    data: Tree
    """Counts of rows, of cut and dropped ones, and a histogram of lengths in tokens."""
    steps: Annotated[dict[Name, Count], Field(max_length=256)]
    memory: Tree
    disk: Tree
    warnings: Annotated[list[Message], Field(max_length=1000)]


MOST_SHOWN = 100
"""Examples that a preview shows."""


MOST_TURNS = 50
"""Turns that a preview shows of an example: of longer conversations the counts have the others."""


class PreviewedTurn(BaseModel):
    """A trained turn of a row, or an answer, compared with what inference has before it."""

    model_config = ConfigDict(frozen=True)

    turn: Count
    """Its number in the row's conversation, from 0; of an answer, behind the turns of its prompt."""
    part: Name
    """The part of the row that has it."""
    outcome: Literal["equal", "different", "cut", "unasked"]
    """equal: the tokens before it are those of inference, and the loss begins behind them. cut: they are, but the row
    is cut or dropped, so that not all of it is trained. unasked: a greeting before any question, for which
    inference has no prompt."""
    reason: Message = ""
    """The first token that differs, with both texts; of 100 turns at most."""


class PreviewedRow(BaseModel):
    """A row as it is trained, or one of the pairs or sequences that are made of it: one id, text and mark per token, of
    which the last ones may be left out."""

    model_config = ConfigDict(frozen=True)

    row: Count
    """Its number in the dataset, from 0."""
    dataset_id: Annotated[str, Field(max_length=512)] = ""
    """Of a mixture; empty: there is one dataset."""
    example: Count = 0
    """Which pair or sequence of its row, from 0."""
    examples: Count = 1
    """Pairs or sequences that are made of its row."""
    tokens: Count
    """Before the cut; of a pair, all of prompt, chosen and rejected."""
    outcome: Literal["trained", "cut", "dropped"]
    reason: Message = ""
    """Why it is cut or dropped."""
    parts: dict[Name, Count]
    """Tokens of each part, in their order: `sequence`, or `prompt`, `chosen` and `rejected`."""
    ids: Annotated[list[Annotated[int, Field(ge=-1, le=2**31)]], Field(max_length=10_000)]
    texts: Annotated[list[Annotated[str, cut(64)]], Field(max_length=10_000)]
    trained: Annotated[str, Field(pattern="^[01]*$", max_length=10_000)]
    """1: the loss covers the token."""
    kept: Annotated[str, Field(pattern="^[01]*$", max_length=10_000)]
    """0: the token is cut, or its row dropped."""
    special: Annotated[str, Field(pattern="^[01]*$", max_length=10_000)]
    """1: a special token of the tokenizer."""
    turns: Annotated[list[PreviewedTurn], Field(max_length=MOST_TURNS)] = []
    """Its first trained turns, or its answers, and whether inference has the same before them."""
    roles: Annotated[list[Name], Field(max_length=MOST_TURNS)] = []
    """Of the first turns of its row; empty: it is a text."""
    tools: Count = 0
    """Tools that its row offers."""
    tool_calls: Count = 0
    """Calls in its row."""
    thoughts: Count = 0
    """Answers of its row that have a thought."""
    thoughts_kept: Count = 0
    """Of these thoughts, the ones that are among its tokens; the job, or the chat template, leaves out the others."""
    untrained_answers: Count = 0
    """Answers of its row that have weight 0."""


class InferenceCounts(BaseModel):
    """Trained turns, or answers, of all rows that were read, compared with inference: `equal` + `different` + `cut`
    + `unasked`."""

    model_config = ConfigDict(frozen=True)

    turns: Count
    """Trained turns of SFT; answers of pairs, labelled ones, and prompts that are answered while the job trains."""
    equal: Count
    """What is trained before them is what inference renders, token by token."""
    different: Count
    cut: Count
    """Equal, in rows that are cut to `max_seq_length` or dropped."""
    unasked: Count = 0
    """Greetings: trained before any question, where inference renders them otherwise or not at all."""
    not_compared: Count = 0
    """Further turns: inference would render too many tokens for a preview."""
    first_different: Message = ""
    """The first row and turn that differ, as a sentence; empty: none does."""


class Previewed(_Event):
    """Rows as they are trained."""

    type: Literal["preview"] = "preview"
    max_seq_length: Count
    data: Tree
    """Counts of the rows that were read, and a histogram of their lengths before the cut."""
    rows: Annotated[list[PreviewedRow], Field(max_length=MOST_SHOWN)]
    """One for each pair or sequence of the requested rows."""
    inference: InferenceCounts
    warnings: Annotated[list[Message], Field(max_length=1000)]


class ProgressValues(BaseModel):
    """What the status shows of the last metric point, under these names: the only list of them.

    Each is a field of `Progress`, one of its metrics (a float), or of `Tokenizing`. The store keeps them as JSON. A
    value that a point lacks stays as an earlier event of the attempt had it; one that is no finite number is unknown
    from then on. They have no bounds here: the events have them.
    """

    model_config = ConfigDict(frozen=True)

    epoch: float | None = None
    """Fraction of epochs done, 1.0 after the first."""
    loss: float | None = None
    """Last training loss. None, too: it was no finite number."""
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    rank_memory_bytes: tuple[int, ...] | None = None
    rank_peak_memory_bytes: tuple[int, ...] | None = None
    tokens_seen: int | None = None
    link_mbit_per_s: float | None = None
    parallel_speedup: float | None = None
    tokenized_rows: int | None = None
    """This and `total_rows` are of `Tokenizing`: None where no row was tokenized, or all of them within 2 seconds."""
    total_rows: int | None = None


class Progress(_Event):
    """One metric point, after optimizer step `step` (1-based). Key in the store: (job, step)."""

    type: Literal["progress"] = "progress"
    step: Count
    epoch: Epochs
    """Fraction of epochs done, 1.0 after the first."""
    metrics: Metrics
    """loss (mean since the last point), learning_rate, grad_norm, tokens_per_second, and the trainer's own."""
    peak_memory_bytes: Bytes
    """Of rank 0. cuda: peak allocated. cpu, mps: peak resident set of the process."""
    rank_memory_bytes: Annotated[tuple[Bytes, ...], Field(max_length=_MOST_RANKS)] | None = None
    """What each rank holds now, by rank: as `peak_memory_bytes`, allocated or resident."""
    rank_peak_memory_bytes: Annotated[tuple[Bytes, ...], Field(max_length=_MOST_RANKS)] | None = None
    """`peak_memory_bytes` of each rank, by rank."""
    tokens_seen: Count | None = None
    """Tokens of the steps so far, without padding: of all ranks, epochs, earlier attempts, and both parts of a pair."""
    link_mbit_per_s: Rate | None = None
    """Mbit/s between the nodes, each way, as measured when their ranks met. None: one node, or GPUs."""
    parallel_speedup: Rate | None = None
    """Rows per second of all nodes over those of one, estimated from the link and the steps up to the 20th."""
    not_finite: Annotated[tuple[Name, ...], Field(max_length=256)] = ()
    """Metrics that were no finite number. They are not in `metrics`: JSON has no such numbers."""

    def values(self) -> ProgressValues:
        """What this point has for the status. A metric that is no finite number counts as missing."""
        known: dict[str, Any] = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        known |= {name: getattr(self, name) for name in type(self).model_fields}
        return ProgressValues(**{name: known.get(name) for name in ProgressValues.model_fields})

    def lost(self) -> list[str]:
        """Values of the status that are no finite number at this point: earlier ones no longer hold."""
        wrong = {name for name, value in self.metrics.items() if not math.isfinite(value)}.union(self.not_finite)
        return [name for name in ProgressValues.model_fields if name in wrong]

    def memory(self) -> Iterator[tuple[str, int]]:
        """Memory as metrics of the point: those of rank 0 without a suffix, those of rank N with `_rank_N`."""
        yield "peak_memory_bytes", self.peak_memory_bytes
        for name, ranks in (
            ("memory_bytes", self.rank_memory_bytes),
            ("peak_memory_bytes", self.rank_peak_memory_bytes),
        ):
            for rank, value in enumerate(ranks or ()):
                yield f"{name}_rank_{rank}" if rank else name, value


class Evaluated(_Event):
    """One pass over the validation dataset, after optimizer step `step`."""

    type: Literal["evaluated"] = "evaluated"
    step: Count
    epoch: Epochs
    metrics: Metrics


class Answer(BaseModel):
    """The model's answer to a prompt of the job's `samples`."""

    model_config = ConfigDict(frozen=True)

    text: Annotated[str, cut(MAX_ANSWER)]
    """Without special tokens."""
    tokens: Count
    """Special ones included."""
    complete: bool
    """Whether the model ended it; False: it has `max_new_tokens`."""


class Sampled(_Event):
    """The model's answers to the prompts of the job's `samples`, after optimizer step `step`. Key in the store: (job,
    step, kind).

    Those of a checkpoint are written before it is: a job that resumes from it has them.
    """

    type: Literal["samples"] = "samples"
    kind: Literal["before", "checkpoint", "after"]
    """after: of the weights in `final`."""
    step: Count
    epoch: Epochs
    answers: Annotated[list[Answer], Field(max_length=MAX_ANSWERS)]
    """In the order of the prompts."""


class RolloutCall(BaseModel):
    """A call of a tool in a prompt."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, cut(MAX_KEY)]
    arguments: Annotated[str, cut(1024)]
    """As JSON."""


class RolloutTurn(BaseModel):
    """A turn of a prompt that the model answers while it trains."""

    model_config = ConfigDict(frozen=True)

    role: Name
    content: Annotated[str, cut(4096)]
    reasoning: Annotated[str, cut(4096)] = ""
    calls: Annotated[list[RolloutCall], Field(max_length=MAX_CALLS)] = []
    """The first ones."""


class RolloutAnswer(Answer):
    """One of the answers to a prompt, which train the model."""

    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The weighted sum of the rewards of all sources; None: nothing rewards it, as in distillation."""
    advantage: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """How much better it is than the other answers to the prompt, as it counts in the loss; None: as of `reward`."""
    rewards: Annotated[dict[Name, float], Field(max_length=MAX_REWARDS)] = {}
    """Of the first sources, by their names."""


class RolledOut(_Event):
    """The answers to one of the prompts of optimizer step `step`, with their rewards where there are any, at some of
    the steps. Key in the store: (job, step, rollout)."""

    type: Literal["rollout"] = "rollout"
    step: Count
    epoch: Epochs
    row: Count
    """Number of the prompt's row in the dataset, from 0."""
    prompt: Annotated[list[RolloutTurn], Field(max_length=MAX_ROLLOUT)]
    """Its last turns."""
    earlier_turns: Count = 0
    """Turns before these."""
    answers: Annotated[list[RolloutAnswer], Field(max_length=MAX_ROLLOUT)]
    """The first ones."""
    further_answers: Count = 0


class CheckpointSaved(_Event):
    """A checkpoint directory that is complete on disk, fsynced and loadable; never written earlier."""

    type: Literal["checkpoint"] = "checkpoint"
    kind: Literal["step", "final", "merged"]
    step: Count
    epoch: Count
    """Number of the epoch in which it was saved, 1-based."""
    path: UsablePath = Field(json_schema_extra=_CHECKPOINT)
    train_loss: float | None
    """Mean training loss over the optimizer steps since the previous step checkpoint (or the start)."""
    validation_loss: float | None = None
    perplexity: float | None = None
    """exp(validation_loss), SFT only."""
    verified: Literal["logits", "weights"] | None = None
    """How `final` and `merged` were compared with the trained model after writing. weights: every weight bit for bit.
    logits: the weights, and the logits of the model loaded from the checkpoint."""
    write_seconds: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    """From the copy in memory to the last byte on disk; of `final` and `merged` with their comparison."""
    logits_difference: float | None = None
    """Difference of those logits as a fraction of their scale, caused by rounding."""


class CheckpointDamaged(_Event):
    """A listed step checkpoint differs from what was written. It was set aside and is no longer listed."""

    type: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    path: UsablePath = Field(json_schema_extra=_CHECKPOINT)
    message: Message
    """The damage, and where the checkpoint is kept now."""


class Paused(_Event):
    """The process ends by request (`control.json`): all is saved up to `step`, nothing is exported."""

    type: Literal["paused"] = "paused"
    step: Count


class Finished(_Event):
    """All work is done and on disk. A job without this event did not complete, whatever its exit code."""

    type: Literal["finished"] = "finished"
    step: Count
    result: Tree | None = None
    """What a job that does not train has found or made."""


class Failed(_Event):
    """An exception ended the process."""

    type: Literal["failed"] = "failed"
    rank: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Which of the job's processes it was."""
    reason: Reason
    message: Message
    traceback: Annotated[str, cut(MAX_TEXT, end=True)] = ""
    """The last lines of the traceback; empty where the reason is sufficient."""

    @classmethod
    def stored(cls, found: str | Mapping[str, Any]) -> Self:
        """One that was stored, as JSON or as its fields. One that cannot be read is a failure that says so."""
        try:
            return cls.model_validate_json(found) if isinstance(found, str) else cls.model_validate(found)
        except ValueError as error:
            return cls(reason=Reason.internal, message=f"its `failed` event cannot be read: {error}")


Event = Annotated[
    Started
    | Tokenizing
    | Prepared
    | Warned
    | Preflighted
    | Previewed
    | Progress
    | Evaluated
    | Sampled
    | RolledOut
    | CheckpointSaved
    | CheckpointDamaged
    | Paused
    | Finished
    | Failed,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(defer_build=True))
CHECKPOINT_PATHS: dict[str, str] = {
    kind.model_fields["type"].default: name
    for kind in get_args(get_args(Event)[0])
    for name, field in kind.model_fields.items()
    if field.json_schema_extra is _CHECKPOINT
}
"""Type of an event -> its field that holds the path of a checkpoint."""


class EventWriter:
    """Appends events to a file. Safe against kill -9.

    Rank 0 writes all events. Every other rank writes at most one: its final event, `failed`.

    The file's modification time is the last heartbeat: a runner ends a process without one for `hang_timeout`.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()

    def write(self, event: BaseModel, *, durable: bool = False) -> None:
        """Append one event, whole or not at all; with `durable`, return when it is on disk (checkpoints, results).
        Raises OSError: the disk is full."""
        line = event.model_dump_json().encode() + b"\n"
        with self._lock:  # a second thread writes checkpoints and their events
            written = os.write(self._fd, line)
            try:
                while written < len(line):  # the disk has filled up in the middle of the line
                    written += os.write(self._fd, line[written:])
            except OSError:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise
        if durable:
            os.fsync(self._fd)

    def heartbeat(self) -> None:
        """Record progress without an event."""
        os.utime(self._fd)

    def heartbeat_of_child(self) -> None:
        """Record progress of a child process, for which this one waits."""
        self.heartbeat()

    def close(self) -> None:
        os.close(self._fd)


class NullEventWriter(EventWriter):
    """Writes nothing: the event writer of every rank but the first, whose events are those of all.

    Args:
        events: gets the heartbeats of children: the first rank, which waits for this one, has none then.
    """

    def __init__(self, events: EventWriter | None = None) -> None:
        self._events = events

    def write(self, event: BaseModel, *, durable: bool = False) -> None:
        """Discard the event."""

    def heartbeat(self) -> None:
        """Do nothing."""

    def heartbeat_of_child(self) -> None:
        if self._events is not None:
            self._events.heartbeat()

    def close(self) -> None:
        """Do nothing."""


def parse_event(line: bytes) -> Event:
    """Read one line. Raises ValueError: the line is not an event, or exceeds one of the bounds above; the message names
    which."""
    if len(line) > LINE_BYTES:
        raise ValueError(f"it has {len(line)} bytes, an event has {LINE_BYTES} at most")
    # Before parsing: a line of commas takes 50 times its size as objects, and more with an error per value.
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:MAX_KEY]
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def event_lines(data: bytes) -> list[bytes]:
    """The lines of what `EventWriter` wrote. (`splitlines` would part a line at carriage returns too.)"""
    return [line for line in data.split(b"\n") if line]


def read_events(path: Path, offset: int = 0, limit: int = 1 << 20) -> tuple[list[Event], int]:
    """Read the whole lines of `path` from byte `offset` on: about `limit` bytes, and at least one line.

    A line that is not an event becomes a warning; the lines after it are read. Returns the events and the offset after
    the last whole line.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            data = file.read(limit)
            while b"\n" not in data and len(data) <= LINE_BYTES and (more := file.read(limit)):
                data += more
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    if not end and len(data) > LINE_BYTES:
        # Without a number, so that the parts of one endless line give one warning.
        return [Warned(message=f"a line of {path.name} is longer than {LINE_BYTES} bytes and was left out")], (
            offset + len(data)
        )
    events: list[Event] = []
    begin = offset
    for line in data[:end].split(b"\n")[:-1]:
        if line:
            events.append(_event_or_warning(line, path, begin))
        begin += len(line) + 1
    return events, offset + end


def iter_events(path: Path) -> Iterator[Event]:
    """All events of a file that is no longer written."""
    offset = 0
    while True:
        events, after = read_events(path, offset)
        yield from events
        if after == offset:
            return
        offset = after


def _event_or_warning(line: bytes, path: Path, begin: int) -> Event:
    try:
        return parse_event(line)
    except ValueError as error:
        return Warned(message=f"the line at byte {begin} of {path.name} is not an event and was left out: {error}")
