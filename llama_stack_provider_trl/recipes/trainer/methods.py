"""The trainer of each method, and the arguments that it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...specs.job import Algorithm, JobSpec
from .arguments import pair_arguments, prompt_arguments, reward_arguments, sft_arguments
from .base import RecipeTrainer
from .dpo import DpoRecipe
from .grpo import GrpoRecipe
from .preference import CpoRecipe, OrpoRecipe
from .reward import RewardRecipe
from .sft import SftRecipe

TRAINERS: dict[Algorithm, tuple[type[RecipeTrainer], Callable[[JobSpec, torch.device], Any]]] = {
    "sft": (SftRecipe, sft_arguments),
    "dpo": (DpoRecipe, pair_arguments),
    "orpo": (OrpoRecipe, pair_arguments),
    "cpo": (CpoRecipe, pair_arguments),
    "simpo": (CpoRecipe, pair_arguments),
    "reward": (RewardRecipe, reward_arguments),
    "grpo": (GrpoRecipe, prompt_arguments),
}
