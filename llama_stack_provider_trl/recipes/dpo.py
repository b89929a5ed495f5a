"""Direct Preference Optimization on TRL's DPOTrainer, with a loss of our own.

TRL's trainer brings the reference model, the fused head and the collator; the loss is ours because the promised
request fields `reward_scale` and `reward_clip` have no place in TRL's. Without them it is plain DPO and gives TRL's
numbers (tests/process/test_recipes.py compares the two step by step).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import is_peft_model
from datasets import Dataset
from trl import DPOTrainer
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


@contextmanager
def _nothing_recomputed(model: torch.nn.Module) -> Iterator[None]:
    """No activation checkpointing while this is open. TRL's own would switch it on again in every block."""
    recomputed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for module in recomputed:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in recomputed:
            module.gradient_checkpointing = True


class DpoRecipe(RecipeTrainer, DPOTrainer):
    """DPO whose reference is the base model: a frozen copy, or under LoRA the model with its adapter switched off.

    Datasets have the columns prompt_ids, chosen_ids and rejected_ids.
    """

    head_outputs = ("log_probs",)

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset  # tokenized already; TRL would tokenize it again

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
        real = (lengths.view(2, -1).sum(dim=0) > 0).float()  # 0 for a filler, which has no completions
        losses = preference_loss(logratios, lengths, self.spec.dpo) * real
        # The mean over the pairs of all ranks, times their number: gradients are averaged over ranks afterwards.
        num_pairs = self.accelerator.reduce(real.sum())
        loss = losses.sum() * self.accelerator.num_processes / num_pairs.clamp(min=1)
        if not self.model.training:
            self.note_evaluated(losses.sum(), real.sum())
        if self.aux_loss_enabled:  # mixture of experts: keeps the router balanced
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        num_tokens = inputs["attention_mask"].masked_fill(real.repeat(2)[:, None] == 0, 0).sum()
        self._note(logps.detach(), logratios.detach(), real, num_pairs, num_tokens)
        return loss

    def _reference_logps(self, forward: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad(), _nothing_recomputed(self.model):
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
