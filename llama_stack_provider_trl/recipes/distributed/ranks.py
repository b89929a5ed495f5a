"""The processes that train one job together: which one this is, and how they agree. Does nothing where there is one.

torchrun sets RANK, LOCAL_RANK and WORLD_SIZE; Trainer opens the process group with its arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ...errors import JobFailure
from ...specs.events import Reason

COLLECTIVE_TIMEOUT = timedelta(days=7)
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


def check_world_size(ranks: int) -> None:
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


class RankLost(RuntimeError):
    """Another rank has failed, and says why itself."""


def broadcast_number(number: int) -> int:
    """Rank 0's `number`, on every rank. Every rank must call it, in the same order as its other collectives."""
    if world_size() == 1:
        return number
    said = torch.tensor([number])
    dist.broadcast(said, src=0, group=cpu_group())
    return int(said)


def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's values, in a tensor in CPU memory. Every rank must call it."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0, group=cpu_group())
    return tensor


def any_rank(here: bool) -> bool:
    """Whether any rank says so. Every rank must call it, in the same order as its other collectives."""
    if world_size() == 1:
        return here
    said = torch.tensor([int(here)])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=cpu_group())
    return bool(said)


def barrier() -> None:
    """Return when every rank has come this far."""
    if world_size() > 1:
        dist.barrier(group=cpu_group())


def gather_all[Value](value: Value, group: Any = None) -> list[Value]:
    """Every rank's `value`, by rank; it is pickled. Every rank must call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group or cpu_group())
    return values


def on_all_ranks[Value](work: Callable[[], Value], group: Any = None) -> list[Value]:
    """Do something on every rank and return what came out on each, by rank.

    Raises:
        whatever `work` has raised here; RankLost, where it failed on another rank alone.
    """
    value: Any = None
    error: BaseException | None = None
    try:
        value = work()
    except BaseException as raised:
        error = raised
    said = gather_all((value, error is None), group)
    if error is not None:
        raise error
    if lost := [rank for rank, (_, is_done) in enumerate(said) if not is_done]:
        raise RankLost(f"rank {lost[0]} has failed")
    return [value for value, _ in said]


def new_cpu_group() -> Any:
    """A group for collectives in another thread, None where there is one process. Every rank must call it."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world_size() > 1 else None


@cache
def cpu_group() -> Any:
    """A group that moves tensors in CPU memory: NCCL cannot, and asking a GPU would wait for all that it has to do.

    None where there is one process.
    """
    if world_size() == 1:
        return None
    return dist.group.WORLD if dist.get_backend() == "gloo" else new_cpu_group()
