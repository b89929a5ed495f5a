"""Imports what trainings of any kind do, and has forks of this process know what each would find out."""

from __future__ import annotations

from llama_stack_provider_trl.launch import warm
from llama_stack_provider_trl.recipes.imports import quick_imports

with quick_imports():
    from transformers.models.llama import modeling_llama  # noqa: F401 - imported here so that no fork has to

    from llama_stack_provider_trl.recipes import session  # noqa: F401
    from llama_stack_provider_trl.recipes.fast import support
    from llama_stack_provider_trl.specs.model_source import ModelSource
    from tests.tiny import tiny_model

_LENGTH = 1024
"""Default of `max_seq_length`."""

warm.fill_caches()
# Whether the model that most train needs padding. This process computes that in one thread (OMP_NUM_THREADS), as a fork
# would lack the others.
assert not support._unsupported(ModelSource(model=str(tiny_model())), _LENGTH)
