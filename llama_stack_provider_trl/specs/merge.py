"""What a merge of models or adapters is to do, and one of an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .model_source import ModelSource

MergeMethod = Literal["linear", "slerp", "ties", "dare_linear", "dare_ties", "cat"]
MODEL_METHODS: tuple[MergeMethod, ...] = ("linear", "slerp", "ties", "dare_linear", "dare_ties")
ADAPTER_METHODS: tuple[MergeMethod, ...] = ("linear", "cat", "slerp", "ties", "dare_linear", "dare_ties")
STACKED_METHODS: tuple[MergeMethod, ...] = ("cat", "slerp")
"""Of adapters, exact: the rank of the result is the sum of theirs."""
PRUNING_METHODS: tuple[MergeMethod, ...] = ("ties", "dare_linear", "dare_ties")
"""They keep a share of each model's differences, `density`."""


class MergeInput(ModelSource):
    """One of the models, or adapters, that are merged: a directory, or a model id of the local cache."""

    weight: float


class MergeSpec(BaseModel):
    """One merge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: tuple[MergeInput, ...] = Field(min_length=1, max_length=64)
    output: Path
    """A directory that does not exist; of a job, its name in the checkpoint directory."""
    method: MergeMethod = "linear"
    base: ModelSource | None = None
    """The model from which those that are merged were trained; `ties` and `dare_*` of whole models need it."""
    density: float | None = Field(None, gt=0, le=1)
    """Share of each weight's differences that `ties` (the largest) and `dare_*` (random ones) keep."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the random choice of `dare_*`."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the result; None: that of the first input."""


class AdapterMergeSpec(BaseModel):
    """One adapter, which becomes a whole model together with its base."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: Path
    """PEFT's directory."""
    base: ModelSource
    is_reward: bool = False
    """The adapter is that of a reward model."""
    output: Path
    """A directory that does not exist."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the result; None: that of the base."""
