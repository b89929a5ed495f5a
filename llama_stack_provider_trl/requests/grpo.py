"""Resolves GRPO: its parameters, its rewards, and what such a job cannot do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from ..errors import InvalidRequest, MethodUnavailable
from ..specs.answer_checks import AnswerCheck, refuse_fields, refuse_references
from ..specs.methods import GrpoLoss, GrpoSpec, RewardScale
from ..specs.rewards import GROUP, RewardModel, RewardSource, find_reward, installed_rewards, package_of
from .bases import PREFIX
from .bodies import JOB_UUID_PATTERN, DataConfig, GRPOConfig, GRPOReward
from .checks import nearest_choice, parse_fields
from .options import ProviderOptions

_LONGEST_CHECKPOINT = 256
"""Characters of a checkpoint's name."""


def resolve_grpo(config: GRPOConfig, options: ProviderOptions, where: str) -> GrpoSpec:
    """The parameters of a job. Raises InvalidRequest."""
    _refuse_options(options)
    for name, choices in (("loss_type", get_args(GrpoLoss)), ("scale_rewards", get_args(RewardScale))):
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise InvalidRequest(f"{where}.{name}", value, nearest_choice(value, choices))
    given = {name: value for name in GrpoSpec.model_fields if (value := getattr(config, name, None)) is not None}
    return GrpoSpec(**{**given, "rewards": _rewards(config.rewards, f"{where}.rewards")})


def check_grpo(fields: Mapping[str, Any], data: DataConfig) -> None:
    """Refuse what a GRPO job cannot do, by its resolved fields and its data.

    Raises:
        InvalidRequest: names the field.
    """
    method = fields.get("method")
    if not isinstance(method, GrpoSpec):
        return
    resources = fields["resources"]
    if resources is not None and resources.nodes > 1:
        hint = "GRPO trains on the ranks of one node: send 1, and the ranks as nproc_per_node"
        raise InvalidRequest("provider_options.resources.nodes", resources.nodes, hint)
    held_out = "GRPO evaluates on no held-out rows: its rewards are metrics of each step; leave it out"
    for name in ("validation_dataset_id", "train_split_percentage"):
        value = getattr(data, name)
        if value is not None and value != 1.0:
            raise InvalidRequest(f"training_config.data_config.{name}", value, held_out)
    if method.max_completion_length >= fields["max_seq_length"]:
        hint = (
            f"it leaves no token for a prompt within max_seq_length {fields['max_seq_length']}: lower it, or raise that"
        )
        raise InvalidRequest("algorithm_config.max_completion_length", method.max_completion_length, hint)


def _refuse_options(options: ProviderOptions) -> None:
    if options.label_smoothing:
        hint = "GRPO has no form with smoothed labels; leave it out"
        raise InvalidRequest("provider_options.label_smoothing", options.label_smoothing, hint)
    if options.truncation_side != "right":
        hint = "GRPO cuts no prompt: one that leaves no room for an answer is left out; leave this out, too"
        raise InvalidRequest("provider_options.truncation_side", options.truncation_side, hint)
    for name in ("reference_model", "precompute_reference"):
        if value := getattr(options, name):
            hint = "GRPO's reference is the model as it begins, and answers are not known before; leave it out"
            raise InvalidRequest(f"provider_options.{name}", value, hint)
    if options.lora and options.lora.quantize_base:
        hint = "GRPO has not been tried with a base in 4 bits; leave it out"
        raise InvalidRequest("provider_options.lora.quantize_base", True, hint)


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
    """The job that a reward names; `jobs.reward_models` looks it up. Raises InvalidRequest."""
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
