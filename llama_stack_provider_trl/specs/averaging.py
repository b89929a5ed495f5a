"""Periodic averaging: workers train on their own, and meet every so many optimizer steps (DiLoCo, arXiv:2311.08105)."""

from __future__ import annotations

from pydantic import Field

from .bases import Frozen


class AveragingSpec(Frozen):
    """Local SGD with an outer step. A worker is a rank, or under HYBRID_SHARD the ranks of a node."""

    interval: int = Field(gt=0)
    """Optimizer steps that each worker trains without the others."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """Of the step from the last common weights towards the mean of the workers' weights."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    """Nesterov's momentum; without `outer_momentum` it changes nothing."""

    def meets(self, step: int, total_steps: int) -> bool:
        """Whether all workers hold the same weights after this optimizer step."""
        return step % self.interval == 0 or step >= total_steps


def passes_multiple(step: int, interval: int, of: int) -> bool:
    """Whether a multiple of `of` lies in the last `interval` steps, `step` included."""
    return step // of > max(0, step - interval) // of


def ring_bytes(num_bytes: int, ranks: int) -> int:
    """What each of the ranks sends, and receives, while a ring reduces so many bytes over them."""
    return 2 * (ranks - 1) * num_bytes // ranks
