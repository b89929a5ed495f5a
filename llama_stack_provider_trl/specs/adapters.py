"""What is trained in place of every weight, or around it: adapters, and quantization-aware training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .bases import Frozen

Quantizer = Literal["Int8DynActInt4WeightQATQuantizer", "Int4WeightOnlyQATQuantizer"]
PeftMethod = Literal["lora", "ia3", "vera"]


class LoraSpec(Frozen):
    """Low-rank adapters (Hu et al., arXiv:2106.09685), with DoRA (arXiv:2402.09353) on request; or adapters of another
    kind in the same places."""

    method: PeftMethod = "lora"
    """ia3 (arXiv:2205.05638): a learned factor for each output of a module, in MLP blocks for each input. vera
    (arXiv:2310.11454): matrices that are random, fixed and shared by all modules, with two learned vectors in each. The
    fields that a method lacks are at their defaults, rank and alpha at 1."""

    target_modules: tuple[str, ...]
    """Module name suffixes in Hugging Face's vocabulary, such as `q_proj`."""
    mlp: bool = False
    """Add the three (or two) linear layers of every MLP block, whatever the architecture calls them."""
    rank: int = Field(gt=0)
    alpha: int = Field(gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    """The probability with which an input of an adapter is 0 in training (PEFT's `lora_dropout`)."""
    use_rslora: bool = False
    """Rank-stabilized (arXiv:2312.03732): scaled by alpha / sqrt(rank), not alpha / rank."""
    use_dora: bool = False
    quantize_base: bool = False
    """Hold the linear layers of the frozen base in 4 bits: NF4, constants quantized too (QLoRA, arXiv:2305.14314)."""


class QatSpec(Frozen):
    """Quantization-aware training: torchao's fake quantization of the linear layers of every block."""

    quantizer_name: Quantizer
    """torchao's names (torchao.quantization.qat): weights in int4 per group, with activations in int8 per token, or
    with activations as they are."""
    group_size: int = Field(gt=1)
    """Weights that share a scale: consecutive inputs of one output. Must divide the input width of every layer."""
