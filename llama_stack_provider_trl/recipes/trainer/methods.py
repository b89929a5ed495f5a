"""The trainer of each method, and the arguments that it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...specs.job import Algorithm, JobSpec
from ...specs.methods import METHODS, CustomSpec
from .arguments import kto_arguments, pair_arguments, prompt_arguments, reward_arguments, sft_arguments
from .base import RecipeTrainer
from .custom import custom_trainer
from .distillation import DistillationRecipe
from .dpo import DpoRecipe
from .ensemble import EnsembleRecipe
from .gold import GoldRecipe
from .grpo import GrpoRecipe
from .kto import KtoRecipe
from .preference import CpoRecipe, OrpoRecipe
from .reward import RewardRecipe
from .sft import SftRecipe

_Arguments = Callable[[JobSpec, torch.device], Any]
_CUSTOM: dict[str, _Arguments] = {"sft": sft_arguments, "dpo": pair_arguments}
"""By the rows of a custom method."""


def trainer_of(spec: JobSpec) -> tuple[type[RecipeTrainer], _Arguments]:
    """The trainer of a job, and the arguments that it gets. Raises JobFailure: the job's method is that of a package
    that cannot be used here."""
    if isinstance(spec.method, CustomSpec):
        return custom_trainer(spec, spec.method), _CUSTOM[METHODS[spec.algorithm].rows]
    if spec.method.other_vocabulary is not None:
        return GoldRecipe, prompt_arguments
    if spec.does.ensemble:
        return EnsembleRecipe, sft_arguments
    return TRAINERS[spec.algorithm]


TRAINERS: dict[Algorithm, tuple[type[RecipeTrainer], _Arguments]] = {
    "sft": (SftRecipe, sft_arguments),
    "dpo": (DpoRecipe, pair_arguments),
    "orpo": (OrpoRecipe, pair_arguments),
    "cpo": (CpoRecipe, pair_arguments),
    "simpo": (CpoRecipe, pair_arguments),
    "reward": (RewardRecipe, reward_arguments),
    "kto": (KtoRecipe, kto_arguments),
    "grpo": (GrpoRecipe, prompt_arguments),
    "distillation": (DistillationRecipe, prompt_arguments),
}
"""Those of this project; `trainer_of` has the methods of packages, too."""
