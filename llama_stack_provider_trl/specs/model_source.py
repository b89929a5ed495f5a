"""Where the models of a job are read from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .bases import Frozen


class ModelSource(Frozen):
    """Where a model and its tokenizer are read from."""

    model: str
    """An absolute local path or a model id."""
    revision: str | None = None
    """Branch, tag or commit of a model id; None: the default branch."""
    trust_remote_code: bool = False
    """Run the code that comes with the model."""
    path: Path | None = None
    """Directory with the files of `model` on the machine that trains; None: where `model` itself leads."""

    @property
    def location(self) -> str:
        """What the files are read from. `model` stays the name that messages and checkpoints have."""
        return self.model if self.path is None else str(self.path)


class ReferenceSpec(Frozen):
    """The frozen model that DPO or KTO compares with, or the teacher of a distillation."""

    model: str | None = None
    """An absolute local path or a model id; None: the base model."""
    revision: str | None = None
    trust_remote_code: bool = False
    """Both as in JobSpec, of `model`."""
    model_path: Path | None = None
    """As in JobSpec."""
    precompute: bool = False
    """Its log-probabilities are computed once, before training, instead of at every step."""
    cache: Path | None = None
    """Directory in which they are kept for other jobs; None: they are not."""

    @property
    def source(self) -> ModelSource | None:
        """Where another model than the base model is read from."""
        if self.model is None:
            return None
        return ModelSource(
            model=self.model, revision=self.revision, trust_remote_code=self.trust_remote_code, path=self.model_path
        )


def reference_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The reference in a job's specification as JSON; empty: its method has none."""
    return ((job.get("train") or {}).get("method") or {}).get("reference") or {}
