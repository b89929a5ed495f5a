"""Where the models and adapters of a job are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from .bases import BaseJob, Frozen

AdapterUse = Literal["continue", "merge"]


class ModelName(Frozen):
    """A model that is named; of one that is no ModelSource at most the configuration is read."""

    model: str
    """An absolute local path or a model id."""
    revision: str | None = None
    """Branch, tag or commit of a model id; None: the default branch."""
    trust_remote_code: bool = False
    """Run the code that comes with the model."""

    @property
    def location(self) -> str:
        """What its files are read from."""
        return self.model


class ModelSource(ModelName):
    """Where a model and its tokenizer, or an adapter, are read from."""

    path: Path | None = None
    """Directory with the files of `model` on the machine that trains; None: where `model` itself leads."""
    made_by: BaseJob | None = None
    """The job that makes it, which completes before this one starts; None: it is there before."""

    @property
    def location(self) -> str:
        """As above. `model` stays the name that messages and checkpoints have."""
        return self.model if self.path is None else str(self.path)

    @property
    def directory(self) -> Path:
        """`location` of a model, or an adapter, that is no model id."""
        return Path(self.location)

    def alone(self) -> ModelSource:
        """The source without what a part of a job adds to it."""
        return ModelSource(**{name: getattr(self, name) for name in ModelSource.model_fields})

    def without_path(self) -> Self:
        """The source without what holds on one machine only."""
        return self.model_copy(update={"path": None})


class AdapterSpec(ModelSource):
    """A trained adapter of the base model, to begin with: `model` is PEFT's directory."""

    use: AdapterUse
    """continue: it is trained further. merge: it is merged into the base model, which is then what is trained, or what
    gets an adapter of its own."""


class ReferenceSpec(Frozen):
    """The frozen model that DPO or KTO compares with, or the teacher of a distillation."""

    source: ModelSource | None = None
    """None: the base model."""
    precompute: bool = False
    """Its log-probabilities are computed once, before training, instead of at every step."""
    cache: Path | None = None
    """Directory in which they are kept for other jobs; None: they are not."""
