"""Products of linear layers in 8 bits (torchao's float8), in blocks that torch's compiler turns into few kernels.

Each token has a scale of its own, in the forward pass and in its gradient, and the gradient of a weight is a product in
the dtype of the computation (torchao's recipe `rowwise_with_gw_hp`): what a token gets does not depend on the rows that
share its batch. Scales are made anew for each product, so that no checkpoint holds any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ...specs.job import JobSpec
from ..model.fsdp import blocks_of
from ..model.quantization import library

USED = "used"
"""How the record of products in 8 bits begins."""
_RECIPE = "rowwise_with_gw_hp"
_CAPABILITY = (8, 9)
"""Of a GPU, from which on it multiplies numbers of 8 bits."""
_MULTIPLE = 16
"""Of both sizes of a layer: the condition of `torch._scaled_mm`."""

_is_open = False


@contextmanager
def products_in_float8() -> Iterator[None]:
    """While this is open, the layers that `use_float8` has changed multiply in 8 bits. Else they compute as they did:
    answers that are generated, one token at a time, would wait for the cast of each weight, and an export is compared
    with the plain model that it is."""
    global _is_open
    _is_open = True
    try:
        yield
    finally:
        _is_open = False


def use_float8(
    model: PreTrainedModel, spec: JobSpec, device: torch.device, *, is_compiled: bool, capability: tuple[int, ...] = ()
) -> str:
    """Have the linear layers of a model's blocks multiply in 8 bits, where a job requests it. Weights stay the same
    objects under their names.

    Args:
        model: whose weights may be placeholders.
        is_compiled: whether its blocks are. Without a compiler each cast is several kernels, and a step slower.
        capability: the least one of the GPUs of all ranks, which decide alike; empty: none is compared.

    Returns:
        What was done, for the job's record.

    Raises:
        JobFailure: invalid_request, where torchao is not installed.
    """
    if spec.compute.float8 != "always":
        return f"not used: float8 is {spec.compute.float8!r}"
    if not is_compiled:
        return "not used: blocks are not compiled"
    if capability and capability < _CAPABILITY:
        return "not used: a GPU has compute capability {}.{}, and products in 8 bits need {}.{}".format(
            *capability, *_CAPABILITY
        )
    blocks = blocks_of(model).values()
    layers = [layer for block in blocks for layer in block.modules() if type(layer) is torch.nn.Linear]
    converted = [layer for layer in layers if not any(size % _MULTIPLE for size in layer.weight.shape)]
    if not converted:
        return f"not used: no linear layer of a block has sizes that are multiples of {_MULTIPLE}"
    kind = _multiplying(is_emulated=device.type == "cpu")
    for layer in converted:
        layer.__class__ = kind
    emulated = ", emulated in fp32" if device.type == "cpu" else ""
    return f"{USED} in {len(converted)} of {len(layers)} linear layers of blocks{emulated}"


def _multiplying(*, is_emulated: bool) -> type[torch.nn.Linear]:
    """The class of linear layers that multiply in 8 bits where a block asks for it.

    A class, and not torchao's module: FSDP2 and weights that are still in their files have the layers as they are.
    """
    float8 = library("torchao.float8", "float8 'always'")
    multiply = library("torchao.float8.float8_linear", "float8 'always'").matmul_with_hp_or_float8_args
    config = replace(float8.Float8LinearConfig.from_recipe_name(_RECIPE), emulate=is_emulated)
    # Also repairs what Triton's compiler does to stores of 8 bits (triton-lang/triton#11111).
    made = float8.convert_to_float8_training(torch.nn.Linear(16, 16, device="meta"), config=config)
    products = made.linear_mm_config

    def forward(self: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        if not _is_open:
            return torch.nn.Linear.forward(self, states)
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        # torchao would make 8 bits of weights in fp32, and FSDP2 gathers them in bf16: ranks that shard the model would
        # have other weights than one process.
        product: torch.Tensor = multiply.apply(states.to(dtype), self.weight.to(dtype).t(), products, config)
        return product if self.bias is None else product + self.bias.to(dtype)

    return type("Linear", (torch.nn.Linear,), {"forward": forward, "__module__": torch.nn.Linear.__module__})
