"""The implementation of attention, and whether it needs the padding mask of a batch that is padded on the right."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec

_PACKAGES = {
    "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
}


def without_cudnn() -> None:
    """Have torch compute attention by its flash kernels, and not by cuDNN's, in the rest of this process.

    torch prefers cuDNN's on Hopper GPUs, and cuDNN makes a plan for every new shape, which takes 2 to 3 ms on the CPU
    for each call of a block. Batches have rows of many lengths: steps of SFT took 0.54 s with it and 0.10 s without,
    steps of DPO 0.75 and 0.21 s (4 rows of up to 1,024 tokens, 0.5B, H200, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def set_attention(spec: JobSpec, model: PreTrainedModel) -> None:
    """Set the implementation of attention that the job names. Raises JobFailure: invalid_request, where it is not
    installed, or the model does not support it."""
    name = spec.compute.attn_implementation
    if name is None:
        return
    if spec.uses_flash_kernels and spec.compute.dtype == "fp32":
        problem = "flash kernels compute in bf16 or fp16, and the job's dtype is fp32"
    elif name in _PACKAGES and not _PACKAGES[name][1]():
        # transformers would fetch a kernel from a hub, which is code that the operator has not chosen.
        problem = f"{_PACKAGES[name][0]} is not installed for this GPU in the environment that trains"
    else:
        try:
            model.set_attn_implementation(name)
            if model.config._attn_implementation == name:
                return
            problem = "its code has an attention of its own"
        except (ValueError, ImportError, RuntimeError) as error:
            problem = " ".join(str(error).split())[:300]
    raise JobFailure(
        Reason.invalid_request,
        f"attn_implementation is {name!r}, and {type(model).__name__} cannot use it here: {problem}. Leave the option "
        "out, or send 'sdpa'.",
    )


def passes_padding_mask(spec: JobSpec, model: torch.nn.Module, kind: str) -> bool:
    """Whether the padding mask is passed to the model.

    With causal attention a token attends only to those before it, so padding behind a row changes none of its numbers.
    Without a mask, attention skips the blocks above the diagonal, does not repeat grouped keys and values, and may use
    flash kernels.

    Args:
        kind: of the device: cuda, mps or cpu.
    """
    if spec.compute.padding_free:
        return False
    if spec.compute.attention_mask == "always" or not is_causal_throughout(model) or balances_experts(model):
        return True
    # Without a mask transformers leaves grouped keys and values to torch, whose kernels for them on cuda are flash, in
    # bf16 (on older GPUs not in fp16), and one that holds all scores.
    return kind == "cuda" and spec.compute.dtype != "bf16" and not spec.uses_flash_kernels and _groups_queries(model)


def is_causal_throughout(model: torch.nn.Module) -> bool:
    """Whether every block is known to have causal attention: False for code of a model's own and for hybrid models."""
    config: Any = model.config
    attention = [module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    known = all(module.is_causal and type(module).__module__.startswith("transformers.") for module in attention)
    return known and len(attention) == config.get_text_config().num_hidden_layers


def _groups_queries(model: torch.nn.Module) -> bool:
    """Whether several heads of queries share keys and values."""
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return getattr(text, "num_key_value_heads", None) not in (None, heads)


def balances_experts(model: torch.nn.Module) -> bool:
    """Whether the loss has a mean over all tokens that are not padding, by the mask."""
    config: Any = model.config
    return bool(getattr(config.get_text_config(), "output_router_logits", False))
