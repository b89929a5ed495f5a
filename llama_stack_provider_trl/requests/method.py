"""Resolves the method of a job: LoRA, QLoRA, QAT, DPO and its reference (`requests.preference`: the other ones)."""

from __future__ import annotations

from typing import Any, get_args

from ..errors import InvalidRequest
from ..specs.job import (
    DpoLoss,
    DpoSpec,
    LoraSpec,
    PeftMethod,
    QatSpec,
    Quantizer,
    ReferenceSpec,
)
from ..specs.methods import METHODS, MethodSpec, SftSpec
from ..specs.model_source import ModelSource
from ..system.data_dir import DataDir
from .bases import PREFIX, Base
from .bodies import (
    DPOAlignmentConfig,
    LoraFinetuningConfig,
    PreferenceOptimizeRequest,
    QATFinetuningConfig,
    SupervisedFineTuneRequest,
)
from .checks import parse_fields, unknown_fields
from .choices import nearest, nearest_choice
from .custom import unknown_method
from .distillation import with_model
from .engines import with_vllm
from .graders import jobs_that_grade, refuse_python_graders
from .options import ProviderOptions
from .paths import resolve_base_model, resolve_trust
from .preference import method_names, resolve_preference
from .settings import Request, Settings

# Llama Stack's names (from torchtune) that differ from Hugging Face's.
MODULE_NAMES = {"output_proj": "o_proj"}


WITHOUT_MEANING: dict[PeftMethod, tuple[str, ...]] = {"lora": (), "ia3": ("rank", "alpha"), "vera": ("alpha",)}
"""Fields of the LoRA settings that a method does not have. A job has 1 there: it resumes from one with other values."""
INT4_GROUP_SIZES = (32, 64, 128, 256)


def resolve_method(
    request: Request, options: ProviderOptions, settings: Settings, warnings: list[str], base: Base
) -> dict[str, Any]:
    fields: dict[str, Any]
    if isinstance(request, SupervisedFineTuneRequest):
        lora = resolve_sft_lora(request, options, warnings)
        fields = {"method": SftSpec(), "lora": lora, "qat": resolve_qat(request)}
        refuse_preference_options(options)
    elif chosen := resolve_preference(request, options, warnings):
        fields = {**chosen, "lora": resolve_dpo_lora(options, warnings)}
        if METHODS[fields["method"].algorithm].has_reference:
            given = {"reference": _reference(options, base, settings)}
            fields["method"] = fields["method"].model_copy(update=given)
        elif fields["method"].has_teacher:
            fields["method"] = with_model(fields["method"], settings)
        else:
            refuse_reference_options(options, METHODS[fields["method"].algorithm].title)
            where = "algorithm_config" if options.method is None else "provider_options.method"
            fields["method"] = with_vllm(fields["method"], settings, where)
            rewards = [(f"{where}.rewards.{n}.check", one) for n, one in enumerate(fields["method"].rewards_of_answers)]
            refuse_python_graders([(name, one.check) for name, one in rewards if one.check is not None], settings)
    else:
        dpo = resolve_dpo(request, options, settings, warnings, base)
        fields = {"lora": resolve_dpo_lora(options, warnings), "method": dpo}
    if base.lora is not None:
        fields["lora"] = _continued(base.lora, fields, options)
    if fields["lora"] is None:
        _refuse_adapter_options(options)
    _refuse_float8(fields, options)
    return fields


def jobs_named_by(fields: dict[str, Any]) -> list[str]:
    """The jobs that a requested method names, by its resolved fields: of its reward models, of the
    models of its graders, and of its teacher. Raises InvalidRequest."""
    method: MethodSpec = fields["method"]
    names = [model.job_uuid for model in method.reward_models]
    names += jobs_that_grade(method.rewards_of_answers)
    if (teacher := method.teacher_source) is not None and teacher.model.startswith(PREFIX):
        names.append(teacher.model.removeprefix(PREFIX).partition("/")[0])
    return names


def _continued(trained: LoraSpec, fields: dict[str, Any], options: ProviderOptions) -> LoraSpec:
    """The settings of a continued adapter. A request may leave them out, or send the same; whether the base is in 4
    bits, and the dropout, are its own."""
    name = METHODS[fields["method"].algorithm].lora_field
    if fields.get("qat") is not None:
        raise InvalidRequest("algorithm_config.type", "QAT", "QAT trains every weight: set adapter to 'merge'")
    requested: LoraSpec | None = fields["lora"]
    if requested is None:
        _refuse_other_options(trained, options)
        return trained.model_copy(update={"dropout": options.lora_dropout})
    own = {"dropout": requested.dropout, "quantize_base": requested.quantize_base}
    expected = trained.model_copy(update=own)
    for field in LoraSpec.model_fields:
        ours, theirs = getattr(requested, field), getattr(expected, field)
        if ours != theirs:
            hint = f"the adapter that is continued has {field} {theirs!r}, not {ours!r}: leave these settings out"
            raise InvalidRequest(name, "...", hint)
    return expected


