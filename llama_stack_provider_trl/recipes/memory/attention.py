"""The memory of attention that a trace on a CPU does not see: what flash kernels add up in their backward pass."""

from __future__ import annotations

from typing import Any

from ...specs.job import JobSpec
from ..fast.attention import accumulator_bytes
from ..fast.layout import Layout
from ..model.loading import load_config
from .trace import Batch


def flash_bytes(spec: JobSpec, batch: Batch, kind: str) -> int:
    """Bytes for which each attention of a backward pass has a use of its own; 0: it is not by flash kernels, or not in
    a fixed order.

    Raises:
        JobFailure: invalid_model.
    """
    if kind != "cuda" or spec.compute.dtype == "fp32" or not spec.compute.padding_free:
        return 0
    config: Any = load_config(spec.source).get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return 0  # it has no attention
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = batch.groups or ((0, (batch.tokens,)),) * batch.sequences
    return accumulator_bytes(Layout(groups).sizes(), heads, head_size)
