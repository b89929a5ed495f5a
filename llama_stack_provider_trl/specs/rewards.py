"""Rewards of answers: the checks that there are, the functions of installed packages, and reward models.

A package adds a function by an entry point of the group `llama_stack_provider_trl.rewards`. Requests name it, and never
bring code of their own.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Literal

from ..errors import MethodUnavailable
from .answer_checks import AnswerCheck
from .bases import Frozen
from .model_source import ModelName, ModelSource
from .names import problem_of_name
from .plugins import package_of, points_of
from .work import FurtherModel

GROUP = "llama_stack_provider_trl.rewards"


class RewardModel(Frozen):
    """A reward model that another job trains."""

    job_uuid: str
    checkpoint: str | None = None
    """Name of its directory; None: the job's result."""
    source: ModelSource | None = None
    """That directory; None: the job is not looked up yet."""
    is_adapter: bool = False
    """It is an adapter of `base`, with the head that was trained with it."""
    base: ModelSource | None = None
    """What its job began with, of an adapter."""
    trained_from: ModelName | None = None
    """The same of a whole model, which has its sizes before the job has written it."""
    max_seq_length: int = 2048
    """Of its job: longer conversations are cut, as those that it was trained on."""
    truncation_side: Literal["right", "left"] = "right"
    """Of its job. right: they lose their end; left: first the beginning of the prompt."""

    @property
    def own(self) -> ModelSource:
        """Where its checkpoint is read from, once its job is looked up."""
        assert self.source is not None
        return self.source

    @property
    def model(self) -> ModelSource:
        """Where the model is read from: its own checkpoint, or what an adapter is one of."""
        return self.base or self.own


class RewardSource(Frozen):
    """A part of a reward: a check, a function of an installed package, or the reward model of another job."""

    name: str
    """In metrics, one of its own."""
    weight: float = 1.0
    check: AnswerCheck | None = None
    """An answer that passes has 1, any other one 0."""
    function: str | None = None
    """Name of an entry point: `function(prompts, completions, rows)` returns a number for each completion."""
    model: RewardModel | None = None
    """An answer has what the reward model gives it."""
    grading: tuple[FurtherModel, ...] = ()
    """The models of a check's graders of type score_model and label_model, in the order of these; empty: they are not
    looked up yet, or there are none."""
    package: str = ""
    """Distribution that has the function, with its version, where the request was checked."""


def checks_of(rewards: tuple[RewardSource, ...]) -> tuple[AnswerCheck, ...]:
    """The checks among the parts of a reward, in their order."""
    return tuple(source.check for source in rewards if source.check is not None)


def reward_models_of(rewards: tuple[RewardSource, ...]) -> tuple[RewardModel, ...]:
    """The reward models among the parts of a reward, in their order."""
    return tuple(source.model for source in rewards if source.model is not None)


def grading_models_of(rewards: tuple[RewardSource, ...]) -> tuple[FurtherModel, ...]:
    """The models that graders ask, each once."""
    return tuple(dict.fromkeys(model for source in rewards for model in source.grading))


def installed_rewards() -> dict[str, list[EntryPoint]]:
    """The functions that installed packages add, by name; none is imported. A name that is not printed is none."""
    return {name: points for name, points in points_of(GROUP).items() if not problem_of_name(name)}


def find_reward(name: str) -> EntryPoint:
    """The function of an installed package. Raises MethodUnavailable: there is none, or several packages add it."""
    points = installed_rewards().get(name, [])
    if not points:
        raise MethodUnavailable(f"no installed package adds the reward function {name!r}")
    if len(points) > 1:
        packages = ", ".join(map(package_of, points))
        raise MethodUnavailable(f"several packages add a reward function {name!r}: {packages}; uninstall all but one")
    return points[0]