def _refuse_other_options(trained: LoraSpec, options: ProviderOptions) -> None:
    for name, theirs in (("peft_method", trained.method), ("use_rslora", trained.use_rslora)):
        ours = getattr(options, name)
        if ours not in (theirs, ProviderOptions.model_fields[name].default):
            hint = f"the adapter that is continued has {theirs!r}: leave it out"
            raise InvalidRequest(f"provider_options.{name}", ours, hint)


def _refuse_adapter_options(options: ProviderOptions) -> None:
    for name in ("peft_method", "lora_dropout", "use_rslora", "merge_adapter", "fuse_lora"):
        value = getattr(options, name)
        if value != ProviderOptions.model_fields[name].default:
            hint = "there is no adapter without LoRA; ask for LoRA, or leave it out"
            raise InvalidRequest(f"provider_options.{name}", value, hint)


def _refuse_float8(fields: dict[str, Any], options: ProviderOptions) -> None:
    if options.float8 != "always":
        return
    hint = ""
    if options.compile_blocks != "always":
        hint = "without torch's compiler products in 8 bits are slower; send compile_blocks 'always', too"
    elif fields["lora"] is not None:
        hint = "frozen weights would be cast again in each pass; train all weights, or leave it out"
    elif fields.get("qat") is not None:
        hint = "QAT rounds the same weights to other numbers; train without QAT, or leave it out"
    if hint:
        raise InvalidRequest("provider_options.float8", options.float8, hint)


def resolve_sft_lora(
    request: SupervisedFineTuneRequest, options: ProviderOptions, warnings: list[str]
) -> LoraSpec | None:
    if options.lora is not None:
        raise InvalidRequest("provider_options.lora", "...", "SFT takes its LoRA settings from algorithm_config")
    config = request.algorithm_config
    if not config:
        return None
    kind = config.get("type", "LoRA")
    if kind == "QAT":
        return None
    if kind != "LoRA":
        hint = "send {'type': 'LoRA', ...} or {'type': 'QAT', ...}, or leave algorithm_config out to train every weight"
        raise InvalidRequest("algorithm_config.type", kind, hint)
    lora = parse_fields(LoraFinetuningConfig, config, "algorithm_config")
    return _lora(lora, "algorithm_config", options, warnings)


def resolve_dpo_lora(options: ProviderOptions, warnings: list[str]) -> LoraSpec | None:
    return _lora(options.lora, "provider_options.lora", options, warnings) if options.lora else None


def _lora(config: LoraFinetuningConfig, where: str, options: ProviderOptions, warnings: list[str]) -> LoraSpec:
    for path, name, value, known in unknown_fields(config, f"{where}."):
        raise InvalidRequest(
            path + name, value, f"there is no such field{nearest(name, known)}; the fields are: {', '.join(known)}"
        )
    if config.type != "LoRA":
        raise InvalidRequest(f"{where}.type", config.type, "send 'LoRA'")
    if config.apply_lora_to_output:
        raise InvalidRequest(
            f"{where}.apply_lora_to_output",
            True,
            "set false: the loss multiplies by the output weights directly, so an adapter there would never train",
        )
    modules = tuple(MODULE_NAMES.get(name, name) for name in config.lora_attn_modules)
    if not modules and not config.apply_lora_to_mlp:
        raise InvalidRequest(f"{where}.lora_attn_modules", [], "name at least one module, such as q_proj and v_proj")
    _refuse_fields_of_lora(config, where, options)
    meaningless = WITHOUT_MEANING[options.peft_method]
    for name in meaningless:
        if name in config.model_fields_set:  # not refused: Llama Stack's model requires them
            warnings.append(f"{where}.{name} means nothing with peft_method {options.peft_method!r} and has no effect")
    sizes = {name: 1 if name in meaningless else getattr(config, name) for name in ("rank", "alpha")}
    return LoraSpec(
        method=options.peft_method,
        target_modules=modules,
        mlp=bool(config.apply_lora_to_mlp),
        **sizes,
        dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        use_dora=bool(config.use_dora),
        quantize_base=bool(config.quantize_base),
    )


def _refuse_fields_of_lora(config: LoraFinetuningConfig, where: str, options: ProviderOptions) -> None:
    given = {
        f"{where}.use_dora": config.use_dora,
        f"{where}.quantize_base": config.quantize_base,
        "provider_options.lora_dropout": options.lora_dropout,
        "provider_options.use_rslora": options.use_rslora,
    }
    for name, value in given.items():
        if value and options.peft_method != "lora":
            hint = f"it belongs to LoRA, and peft_method is {options.peft_method!r}; use 'lora', or leave it out"
            raise InvalidRequest(name, value, hint)


