"""Trainer with the job that it trains: what the classes share that `recipes.trainer.base` puts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer

from ...specs.events import EventWriter
from ...specs.job import JobSpec
from ..data.mixture import Mixture
from ..data.sampling import BatchPlan
from ..distributed import ranks
from ..model.adapters import continues, read_weights
from ..model.fsdp import sharding_on_any_device
from ..model.quantization import keep_adapters_in_fp32
from .averaging import OuterOptimizer, workers_of
from .trl_patches import keep_allocator_cache


class JobTrainer(Trainer):
    """The trainer of a job. Where a trainer of TRL comes after it in the bases, it extends that.

    Args:
        spec: as this attempt's ranks train it.
        mixture: what an epoch takes of each dataset; None: each row of one dataset once.
    """

    outer: OuterOptimizer | None = None
    """With periodic averaging, from the first step on."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        batch_plan: BatchPlan,
        writer: EventWriter,
        mixture: Mixture | None = None,
        source_names: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        with sharding_on_any_device():
            super().__init__(**arguments)
        ranks.extend_timeouts()
        keep_allocator_cache(self)
        if spec.lora and spec.lora.quantize_base:
            keep_adapters_in_fp32(self.model)
            if continues(spec):
                read_weights(spec, self.model)  # TRL has rounded them to bf16
        self.spec, self.batch_plan, self._writer = spec, batch_plan, writer
        self.mixture, self.source_names = mixture, tuple(source_names)
        self.workers = workers_of(spec)
