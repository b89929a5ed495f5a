"""Weights that transformers merges while it loads a model, merged when the model is sharded instead.

Files hold the weights of each expert on their own, and transformers stacks those of a block into one tensor. Such a
tensor is a copy, which every rank would have of every block.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

_MERGING = {Concatenate, MergeModulelist, Transpose}
"""Operations that make one tensor of several; others are done while the model is loaded."""


@contextmanager
def merged_later() -> Iterator[None]:
    """While this is open, `from_pretrained` leaves weights that it would merge in their files.

    Each becomes a placeholder without memory, of the shape and dtype of the merged weight; `take_merge` returns what
    merges it.
    """
    merge_now = WeightConverter.convert

    def convert(self: WeightConverter, layer_name: str, **more: Any) -> dict[str, Any]:
        if (
            self.quantization_operation is not None
            or not {type(operation) for operation in self.operations} <= _MERGING
        ):
            return merge_now(self, layer_name, **more)
        parts = self.materialize_tensors()

        def merged_on(device: torch.device | str, **more: Any) -> dict[str, torch.Tensor]:
            converter = copy.copy(self)
            there = {pattern: [part.to(device) for part in tensors] for pattern, tensors in parts.items()}
            converter.collected_tensors = there
            return merge_now(converter, layer_name, **more)

        def placeholder(name: str, outline: torch.Tensor) -> Any:
            weight: Any = torch.nn.Parameter(torch.tensor(float("nan")).to(outline.dtype).expand(outline.shape))
            weight.merge = lambda device: merged_on(device, model=more["model"], config=more["config"])[name]
            return weight

        return {name: placeholder(name, outline) for name, outline in merged_on("meta", **more).items()}

    with patch.object(WeightConverter, "convert", convert):
        yield


@contextmanager
def few_copies() -> Iterator[None]:
    """While this is open, `from_pretrained` copies the converter of weights once for each weight of the model.

    It makes a deep copy for each weight in the files, and drops those of a model's weight that has one.
    """
    unused: dict[int, WeightConverter] = {}

    def copied(self: WeightConverter, memo: dict[int, Any]) -> WeightConverter:
        if id(self) not in unused or unused[id(self)].layer_targets:
            converter = copy.copy(self)
            converter.operations = copy.deepcopy(self.operations, memo)
            converter.collected_tensors, converter.layer_targets = defaultdict(list), defaultdict(set)
            unused[id(self)] = converter
        return unused[id(self)]

    with patch.object(WeightConverter, "__deepcopy__", copied, create=True):
        yield


def is_merged_later(weight: torch.Tensor) -> bool:
    """Whether this is a placeholder that `merged_later` made."""
    return hasattr(weight, "merge")


def take_merge(weight: torch.Tensor) -> Callable[[torch.device], torch.Tensor] | None:
    """Take from a placeholder what merges its values on a device; None: another weight."""
    return vars(weight).pop("merge", None)
