"""Whether a job over several nodes trains faster than on one, by its own steps."""

from __future__ import annotations

import statistics
import time

from ...specs.job import JobSpec
from ...specs.parallel import Advice, Exchange, verdict_after
from ..distributed import ranks

STEPS = 20
"""Optimizer steps of an attempt after which its nodes are judged by them."""
_WARM_UP = 2
"""Steps that are not counted: the first ones allocate memory."""


class ParallelCheck:
    """Measures the first steps of an attempt over several nodes."""

    def __init__(self, mbit_per_s: float) -> None:
        self.mbit_per_s = mbit_per_s
        self.speedup: float | None = None
        self._seconds: list[float] = []
        self._began: float | None = None

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self) -> bool:
        """Count the step; returns whether it is the last one that is needed."""
        if self._began is None or len(self._seconds) == STEPS:
            return False
        self._seconds.append(time.perf_counter() - self._began)
        self._began = None
        return len(self._seconds) == STEPS

    def conclude(self, exchange: Exchange) -> Advice:
        found = verdict_after(exchange, statistics.median(self._seconds[_WARM_UP:]), self.mbit_per_s)
        self.speedup = round(found.speedup, 3)
        return found


def exchange_of(spec: JobSpec, trainable: int, total: int, reference: int, gradient_sync: str | None) -> Exchange:
    """What the nodes of a job on CPUs exchange in a step.

    Args:
        trainable: parameters that are trained; `total`: all of the model, `reference`: of a sharded reference.
        gradient_sync: when accumulated gradients are reduced; None: nothing is accumulated.
    """
    per_node = ranks.local_world_size()
    return Exchange(
        nodes=ranks.world_size() // per_node,
        trainable=trainable,
        total=total,
        reference=reference,
        ranks_per_node=per_node,
        strategy=spec.sharding.strategy if spec.sharding else "NO_SHARD",
        micro_steps=spec.train.gradient_accumulation_steps,
        interval=spec.train.averaging.interval if spec.train.averaging else 1,
        keeps_whole_gradients=gradient_sync != "micro_step",
        weight_bytes=4 if spec.compute.dtype == "fp32" else 2,
    )
