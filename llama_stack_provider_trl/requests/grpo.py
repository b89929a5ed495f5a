"""Resolves GRPO: its parameters, its rewards, and what such a job cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ..errors import InvalidRequest
from ..specs.answer_checks import AnswerCheck, refuse_fields, refuse_references
from ..specs.methods import GrpoLoss, GrpoSpec, RewardScale
from ..specs.rewards import GROUP, RewardSource, installed_rewards
from .bodies import DataConfig, GRPOConfig, GRPOReward
from .checks import nearest_choice, parse_fields
from .options import ProviderOptions

_ONE_PROCESS = "GRPO answers prompts and trains in one process"


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
        hint = f"{_ONE_PROCESS}: send 1"
        raise InvalidRequest("provider_options.resources.nodes", resources.nodes, hint)
    if fields["ranks"] > 1:
        raise InvalidRequest("provider_options.nproc_per_node", fields["ranks"], f"{_ONE_PROCESS}: send 1")
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
        hint = 'send at least one, such as {"check": {"type": "exact", "column": "answer"}} or {"function": NAME}'
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
            hint = "another reward has this name: give each check a name of its own, and name a function once"
            raise InvalidRequest(f"{where}.{number}", source.name, hint)
        sources.append(source)
    checks = {f"{where}.{number}.check": source.check for number, source in enumerate(sources)}
    refuse_references({field: check for field, check in checks.items() if check is not None})
    return tuple(sources)


def _source(given: GRPOReward, where: str) -> RewardSource:
    if given.model is not None:
        hint = "rewards by another job's reward model are not supported: send a check or a function"
        raise InvalidRequest(f"{where}.model", given.model, hint)
    if (given.check is None) == (given.function is None):
        raise InvalidRequest(where, given.model_dump(exclude_none=True), "send either a check or a function")
    if given.weight == 0:
        raise InvalidRequest(f"{where}.weight", 0, "a reward without a weight teaches nothing; leave it out")
    weight = 1.0 if given.weight is None else given.weight
    if given.check is None:
        _check_installed(given.function or "", where)
        return RewardSource(name=given.function or "", weight=weight, function=given.function)
    check = parse_fields(AnswerCheck, given.check, f"{where}.check")
    refuse_fields(check, f"{where}.check")
    return RewardSource(name=check.measure, weight=weight, check=check)


def _check_installed(name: str, where: str) -> None:
    installed = installed_rewards()
    if name not in installed:
        those = nearest_choice(name, sorted(installed)) if installed else "no installed package adds one"
        hint = f"{those}; a package adds functions by entry points of the group {GROUP}"
        raise InvalidRequest(f"{where}.function", name, hint)
