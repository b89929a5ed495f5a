"""Decides about the trials of a search: which continue at a rung, which are pruned, and how the search ends. Pure.

A rung is decided once, when every trial that is left has reached it: the order in which trials run changes nothing.
What is decided is recorded; what to do about a trial then follows from the record and the trial's state alone, so a
process that is killed in between changes nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...specs.evaluations import best_step
from ...specs.events import Reason
from ...specs.search import Direction, PruningSpec, SearchSpec, rung_steps
from .states import ACTIVE, TERMINAL, JobState

_NAMED = 3
"""Failed trials that the message of a failed search names."""


class Trial(NamedTuple):
    """A trial of a search, as it is recorded."""

    number: int
    job_uuid: str
    state: JobState
    attempt: int = 0
    step: int = 0
    """Optimizer steps done."""
    total_steps: int | None = None
    """As planned; None: not known yet."""
    paused_at_step: int | None = None
    """Where the current attempt saved and ended."""
    rung: int = 0
    """Rungs at which it was decided that the trial continues."""
    pruned: str = ""
    """Why it does not continue; empty: it does."""
    resumed_attempt: int = 0
    """The attempt that ended at a rung and was resumed last."""
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """Step and metrics of each, by step."""
    best_checkpoint: str | None = None
    """The metric by which its result is chosen; None: its last step is its result."""
    values: Mapping[str, Any] = {}
    """Path of a field -> its value in this trial."""

    def value_at(self, step: int, metric: str) -> float | None:
        return next((found[metric] for at, found in self.evaluations if at == step and metric in found), None)

    def result(self, metric: str) -> float | None:
        """The metric of the weights that the trial ends with, as far as it is trained."""
        evaluated = [(at, found) for at, found in self.evaluations if metric in found]
        best = best_step(self.best_checkpoint, evaluated) if self.best_checkpoint else None
        chosen = [found[metric] for at, found in evaluated if best is None or at == best]
        return chosen[-1] if chosen else None


class Searched(NamedTuple):
    """The part of a job in a search."""

    trials: tuple[Trial, ...] = ()
    """Of a search: its trials, by number."""
    search: str | None = None
    """Of a trial: the job_uuid of its search."""
    trial: Trial | None = None
    """Of a trial: its record."""


NOT_SEARCHED = Searched()


class Ending(NamedTuple):
    """How a search ends."""

    state: JobState
    best: Trial | None = None
    reason: Reason | None = None
    message: str = ""


class Generation(NamedTuple):
    """Trials that are added to a Bayesian search at once, by number."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class SearchDecisions(NamedTuple):
    """What follows for a search."""

    promoted: tuple[Trial, ...] = ()
    """To be recorded: they continue at their next rung."""
    pruned: tuple[tuple[Trial, str], ...] = ()
    """To be recorded: they do not, and why."""
    resume: tuple[Trial, ...] = ()
    """Paused at a rung that they have passed."""
    cancel: tuple[Trial, ...] = ()
    """They have not ended, and do not continue."""
    ending: Ending | None = None
    generation: Generation | None = None
    """To be added: all earlier trials have ended, and these are still to come."""
    detail: str = ""
    """How far the search is."""


def decide(search: SearchSpec, state: JobState, trials: Sequence[Trial]) -> SearchDecisions:
    """Decide about a search that has not ended.

    Args:
        state: of the search's own job; `cancelling` ends its trials.
        trials: all of them, by number.
    """
    live = [one for one in trials if one.state not in TERMINAL]
    if state is JobState.cancelling:
        if not live:
            return SearchDecisions(ending=Ending(JobState.cancelled))
        return SearchDecisions(cancel=_to_cancel(live), detail=f"{len(live)} trials are being cancelled")
    if not live and (generation := _next_generation(search, trials)) is not None:
        detail = f"{_detail(search, trials)}, the next ones are being chosen"
        return SearchDecisions(generation=generation, detail=detail)
    if not live:
        return SearchDecisions(ending=_ending(search, trials))
    promoted, pruned = _rung(search, trials)
    return SearchDecisions(
        promoted,
        pruned,
        tuple(one for one in live if not one.pruned and _waits_to_continue(search, one)),
        _to_cancel(one for one in live if one.pruned),
        detail=_detail(search, trials),
    )


def best_trial(search: SearchSpec, trials: Iterable[Trial]) -> Trial | None:
    """The completed trial with the best objective, the first of equals; None: none has one."""
    completed = [one for one in trials if one.state is JobState.completed]
    ranked = ranking(search.direction, [(one, one.result(search.objective)) for one in completed])
    return ranked[0][0] if ranked and ranked[0][1] is not None else None


def ranking(direction: Direction, valued: Iterable[tuple[Trial, float | None]]) -> list[tuple[Trial, float | None]]:
    """Trials with their values, the best first, the lower number first among equals; those without a value last."""
    sign = -1.0 if direction == "maximize" else 1.0

    def key(item: tuple[Trial, float | None]) -> tuple[float, int]:
        trial, value = item
        return (math.inf if value is None or math.isnan(value) else sign * value), trial.number

    return sorted(valued, key=key)


