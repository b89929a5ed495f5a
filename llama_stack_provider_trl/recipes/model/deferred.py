"""Weights that stay in their files until the model is sharded, so that no rank has a copy of the whole model.

transformers maps safetensors files, whose pages the ranks of a machine share, and copies a weight only to give it
another dtype. So a model that is to be sharded is loaded in the dtype of its files, FSDP2 copies this rank's rows, and
the rows are cast. Until then each weight is a placeholder without memory, of the dtype that the rows will have: PEFT
creates adapters in the dtype of their base, and accelerate would cast whole weights to fp32.

Layers of a base in 4 bits are quantized one unit at a time, each when FSDP2 is about to shard it, on the device that it
is used on. Every rank quantizes all of them, since constants belong to a whole layer. Experts are merged in the same
way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import accelerate.accelerator
import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from .merging import is_merged_later, take_merge
from .quantization import is_in_files, is_packed, pack


@dataclass
class _Weight:
    module: torch.nn.Module
    name: str
    dtype: torch.dtype
    values: torch.Tensor | None
    """As loading left them; None once the model has them back."""
    merge: Callable[[torch.device], torch.Tensor] | None = None
    """Makes the values, where loading has not; None once it has."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        return getattr(self.module, self.name)


class DeferredWeights:
    """Takes the values out of a model, and returns them while the model is sharded.

    Args:
        model: as loading left it; every parameter becomes a placeholder whose elements are NaN.
        dtype: of the weights once they are sharded. Those that were not loaded in the model's dtype keep theirs.
        device: that the model is used on.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        loaded, known = model.config.dtype, set[int]()
        self._dtype, self._device = dtype, device
        self._weights: list[_Weight] = []
        self._unpacked: list[tuple[torch.nn.Module, str]] = []
        """Those to be quantized, which are placeholders already, with the names that their modules give them."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if is_in_files(parameter):
                    self._unpacked.append((module, name))
                if id(parameter) in known or not parameter.is_floating_point() or is_packed(parameter):
                    continue  # tied; of integers; quantized while loading, or when it is sharded
                known.add(id(parameter))
                becomes = dtype if parameter.dtype == loaded else parameter.dtype
                merge = take_merge(parameter)
                self._weights.append(_Weight(module, name, becomes, None if merge else parameter.data, merge))
                # One element for each: accelerate recognizes the optimizer's parameters by their addresses.
                parameter.data = torch.tensor(float("nan")).to(becomes).expand(parameter.shape)
        _set_dtype(model.config, dtype)

    def fully_shard(self, unit: torch.nn.Module | list[torch.nn.Module], **options: Any) -> Any:
        """Do what FSDP2's `fully_shard` does, with the values of the unit's weights."""
        modules = unit if isinstance(unit, list) else [unit]
        self._return()
        self._make({module for one in modules for module in one.modules()})
        sharded = fully_shard(unit, **options)
        for module in modules:
            self._cast(module)
        return sharded

    @contextmanager
    def returned_to_accelerate(self) -> Iterator[None]:
        """While this is open, accelerate shards the values instead of the placeholders. Once is enough.

        They are returned when it shards the first unit: before, it casts trained weights to fp32, and keeps references.
        """
        prepare = accelerate.accelerator.fsdp2_prepare_model

        def prepare_values(*args: Any, **kwargs: Any) -> Any:
            with patch.object(torch.distributed.fsdp, "fully_shard", self.fully_shard):
                return prepare(*args, **kwargs)

        with patch.object(accelerate.accelerator, "fsdp2_prepare_model", prepare_values):
            yield
        if self._unpacked or any(weight.values is not None or weight.merge for weight in self._weights):
            raise AssertionError("the model was not sharded: its weights are placeholders")

    def _return(self) -> None:
        for weight in self._weights:
            if weight.values is not None:
                weight.parameter.data = weight.values
                weight.values = None

    def _make(self, modules: set[torch.nn.Module]) -> None:
        """Merge and quantize the weights of these modules that loading has not merged or quantized."""
        for weight in self._weights:
            if weight.merge and weight.module in modules:
                weight.parameter.data = weight.merge(self._device)
                weight.merge = None
        for module, name in self._unpacked:
            if module in modules:
                pack(getattr(module, name), self._dtype, self._device)
        self._unpacked = [(module, name) for module, name in self._unpacked if module not in modules]

    def _cast(self, model: torch.nn.Module) -> None:
        """Cast this rank's rows where their dtype is still that of the files; parameters stay the same objects."""
        sharded = (weight for weight in self._weights if isinstance(weight.parameter, DTensor))
        dtypes = {id(one.parameter): one.dtype for one in sharded if one.parameter.dtype != one.dtype}
        if dtypes:  # as `Module.to` does, after which FSDP2 takes the new rows
            model._apply(lambda tensor: tensor.to(dtypes.get(id(tensor), tensor.dtype)))


def has_placeholders(model: PreTrainedModel) -> bool:
    """Whether some weights of a model are placeholders since it was loaded, so that it cannot compute."""
    return any(is_in_files(weight) or is_merged_later(weight) for weight in model.parameters())


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Set what `from_pretrained` sets where it loads a model in this dtype."""
    for one in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if one is not None:
            one.dtype = dtype
