"""What a training holds in memory at most."""

from __future__ import annotations

from collections.abc import Sequence

from llama_stack_provider_trl.recipes.memory import trace as memory


def most(windows: Sequence[memory.Window]) -> float:
    return max(window.activations + window.logits + window.gradients for window in windows)
