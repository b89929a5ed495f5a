"""Rewards the answers of a GRPO job: its checks, graders and the models that these ask, the functions of installed
packages, and reward models of jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

import torch

from ...errors import JobFailure, LimitReached, MethodUnavailable
from ...specs.answer_checks import AnswerCheck, passes, reward_of
from ...specs.answer_rows import CheckedRow
from ...specs.compiled_checks import TIMEOUT
from ...specs.events import Reason
from ...specs.grading.asking import Question, Reply, Replying, replying_of
from ...specs.grading.errors import GradingError
from ...specs.grading.graders import asking_of
from ...specs.grading.grading import Replied, questions_of, unusable_here
from ...specs.grading.isolated import WALL_S
from ...specs.job import JobSpec
from ...specs.methods import GrpoSpec
from ...specs.plugins import package_of
from ...specs.rewards import GROUP, RewardSource, checks_of, find_reward
from ...specs.rows import Message
from ...specs.work import FurtherModel
from .grading_models import GradingModel
from .reward_models import LARGEST, RewardScorer

Function = Callable[[list[list[Message]], list[str], list[dict[str, Any]]], Iterable[float]]


class Scores(NamedTuple):
    """The rewards of completions, not weighted."""

    values: list[list[float]]
    """Of each completion, of each source."""
    timed_out: list[list[bool]]
    """Whether a check could not be decided, or a grader had not ended, in time, which counts as failed; same shape."""
    without_room: list[list[bool]]
    """Whether the prompt takes all tokens that a reward model reads; same shape."""
    errors: list[list[str]]
    """Why a grader gives no reward, which counts as 0; empty: it gives one. Same shape."""


class Rewards:
    """The rewards of a job. Functions are imported here; `load_models` loads what its reward models are. Raises
    JobFailure: a function is not installed, or cannot be imported; a grader cannot be used."""

    def __init__(self, spec: GrpoSpec) -> None:
        self._sources = spec.rewards
        self._functions = {source.name: _load(source) for source in spec.rewards if source.function is not None}
        refuse_unusable_graders(checks_of(spec.rewards))
        self._scorers: dict[str, RewardScorer] = {}
        self._models: dict[FurtherModel, GradingModel] = {}
        self._timed_out: set[str] = set()
        self._without_room: set[str] = set()
        self._with_errors: set[str] = set()
        self.names = [source.name for source in spec.rewards]
        self.weights = torch.tensor([source.weight for source in spec.rewards], dtype=torch.float32)

    def load_models(self, spec: JobSpec, device: torch.device) -> None:
        """Load the reward models of a job, and the models that its graders ask. Raises JobFailure: one cannot be
        loaded."""
        for source in self._sources:
            if source.model is not None:
                self._scorers[source.name] = RewardScorer(source.model, spec.compute.dtype, device)
        self._models = {model: GradingModel(spec, model, device) for model in spec.method.grading_models}

    @property
    def asks_models(self) -> bool:
        return bool(self._models)

    def ask(
        self,
        completions: list[str],
        rows: list[dict[str, Any]],
        row_numbers: Sequence[int],
        alive: Callable[[], object],
    ) -> list[dict[str, Replied]]:
        """What the models of graders write of each completion, by the names of the sources.

        Each grader asks its model about all completions together. Raises JobFailure: a chat template refuses the
        messages of a grader.

        Args:
            rows, row_numbers: as of `score`.
        """
        found: list[dict[str, dict[str, Reply | GradingError]]] = [{} for _ in completions]
        for source in self._sources:
            if not source.grading:
                continue
            assert source.check is not None
            assert source.check.grader is not None
            grader = source.check.grader
            asked = [questions_of(grader, text, row) for text, row in zip(completions, rows, strict=True)]
            for one in found:
                one[source.name] = {}
            for (name, leaf), model in zip(asking_of(grader).items(), source.grading, strict=True):
                questions = [of_completion[name] for of_completion in asked]
                replies = self._asked(self._models[model], questions, row_numbers, replying_of(leaf), alive)
                for one, reply in zip(found, replies, strict=True):
                    one[source.name][name] = reply
        return [{**one} for one in found]

    def _asked(
        self,
        model: GradingModel,
        questions: Sequence[Question | GradingError],
        row_numbers: Sequence[int],
        replying: Replying,
        alive: Callable[[], object],
    ) -> list[Reply | GradingError]:
        """The replies to some questions. Equal ones are asked once: their replies are the same."""
        alive()
        numbers: dict[str, int] = {}
        once: list[tuple[Question, int]] = []
        for question, row in zip(questions, row_numbers, strict=True):
            if isinstance(question, Question) and question.seed not in numbers:
                numbers[question.seed] = len(once)
                once.append((question, row))
        replies = model.replies(once, replying, alive)
        return [one if isinstance(one, GradingError) else replies[numbers[one.seed]] for one in questions]

    def model_warnings(self) -> list[str]:
        return [message for model in self._models.values() for message in model.warnings()]

    def score(
        self,
        checked: list[CheckedRow],
        completions: list[str],
        rows: list[dict[str, Any]],
        row_numbers: Sequence[int],
        alive: Callable[[], object] = lambda: None,
        replied: Sequence[Mapping[str, Replied]] = (),
    ) -> Scores:
        """Rewards of completions. Raises JobFailure: a function raises, or does not return a finite number for each
        completion.

        Args:
            checked: of each completion, its prompt and what its checks compare it with.
            rows: of each completion, with all columns.
            alive: called before each source, and before each completion that is checked: a check may take a second.
            replied: of each completion, as `ask`; empty: no grader asks a model.
        """
        numbers = iter(range(len(self._sources)))
        values, timed_out, without_room, errors = [], [], [], []
        for source in self._sources:
            alive()
            late = unread = [False] * len(completions)
            wrong = [""] * len(completions)
            if source.model is not None:
                scorer = self._scorers[source.name]
                found, unread = scorer.score([row.messages for row in checked], completions, row_numbers, alive)
            elif source.check is None:
                found = self._of_function(source, [row.messages for row in checked], completions, rows)
            elif source.check.type == "grader":
                replies = [one.get(source.name) for one in replied] or [None] * len(completions)
                found, wrong, late = _of_grader(source.check, next(numbers), checked, completions, replies, alive)
            else:
                passed = _of_check(source.check, next(numbers), checked, completions, alive)
                found, late = [float(one or False) for one in passed], [one is None for one in passed]
            values.append(found)
            timed_out.append(late)
            without_room.append(unread)
            errors.append(wrong)
        by_completion = range(len(completions))
        return Scores(
            [[of_source[number] for of_source in values] for number in by_completion],
            [[of_source[number] for of_source in timed_out] for number in by_completion],
            [[of_source[number] for of_source in without_room] for number in by_completion],
            [[of_source[number] for of_source in errors] for number in by_completion],
        )

    def warnings(self, timed_out: Sequence[int]) -> list[str]:
        """A sentence for each check, and each grader, that took too long for the first time."""
        late = [source for source, count in zip(self._sources, timed_out, strict=True) if count]
        new = [source for source in late if source.name not in self._timed_out]
        self._timed_out.update(source.name for source in new)
        return [
            f"the {_kind(source)} {source.name!r} took more than {_limit(source):g} s for an answer, which counts as "
            f"{'0' if _kind(source) == 'grader' else 'failed'}: simplify it. The metric "
            f"rewards/{source.name}/timed_out has the share of such answers"
            for source in new
        ]

    def room_warnings(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """A sentence for each reward model for which prompts left no room for their answers for the first time."""
        found = []
        for source, numbers in zip(self._sources, rows, strict=True):
            if source.model is not None and numbers and source.name not in self._without_room:
                self._without_room.add(source.name)
                found.append(
                    f"row {numbers[0]}: its prompt takes all {source.model.max_seq_length} tokens that the reward "
                    f"model of job {source.model.job_uuid!r} reads (its max_seq_length), so all its answers get the "
                    "same reward: shorten such prompts, or train the reward model with a larger max_seq_length. "
                    "Further such rows are not named"
                )
        return found

    def error_warnings(self, errors: Sequence[Sequence[str]]) -> list[str]:
        """A sentence for each grader that gave an answer no reward for the first time."""
        found = []
        for name, sentences in zip(self.names, errors, strict=True):
            if sentences and name not in self._with_errors:
                self._with_errors.add(name)
                found.append(
                    f"the grader {name!r} gives {len(sentences)} answers no reward, which counts as 0; the first time: "
                    f"{sentences[0]}. The metric rewards/{name}/errors has the share of such answers"
                )
        return found

    def _of_function(
        self, source: RewardSource, prompts: list[list[Message]], completions: list[str], rows: list[dict[str, Any]]
    ) -> list[float]:
        # Copies: what a function changes, the next one and later steps would read.
        arguments = deepcopy(prompts), [*completions], deepcopy(rows)
        try:
            given = list(self._functions[source.name](*arguments))
            found = [float(value) for value in given]
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise _failure(source, f"raised {type(error).__name__}{f': {text}' if text else ''}") from error
        _check_numbers(source, found, len(completions))
        return found


def used_packages(rewards: Iterable[RewardSource]) -> dict[str, str]:
    return {source.name: _package(source) for source in rewards if source.function is not None}


def other_packages(rewards: Iterable[RewardSource]) -> list[str]:
    """Warnings of a job whose functions are of other versions than those that its request was checked with."""
    return [
        f"the reward function {source.function!r} is of {used} here, and of {source.package} where the request was "
        "checked: install the same version in both environments"
        for source in rewards
        if source.function is not None and source.package and (used := _package(source)) != source.package
    ]


def _of_check(
    check: AnswerCheck,
    number: int,
    checked: Sequence[CheckedRow],
    completions: list[str],
    alive: Callable[[], object],
) -> list[bool | None]:
    """Whether each completion passes a check; None: that cannot be decided in time."""
    found: list[bool | None] = []
    for row, text in zip(checked, completions, strict=True):
        alive()
        try:
            found.append(passes(check, text, row.references[number]))
        except TimeoutError:
            found.append(None)
    return found


def _of_grader(
    check: AnswerCheck,
    number: int,
    checked: Sequence[CheckedRow],
    completions: list[str],
    replied: Sequence[Replied | None],
    alive: Callable[[], object],
) -> tuple[list[float], list[str], list[bool]]:
    """The reward of each completion, why there is none, and whether it took too long; see `_of_check`."""
    rewards, errors, late = [], [], []
    for row, text, replies in zip(checked, completions, replied, strict=True):
        alive()
        given = reward_of(check, text, row.references[number], replies)
        rewards.append(given.reward)
        errors.append("" if given.error is None else given.error.sentence)
        late.append(given.is_late)
    return rewards, errors, late


def _kind(source: RewardSource) -> str:
    return "grader" if source.check is not None and source.check.type == "grader" else "check"


def _limit(source: RewardSource) -> float:
    """Seconds that it may take for an answer."""
    return WALL_S if _kind(source) == "grader" else TIMEOUT


def refuse_unusable_graders(checks: Iterable[AnswerCheck]) -> None:
    """Raises JobFailure: this environment lacks what a grader needs."""
    for check in checks:
        if check.grader is None:
            continue
        try:
            problem = unusable_here(check.grader)
        except (LimitReached, OSError):  # too busy to parse a source: grading tries again, and fails the job
            continue
        if problem is not None:
            raise JobFailure(
                Reason.launch_failed,
                f"the grader {check.grader.name!r} cannot be used in {sys.executable}: {problem[1]}",
            )


def _check_numbers(source: RewardSource, found: Sequence[float], expected: int) -> None:
    if len(found) != expected:
        raise _failure(source, f"returned {len(found)} rewards for {expected} completions")
    if wrong := [value for value in found if not abs(value) <= LARGEST]:
        raise _failure(source, f"returned {wrong[0]} as a reward, expected finite numbers")


def _load(source: RewardSource) -> Function:
    point = _point(source)
    try:
        function: Function = point.load()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise _failure(source, f"cannot be imported ({type(error).__name__}: {text})") from error
    if not callable(function):
        raise _failure(source, f"is a {type(function).__name__}, expected function(prompts, completions, rows)")
    return function


def _package(source: RewardSource) -> str:
    return package_of(_point(source))


def _point(source: RewardSource) -> EntryPoint:
    try:
        return find_reward(source.function or "")
    except MethodUnavailable as error:
        raise JobFailure(
            Reason.launch_failed,
            f"the reward function {source.function!r} cannot be used by the environment that trains "
            f"({sys.executable}): {error}. It has to be that of {source.package or 'one package'} there, an entry "
            f"point of the group {GROUP}",
        ) from error


def _failure(source: RewardSource, found: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_request, f"the reward function {source.function!r} {found}. Its author has to correct it"
    )
