"""What a merge of an adapter into its base model is to do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .model_source import ModelSource


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
