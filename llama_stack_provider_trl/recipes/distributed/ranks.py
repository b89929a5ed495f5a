"""The ranks of a job: the number of this process, and collective operations. With one process they do nothing.

torchrun sets RANK, LOCAL_RANK and WORLD_SIZE; Trainer opens the process group with its arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ...errors import JobFailure
from ...specs.events import Reason

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of collective operations. It must exceed the writing of a large checkpoint; the runner's watchdog ends a job
that hangs, with the stacks of each rank."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Which torchrun sets."""


def rank() -> int:
    """Number of this process, 0 to world_size - 1."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Its number on this machine: which of the visible GPUs is its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Number of those processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))


def check_world_size(ranks: int) -> None:
    """Refuse a number of processes that differs from the job's: every metric would be wrong. Raises JobFailure:
    launch_failed."""
    if world_size() != ranks:
        raise JobFailure(
            Reason.launch_failed,
            f"the job is for {ranks} ranks and WORLD_SIZE is {world_size()}; the launcher must start as many "
            "processes as the job has ranks",
        )


class RankLost(RuntimeError):
    """Raised when another rank has failed, which reports the reason itself."""


def broadcast_number(number: int) -> int:
    """Rank 0's `number`, on every rank. A collective: every rank calls it, in the order of its other collectives."""
    if world_size() == 1:
        return number
    value = torch.tensor([number])
    dist.broadcast(value, src=0, group=cpu_group())
    return int(value)


def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's values, in a tensor in CPU memory. A collective."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0, group=cpu_group())
    return tensor


def any_rank(here: bool) -> bool:
    """Whether `here` is true on any rank. A collective."""
    if world_size() == 1:
        return here
    value = torch.tensor([int(here)])
    dist.all_reduce(value, dist.ReduceOp.MAX, group=cpu_group())
    return bool(value)


def barrier() -> None:
    """Return when every rank has called this."""
    if world_size() > 1:
        dist.barrier(group=cpu_group())


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's `numbers`, by rank. A collective: of equally many on each rank, below 2**63."""
    if world_size() == 1:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own, group=cpu_group())
    return [of_rank.tolist() for of_rank in found]


def gather_all[Value](value: Value, group: Any = None) -> list[Value]:
    """Every rank's `value`, by rank. A collective; values are pickled."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group or cpu_group())
    return values


def on_all_ranks[Value](work: Callable[[], Value], group: Any = None) -> list[Value]:
    """Run `work` on every rank and return the results, by rank. A collective. Raises the exception of `work` on this
    rank; RankLost, where it failed on other ranks only."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = work()
    except BaseException as raised:
        error = raised
    outcomes = gather_all((value, error is None), group)
    if error is not None:
        raise error
    if lost := [rank for rank, (_, is_done) in enumerate(outcomes) if not is_done]:
        raise RankLost(f"rank {lost[0]} has failed")
    return [value for value, _ in outcomes]


def new_cpu_group() -> Any:
    """A group for collectives in another thread; None with one process. A collective."""
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world_size() > 1 else None


def extend_timeouts() -> None:
    """Give every process group of this rank COLLECTIVE_TIMEOUT. DeviceMesh opens those of its dimensions with torch's
    default, 10 minutes under NCCL, within which a slow disk may keep rank 0 busy."""
    if world_size() > 1:
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)


@cache
def cpu_group() -> Any:
    """A group for tensors in CPU memory; None with one process.

    NCCL has none, and a collective on a GPU would wait for its queued work.
    """
    if world_size() == 1:
        return None
    return dist.group.WORLD if dist.get_backend() == "gloo" else new_cpu_group()
