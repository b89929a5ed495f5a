"""Trainers of methods that installed packages add (`specs.custom`), and the classes that they are made from.

A package subclasses `CustomPairTrainer` or `CustomRowTrainer` and writes a loss per pair, or per token. The means over
an optimizer step, ranks, checkpoints, resume and exports are those of every method.
"""

from __future__ import annotations

import importlib
import sys
from abc import abstractmethod
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from ...errors import JobFailure, MethodUnavailable
from ...specs.custom import ALGORITHMS, InstalledMethod, Rows, check_custom_rows, find_method
from ...specs.custom_imports import first_problem
from ...specs.event_fields import MAX_KEY
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.methods import CustomSpec
from .base import RecipeTrainer
from .preference import ReferenceFreeRecipe
from .sft import SftRecipe


class CustomPairTrainer(ReferenceFreeRecipe):
    """A loss of preference pairs. Override `pair_losses`; the attributes may be set in `__init__`, after super's."""

    averages = False
    chosen_weight = 0.0
    reward_factor = 1.0
    parameters: Any
    """The request's fields, an object of the method's own model."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        self.parameters = parameters_of(spec)
        super().__init__(spec=spec, **arguments)

    def _checked_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        returned: Any = super()._checked_losses(log_probs, lengths)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            found = type(returned).__name__
            raise _wrong(self, f"returned an object of type {found}, expected losses and a dict of metrics")
        losses, metrics = returned
        shape = (len(log_probs) // 2,)
        _check_shape(self, "loss", losses, shape)
        for name, values in metrics.items():
            _check_name(self, name)
            _check_shape(self, name, values, shape)
        return losses, metrics


class CustomRowTrainer(SftRecipe):
    """A loss of the trained tokens of rows. Override `token_losses`."""

    parameters: Any
    """The request's fields, an object of the method's own model."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        self.parameters = parameters_of(spec)
        super().__init__(spec=spec, **arguments)

    @abstractmethod
    def token_losses(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Loss of each token.

        Args:
            log_probs: of the tokens, given those before them; 0 where the loss covers none, whose result is not used.
        """

    def losses_of_tokens(self, outputs: Any) -> torch.Tensor:
        losses = self.token_losses(outputs.log_probs)
        _check_shape(self, "loss", losses, tuple(outputs.log_probs.shape))
        return losses.where(outputs.label_mask, 0.0)


_TRAINERS: dict[Rows, tuple[type[RecipeTrainer], str]] = {
    "pairs": (CustomPairTrainer, "pair_losses"),
    "conversations": (CustomRowTrainer, "token_losses"),
}
"""What the trainer of a method subclasses, and what it overrides, by the method's rows."""
_ENGINE_METRICS = (
    "loss",
    "learning_rate",
    "grad_norm",
    "epoch",
    "step",
    "nll_loss",
    "aux_loss",
    "num_tokens",
    "tokens_per_second",
    "exchanged_bytes",
)
"""Metrics of every job, which one of the same name would hide."""


def custom_trainer(spec: JobSpec, method: CustomSpec) -> type[RecipeTrainer]:
    """The trainer of a job whose method is that of a package. Raises JobFailure: the package is not installed here,
    cannot be imported, or has another method of this name."""
    found = _find(method)
    if ALGORITHMS[found.method.rows] != spec.algorithm:
        raise _failure(method, f"{found.package} {found.version} reads {found.method.rows} here")
    module, _, name = found.method.trainer.partition(":")
    try:
        trainer = getattr(importlib.import_module(module), name)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise _failure(method, f"{found.method.trainer} cannot be imported: {type(error).__name__}: {text}") from error
    expected, loss = _TRAINERS[found.method.rows]
    if not (isinstance(trainer, type) and issubclass(trainer, expected)):
        raise _unfit(found, f"it is not a subclass of {expected.__name__}, which trains on {found.method.rows}")
    if getattr(getattr(trainer, loss), "__isabstractmethod__", False):
        raise _unfit(found, f"it does not override {loss}")
    return trainer


def parameters_of(spec: JobSpec) -> BaseModel:
    """The fields of a job's custom method. Raises JobFailure: the version here does not accept them."""
    assert isinstance(spec.method, CustomSpec)
    try:
        return _find(spec.method).parameters(spec.method.parameters)
    except (MethodUnavailable, ValidationError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise _failure(spec.method, f"it does not accept the fields of the request: {why}") from error


def used_method(method: CustomSpec) -> dict[str, str]:
    found = _find(method)
    return {"type": found.name, "package": found.package, "version": found.version, "trainer": found.method.trainer}


def other_version(spec: JobSpec) -> str:
    """The warning of a job that another version of its package trains than has checked its request; empty: none."""
    method = spec.method
    if not isinstance(method, CustomSpec):
        return ""
    found = _find(method)
    if (found.package, found.version) == (method.package, method.version):
        return ""
    checked, used = f"{method.package} {method.version}", f"{found.package} {found.version}"
    return f"{checked} has checked this request, and {used} trains it: install the same version in both environments"


def check_rows_of_jobs(spec: JobSpec) -> None:
    """Have a custom method check rows that another job has made, which were not known when the job was submitted.
    Raises InvalidRows: it refuses a row; JobFailure: it cannot be used here."""
    if spec.data.dataset.of_job is None or not isinstance(spec.method, CustomSpec):
        return
    try:
        check_custom_rows(spec.method, spec.data.dataset, spec.algorithm, spec.data.data_format)
    except MethodUnavailable as error:
        raise _failure(spec.method, str(error)) from error


def _find(method: CustomSpec) -> InstalledMethod:
    try:
        return find_method(method.type, tries_first=False)
    except MethodUnavailable as error:
        raise _failure(method, str(error)) from error


def _failure(method: CustomSpec, found: str) -> JobFailure:
    return JobFailure(
        Reason.launch_failed,
        f"the method {method.type!r} cannot be used by the environment that trains ({sys.executable}): {found}. "
        f"Install {method.package} {method.version} there, as where the request was checked.",
    )


def _unfit(found: InstalledMethod, why: str) -> JobFailure:
    return JobFailure(
        Reason.launch_failed,
        f"{found.method.trainer} of {found.package} {found.version} cannot train the method {found.name!r}: {why}. Its "
        "author has to correct it.",
    )


def _check_shape(trainer: RecipeTrainer, name: str, values: Any, expected: tuple[int, ...]) -> None:
    shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    if shape != expected:
        raise _wrong(
            trainer,
            f"returned {name!r} as {shape}, expected a tensor of shape {expected}: one value for each, which the "
            "trainer averages itself",
        )


def _check_name(trainer: RecipeTrainer, name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_KEY:
        raise _wrong(trainer, f"returned a metric named {str(name)[:100]!r}, expected 1 to {MAX_KEY} characters")
    if name in _ENGINE_METRICS or name.startswith("eval_"):
        raise _wrong(
            trainer, f"returned a metric named {name!r}, which would hide the trainer's: expected another name"
        )


def _wrong(trainer: RecipeTrainer, what: str) -> JobFailure:
    name = f"{type(trainer).__module__}.{type(trainer).__name__}"
    return JobFailure(Reason.rank_failed, f"{name} {what}. Its author has to correct it.")