def resolve_qat(request: SupervisedFineTuneRequest) -> QatSpec | None:
    if not request.algorithm_config or request.algorithm_config.get("type") != "QAT":
        return None
    config = parse_fields(QATFinetuningConfig, request.algorithm_config, "algorithm_config")
    for path, name, value, known in unknown_fields(config, "algorithm_config."):
        hint = (
            f"QAT trains every weight and has no LoRA fields{nearest(name, known)}; its fields are: {', '.join(known)}"
        )
        raise InvalidRequest(path + name, value, hint)
    quantizers = get_args(Quantizer)
    if config.quantizer_name not in quantizers:
        hint = nearest_choice(config.quantizer_name or "", quantizers)
        raise InvalidRequest("algorithm_config.quantizer_name", config.quantizer_name, hint)
    if config.group_size is None:
        raise InvalidRequest("algorithm_config.group_size", None, "send 32: it divides the widths of most models")
    if config.quantizer_name == "Int4WeightOnlyQATQuantizer" and config.group_size not in INT4_GROUP_SIZES:
        hint = f"torchao's int4 kernels have groups of {', '.join(map(str, INT4_GROUP_SIZES))}"
        raise InvalidRequest("algorithm_config.group_size", config.group_size, hint)
    return QatSpec(quantizer_name=config.quantizer_name, group_size=config.group_size)  # type: ignore[arg-type]


def resolve_dpo(
    request: PreferenceOptimizeRequest,
    options: ProviderOptions,
    settings: Settings,
    warnings: list[str],
    base: Base,
) -> DpoSpec:
    config = parse_fields(DPOAlignmentConfig, request.algorithm_config or {}, "algorithm_config")
    for path, name, value, known in unknown_fields(config, "algorithm_config."):
        raise InvalidRequest(
            path + name, value, f"there is no such field{nearest(name, known)}; the fields are: {', '.join(known)}"
        )
    if config.type not in (None, "dpo"):
        raise InvalidRequest("algorithm_config.type", config.type, unknown_method(config.type, method_names()))
    loss = config.loss_type or "sigmoid"
    if loss not in get_args(DpoLoss):
        raise InvalidRequest("algorithm_config.loss_type", loss, nearest_choice(loss, get_args(DpoLoss)))
    if config.reward_scale == config.reward_clip == 0.0:
        config = config.model_copy(update={"reward_scale": None, "reward_clip": None})
        warnings.append(
            "algorithm_config.reward_scale and reward_clip are both 0.0, which is read as not set: plain DPO"
        )
    for name in ("reward_scale", "reward_clip"):
        if getattr(config, name) == 0.0:
            hint = "a margin of 0 teaches nothing: send a number above 0, or leave it out"
            raise InvalidRequest(f"algorithm_config.{name}", 0.0, hint)
    if loss == "ipo" and (config.reward_clip is not None or config.reward_scale not in (None, 1.0)):
        raise InvalidRequest(
            "algorithm_config.loss_type", loss, "IPO has no reward margin to scale or clip; leave the reward fields out"
        )
    if loss != "sigmoid" and options.label_smoothing:
        raise InvalidRequest(
            "provider_options.label_smoothing",
            options.label_smoothing,
            f"the loss {loss} has no form with smoothed labels; use loss_type 'sigmoid', or leave it out",
        )
    for name in ("epsilon", "gamma"):
        if getattr(config, name) is not None:
            warnings.append(f"algorithm_config.{name} means nothing in DPO and has no effect")
    return DpoSpec(
        beta=config.beta or 0.1,
        loss_type=loss,  # type: ignore[arg-type]
        reward_scale=config.reward_scale or 1.0,
        reward_clip=config.reward_clip,
        label_smoothing=options.label_smoothing,
        reference=_reference(options, base, settings),
    )


def _reference(options: ProviderOptions, base: Base, settings: Settings) -> ReferenceSpec:
    fields: dict[str, Any] = {}
    if options.precompute_reference:
        fields = {"precompute": True, "cache": DataDir(settings.data_dir).reference}
    source = reference_source("provider_options.reference_model", options.reference_model, base, settings)
    return ReferenceSpec(**fields, source=source)


def reference_source(field: str, value: str | None, base: Base, settings: Settings) -> ModelSource | None:
    """Where a reference is read from; None: it is the base model. Raises InvalidRequest."""
    if value is None:
        return None
    model = resolve_base_model(field, value, settings)
    if model == base.source.model and base.adapter is None:
        return None
    return ModelSource(model=model, **resolve_trust(model, settings))


def refuse_preference_options(options: ProviderOptions) -> None:
    for name in ("method", "label_smoothing", "reference_model", "precompute_reference"):
        if value := getattr(options, name):
            belongs = "the call preference-optimize" if name == "method" else "DPO"
            raise InvalidRequest(f"provider_options.{name}", value, f"it belongs to {belongs}; leave it out")


def refuse_reference_options(options: ProviderOptions, title: str) -> None:
    for name in ("reference_model", "precompute_reference"):
        if value := getattr(options, name):
            raise InvalidRequest(f"provider_options.{name}", value, f"{title} has no reference model; leave it out")
