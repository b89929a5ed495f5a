"""What a job begins with, besides a model: another job's checkpoint, or a trained adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

MERGED_BASE = "merged-base"
"""Directory in a job's checkpoint directory: the base model with the adapter that the job began with merged in."""

AdapterUse = Literal["continue", "merge"]


class Frozen(BaseModel):
    """A part of a specification."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class AdapterSpec(Frozen):
    """A trained adapter of the base model, to begin with."""

    path: Path
    """PEFT's directory."""
    use: AdapterUse
    """continue: it is trained further. merge: it is merged into the base model, which is then what is trained, or what
    gets an adapter of its own."""


class BaseJob(Frozen):
    """A job whose checkpoint a model, or an adapter, is."""

    job_uuid: str
    checkpoint: str
    """Name of its directory: final, merged or checkpoint-N."""


class ResumeFrom(Frozen):
    """A step checkpoint of another job to begin with."""

    job_uuid: str
    checkpoint: str | None = None
    """Such as `checkpoint-6`; None: the newest."""
    path: Path | None = None
    """The job's own copy of it; None: not looked up yet."""
