"""The workers of a job with periodic averaging: ranks that train on their own, or groups of ranks of one node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from . import ranks


@dataclass(frozen=True)
class Workers:
    """How the ranks of an attempt form workers; rank r is in worker r // size."""

    size: int = 1
    """Ranks of each."""

    @property
    def count(self) -> int:
        return ranks.world_size() // self.size

    @property
    def own(self) -> int:
        return ranks.rank() // self.size

    @property
    def position(self) -> int:
        return ranks.rank() % self.size

    @cached_property
    def within(self) -> Any:
        """The group of the ranks of this rank's worker. A collective."""
        groups = [
            dist.new_group(list(range(first, first + self.size)), timeout=ranks.COLLECTIVE_TIMEOUT)
            for first in range(0, ranks.world_size(), self.size)
        ]
        return groups[self.own]

    @cached_property
    def _counterparts(self) -> Any:
        """The group of this rank and the ranks of other workers that hold the same part of the model. A collective."""
        if self.size == 1:
            return None  # all ranks
        groups = [
            dist.new_group(list(range(position, ranks.world_size(), self.size)), timeout=ranks.COLLECTIVE_TIMEOUT)
            for position in range(self.size)
        ]
        return groups[self.position]

    def sum_within(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's worker, in place. A collective."""
        if self.size > 1:
            dist.all_reduce(values, group=self.within)
        return values

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all workers, in place. A collective."""
        if self.count > 1:
            dist.all_reduce(values, group=self._counterparts)
            values /= self.count
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """The first worker's values, in place. A collective."""
        if self.count > 1:
            dist.broadcast(values, src=self.position, group=self._counterparts)
        return values
