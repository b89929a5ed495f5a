"""Spares steps their walks over all modules of a model, whose number a step does not change.

Trainer makes four of them: `train()` and the parameters for its count of operations in each micro step, `zero_grad` and
the parameters to clip in each optimizer step. For LoRA of 32 layers they take 26 ms of a CPU, while a GPU that is ahead
has nothing to do (`benchmarks/walks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class KeptParameters:
    """Parameters of a model as Trainer asks for them to clip gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)


def keep_walks(model: nn.Module) -> KeptParameters:
    """Have a model's `train` return where nothing changes, and `zero_grad` visit what is trained.

    Args:
        model: as it is trained: wrapped and sharded, with all adapters. From now on it has the same modules, and the
            same parameters require gradients.
    """
    wrappers, trained = list(_wrappers(model)), [weight for weight in model.parameters() if weight.requires_grad]
    switch = model.train

    def train(mode: bool = True) -> Any:
        # Who evaluates may have switched the model below the wrappers alone.
        return model if all(module.training == mode for module in wrappers) else switch(mode)

    def zero_grad(set_to_none: bool = True) -> None:
        for weight in trained:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.detach_().zero_()

    model.train, model.zero_grad = train, zero_grad
    return KeptParameters(model)


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and those that it wraps: of DDP, of PEFT, and one for a head."""
    module: Any = model
    while isinstance(module, nn.Module):
        yield module
        names = ("module", "base_model", "model")
        module = next((module._modules[name] for name in names if name in module._modules), None)
