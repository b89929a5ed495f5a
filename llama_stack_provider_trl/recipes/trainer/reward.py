"""Reward models on TRL's RewardTrainer: a model with a head of one number, trained on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from trl import RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from ...specs.job import JobSpec
from ...specs.methods import RewardSpec
from ..model.attention import passes_padding_mask
from .base import RecipeTrainer
from .pairs import reward_metrics
from .trl_patches import PreparedDatasets


def reward_loss(rewards: torch.Tensor, spec: RewardSpec, margins: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Loss of each pair, shape (pairs,).

    Args:
        rewards: of the chosen answers, then of the rejected ones, shape (2 * pairs,).
        margins: of the pairs, shape (pairs,).
    """
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected - margins) + spec.center_rewards_coefficient * (chosen + rejected) ** 2


class WholeAnswers:
    """Collates pairs with the columns prompt_ids, chosen_ids and rejected_ids, and perhaps margin: all chosen
    sequences, then all rejected ones, padded; `real` is 0 for a filler, which has no answers."""

    def __init__(self, pad_token_id: int) -> None:
        self._collate = DataCollatorForPreference(pad_token_id=pad_token_id)

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        answers = ("chosen_ids", "rejected_ids")
        whole = [{name: [*pair["prompt_ids"], *pair[name]] for name in answers} for pair in pairs]
        real = torch.tensor([float(bool(pair["chosen_ids"])) for pair in pairs])
        margins = {"margins": torch.tensor([pair["margin"] for pair in pairs])} if "margin" in pairs[0] else {}
        return {**self._collate(whole), "real": real, **margins}


class RewardRecipe(PreparedDatasets, RecipeTrainer, RewardTrainer):
    """Means are over the pairs of a whole optimizer step, for any number of ranks and micro steps."""

    head_outputs = ()
    aux_loss_enabled = False

    def __init__(self, *, spec: JobSpec, processing_class: Any, **arguments: Any) -> None:
        assert isinstance(spec.method, RewardSpec)
        self._reward = spec.method
        collator = WholeAnswers(processing_class.pad_token_id)
        super().__init__(spec=spec, processing_class=processing_class, data_collator=collator, **arguments)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        passes = passes_padding_mask(self.spec, self.model, self.args.device.type)
        mask = {"attention_mask": inputs["attention_mask"]} if passes else {}
        outputs = model(input_ids=inputs["input_ids"], use_cache=False, **mask)
        rewards, real = outputs.logits.squeeze(-1).float(), inputs["real"]
        losses = reward_loss(rewards, self._reward, inputs.get("margins", 0.0)) * real
        tokens = inputs["attention_mask"].sum(dim=1).view(2, -1).sum(dim=0) * real
        num_pairs = self._note(rewards.detach(), real, tokens.sum())
        if self.model.training:
            loss = losses.sum() / self.rows_of_step * self.current_gradient_accumulation_steps
        else:
            loss = losses.sum() / num_pairs.clamp(min=1)
            self.add_evaluation(losses.sum(), real.sum())
        self.add_source_losses(losses, real, inputs.get("sources"))
        loss = loss * self.accelerator.num_processes  # gradients are averaged over ranks
        return (loss, {"logits": rewards}) if return_outputs else loss

    def _note(self, rewards: torch.Tensor, real: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        values = reward_metrics(rewards)
        sums = torch.stack([*((value * real).sum() for value in values.values()), real.sum(), num_tokens.float()])
        *totals, num_pairs, all_tokens = self.accelerator.reduce(sums)
        self.add_metrics(dict(zip(values, totals, strict=True)), num_pairs)
        if self.model.training:
            self.add_tokens(all_tokens.long())
        return num_pairs
