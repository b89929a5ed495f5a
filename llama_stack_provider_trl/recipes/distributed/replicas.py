"""Ranks that each hold a whole model and work on batches of their own: those of jobs that do not train.

What computes a batch must not depend on the number of ranks. So each rank computes as if it were alone: without the
variables of torchrun, by which accelerate and our own recipes find other ranks, and with the GPU that is its own as the
only one. What the ranks have found is exchanged through `Replicas`, over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...specs.events import EventWriter
from ...specs.job import AttemptSpec
from ...system.files import RunDir
from . import ranks
from .peers import connected_peers

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Replicas:
    """The ranks of a job, and which of them this process is. With one all methods do nothing.

    The methods are collectives: every rank calls them in the same order. Values are pickled.
    """

    rank: int = 0
    count: int = 1
    group: Any = None
    """Of all ranks, for values in CPU memory."""

    @property
    def is_first(self) -> bool:
        """Whether this rank reads and writes the files of the job."""
        return self.rank == 0

    def gather[Value](self, value: Value) -> list[Value]:
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_first[Value](self, value: Value) -> Value:
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def deal[Value](self, values: Sequence[Value]) -> Value:
        """This rank's one of the first rank's values, which are as many as there are ranks."""
        if self.count == 1:
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, [*values] if self.is_first else None, src=0, group=self.group)
        return own[0]


ALONE = Replicas()
"""One process."""


@contextmanager
def replicas(attempt: AttemptSpec, writer: EventWriter) -> Iterator[tuple[Replicas, EventWriter]]:
    """Connect the ranks of an attempt. While this is open, each computes as if it were alone. Raises JobFailure:
    launch_failed.

    Yields:
        The ranks, and the writer of this one's events: of ranks beyond the first the heartbeats alone are written. A
        batch of theirs may take longer than that of the first, which waits for it.
    """
    ranks.check_world_size(attempt.world_size)
    if attempt.world_size == 1:
        yield ALONE, writer
        return
    with connected_peers(torch.device("cpu"), attempt.run_dir, writer):
        found = Replicas(ranks.rank(), ranks.world_size(), ranks.cpu_group())
        own = writer if found.is_first else Heartbeats(EventWriter(RunDir(attempt.run_dir).events))
        with _alone():
            yield found, own


class Heartbeats(EventWriter):
    """Writes heartbeats, and no event."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events

    def write(self, event: Any, *, durable: bool = False) -> None:
        """Discard the event."""

    def heartbeat(self) -> None:
        self._events.heartbeat()

    def close(self) -> None:
        self._events.close()


@contextmanager
def _alone() -> Iterator[None]:
    """Hide the other ranks, and their GPUs, while this is open. CUDA is not in use yet."""
    gpus = os.environ.get(_VISIBLE, "").split(",")
    if len(gpus) == ranks.local_world_size():
        os.environ[_VISIBLE] = gpus[ranks.local_rank()]
    hidden = {name: os.environ.pop(name) for name in ranks.VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)  # a failure is reported with the rank
