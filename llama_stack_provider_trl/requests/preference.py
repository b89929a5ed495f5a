"""Resolves the preference methods beside DPO: each has a model of its request fields, and a function to its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import InvalidRequest
from ..specs.custom import custom_names
from ..specs.methods import METHODS, CpoSpec, KtoLoss, KtoSpec, MethodSpec, OrpoSpec, RewardSpec
from .bodies import (
    CPOConfig,
    DistillationConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    PreferenceOptimizeRequest,
    RewardConfig,
    SimPOConfig,
)
from .checks import parse_fields, unknown_fields
from .choices import nearest, nearest_choice
from .custom import resolve_custom, unknown_method
from .distillation import resolve_distillation
from .grpo import resolve_grpo
from .options import ProviderOptions

CPO_LOSSES = ("sigmoid", "hinge", "ipo")


@dataclass(frozen=True)
class Requested:
    """How a method is requested."""

    fields: type[BaseModel]
    """Its fields in `algorithm_config`; another method's are refused by name."""
    resolve: Callable[[Any, ProviderOptions, str], MethodSpec]
    """From the fields, the options, and where the fields are."""


def resolve_preference(
    request: PreferenceOptimizeRequest, options: ProviderOptions, warnings: list[str]
) -> dict[str, Any] | None:
    """The algorithm that a request names and its spec; None: DPO. Raises InvalidRequest: there is no such method, or
    the method has no such field or value."""
    where, given = "algorithm_config", request.algorithm_config or {}
    if options.method is not None:
        _note_unread(given, options.method.get("type"), warnings)
        where, given = "provider_options.method", options.method
    name = given.get("type")
    if isinstance(name, str) and name not in REQUESTED and name in custom_names():
        custom, fields = resolve_custom(name, given, where)
        _refuse_smoothing(options, custom.method.title)
        return fields
    if not isinstance(name, str) or name not in REQUESTED:
        if options.method is None:
            return None  # `resolve_dpo` refuses other types
        hint = "DPO has its fields in algorithm_config; " if name == "dpo" else ""
        raise InvalidRequest(f"{where}.type", name, hint + unknown_method(name, [*REQUESTED]))
    config = parse_fields(REQUESTED[name].fields, given, where)
    for path, field, value, known in unknown_fields(config, f"{where}."):
        title = METHODS[name].title  # type: ignore[index]  # it has every name of REQUESTED
        hint = f"{title} has no such field{nearest(field, known)}; its fields are: {', '.join(known)}"
        raise InvalidRequest(path + field, value, hint)
    return {"method": REQUESTED[name].resolve(config, options, where)}


def check_step(fields: Mapping[str, Any]) -> None:
    """Refuse KTO with one row per optimizer step. Raises InvalidRequest: the only row would be its own estimate of the
    KL divergence.

    Args:
        fields: of the JobSpec.
    """
    rows = fields["batch_size"] * fields["gradient_accumulation_steps"] * fields["ranks"]
    if fields["method"].estimates_kl and rows == 1:
        hint = "KTO gives each prompt the answer of another row of the optimizer step, which has one row: send at least"
        raise InvalidRequest("training_config.data_config.batch_size", 1, f"{hint} 2, or loss_type 'apo_zero_unpaired'")


def method_names() -> list[str]:
    """Values of `algorithm_config.type` in the call preference-optimize, without those of installed packages."""
    return ["dpo", *REQUESTED]


def _note_unread(given: dict[str, Any], name: Any, warnings: list[str]) -> None:
    """Newer releases require DPO's fields in `algorithm_config`: beside the option `method` they have no meaning."""
    if given.get("type") not in (None, name):
        hint = f"provider_options.method has the type {name!r}; send one of them"
        raise InvalidRequest("algorithm_config.type", given["type"], hint)
    if unread := [field for field, value in given.items() if field != "type" and value is not None]:
        fields = ", ".join(f"algorithm_config.{field}" for field in unread)
        warnings.append(f"{fields}: no effect, since provider_options.method has the method and its fields")


