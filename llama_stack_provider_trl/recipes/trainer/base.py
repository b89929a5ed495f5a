"""The base of all our trainers: Trainer, with a class of ours for each topic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ..fast.lora import fuse_lora
from .data_order import DataOrder
from .later_metrics import LaterMetrics
from .optimization import Optimization
from .source_losses import SourceLosses
from .step_checkpoints import StepCheckpoints
from .trl_patches import every_position, fast_head, fuse_head, has_fast_head, weighs_tokens_alike


class RecipeTrainer(StepCheckpoints, DataOrder, Optimization, SourceLosses, LaterMetrics):
    """What the trainers of all methods have. Those on a trainer of TRL derive from that, too, after this.

    Args:
        arguments: of the classes for each topic.
    """

    ref_model: torch.nn.Module | None = None
    """The model that DPO's policy is compared with, where it is not the policy itself."""
    head_outputs: tuple[str, ...]
    """What the fused head computes per token; empty: the model has no head over the vocabulary."""
    keeps_gathered = False
    """Of ranks that shard the model: whether its blocks stay gathered while it answers prompts."""
    fused_lora: str
    """Which LoRA layers compute as one operation, and why no others; empty: the job has none."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.head_outputs:
            fuse_head(self.policy, outputs=self.head_outputs)
        self.fused_lora = fuse_lora(self.model, self.spec, self.args.device.type) if self.spec.lora else ""

    @property
    def policy(self) -> Any:
        """The model that is trained, without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def scoring(self) -> AbstractContextManager[None]:
        """While this is open, forwards score batches with the head that is fastest on this device."""
        kind = self.args.device.type
        if has_fast_head(self.spec, kind):
            return fast_head(kind=kind, alike=weighs_tokens_alike(self.spec))
        return every_position() if self.spec.compute.padding_free else nullcontext()
