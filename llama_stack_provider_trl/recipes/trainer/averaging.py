"""The outer optimizer of periodic averaging: SGD with Nesterov momentum on the difference that an interval made.

Each worker trains `interval` optimizer steps from the same weights. The mean over all workers of (common weights -
own weights) is the gradient of one outer step, whose result all workers continue with (DiLoCo, arXiv:2311.08105).
Common weights and momentum are on the device of the weights, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator

from ...specs.averaging import AveragingSpec, ring_bytes
from ...specs.job import JobSpec
from ..checkpoint.optimizer_state import read_momentum
from ..distributed import ranks
from ..distributed.workers import Workers
from ..model.fsdp import is_sharded, local

BUCKET = 1 << 23
"""Elements that are reduced at a time: 32 MiB."""


class OuterOptimizer:
    """Steps the weights of all workers together.

    A collective to make: all workers begin with the first one's weights.

    Args:
        weights: the trained weights by name; of sharded ones this rank's parts are stepped.
        checkpoint: has the momentum, where training resumes from one that was saved with it.
    """

    def __init__(
        self,
        spec: AveragingSpec,
        weights: Mapping[str, torch.Tensor],
        workers: Workers,
        checkpoint: Path | None = None,
    ) -> None:
        self.spec, self.workers = spec, workers
        self._weights = dict(weights)
        self.exchanged_bytes = 0
        """That this rank has sent, and received, since they were last taken."""
        with torch.no_grad():
            for weight in self._weights.values():
                local(weight).copy_(workers.broadcast(local(weight).contiguous()))
        self._common = {name: local(weight).to(torch.float32, copy=True) for name, weight in self._weights.items()}
        zeros = partial(torch.zeros_like, dtype=torch.float32, requires_grad=False)
        self.momentum = {name: zeros(weight) for name, weight in self._weights.items()}
        """As large as the weights, and sharded as they are."""
        if checkpoint is not None:
            read_momentum(self.momentum, checkpoint)

    @torch.no_grad()
    def step(self) -> None:
        """Average what the workers trained, and step. A collective; all hold the same weights afterwards."""
        for names in self._buckets():
            parts = [local(self._weights[name]) for name in names]
            trained = [self._common[name] - part for name, part in zip(names, parts, strict=True)]
            gradients = torch.cat([part.reshape(-1) for part in trained])
            del trained
            self.workers.average(gradients)
            self.exchanged_bytes += ring_bytes(gradients.nbytes, self.workers.count)
            sizes = [part.numel() for part in parts]
            for name, part, gradient in zip(names, parts, gradients.split(sizes), strict=True):
                part.copy_(self._step_one(name, gradient.view_as(part)))

    def take_bytes(self) -> int:
        """The bytes that were exchanged since the last call."""
        taken, self.exchanged_bytes = self.exchanged_bytes, 0
        return taken

    def _step_one(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        spec, momentum = self.spec, local(self.momentum[name])
        momentum.mul_(spec.outer_momentum).add_(gradient)
        update = gradient.add(momentum, alpha=spec.outer_momentum) if spec.nesterov else momentum
        return self._common[name].sub_(update, alpha=spec.outer_learning_rate)

    def _buckets(self) -> Iterator[Sequence[str]]:
        """Names of weights that are reduced together: of as many elements as fit, at least one weight."""
        names: list[str] = []
        filled = 0
        for name, weight in self._weights.items():
            size = local(weight).numel()
            if names and filled + size > BUCKET:
                yield names
                names, filled = [], 0
            names.append(name)
            filled += size
        if names:
            yield names


def workers_of(spec: JobSpec) -> Workers:
    """The workers of this attempt's ranks: without averaging all ranks are one."""
    if spec.train.averaging is None:
        return Workers(ranks.world_size())
    return Workers(ranks.local_world_size() if is_sharded(spec) else 1)


def without_ddp(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """While this is open, accelerate prepares models without DDP, which would reduce gradients in every step."""
    return patch.object(accelerator, "prepare_model", partial(accelerator.prepare_model, evaluation_mode=True))
