"""DPO's reference: the frozen model that the policy is compared with.

It is the base model: under LoRA the policy with its adapter switched off, else a second, frozen copy.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from .models import load_model
from .sharding import is_sharded, shard_frozen
from .spec import JobSpec


class NoReference(PreTrainedModel):
    """An empty model for TRL, which would load a reference of its own, and shard it as one unit."""

    config_class = PreTrainedConfig

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())

    def forward(self) -> None:
        """Never called."""


def is_needed(spec: JobSpec) -> bool:
    """Whether the reference is a model of its own, rather than the policy without its adapter."""
    return spec.dpo is not None and spec.lora is None


def load_reference(spec: JobSpec, device: torch.device, accelerator: Accelerator) -> torch.nn.Module:
    """The reference model, frozen and ready to score; under FSDP2 each rank holds a part of every layer.

    Raises:
        JobFailure: invalid_model, as for the policy.
    """
    model = load_model(spec, device).requires_grad_(False).eval()
    add_fused_lm_head(model, outputs=("log_probs",))
    if is_sharded(spec):
        return shard_frozen(model, accelerator)
    prepared: torch.nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared
