"""Request + options + configuration -> JobSpec. Whatever would be ignored is refused here, by name.

`resolve` looks at everything that needs no data, so a bad field is refused before a single row is read;
`Resolution.spec` then adds the datasets. `derive` turns a JobSpec into one attempt.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .errors import InvalidRequest
from .options import PRIORITIES, ProviderOptions
from .recipes.evaluations import METRICS
from .recipes.spec import (
    Algorithm,
    AttemptSpec,
    DatasetRef,
    DpoLoss,
    DpoSpec,
    EarlyStoppingSpec,
    JobSpec,
    LoraSpec,
    OptimizerSpec,
    QatSpec,
    Quantizer,
    ReferenceSpec,
    ResourcesSpec,
    ResumeFrom,
    ShardingSpec,
)
from .requests import (
    JOB_UUID_PATTERN,
    DataConfig,
    DPOAlignmentConfig,
    EfficiencyConfig,
    LoraFinetuningConfig,
    OptimizerConfig,
    PreferenceOptimizeRequest,
    QATFinetuningConfig,
    SupervisedFineTuneRequest,
    TrainingConfig,
)

Request = SupervisedFineTuneRequest | PreferenceOptimizeRequest

# TRL's defaults for full fine-tuning; adapters start from zero and take ten times as much (TRL's documentation).
LEARNING_RATES = {("sft", False): 2e-5, ("sft", True): 2e-4, ("dpo", False): 1e-6, ("dpo", True): 1e-5}
# Llama Stack's names (from torchtune) that differ from Hugging Face's.
MODULE_NAMES = {"output_proj": "o_proj"}
# What a job writes into its directory: a job of such a name could land on another one's checkpoint.
RESERVED_NAMES = r"(final|merged)(\.tmp)?|checkpoint-\d+"
RESERVED_DIRECTORIES = ("jobs", "datasets", "reference", "preflights", "llama-stack", "node")
"""What we write into a data directory besides checkpoints."""
INT4_GROUP_SIZES = (32, 64, 128, 256)
DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}


@dataclass(frozen=True)
class Settings:
    """What `resolve` takes from the provider's configuration."""

    data_dir: Path
    devices: tuple[str, ...]
    max_seq_length: int = 1024
    checkpoint_roots: tuple[Path, ...] = ()
    model_roots: tuple[Path, ...] | None = None
    """Directories below which a model may be named by its path, besides our own checkpoints; None: anywhere."""
    save_steps: int | None = None
    keep_last: int | None = None
    retries: int = 0
    oom_retry: bool = False
    max_duration: float | None = None
    priority: str = "normal"
    min_free_bytes: int = 0
    ranks: int = 1
    """Processes per job where a job does not say; 1: nothing here can train with several."""
    max_ranks: int = 1
    """The most that a job may ask for, per node."""
    nodes: int = 1
    """Machines per job where a job does not say."""
    max_nodes: int = 1
    """The most that a job may ask for; 1: nothing here can train on other machines."""
    sharding: ShardingSpec | None = None
    """How several ranks hold a model; None: this provider trains in one process only."""
    gradient_checkpointing: bool = False
    """Where a job does not say."""
    checkpoint_every: int = 1
    """Of how many blocks one is recomputed, where a job does not say."""
    trust_remote_code: tuple[str, ...] = ()
    """Models whose own code may run: directories, and model ids with their revision as ORG/NAME@REVISION."""


@dataclass(frozen=True)
class Resolution:
    """A request that can be honoured; lacks only its data."""

    dataset_id: str
    validation_dataset_id: str | None
    fields: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    train_share: float = 1.0
    """Share of the rows to train on; the others are held out for validation."""

    def spec(self, dataset: DatasetRef, validation: DatasetRef | None) -> JobSpec:
        return JobSpec(dataset=dataset, validation=validation, **self.fields)


def resolve(request: Request, options: ProviderOptions, settings: Settings) -> Resolution:
    """Decide everything about a job that does not depend on its rows.

    Raises:
        InvalidRequest: naming the field, its value and the nearest thing that works.
    """
    training = request.training_config
    _refuse_unknown(request)
    _refuse_infinite(request, "")
    _refuse_infinite(options, "provider_options.")
    _refuse_unsupported(request, sharded=settings.sharding is not None)
    data = _data_config(training)
    warnings: list[str] = []
    is_sft = isinstance(request, SupervisedFineTuneRequest)
    lora = _sft_lora(request, options) if isinstance(request, SupervisedFineTuneRequest) else _dpo_lora(options)
    qat = _qat(request) if isinstance(request, SupervisedFineTuneRequest) else None
    dpo = None if isinstance(request, SupervisedFineTuneRequest) else _dpo(request, options, settings, warnings)
    algorithm: Algorithm = "sft" if is_sft else "dpo"
    if is_sft:
        _refuse_dpo_options(options)
    if options.merge_adapter and lora is None:
        raise InvalidRequest(
            "provider_options.merge_adapter", True, "there is no adapter without LoRA; ask for LoRA, or leave it out"
        )
    fields = {
        "job_uuid": _job_uuid(request.job_uuid),
        "algorithm": algorithm,
        **(names := _names(request, settings)),
        **_trust(names["model"], settings),
        "checkpoint_dir": _checkpoint_dir(request, settings),
        "data_format": _data_format(data, is_sft, warnings),
        "n_epochs": training.n_epochs,
        "max_steps_per_epoch": training.max_steps_per_epoch,
        "batch_size": data.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps or 1,
        "max_validation_steps": _max_validation_steps(training, data, warnings),
        "shuffle": data.shuffle,
        "train_on_input": _train_on_input(data, is_sft),
        "packed": _packed(data, is_sft),
        "max_seq_length": options.max_seq_length or settings.max_seq_length,
        "max_seq_length_is_default": options.max_seq_length is None,
        "truncation_side": options.truncation_side,
        "dtype": _dtype(training, options.device or settings.devices[0]),
        **_activations(training, settings, options.device or settings.devices[0]),
        "optimizer": _optimizer(training, options, LEARNING_RATES[algorithm, lora is not None]),
        "lora": lora,
        "qat": qat,
        "dpo": dpo,
        "merge_adapter": options.merge_adapter,
        "save_steps": options.save_steps or settings.save_steps,
        **_evaluations(options, data, algorithm),
        "keep_last": options.keep_last or settings.keep_last,
        "retries": settings.retries if options.retries is None else options.retries,
        "oom_retry": settings.oom_retry if options.oom_retry is None else options.oom_retry,
        "max_duration": options.max_duration or settings.max_duration,
        "priority": PRIORITIES[options.priority or settings.priority],
        "min_free_bytes": settings.min_free_bytes,
        "logging_steps": options.logging_steps,
        "seed": options.seed,
        "preflight": options.preflight,
        "device": _device(options, settings),
        "resume_from": _resume_from(options),
        **_ranks(request, options, settings, resources := _resources(options, settings, names["model"])),
        "resources": resources,
    }
    return Resolution(data.dataset_id, data.validation_dataset_id, fields, warnings, _train_share(data))


def derive(
    spec: JobSpec,
    attempt: int,
    device: str,
    run_dir: Path,
    resume_from: Path | None = None,
    *fall_back_to: Path,
    in_smaller_parts: bool = False,
    has_trained: bool = False,
    nodes: int | None = None,
) -> AttemptSpec:
    """One try at a job on a concrete device. Pure: the same arguments give the same spec.

    Args:
        fall_back_to: checkpoints for the case that `resume_from` is damaged, the best first.
        in_smaller_parts: it ran out of memory before.
        has_trained: an attempt before has done steps. It did fit: an estimate no longer refuses it, since what others
            leave free on a GPU at the moment would end for good what another try can finish.
        nodes: that it runs on; None: as many as the job asks for.
    """
    spec = (spec.in_smaller_parts() if in_smaller_parts else None) or spec
    preflight = "warn" if has_trained and spec.preflight == "refuse" else spec.preflight
    placed = spec.model_copy(update={"device": device, "preflight": preflight})
    return AttemptSpec(
        job=placed,
        attempt=attempt,
        run_dir=run_dir,
        world_size=spec.ranks_per_node * (nodes or spec.nodes),
        # Of the job and not of `placed`: whatever an attempt changes, a step takes the same rows.
        rows_per_step=spec.rows_per_step,
        resume_from=resume_from,
        fall_back_to=fall_back_to,
    )


_NO_SAVERS = EfficiencyConfig()
COMPARED = 100
"""Characters of a name that is compared with ours: the time grows with the square of its length."""


def _refuse_unknown(request: Request) -> None:
    for path, name, value, known in _unknown_fields(request, ""):
        close = difflib.get_close_matches(name[:COMPARED], known, n=1)
        hint = (
            f"there is no such field: did you mean `{close[0]}`?" if close else "there is no such field: leave it out."
        )
        raise InvalidRequest(path + name, value, f"{hint} docs/reference/api.md lists every field")


def _unknown_fields(model: BaseModel, prefix: str) -> Iterator[tuple[str, str, Any, list[str]]]:
    known = list(type(model).model_fields)
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            yield prefix, name, value, known
    for name in known:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _unknown_fields(value, f"{prefix}{name}.")


def _refuse_infinite(model: BaseModel, prefix: str) -> None:
    """Python reads JSON's 1e999 as infinity, and JSON writes that as null: the stored job could not be read again."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(prefix + name, value, "send a finite number")
        if isinstance(value, BaseModel):
            _refuse_infinite(value, f"{prefix}{name}.")


def _refuse_unsupported(request: Request, *, sharded: bool) -> None:
    """The fields whose one supported value is 'off', in one table."""
    savers = request.training_config.efficiency_config or _NO_SAVERS
    efficiency = "training_config.efficiency_config."
    one_process = "this provider trains in one process and shards nothing; leave it out or set false"
    refused = [
        ("hyperparam_search_config", request.hyperparam_search_config, "send {} and one set of hyperparameters"),
        ("logger_config", request.logger_config, "send {}; metrics are in the job's status and in events.jsonl"),
        # Under FSDP2 the embeddings are units of their own whether it is asked for or not.
        (efficiency + "memory_efficient_fsdp_wrap", savers.memory_efficient_fsdp_wrap and not sharded, one_process),
        (efficiency + "fsdp_cpu_offload", savers.fsdp_cpu_offload and not sharded, one_process),
    ]
    for name, value, hint in refused:
        if value:
            raise InvalidRequest(name, value, hint)


def _data_config(training: TrainingConfig) -> DataConfig:
    if training.data_config is None:
        raise InvalidRequest("training_config.data_config", None, "name a dataset_id, a batch_size and shuffle")
    return training.data_config


def _job_uuid(job_uuid: str) -> str:
    if not re.fullmatch(JOB_UUID_PATTERN, job_uuid) or re.fullmatch(RESERVED_NAMES, job_uuid):
        raise InvalidRequest(
            "job_uuid",
            job_uuid,
            "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit, and not a name that "
            "checkpoints have (final, merged, checkpoint-7); it names a directory",
        )
    return job_uuid


def _names(request: Request, settings: Settings) -> dict[str, str]:
    """Base model and name of the result."""
    if isinstance(request, SupervisedFineTuneRequest):
        return {"model": _base_model("model", request.model, settings), "output_name": request.job_uuid}
    if request.model is None:
        model = _base_model("finetuned_model", request.finetuned_model, settings)
        return {"model": model, "output_name": request.job_uuid}
    model = _base_model("model", request.model, settings)
    return {"model": model, "output_name": request.finetuned_model or request.job_uuid}


def _trust(model: str, settings: Settings) -> dict[str, Any]:
    """Whether the operator lets this model's own code run, and of which revision."""
    for entry in settings.trust_remote_code:
        name, _, revision = entry.partition("@")
        if name == model or (not revision and Path(name).expanduser().resolve() == Path(model)):
            return {"trust_remote_code": True, "revision": revision or None}
    return {}


def _base_model(name: str, model: str | None, settings: Settings) -> str:
    if not model:
        raise InvalidRequest(name, model, "name the base model: a local directory or a model id such as org/name")
    path = _path(name, model)
    is_path = model.startswith(("/", "./", "~")) or ".." in Path(model).parts
    # Before anything is said of what is there.
    if (is_path or path.is_dir()) and not _may_be_read(path, settings):
        roots = ", ".join(map(str, settings.model_roots or ())) or "none is configured"
        raise InvalidRequest(
            name,
            model,
            f"a model that is a directory must lie below one of the configured model_roots ({roots}), or be a "
            "checkpoint of a job of this service; or name a model id such as org/name",
        )
    if not path.is_dir():
        if is_path:
            raise InvalidRequest(name, model, "there is no such directory on the machine that trains")
        return model
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise InvalidRequest(
                name,
                model,
                "this directory holds a LoRA adapter, not a model; train it with provider option merge_adapter and "
                "name its `merged` checkpoint",
            )
        raise InvalidRequest(name, model, "the directory has no config.json; expected what save_pretrained writes")
    return str(path)


def _may_be_read(path: Path, settings: Settings) -> bool:
    """Whether a request may name a model's directory: everywhere without `model_roots`; else below one of them, where
    jobs write checkpoints, and what the operator trusts by its path."""
    if settings.model_roots is None:
        return True
    data_dir = settings.data_dir.resolve()
    if path.is_relative_to(data_dir):
        return path != data_dir and not any(path.is_relative_to(data_dir / name) for name in RESERVED_DIRECTORIES)
    trusted = (entry for entry in settings.trust_remote_code if entry.startswith(("/", "~")))
    roots = (*settings.model_roots, *settings.checkpoint_roots, *map(Path, trusted))
    return any(path.is_relative_to(root.expanduser().resolve()) for root in roots)


def _path(name: str, text: str, root: Path = Path()) -> Path:
    """The absolute path that a text means; one that the system cannot look at is refused under its field's name."""
    try:
        path = (root / Path(text).expanduser()).resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission; no such ~user; a NUL character
        raise InvalidRequest(name, text, f"it cannot be looked up on this machine: {error}") from error
    return path


def _checkpoint_dir(request: Request, settings: Settings) -> Path:
    """`<checkpoint_dir>/<job_uuid>`: jobs that name the same directory never overwrite each other."""
    roots = [settings.data_dir, *settings.checkpoint_roots]
    base = _path("checkpoint_dir", request.checkpoint_dir or "checkpoints", settings.data_dir)
    if not any(base.is_relative_to(root.resolve()) for root in roots):
        raise InvalidRequest(
            "checkpoint_dir",
            request.checkpoint_dir,
            f"give a path relative to the data directory, or one inside {', '.join(map(str, roots))} "
            "(`checkpoint_roots` in the provider's configuration adds more)",
        )
    data_dir = settings.data_dir.resolve()
    if base == data_dir or data_dir.is_relative_to(base / request.job_uuid):
        raise InvalidRequest(
            "checkpoint_dir", request.checkpoint_dir, "our own files lie there; name a directory in it"
        )
    for reserved in RESERVED_DIRECTORIES:
        if base.is_relative_to(data_dir / reserved):
            raise InvalidRequest(
                "checkpoint_dir", request.checkpoint_dir, f"`{reserved}` holds our own files; use another"
            )
    for path in (base / request.job_uuid, base, *base.parents):
        if path.exists() and not path.is_dir():
            raise InvalidRequest("checkpoint_dir", request.checkpoint_dir, f"{path} is a file; name a directory")
    return base / request.job_uuid


def _data_format(data: DataConfig, is_sft: bool, warnings: list[str]) -> str | None:
    if data.data_format is None or data.data_format in ("instruct", "dialog"):
        return data.data_format if is_sft else None
    if not is_sft and data.data_format == "preference":
        return None
    raise InvalidRequest(
        "training_config.data_config.data_format",
        data.data_format,
        "send 'instruct' or 'dialog', or leave it out: each row's columns tell its shape "
        "(docs/reference/data-formats.md)",
    )


def _train_on_input(data: DataConfig, is_sft: bool) -> bool:
    if data.train_on_input and not is_sft:
        raise InvalidRequest(
            "training_config.data_config.train_on_input", True, "DPO compares completions only; set false"
        )
    return bool(data.train_on_input)


def _packed(data: DataConfig, is_sft: bool) -> bool:
    if data.packed and not is_sft:
        raise InvalidRequest(
            "training_config.data_config.packed",
            True,
            "DPO scores each pair on its own; set false: pairs are padded to the longest of their batch",
        )
    return bool(data.packed)


def _max_validation_steps(training: TrainingConfig, data: DataConfig, warnings: list[str]) -> int | None:
    if _validates(data):
        return training.max_validation_steps
    if training.max_validation_steps is not None:  # not refused: some clients always send the schema's default
        warnings.append("training_config.max_validation_steps has no effect without a validation_dataset_id")
    return None


def _validates(data: DataConfig) -> bool:
    """Whether the job has rows to evaluate on."""
    return bool(data.validation_dataset_id) or (data.train_split_percentage or 1.0) < 1.0


def _train_share(data: DataConfig) -> float:
    if data.validation_dataset_id and (data.train_split_percentage or 1.0) < 1.0:
        raise InvalidRequest(
            "training_config.data_config.train_split_percentage",
            data.train_split_percentage,
            f"validation_dataset_id names the rows to evaluate on, {data.validation_dataset_id!r}; send one of them",
        )
    return data.train_split_percentage or 1.0


def _evaluations(options: ProviderOptions, data: DataConfig, algorithm: Algorithm) -> dict[str, Any]:
    for name in ("eval_steps", "early_stopping", "best_checkpoint"):
        if getattr(options, name) is not None and not _validates(data):
            value = options.model_dump()[name]
            raise InvalidRequest(
                f"provider_options.{name}", value, "there is nothing to evaluate on: name a validation_dataset_id"
            )
    early, best = options.early_stopping, options.best_checkpoint
    if early:
        metric = _metric("provider_options.early_stopping.metric", early.metric, algorithm)
    return {
        "eval_steps": options.eval_steps,
        "early_stopping": early and EarlyStoppingSpec(**{**early.model_dump(), "metric": metric}),
        "best_checkpoint": best and _metric("provider_options.best_checkpoint", best, algorithm),
    }


def _metric(name: str, metric: str, algorithm: Algorithm) -> str:
    """As evaluations report it; `eval_` may be left out."""
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    if full not in METRICS[algorithm]:
        raise InvalidRequest(name, metric, _nearest(full, METRICS[algorithm]))
    return full


def _dtype(training: TrainingConfig, device: str) -> str:
    # Unset: bf16 where the hardware computes in it. A CPU without bf16 instructions is ten times slower than in fp32
    # (10M Llama, AVX2, 80 against 600 tokens/s).
    given = training.dtype or ("bf16" if device.startswith("cuda") else "fp32")
    if given not in DTYPES:
        raise InvalidRequest("training_config.dtype", given, "send 'bf16' (fp32 weights, bf16 compute) or 'fp32'")
    if DTYPES[given] == "fp16" and not device.startswith("cuda"):
        hint = f"its loss scaling needs cuda, and this job trains on {device}; send 'bf16' (the nearest) or 'fp32'"
        raise InvalidRequest("training_config.dtype", given, hint)
    return DTYPES[given]


def _activations(training: TrainingConfig, settings: Settings, device: str) -> dict[str, Any]:
    """What becomes of activations between the forward and the backward pass."""
    savers = training.efficiency_config or _NO_SAVERS
    if savers.enable_activation_offloading and not device.startswith("cuda"):
        raise InvalidRequest(
            "training_config.efficiency_config.enable_activation_offloading",
            True,
            f"it moves activations from a GPU's memory to the CPU's, and this job trains on {device}; set "
            "enable_activation_checkpointing instead, which saves the same memory by recomputing",
        )
    given = savers.enable_activation_checkpointing
    return {
        "gradient_checkpointing": settings.gradient_checkpointing if given is None else given,
        "checkpoint_every": settings.checkpoint_every if given is None else 1,
        "activation_offloading": bool(savers.enable_activation_offloading),
    }


def _optimizer(training: TrainingConfig, options: ProviderOptions, default_lr: float) -> OptimizerSpec:
    given = training.optimizer_config or OptimizerConfig()
    name = given.optimizer_type or "adamw"
    if name not in ("adam", "adamw", "sgd"):
        raise InvalidRequest(
            "training_config.optimizer_config.optimizer_type", name, _nearest(name, ["adam", "adamw", "sgd"])
        )
    if given.lr and training.learning_rate and given.lr != training.learning_rate:
        raise InvalidRequest(
            "training_config.learning_rate",
            training.learning_rate,
            f"optimizer_config.lr says {given.lr}; send one of them, or the same value",
        )
    if given.warmup_ratio and given.num_warmup_steps:
        raise InvalidRequest(
            "training_config.optimizer_config.warmup_ratio",
            given.warmup_ratio,
            f"num_warmup_steps asks for {given.num_warmup_steps} steps; send one of them",
        )
    if options.lr_decay_steps is not None and options.lr_scheduler != "warmup_stable_decay":
        raise InvalidRequest(
            "provider_options.lr_decay_steps",
            options.lr_decay_steps,
            f"the schedule {options.lr_scheduler!r} has no such part; lr_scheduler 'warmup_stable_decay' has",
        )
    return OptimizerSpec(
        name=name,  # type: ignore[arg-type]
        learning_rate=given.lr or training.learning_rate or default_lr,
        weight_decay=given.weight_decay or 0.0,
        warmup_steps=given.num_warmup_steps or 0,
        warmup_ratio=given.warmup_ratio or 0.0,
        scheduler=options.lr_scheduler,
        decay_steps=options.lr_decay_steps,
        max_grad_norm=options.max_grad_norm,
    )


def _sft_lora(request: SupervisedFineTuneRequest, options: ProviderOptions) -> LoraSpec | None:
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
    return _lora(_parse(LoraFinetuningConfig, config, "algorithm_config"), "algorithm_config")


def _dpo_lora(options: ProviderOptions) -> LoraSpec | None:
    return _lora(options.lora, "provider_options.lora") if options.lora else None


def _lora(config: LoraFinetuningConfig, where: str) -> LoraSpec:
    for path, name, value, known in _unknown_fields(config, f"{where}."):
        raise InvalidRequest(path + name, value, f"the fields are: {', '.join(known)}")
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
    return LoraSpec(
        target_modules=modules,
        mlp=bool(config.apply_lora_to_mlp),
        rank=config.rank,
        alpha=config.alpha,
        use_dora=bool(config.use_dora),
        quantize_base=bool(config.quantize_base),
    )


def _qat(request: SupervisedFineTuneRequest) -> QatSpec | None:
    if not request.algorithm_config or request.algorithm_config.get("type") != "QAT":
        return None
    config = _parse(QATFinetuningConfig, request.algorithm_config, "algorithm_config")
    for path, name, value, known in _unknown_fields(config, "algorithm_config."):
        hint = f"QAT trains every weight and has no LoRA fields; its fields are: {', '.join(known)}"
        raise InvalidRequest(path + name, value, hint)
    quantizers = get_args(Quantizer)
    if config.quantizer_name not in quantizers:
        hint = _nearest(config.quantizer_name or "", quantizers)
        raise InvalidRequest("algorithm_config.quantizer_name", config.quantizer_name, hint)
    if config.group_size is None:
        raise InvalidRequest("algorithm_config.group_size", None, "send 32: it divides the widths of most models")
    if config.quantizer_name == "Int4WeightOnlyQATQuantizer" and config.group_size not in INT4_GROUP_SIZES:
        hint = f"torchao's int4 kernels have groups of {', '.join(map(str, INT4_GROUP_SIZES))}"
        raise InvalidRequest("algorithm_config.group_size", config.group_size, hint)
    return QatSpec(quantizer_name=config.quantizer_name, group_size=config.group_size)  # type: ignore[arg-type]


def _dpo(
    request: PreferenceOptimizeRequest, options: ProviderOptions, settings: Settings, warnings: list[str]
) -> DpoSpec:
    config = _parse(DPOAlignmentConfig, request.algorithm_config or {}, "algorithm_config")
    for path, name, value, known in _unknown_fields(config, "algorithm_config."):
        raise InvalidRequest(path + name, value, f"the fields are: {', '.join(known)}")
    if config.type not in (None, "dpo"):
        raise InvalidRequest("algorithm_config.type", config.type, "send 'dpo', or leave it out")
    loss = config.loss_type or "sigmoid"
    if loss not in get_args(DpoLoss):
        raise InvalidRequest("algorithm_config.loss_type", loss, _nearest(loss, get_args(DpoLoss)))
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
        reference=_reference(options, _names(request, settings)["model"], settings),
    )


def _reference(options: ProviderOptions, base_model: str, settings: Settings) -> ReferenceSpec:
    fields: dict[str, Any] = {}
    if options.precompute_reference:
        fields = {"precompute": True, "cache": settings.data_dir / "reference"}
    if options.reference_model is not None:
        model = _base_model("provider_options.reference_model", options.reference_model, settings)
        if model != base_model:
            fields |= {"model": model, **_trust(model, settings)}
    return ReferenceSpec(**fields)


def _refuse_dpo_options(options: ProviderOptions) -> None:
    for name in ("label_smoothing", "reference_model", "precompute_reference"):
        if value := getattr(options, name):
            raise InvalidRequest(f"provider_options.{name}", value, "it belongs to DPO; leave it out")


def _resources(options: ProviderOptions, settings: Settings, model: str) -> ResourcesSpec | None:
    """What the job asks of its nodes; None: it stays on this machine."""
    asked = options.resources
    if asked is not None and settings.sharding is None:
        hint = "this provider trains on its own machine; leave it out, or use the service (remote::trl_remote)"
        raise InvalidRequest("provider_options.resources", asked.model_dump(exclude_unset=True), hint)
    nodes = (asked.nodes if asked else None) or settings.nodes
    if nodes > settings.max_nodes:
        hint = "no other machine can join this service, which listens on loopback: set TRL_SERVICE_HOST and its token"
        raise InvalidRequest("provider_options.resources.nodes", nodes, hint)
    if asked is None:
        # What has a path, or a device of its own, may be on this machine only.
        is_here = Path(model).is_absolute() or ":" in (options.device or "")
        stays = nodes == 1 and (settings.max_nodes == 1 or is_here)
        return None if stays else ResourcesSpec(nodes=nodes, min_nodes=nodes)
    if asked.min_nodes is not None and asked.min_nodes > nodes:
        raise InvalidRequest("provider_options.resources.min_nodes", asked.min_nodes, f"use at most nodes, {nodes}")
    if asked.model_present and Path(model).is_absolute():
        hint = "a model that is a directory is in no node's cache; name a model id, or leave it out"
        raise InvalidRequest("provider_options.resources.model_present", True, hint)
    if asked.gpu_memory_gb and options.device in ("cpu", "mps"):
        hint = f"device {options.device} has no memory of its own; leave one of the two out"
        raise InvalidRequest("provider_options.resources.gpu_memory_gb", asked.gpu_memory_gb, hint)
    given = asked.model_dump(exclude={"nodes", "min_nodes"}, exclude_none=True)
    return ResourcesSpec(nodes=nodes, min_nodes=asked.min_nodes or nodes, **given)


def _ranks(
    request: Request, options: ProviderOptions, settings: Settings, resources: ResourcesSpec | None
) -> dict[str, Any]:
    """How many processes train, and how they share the model."""
    nodes = resources.nodes if resources else 1
    per_node = options.nproc_per_node or settings.ranks
    ranks = per_node * nodes
    # What devices or cores another machine has is its own matter: a job that asks for too many waits, and says so.
    if per_node > settings.max_ranks and resources is None:
        if settings.sharding is None:
            hint = "this provider trains in one process; leave it out, or use the service (remote::trl_remote)"
        else:
            hint = f"this node has devices for {settings.max_ranks}"
        raise InvalidRequest("provider_options.nproc_per_node", per_node, hint)
    if settings.sharding is None:
        return {"ranks": ranks}
    savers = request.training_config.efficiency_config or _NO_SAVERS
    if ranks == 1:
        for name in ("memory_efficient_fsdp_wrap", "fsdp_cpu_offload"):
            if getattr(savers, name):
                hint = "one process shards nothing: ask for more with the provider option nproc_per_node, or set false"
                raise InvalidRequest(f"training_config.efficiency_config.{name}", True, hint)
        return {"ranks": 1}
    offload = settings.sharding.cpu_offload or bool(savers.fsdp_cpu_offload)
    if offload and settings.sharding.strategy == "NO_SHARD":
        raise InvalidRequest(
            "training_config.efficiency_config.fsdp_cpu_offload",
            True,
            "the service's sharding_strategy is NO_SHARD, which keeps everything on the device; set false",
        )
    return {"ranks": ranks, "sharding": settings.sharding.model_copy(update={"cpu_offload": offload})}


def _device(options: ProviderOptions, settings: Settings) -> str:
    if options.device is None:
        return "auto"
    kinds = ("cpu", "cuda") if settings.max_nodes > 1 else ()
    if options.device not in (*settings.devices, *kinds):
        raise InvalidRequest("provider_options.device", options.device, _nearest(options.device, settings.devices))
    return options.device


def _resume_from(options: ProviderOptions) -> ResumeFrom | None:
    """Which checkpoint; whether it is there is found out when the job is submitted."""
    if options.resume_from is None:
        return None
    job_uuid, _, checkpoint = options.resume_from.partition("/")
    is_named = re.fullmatch(JOB_UUID_PATTERN, job_uuid) and re.fullmatch(r"(checkpoint-\d+)?", checkpoint)
    if not is_named or options.resume_from.endswith("/"):
        hint = "send JOB_UUID, or JOB_UUID/checkpoint-N, of a job of this provider; a path is not taken"
        raise InvalidRequest("provider_options.resume_from", options.resume_from, hint)
    return ResumeFrom(job_uuid=job_uuid, checkpoint=checkpoint or None)


def _parse[Model: BaseModel](model: type[Model], value: Any, where: str) -> Model:
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([where, *map(str, first["loc"])])
        raise InvalidRequest(path, first["input"], first["msg"]) from error
    _refuse_infinite(parsed, f"{where}.")
    return parsed


def _nearest(value: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(value[:COMPARED], choices, n=1)
    nearest = f"; the nearest is '{close[0]}'" if close else ""
    return f"expected one of {', '.join(choices)}{nearest}"