def waits_at(pruning: PruningSpec, trial: Trial) -> int | None:
    """The step at which a trial is paused until it is decided whether it continues; None: it is not."""
    steps = () if trial.total_steps is None else rung_steps(pruning, trial.total_steps)
    undecided = not trial.pruned and trial.rung < len(steps) and trial.paused_at_step == steps[trial.rung]
    return trial.paused_at_step if undecided and trial.state is JobState.paused else None


def _next_generation(search: SearchSpec, trials: Sequence[Trial]) -> Generation | None:
    """The generation after these trials; None: they are all."""
    first = len(trials) + 1
    is_next = search.method == "bayesian" and first <= search.trials
    return Generation(first, min(first + search.parallel - 1, search.trials)) if is_next else None


def _rung(search: SearchSpec, trials: Sequence[Trial]) -> tuple[tuple[Trial, ...], tuple[tuple[Trial, str], ...]]:
    """The trials that are promoted and pruned now, with the reason; none before all have reached the rung."""
    undecided = [one for one in trials if not one.pruned]
    live = [one for one in undecided if one.state not in TERMINAL]
    if search.pruning is None or not live:
        return (), ()
    rung = min(one.rung for one in live)
    compared = [one for one in undecided if one.rung == rung]
    if not all(_has_reached(search, one, rung) for one in compared):
        return (), ()
    valued = [(one, _value_at_rung(search, one, rung)) for one in compared]
    ranked = ranking(search.direction, valued)
    keep = max(1, len(compared) // search.pruning.eta)
    promoted = [one for one, value in ranked[:keep] if value is not None]
    cut = next((value for _, value in reversed(ranked[:keep]) if value is not None), None)
    losers = [
        (one, _why_pruned(search, one, rung, value, cut))
        for one, value in valued
        if one not in promoted and one.state not in TERMINAL
    ]
    return tuple(promoted), tuple(losers)


def _has_reached(search: SearchSpec, trial: Trial, rung: int) -> bool:
    """Whether a trial has ended, or was evaluated at a rung and trains no more before it is decided."""
    if trial.state in TERMINAL:
        return True
    step = _step_of(search, trial, rung)
    if step is None or trial.value_at(step, search.objective) is None:
        # An evaluation whose value is not finite is reported without it: the pause shows that it is over.
        return step is not None and trial.state is JobState.paused and trial.paused_at_step == step
    return trial.state not in ACTIVE or trial.step > step


def _value_at_rung(search: SearchSpec, trial: Trial, rung: int) -> float | None:
    """The objective at a rung; of a trial that completed before, that of its result."""
    step = _step_of(search, trial, rung)
    value = None if step is None else trial.value_at(step, search.objective)
    if trial.state in (JobState.failed, JobState.cancelled):
        return None
    return trial.result(search.objective) if value is None and trial.state is JobState.completed else value


def _step_of(search: SearchSpec, trial: Trial, rung: int) -> int | None:
    """The steps of a rung; None: not known yet, or the trial ends before."""
    steps = () if trial.total_steps is None else rung_steps(search.pruning, trial.total_steps)
    return steps[rung] if rung < len(steps) else None


def _why_pruned(search: SearchSpec, trial: Trial, rung: int, value: float | None, cut: float | None) -> str:
    step = _step_of(search, trial, rung)
    found = "none" if value is None else f"{value:.6g}"
    return f"pruned at step {step}: {search.objective} {found}, cut {'none' if cut is None else f'{cut:.6g}'}"


def _waits_to_continue(search: SearchSpec, trial: Trial) -> bool:
    """Whether a trial is paused at a rung that it has passed, and has not been resumed since."""
    if trial.state is not JobState.paused or trial.attempt <= trial.resumed_attempt:
        return False
    return any(trial.paused_at_step == _step_of(search, trial, rung) for rung in range(trial.rung))


def _to_cancel(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    return tuple(one for one in trials if one.state not in TERMINAL and one.state is not JobState.cancelling)


def _ending(search: SearchSpec, trials: Sequence[Trial]) -> Ending:
    if (best := best_trial(search, trials)) is not None:
        return Ending(JobState.completed, best)
    states = [f"{one.job_uuid} ({one.state})" for one in trials[:_NAMED]]
    more = f" and {len(trials) - _NAMED} more" if len(trials) > _NAMED else ""
    message = f"no trial completed with a value of {search.objective}: {', '.join(states)}{more}"
    return Ending(JobState.failed, None, Reason.no_trial_completed, message)


def _detail(search: SearchSpec, trials: Sequence[Trial]) -> str:
    ended = sum(one.state in TERMINAL for one in trials)
    pruned = sum(bool(one.pruned) for one in trials)
    text = f"{ended} of {max(len(trials), search.trials)} trials have ended"
    return f"{text}, {pruned} of them pruned" if pruned else text
