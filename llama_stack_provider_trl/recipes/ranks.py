"""The processes that train one job together: which one this is, and how they agree. Does nothing where there is one.

torchrun sets RANK, LOCAL_RANK and WORLD_SIZE; Trainer opens the process group with its arguments.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..errors import JobFailure
from .events import Reason

PATIENCE = timedelta(days=7)
"""How long ranks wait for each other. The runner's watchdog ends what hangs, and says what each rank was doing; waiting
for a large checkpoint must not end first."""


def rank() -> int:
    """Number of this process, 0 to world_size - 1."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Its number on this machine: which of the visible GPUs is its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))


def expect(ranks: int) -> None:
    """Refuse to train with another number of ranks than the job has: every number would be wrong.

    Raises:
        JobFailure: launch_failed.
    """
    if world_size() != ranks:
        raise JobFailure(
            Reason.launch_failed,
            f"the job is for {ranks} ranks and WORLD_SIZE says {world_size()}; the launcher must start as many "
            "processes as the job has ranks",
        )


def agree(number: int) -> int:
    """Rank 0's `number`, on every rank. Every rank must call it, in the same order as its other collectives."""
    if world_size() == 1:
        return number
    said = torch.tensor([number])
    dist.broadcast(said, src=0, group=_cpu_group())
    return int(said)


def wait_for_all() -> None:
    """Return when every rank has come this far."""
    if world_size() > 1:
        dist.barrier(group=_cpu_group())


@cache
def _cpu_group() -> Any:
    """A group that moves tensors in CPU memory: NCCL cannot, and asking a GPU would wait for all that it has to do."""
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=PATIENCE)
