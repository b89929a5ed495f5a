"""LoRA layers whose base product and low-rank update are one node of the graph.

PEFT composes a layer of five operations, for which autograd adds ten. Here the update is added within the product that
computes it, in the forward pass to the base product and in the backward pass to the gradient of the input, and
`scaling` is a factor of these products. Of the forward pass the layer's input is kept, and its product with A is
computed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear, LoraLayer
from torch.autograd.function import once_differentiable

from ...specs.job import JobSpec


def why_as_peft(spec: JobSpec, device: str) -> str:
    """Why the LoRA layers of a job compute as PEFT has them; empty: they need not.

    Args:
        device: its type.
    """
    lora = spec.lora
    if lora is None or lora.method != "lora":
        return "its adapters are not LoRA"
    if lora.use_dora:
        return "DoRA scales the base product"
    if lora.dropout:
        return "dropout is between input and update"
    if lora.quantize_base or spec.train.qat:
        return "the base model is quantized"
    if not spec.fuses_lora(device):
        option = spec.compute.fuse_lora
        return f"fuse_lora is {option!r}" + (f" and the device is {device}" if option == "auto" else "")
    return ""


def fuse_lora(model: torch.nn.Module, spec: JobSpec, device: str) -> str:
    """Have the LoRA layers of a job's model compute by `LoraProduct`, where that has the numbers of PEFT's own.

    Layers on others than plain linear ones, and on those with hooks, stay as they are. The
    others compute as PEFT has them wherever a forward asks for something else than one adapter without dropout, bias
    and variant, or the dtypes differ outside of autocast.

    Args:
        device: its type.

    Returns:
        What was done, for the job's record.
    """
    if reason := why_as_peft(spec, device):
        return f"not used: {reason}"
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    fused = [layer for layer in layers if _is_plain(layer)]
    for layer in fused:
        layer.__class__ = FusedLinear
    return f"used in {len(fused)} of {len(layers)} layers"


class LoraProduct(torch.autograd.Function):
    """x W^T + bias + scaling * (x A^T) B^T, where W and the bias have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """
        Args:
            states: x, shape (..., inputs).
            weight: W, shape (outputs, inputs).
            bias: shape (outputs,).
            down: A, shape (rank, inputs).
            up: B, shape (outputs, rank).
            dtype: of the products, and of the result.

        Returns:
            Shape (..., outputs).
        """
        rows = states.reshape(-1, states.shape[-1]).to(dtype)
        down_cast, up_cast = down.to(dtype), up.to(dtype)
        # A frozen weight in another dtype is cast again, which takes less memory than its copy. Where nothing is cast
        # the parameters themselves are saved, which FSDP2 gathers again.
        ctx.save_for_backward(rows, weight, down_cast, up_cast)
        ctx.scaling, ctx.dtypes, ctx.shape = scaling, (states.dtype, down.dtype, up.dtype), states.shape
        product = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
        product.addmm_(rows @ down_cast.t(), up_cast.t(), alpha=scaling)
        return product.view(*states.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up = ctx.saved_tensors
        to_states, _, _, to_down, to_up, *_ = ctx.needs_input_grad
        of_states, of_down, of_up = ctx.dtypes
        gradient = gradients[0].reshape(-1, len(weight)).to(rows.dtype)
        scaled = _product(gradient, up, ctx.scaling) if to_states or to_down else None  # shape (tokens, rank)
        found: list[torch.Tensor | None] = [None, None, None]
        if to_states and scaled is not None:
            found[0] = (gradient @ weight.to(rows.dtype)).addmm_(scaled, down).view(ctx.shape).to(of_states)
        if to_down and scaled is not None:
            found[1] = (scaled.t() @ rows).to(of_down)
        if to_up:
            found[2] = _product(gradient.t(), rows @ down.t(), ctx.scaling).to(of_up)
        return found[0], None, None, found[1], found[2], None, None


def _product(one: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * one @ other, in one operation: with beta 0 what `empty` finds in memory is not read."""
    return one.new_empty(one.shape[0], other.shape[1]).addmm_(one, other, beta=0, alpha=factor)


def _is_plain(layer: Any) -> bool:
    base = layer.base_layer
    if type(layer) is not Linear or type(base) is not torch.nn.Linear or layer.fan_in_fan_out:
        return False
    return not (base._forward_hooks or base._forward_pre_hooks or any(one.requires_grad for one in base.parameters()))


class FusedLinear(Linear):
    """PEFT's, by `LoraProduct`. A class: torch's compiler would make a graph for each object that has a forward of its
    own."""

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = None if args or kwargs else _active(self)
        if name is None:
            return super().forward(states, *args, **kwargs)
        base, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        kind, dtype = states.device.type, states.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif not dtype == base.weight.dtype == down.dtype == up.dtype:
            return super().forward(states)
        return LoraProduct.apply(states, base.weight, base.bias, down, up, self.scaling[name], dtype)


def _active(layer: Any) -> str | None:
    """The one adapter that a layer adds, where that is two products and no more; None: it is something else."""
    names = layer.active_adapters
    if len(names) != 1 or layer.disable_adapters or layer.merged_adapters:
        return None
    (name,) = names
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return None
    return name if isinstance(layer.lora_dropout[name], torch.nn.Identity) else None
