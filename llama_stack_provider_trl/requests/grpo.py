"""Resolves GRPO: its parameters and its rewards."""

from __future__ import annotations

import re
from typing import Any, get_args

from ..errors import InvalidRequest, MethodUnavailable
from ..specs.answer_checks import AnswerCheck, refuse_fields, refuse_references
from ..specs.methods import GrpoLoss, GrpoSpec, RewardScale
from ..specs.plugins import package_of
from ..specs.rewards import GROUP, RewardModel, RewardSource, find_reward, installed_rewards
from .answering import refuse_options
from .bases import PREFIX
from .bodies import GRPOConfig, GRPOReward
from .checks import parse_fields
from .choices import nearest_choice
from .engines import resolve_vllm
from .names import JOB_UUID_PATTERN
from .options import ProviderOptions

_LONGEST_CHECKPOINT = 256
"""Characters of a checkpoint's name."""


def resolve_grpo(config: GRPOConfig, options: ProviderOptions, where: str) -> GrpoSpec:
    """The parameters of a job. Raises InvalidRequest."""
    refuse_options(options, "GRPO", "GRPO's reference is the model as it begins, and answers are not known before")
    for name, choices in (("loss_type", get_args(GrpoLoss)), ("scale_rewards", get_args(RewardScale))):
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise InvalidRequest(f"{where}.{name}", value, nearest_choice(value, choices))
    given = {name: value for name in GrpoSpec.model_fields if (value := getattr(config, name, None)) is not None}
    vllm = resolve_vllm(config, options, where)
    return GrpoSpec(**{**given, "rewards": _rewards(config.rewards, f"{where}.rewards"), "vllm": vllm})


def _rewards(given: list[dict[str, Any]] | None, where: str) -> tuple[RewardSource, ...]:
    if not given:
        hint = 'send at least one, such as {"check": {"type": "exact", "column": "answer"}} or {"model": "job:NAME"}'
        raise InvalidRequest(where, given, hint)
    sources: list[RewardSource] = []
    for number, one in enumerate(given):
        source = _source(parse_fields(GRPOReward, one, f"{where}.{number}"), f"{where}.{number}")
        if source.check is not None and source.check.type == "judge":
            hint = (
                "a judge is a second model, which evaluations alone load: send a check of another type, or a function"
            )
            raise InvalidRequest(f"{where}.{number}.check.type", source.check.type, hint)
        if source.check is not None and source.check.type == "grader" and source.check.at_least is not None:
            hint = "the reward of a grader counts as it is here, and is not compared with a threshold: leave it out"
            raise InvalidRequest(f"{where}.{number}.check.at_least", source.check.at_least, hint)
        if source.name in {other.name for other in sources}:
            hint = "another reward has this name: give each check a name of its own, and name a function or job once"
            raise InvalidRequest(f"{where}.{number}", source.name, hint)
        sources.append(source)
    checks = {f"{where}.{number}.check": source.check for number, source in enumerate(sources)}
    refuse_references({field: check for field, check in checks.items() if check is not None})
    return tuple(sources)


def _source(given: GRPOReward, where: str) -> RewardSource:
    if sum(one is not None for one in (given.check, given.function, given.model)) != 1:
        hint = "send one of these: a check, a function, or a model"
        raise InvalidRequest(where, given.model_dump(exclude_none=True), hint)
    if given.weight == 0:
        raise InvalidRequest(f"{where}.weight", 0, "a reward without a weight teaches nothing; leave it out")
    weight = 1.0 if given.weight is None else given.weight
    if given.function is not None:
        package = _package_of(given.function, where)
        return RewardSource(name=given.function, weight=weight, function=given.function, package=package)
    if given.model is not None:
        model = _model(given.model, f"{where}.model")
        return RewardSource(name=model.job_uuid, weight=weight, model=model)
    check = parse_fields(AnswerCheck, given.check or {}, f"{where}.check")
    refuse_fields(check, f"{where}.check")
    return RewardSource(name=check.measure, weight=weight, check=check)


def _model(value: str, where: str) -> RewardModel:
    """The job that a reward names; `jobs.inputs.reward_models` looks it up. Raises InvalidRequest."""
    job_uuid, slash, checkpoint = value.removeprefix(PREFIX).partition("/")
    is_name = value.startswith(PREFIX) and re.fullmatch(JOB_UUID_PATTERN, job_uuid)
    if not is_name or (slash and not checkpoint) or len(checkpoint) > _LONGEST_CHECKPOINT:
        hint = "send job:NAME, or job:NAME/CHECKPOINT, of a job that trains a reward model"
        raise InvalidRequest(where, value, hint)
    return RewardModel(job_uuid=job_uuid, checkpoint=checkpoint or None)


def _package_of(name: str, where: str) -> str:
    """The package that adds a function. Raises InvalidRequest."""
    try:
        return package_of(find_reward(name))
    except MethodUnavailable as error:
        installed = installed_rewards()
        those = "no installed package adds one"
        if installed:
            those = str(error) if name in installed else nearest_choice(name, sorted(installed))
        hint = f"{those}; a package adds functions by entry points of the group {GROUP}"
        raise InvalidRequest(f"{where}.function", name, hint) from error
