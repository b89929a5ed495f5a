"""Rewards the answers of a GRPO job: its checks, and the functions of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import JobFailure
from ...specs.answer_checks import AnswerCheck, passes
from ...specs.answer_rows import CheckedRow
from ...specs.events import Reason
from ...specs.methods import GrpoSpec
from ...specs.rewards import GROUP, RewardSource, installed_rewards
from ...specs.rows import Message

_LARGEST = 1e30
"""Of a reward: the sum of many squares is a number in float32, too."""

Function = Callable[[list[list[Message]], list[str], list[dict[str, Any]]], Iterable[float]]


class Rewards:
    """The rewards of a job. Functions are imported here, before a model is loaded.

    Raises:
        JobFailure: a function is not installed, or cannot be imported.
    """

    def __init__(self, spec: GrpoSpec) -> None:
        self._sources = spec.rewards
        self._functions = {source.name: _load(source) for source in spec.rewards if source.function is not None}
        self.names = [source.name for source in spec.rewards]
        self.weights = torch.tensor([source.weight for source in spec.rewards], dtype=torch.float32)

    def score(
        self,
        checked: list[CheckedRow],
        completions: list[str],
        rows: list[dict[str, Any]],
        alive: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Rewards of completions, shape (completions, sources), not weighted.

        Args:
            checked: of each completion, its prompt and what its checks compare it with.
            rows: of each completion, with all columns.
            alive: called before each source, whose checks may take a second for each completion.

        Raises:
            JobFailure: a function raises, or does not return a finite number for each completion.
        """
        numbers = iter(range(len(self._sources)))
        found = []
        for source in self._sources:
            alive()
            found.append(
                self._of_function(source, [row.messages for row in checked], completions, rows)
                if source.check is None
                else _of_check(source.check, next(numbers), checked, completions)
            )
        return torch.tensor(found, dtype=torch.float32).T

    def _of_function(
        self, source: RewardSource, prompts: list[list[Message]], completions: list[str], rows: list[dict[str, Any]]
    ) -> list[float]:
        try:
            given = list(self._functions[source.name]([*prompts], [*completions], [dict(row) for row in rows]))
            found = [float(value) for value in given]
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise _failure(source, f"raised {type(error).__name__}{f': {text}' if text else ''}") from error
        _check_numbers(source, found, len(completions))
        return found


def _of_check(check: AnswerCheck, number: int, checked: Sequence[CheckedRow], completions: list[str]) -> list[float]:
    """1.0 for each completion that passes a check.

    Args:
        number: of the check among the job's.
    """
    return [_passes(check, text, row.references[number]) for row, text in zip(checked, completions, strict=True)]


def _passes(check: AnswerCheck, text: str, reference: Any) -> float:
    try:
        return float(passes(check, text, reference))
    except TimeoutError:
        return 0.0


def _check_numbers(source: RewardSource, found: Sequence[float], expected: int) -> None:
    if len(found) != expected:
        raise _failure(source, f"returned {len(found)} rewards for {expected} completions")
    if wrong := [value for value in found if not abs(value) <= _LARGEST]:
        raise _failure(source, f"returned {wrong[0]} as a reward, expected finite numbers")


def _load(source: RewardSource) -> Function:
    point = installed_rewards().get(source.function or "")
    if point is None:
        raise JobFailure(
            Reason.launch_failed,
            f"the reward function {source.function!r} is not installed in the environment that trains "
            f"({sys.executable}): install the package whose entry point of the group {GROUP} it is",
        )
    try:
        function: Function = point.load()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise _failure(source, f"cannot be imported ({type(error).__name__}: {text})") from error
    if not callable(function):
        raise _failure(source, f"is a {type(function).__name__}, expected function(prompts, completions, rows)")
    return function


def _failure(source: RewardSource, found: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_request, f"the reward function {source.function!r} {found}. Its author has to correct it"
    )
