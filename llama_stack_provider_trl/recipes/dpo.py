"""Direct Preference Optimization on TRL's DPOTrainer, with a loss of our own.

TRL's trainer brings the reference model, the fused head and the collator; the loss is ours because the promised
request fields `reward_scale` and `reward_clip` have no place in TRL's. Without them it is plain DPO and gives TRL's
numbers (tests/process/test_recipes.py compares the two step by step).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import is_peft_model
from datasets import Dataset
from trl import DPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from .spec import DpoSpec
from .trainers import RecipeTrainer


def preference_loss(logratios: torch.Tensor, lengths: torch.Tensor, spec: DpoSpec) -> torch.Tensor:
    """Loss of each pair, shape (pairs,).

    Args:
        logratios: log pi(completion|prompt) - log pi_ref(completion|prompt), summed over the completion's tokens; the
            chosen completions first, then the rejected ones in the same order, shape (2 * pairs,).
        lengths: completion tokens, same shape; `ipo` averages by them.
        spec: margin = clip(reward_scale * beta * (chosen - rejected), +-reward_clip); `sigmoid` is eq. 7 of
            arXiv:2305.18290, `hinge` is SLiC (arXiv:2305.10425), `ipo` eq. 17 of arXiv:2310.12036 per token.
    """
    if spec.loss_type == "ipo":
        chosen, rejected = (logratios / lengths.clamp(min=1)).chunk(2)
        return (chosen - rejected - 1 / (2 * spec.beta)) ** 2
    chosen, rejected = logratios.chunk(2)
    margin = spec.reward_scale * spec.beta * (chosen - rejected)
    if spec.reward_clip is not None:
        margin = margin.clamp(-spec.reward_clip, spec.reward_clip)
    if spec.loss_type == "hinge":
        return torch.relu(1 - margin)
    return -F.logsigmoid(margin)


class DpoRecipe(RecipeTrainer, DPOTrainer):
    """DPO whose reference is the base model: a frozen copy, or under LoRA the model with its adapter switched off.

    Datasets have the columns prompt_ids, chosen_ids and rejected_ids.
    """

    head_outputs = ("log_probs",)
    _step_pairs: torch.Tensor | None = None
    """Pairs of the optimizer step at hand, on all ranks, over its micro-batches' mean of 1."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset  # tokenized already; TRL would tokenize it again

    def get_batch_samples(self, *args: Any) -> tuple[list[dict[str, torch.Tensor]], Any]:
        """Trainer's, and count the pairs of the whole step: accumulated micro-batches need not be of one size, and the
        mean of their means is then not the mean over the step."""
        batches, num_items = super().get_batch_samples(*args)
        if batches:
            own = torch.stack([_real(batch["completion_mask"]).sum() for batch in batches]).sum()
            self._step_pairs = self.accelerator.reduce(own.to(self.args.device)) / len(batches)
        return batches, num_items

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> torch.Tensor:
        if self.spec.dpo is None:
            raise AssertionError("a DPO job without a DpoSpec")
        mask = inputs["completion_mask"]
        forward = {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "labels": inputs["input_ids"].masked_fill(mask == 0, -100),
            "use_cache": False,
            "fused_lm_head": True,
        }
        outputs = model(**forward, **({"output_router_logits": True} if self.aux_loss_enabled else {}))
        logps = outputs.log_probs.sum(dim=1)
        logratios = logps - self._reference_logps(forward)
        lengths = mask[:, 1:].sum(dim=1)
        real = _real(mask)
        losses = preference_loss(logratios, lengths, self.spec.dpo) * real
        num_pairs = self.accelerator.reduce(real.sum())
        # The mean over the pairs of all ranks and of the step, times the number of ranks, over which gradients are
        # averaged afterwards; Trainer divides by the number of micro-batches.
        mean_over = num_pairs if self._step_pairs is None or not self.model.training else self._step_pairs
        loss = losses.sum() * self.accelerator.num_processes / mean_over.clamp(min=1e-9)
        if not self.model.training:
            self.note_evaluated(losses.sum(), real.sum())
        if self.aux_loss_enabled:  # mixture of experts: keeps the router balanced
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        num_tokens = inputs["attention_mask"].masked_fill(real.repeat(2)[:, None] == 0, 0).sum()
        self._note(logps.detach(), logratios.detach(), real, num_pairs, num_tokens)
        return loss

    def _reference_logps(self, forward: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                return self.ref_model(**forward).log_probs.sum(dim=1)
            if not is_peft_model(self.model):
                raise AssertionError("full fine-tuning without a reference model")
            with use_adapter(self.accelerator.unwrap_model(self.model), adapter_name=None):
                return self.model(**forward).log_probs.sum(dim=1)

    def _note(
        self,
        logps: torch.Tensor,
        logratios: torch.Tensor,
        real: torch.Tensor,
        num_pairs: torch.Tensor,
        num_tokens: torch.Tensor,
    ) -> None:
        """Keep the metrics of this batch as tensors; `log` turns them into numbers, so no step waits for the device."""
        mode = "train" if self.model.training else "eval"
        scale = self.spec.dpo.reward_scale * self.spec.dpo.beta if self.spec.dpo else 1.0
        chosen, rejected = (scale * part for part in logratios.chunk(2))
        chosen_logps, rejected_logps = logps.chunk(2)
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": chosen_logps,
            "logps/rejected": rejected_logps,
        }
        sums = torch.stack([(value * real).sum() for value in values.values()] + [num_tokens.float()])
        *sums, all_tokens = self.accelerator.reduce(sums)
        for name, value in zip(values, sums, strict=True):
            self._metrics[mode][name].append(value / num_pairs.clamp(min=1))
        if mode == "train":
            self._total_train_tokens += all_tokens.long()


def _real(completion_mask: torch.Tensor) -> torch.Tensor:
    """1.0 for each pair of a batch, 0.0 for a filler, which has no completions; shape (pairs,).

    Args:
        completion_mask: shape (2 * pairs, tokens).
    """
    return (completion_mask[:, 1:].sum(dim=1).view(2, -1).sum(dim=0) > 0).float()
