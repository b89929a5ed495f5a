"""What ranks whose blocks are compiled call before they train."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llama_stack_provider_trl.recipes.trainer.base import RecipeTrainer


def compile_once() -> None:
    """Refuse a graph that the first batch does not need."""
    original = RecipeTrainer._compile

    def compiling(*arguments: Any) -> None:
        original(*arguments)
        torch._dynamo.config.error_on_recompile = True

    RecipeTrainer._compile = compiling  # type: ignore[method-assign]


def compile_once_to_eager_kernels() -> None:
    """The same, whose graphs are computed by eager kernels: no C++ is compiled."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    compile_once()
