"""Norms, rotary embeddings and activations of a model's blocks by Liger's Triton kernels (arXiv:2410.10989).

torch computes each of them by three to seven kernels that read and write whole tensors; Liger's are one each, without a
compiler that a short job would wait for.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from ...specs.job import JobSpec
from ...system.compiler import missing_compiler
from ..model.fsdp import blocks_of
from ..model.quantization import library
from .compiled import why_eager

PROVEN = ("llama", "qwen2", "qwen3")
"""Types of models whose numbers were compared with those of transformers' own operations."""
_ACTIVATIONS = ("silu", "swish")
"""Names of the activation that Liger's kernel has."""


def why_not_liger(spec: JobSpec, device: str) -> str:
    """Why a job's blocks compute by torch's operations; empty: Liger's kernels compute, if its model's can be.

    Args:
        device: its type.
    """
    if spec.compute.liger_kernels != "always":
        return f"liger_kernels is {spec.compute.liger_kernels!r}"
    if device != "cuda":
        return f"the device is {device}"
    if not why_eager(spec, device):
        return "blocks are compiled"
    missing = missing_compiler()
    return f"Triton cannot compile here: {missing}" if missing else ""


def use_liger(model: PreTrainedModel, spec: JobSpec, device: str) -> str:
    """Have Liger's kernels compute in the blocks of a model, where a job requests it.

    Args:
        model: without adapters, and before its networks compute in tiles.
        device: its type.

    Returns:
        What was done, for the job's record.

    Raises:
        JobFailure: invalid_request, where the package is not installed.
    """
    if reason := why_not_liger(spec, device) or _why_model(model):
        return f"not used: {reason}"
    kernels = library("liger_kernel.ops", "liger_kernels 'always'", "liger")
    blocks: list[Any] = list(blocks_of(model).values())
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, kernels, module)
    for block in blocks:
        block.mlp.forward = partial(_network, kernels, block.mlp)
    for name in {type(block.self_attn).__module__ for block in blocks}:
        # Attention calls this function of its module: for all models of this process, the reference among them.
        sys.modules[name].apply_rotary_pos_emb = partial(_rotated, kernels)  # type: ignore[attr-defined]
    return f"used in {len(blocks)} of {len(blocks)} blocks"


def _why_model(model: PreTrainedModel) -> str:
    config: Any = model.config
    if config.model_type not in PROVEN:
        return f"they are proven for {', '.join(PROVEN)}, and this model is a {config.model_type}"
    return "" if config.hidden_act in _ACTIVATIONS else f"its activation is {config.hidden_act}"


def _norm(kernels: ModuleType, module: Any, states: torch.Tensor) -> torch.Tensor:
    # Not in place: a gradient may be another node's, too.
    return kernels.LigerRMSNormFunction.apply(states, module.weight, module.variance_epsilon, 0.0, "llama", False)


def _network(kernels: ModuleType, network: Any, states: torch.Tensor) -> torch.Tensor:
    gated = kernels.LigerSiLUMulFunction.apply(network.gate_proj(states), network.up_proj(states))
    return network.down_proj(gated)


def _rotated(
    kernels: ModuleType, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.LigerRopeFunction.apply(query, key, cos, sin)
