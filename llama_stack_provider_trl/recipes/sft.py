"""Supervised fine-tuning on TRL's SFTTrainer, fed with rows that `recipes.data` tokenized."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTTrainer

from .arguments import sft_arguments
from .spec import JobSpec
from .trainers import RecipeTrainer


class SftRecipe(RecipeTrainer, SFTTrainer):
    """Token-level cross entropy over the trained tokens of the whole (accumulated) batch."""


def build_sft(
    spec: JobSpec,
    device: torch.device,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    validation: Dataset | None,
    peft_config: LoraConfig | None,
) -> SftRecipe:
    """A trainer for `train` (columns input_ids, labels; -100 outside the loss)."""
    trainer = SftRecipe(
        model=model,
        args=sft_arguments(spec, device),
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.bind(spec)
    return trainer
