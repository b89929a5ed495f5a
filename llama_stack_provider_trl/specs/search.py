"""A search over the fields of a request: what was requested, and the steps at which its trials are compared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .bases import BaseJob, Frozen

SearchMethod = Literal["grid", "random", "bayesian"]
Direction = Literal["minimize", "maximize"]
BETWEEN = "-trial-"
"""Between the name of a search and the number of a trial, in the name of the trial."""


class PruningSpec(Frozen):
    """Successive halving (arXiv:1502.07943): at each rung the trials are paused, and the best of them continue."""

    eta: int = Field(ge=2)
    """One in so many continues at a rung; the next rung is at so many times its steps."""
    min_steps: int | None = Field(None, gt=0)
    """Optimizer steps of the first rung; None: `fraction` decides."""
    fraction: float | None = Field(None, gt=0, lt=1)
    """The first rung as a share of a trial's steps, rounded."""


class Submitted(Frozen):
    """The request that later trials are made from."""

    call: str
    """Name of the request's class."""
    body: dict[str, Any]
    """The fields that were set, without the search."""
    options: dict[str, Any]


class SearchSpec(Frozen):
    """The search of a job that is not trained itself: its trials are jobs of their own."""

    method: SearchMethod
    parameters: dict[str, Any]
    """Dotted path of a request field -> its values or its range, as requested."""
    trials: int = Field(gt=0)
    """All of them; those of a Bayesian search are added in generations."""
    seed: int | None = None
    """Of a search that draws."""
    parallel: int = Field(1, gt=0)
    """Bayesian: trials of a generation."""
    submitted: Submitted | None = None
    """Of a Bayesian search."""
    reads: tuple[BaseJob, ...] = ()
    """Of a Bayesian search: the checkpoints that any of its trials may read."""
    settings: tuple[str, ...] = ()
    """Dotted names of the settings that have several values in its trials, as `JobSpec.flat` has them."""
    objective: str
    """A metric of the evaluations."""
    direction: Direction
    pruning: PruningSpec | None = None


def rung_steps(pruning: PruningSpec | None, total_steps: int) -> tuple[int, ...]:
    """The optimizer steps at which a trial of so many steps is compared with the others, ascending, without its last
    one."""
    if pruning is None:
        return ()
    first = pruning.min_steps or (pruning.fraction or 0.0) * total_steps
    steps: list[int] = []
    while (step := max(1, round(first))) < total_steps:
        if not steps or step > steps[-1]:
            steps.append(step)
        first *= pruning.eta
    return tuple(steps)