def _orpo(config: ORPOConfig, options: ProviderOptions, where: str) -> OrpoSpec:
    _refuse_smoothing(options, "ORPO")
    return OrpoSpec(**_given(config, "beta"))


def _cpo(config: CPOConfig, options: ProviderOptions, where: str) -> CpoSpec:
    loss = config.loss_type or "sigmoid"
    if loss not in CPO_LOSSES:
        hint = "send the type 'simpo'" if loss == "simpo" else nearest_choice(loss, CPO_LOSSES)
        raise InvalidRequest(f"{where}.loss_type", loss, hint)
    if loss != "sigmoid":
        _refuse_smoothing(options, f"the loss {loss}")
    given = _given(config, "beta", "alpha")
    return CpoSpec(loss_type=loss, label_smoothing=options.label_smoothing, **given)  # type: ignore[arg-type]


def _simpo(config: SimPOConfig, options: ProviderOptions, where: str) -> CpoSpec:
    # The paper's beta is 2 to 2.5, for log-probabilities that are averaged over tokens.
    values = {"beta": 2.0, "gamma": 0.5, "alpha": 0.0, **_given(config, "beta", "gamma", "alpha")}
    return CpoSpec(algorithm="simpo", loss_type="simpo", label_smoothing=options.label_smoothing, **values)


def _reward(config: RewardConfig, options: ProviderOptions, where: str) -> RewardSpec:
    _refuse_smoothing(options, "a reward model")
    for name, why in _NOT_OF_REWARDS.items():
        value = options.model_dump()[name]
        if value != ProviderOptions.model_fields[name].default:
            raise InvalidRequest(f"provider_options.{name}", value, f"{why}; leave it out")
    if options.lora and (options.lora.quantize_base or options.lora.use_dora):
        name = "quantize_base" if options.lora.quantize_base else "use_dora"
        raise InvalidRequest(f"provider_options.lora.{name}", True, "a reward model trains with plain LoRA only")
    return RewardSpec(**_given(config, "center_rewards_coefficient", "margin"))


def _kto(config: KTOConfig, options: ProviderOptions, where: str) -> KtoSpec:
    _refuse_smoothing(options, "KTO")
    loss = config.loss_type or "kto"
    if loss not in get_args(KtoLoss):
        raise InvalidRequest(f"{where}.loss_type", loss, nearest_choice(loss, get_args(KtoLoss)))
    if config.desirable_weight == config.undesirable_weight == 0:
        raise InvalidRequest(f"{where}.desirable_weight", 0.0, "with both weights 0 no row has a loss; raise one")
    if options.precompute_reference:
        hint = "KTO's reference also scores each prompt with another row's answer, which differs in every epoch"
        raise InvalidRequest("provider_options.precompute_reference", True, f"{hint}; leave it out")
    return KtoSpec(loss_type=loss, **_given(config, "beta", "desirable_weight", "undesirable_weight"))  # type: ignore[arg-type]


_NOT_OF_REWARDS = {
    "samples": "a reward model writes no text",
    "adapter": "a reward model has a head of its own, which an adapter of another job lacks",
    "merge_adapter": "the head of a reward model is in its adapter, which is not merged",
    "peft_method": "a reward model trains with plain LoRA only",
}
"""Provider option -> why a reward model cannot have it."""


def _given(config: BaseModel, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _refuse_smoothing(options: ProviderOptions, what: str) -> None:
    if options.label_smoothing:
        hint = f"{what} has no form with smoothed labels; leave it out"
        raise InvalidRequest("provider_options.label_smoothing", options.label_smoothing, hint)


REQUESTED: dict[str, Requested] = {
    "orpo": Requested(ORPOConfig, _orpo),
    "cpo": Requested(CPOConfig, _cpo),
    "simpo": Requested(SimPOConfig, _simpo),
    "reward": Requested(RewardConfig, _reward),
    "kto": Requested(KTOConfig, _kto),
    "grpo": Requested(GRPOConfig, resolve_grpo),
    "distillation": Requested(DistillationConfig, resolve_distillation),
}
