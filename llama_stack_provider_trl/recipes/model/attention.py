"""Whether a model needs the padding mask of a batch whose rows are padded on the right."""

from __future__ import annotations

from typing import Any

import torch

from ...specs.job import JobSpec


def passes_padding_mask(spec: JobSpec, model: torch.nn.Module) -> bool:
    """Whether the padding mask is passed to the model.

    With causal attention a token sees only those before it, so padding behind a row changes none of its numbers.
    Without a mask, attention skips the blocks above the diagonal, does not repeat grouped keys and values, and may use
    flash kernels.
    """
    return spec.attention_mask == "always" or not _is_causal_throughout(model) or _balances_experts(model)


def _is_causal_throughout(model: torch.nn.Module) -> bool:
    """Whether every block is known to have causal attention: False for code of a model's own and for hybrid models."""
    config: Any = model.config
    attention = [module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    known = all(module.is_causal and type(module).__module__.startswith("transformers.") for module in attention)
    return known and len(attention) == config.get_text_config().num_hidden_layers


def _balances_experts(model: torch.nn.Module) -> bool:
    """Whether the loss has a mean over all tokens that are not padding, by the mask."""
    config: Any = model.config
    return bool(getattr(config.get_text_config(), "output_router_logits", False))
