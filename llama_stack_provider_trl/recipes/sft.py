"""Supervised fine-tuning on TRL's SFTTrainer, fed with rows that `recipes.data` tokenized."""

from __future__ import annotations

from typing import Any

import torch
from trl import SFTTrainer

from .trainers import RecipeTrainer


class SftRecipe(RecipeTrainer, SFTTrainer):
    """Token-level cross entropy over the trained tokens of the whole (accumulated) batch: TRL's loss and numbers.

    Datasets have the columns input_ids and labels; -100 is outside the loss.
    """

    head_outputs = ("log_probs", "is_top1")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the negative log-probabilities of the trained tokens, over `num_items_in_batch` of them."""
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**inputs, **router, use_cache=False, fused_lm_head=True)
        trained = outputs.label_mask.sum()
        count = trained if num_items_in_batch is None else num_items_in_batch
        loss = -outputs.log_probs.sum() / torch.as_tensor(count).clamp(min=1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the count is over all ranks, whose gradients are averaged
        if self.aux_loss_enabled:  # mixture of experts: keeps the router balanced
            steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._note(outputs.is_top1.sum(), trained, inputs["attention_mask"].sum())
        return loss

    def _note(self, hits: torch.Tensor, trained: torch.Tensor, num_tokens: torch.Tensor) -> None:
        mode = "train" if self.model.training else "eval"
        hits, trained, num_tokens = (
            self.accelerator.gather_for_metrics(value).sum() for value in (hits, trained, num_tokens)
        )
        self._metrics[mode]["mean_token_accuracy"].append(hits / trained.clamp(min=1))
        if mode == "train":
            self._total_train_tokens += num_tokens
