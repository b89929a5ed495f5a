"""Supervised fine-tuning on TRL's SFTTrainer, fed with rows that `recipes.data` tokenized."""

from __future__ import annotations

from trl import SFTTrainer

from .trainers import RecipeTrainer


class SftRecipe(RecipeTrainer, SFTTrainer):
    """Token-level cross entropy over the trained tokens of the whole (accumulated) batch.

    Datasets have the columns input_ids and labels; -100 is outside the loss.
    """
