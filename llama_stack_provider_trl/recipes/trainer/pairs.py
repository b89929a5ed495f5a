"""Preference pairs: their padded batches, as TRL's collator makes them (all chosen sequences, then all rejected ones),
and what the trainers on pairs have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.lora import LoraLayer
from trl import DPOTrainer

from ...specs.job import JobSpec
from ..data.images import Images
from ..data.tables import IMAGES
from ..fast.batches import FlatPairs
from ..model.adapters import DEFAULT
from ..model.attention import passes_padding_mask
from .base import RecipeTrainer
from .reference import NoReference
from .source_losses import Collate
from .trl_patches import PreparedDatasets


class PaddedPairs:
    """The reference for `recipes.fast.batches.FlatPairs`, and for models that cannot be trained on those."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def forward_arguments(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a forward of `model` that scores the answers: log-probabilities of shape (2 * pairs, tokens)."""
        device = inputs["input_ids"].device.type
        passes = self._spec.data.has_images or passes_padding_mask(self._spec, model, device)
        mask = {"attention_mask": inputs["attention_mask"]} if passes else {}
        labels = inputs["input_ids"].masked_fill(self._scored(inputs) == 0, -100)
        return {
            "input_ids": inputs["input_ids"],
            "labels": labels,
            "use_cache": False,
            "fused_lm_head": True,
            **mask,
            **inputs.get("features", {}),
        }

    def _scored(self, inputs: dict[str, Any]) -> torch.Tensor:
        """1 for each token whose log-probability is computed."""
        return inputs["completion_mask"]

    def log_probs(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of whole answers, chosen then rejected, shape (2 * pairs,)."""
        return outputs.log_probs.sum(dim=1)

    def lengths(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Scored tokens of each answer, chosen then rejected, shape (2 * pairs,)."""
        return inputs["completion_mask"][:, 1:].sum(dim=1)

    def num_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Tokens of both sequences of each pair, shape (pairs,)."""
        return inputs["attention_mask"].sum(dim=1).view(2, -1).sum(dim=0)


def collate_images(images: Images, collate: Collate, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of pairs with the column `IMAGES`: the inputs of `collate`, and `features`, those of the images, which
    are decoded here: once for both answers, and given to the model for each."""
    inputs = collate([{name: value for name, value in pair.items() if name != IMAGES} for pair in pairs])
    ids = inputs["input_ids"].tolist()
    return {**inputs, "features": images.features([pair[IMAGES] for pair in pairs], ids, repeats=2)}


class WholePairs(PaddedPairs):
    """Padded batches in which prompts are scored too, for losses that cover them."""

    def _scored(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["attention_mask"]

    def log_probs(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return (outputs.log_probs * inputs["completion_mask"][:, 1:]).sum(dim=1)


class PairRecipe(PreparedDatasets, RecipeTrainer, DPOTrainer):
    """What trainers on preference pairs share: TRL's DPOTrainer without a reference model and without its loss.

    Datasets have the columns prompt_ids, chosen_ids and rejected_ids, and `IMAGES` where rows have images.
    """

    head_outputs = ("log_probs",)

    def __init__(self, *, spec: JobSpec, peft_config: PeftConfig | None = None, **arguments: Any) -> None:
        self._batches = self.batches(spec)
        super().__init__(
            spec=spec,
            ref_model=None if peft_config else NoReference(),
            peft_config=peft_config,
            data_collator=self._batches.collate if isinstance(self._batches, FlatPairs) else None,
            **arguments,
        )
        self.ref_model = None
        if spec.data.has_images:
            self.data_collator = partial(collate_images, Images(spec.source), self.data_collator)
        if spec.lora:
            set_adapter_dropout(self.model, spec.lora.dropout)

    def batches(self, spec: JobSpec) -> FlatPairs | PaddedPairs:
        return FlatPairs() if spec.compute.padding_free else PaddedPairs(spec)


def reward_metrics(rewards: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is reported of the rewards of answers, chosen then rejected, shape (2 * pairs,); by name, shape (pairs,)."""
    chosen, rejected = rewards.chunk(2)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
    }


def real_pairs(lengths: torch.Tensor) -> torch.Tensor:
    """1 for each pair, 0 for a filler, which has no completions; shape (pairs,).

    Args:
        lengths: scored tokens of each answer, chosen then rejected, shape (2 * pairs,).
    """
    return (lengths.view(2, -1).sum(dim=0) > 0).float()


def set_adapter_dropout(model: torch.nn.Module, probability: float) -> None:
    """TRL switches off all dropout. The policy differs from its reference by the adapter, so that of adapters stays."""
    for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
        dropout = dict(layer.lora_dropout).get(DEFAULT)
        if isinstance(dropout, torch.nn.Dropout):
            dropout.p = probability
