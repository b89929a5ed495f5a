"""The numerics of a job: dtype, kernels, activation checkpointing, optimizer."""

from __future__ import annotations

from typing import Any, get_args

from ..errors import InvalidRequest
from ..specs.job import Algorithm, OptimizerName, OptimizerSpec, default_dtype
from ..specs.methods import METHODS
from .bodies import OptimizerConfig, TrainingConfig
from .checks import NO_SAVERS
from .choices import nearest_choice
from .options import ProviderOptions
from .settings import Settings

DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}


def resolve_training(
    training: TrainingConfig, options: ProviderOptions, settings: Settings, algorithm: Algorithm, *, has_adapters: bool
) -> dict[str, Any]:
    device, hint = device_of(options, settings, may_leave=settings.max_nodes > 1)
    activations = resolve_activations(training, settings, device, hint)
    _refuse_kept_attention(options, is_recomputed=activations["gradient_checkpointing"])
    _refuse_liger(options, device, hint)
    _refuse_flash(training, options, device, hint)
    return {
        "dtype": resolve_dtype("training_config.dtype", training.dtype, device, hint),
        **activations,
        "optimizer": resolve_optimizer(training, options, METHODS[algorithm].learning_rates[has_adapters], device),
    }


def device_of(options: ProviderOptions, settings: Settings, *, may_leave: bool) -> tuple[str, str]:
    """The device whose limits a job has, and the end of a hint to another one.

    Args:
        may_leave: whether a job without a device may run on any node: its placement is not known yet.
    """
    hint = ", or set provider_options.device to 'cuda'" if may_leave and not options.device else ""
    return options.device or settings.devices[0], hint


def resolve_dtype(field: str, value: str | None, device: str, other_device: str = "") -> str:
    given = value or default_dtype(device)
    if given not in DTYPES:
        raise InvalidRequest(field, given, "send 'bf16' (fp32 weights, bf16 compute) or 'fp32'")
    if DTYPES[given] == "fp16" and not device.startswith("cuda"):
        hint = f"its loss scaling needs cuda, and this job trains on {device}; send 'bf16' (the nearest) or 'fp32'"
        hint += other_device
        raise InvalidRequest(field, given, hint)
    return DTYPES[given]


def resolve_activations(
    training: TrainingConfig, settings: Settings, device: str, other_device: str = ""
) -> dict[str, Any]:
    """Resolve the treatment of activations between the forward and the backward pass."""
    savers = training.efficiency_config or NO_SAVERS
    if savers.enable_activation_offloading and not device.startswith("cuda"):
        raise InvalidRequest(
            "training_config.efficiency_config.enable_activation_offloading",
            True,
            f"it moves activations from a GPU's memory to the CPU's, and this job trains on {device}; set "
            f"enable_activation_checkpointing instead, which saves the same memory by recomputing{other_device}",
        )
    given = savers.enable_activation_checkpointing
    return {
        "gradient_checkpointing": settings.gradient_checkpointing if given is None else given,
        "checkpoint_every": settings.checkpoint_every if given is None else 1,
        "activation_offloading": bool(savers.enable_activation_offloading),
    }


def _refuse_kept_attention(options: ProviderOptions, *, is_recomputed: bool) -> None:
    """Refuse to keep what would be kept anyway, or what no operator of torch computes."""
    value, field = options.keep_attention, "provider_options.keep_attention"
    if value != "auto" and not is_recomputed:
        hint = "no activations are computed again; set enable_activation_checkpointing, or leave it out"
        raise InvalidRequest(field, value, hint)
    name = options.attn_implementation
    if value == "always" and name not in (None, "sdpa"):
        raise InvalidRequest(field, value, f"attn_implementation {name!r} is none of torch's operators; send 'sdpa'")
    if value == "always" and options.compile_blocks == "always":
        raise InvalidRequest(field, value, "compile_blocks 'always' computes attention again; send one of them")


def _refuse_liger(options: ProviderOptions, device: str, other_device: str) -> None:
    value, field = options.liger_kernels, "provider_options.liger_kernels"
    if value == "always" and not device.startswith("cuda"):
        raise InvalidRequest(
            field, value, f"Triton's kernels are for cuda, and this job trains on {device}; leave it out{other_device}"
        )
    if value == "always" and options.compile_blocks == "always":
        hint = "compile_blocks 'always' makes kernels of the same operations; send one of them"
        raise InvalidRequest(field, value, hint)


def _refuse_flash(training: TrainingConfig, options: ProviderOptions, device: str, other_device: str) -> None:
    name = options.attn_implementation
    if name is not None and name.startswith("flash"):
        if not device.startswith("cuda"):
            hint = f"flash kernels are for cuda, and this job trains on {device}; send 'sdpa', or leave it out"
            hint += other_device
            raise InvalidRequest("provider_options.attn_implementation", name, hint)
        if training.dtype in ("fp32", "float32"):
            hint = "flash kernels compute in bf16 or fp16, and training_config.dtype is fp32; send 'sdpa'"
            raise InvalidRequest("provider_options.attn_implementation", name, hint)


def resolve_optimizer(
    training: TrainingConfig, options: ProviderOptions, default_lr: float, device: str
) -> OptimizerSpec:
    given = training.optimizer_config or OptimizerConfig()
    name = given.optimizer_type or "adamw"
    if name not in get_args(OptimizerName):
        field = "training_config.optimizer_config.optimizer_type"
        raise InvalidRequest(field, name, nearest_choice(name, get_args(OptimizerName)))
    if name == "adamw_8bit" and device.startswith("mps"):
        hint = f"its kernels are for cuda and cpu, and this job trains on {device}; send 'adamw'"
        raise InvalidRequest("training_config.optimizer_config.optimizer_type", name, hint)
    if given.lr and training.learning_rate and given.lr != training.learning_rate:
        raise InvalidRequest(
            "training_config.learning_rate",
            training.learning_rate,
            f"optimizer_config.lr is {given.lr}; send one of them, or the same value",
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
    if options.num_cycles is not None and options.lr_scheduler != "cosine":
        raise InvalidRequest(
            "provider_options.num_cycles",
            options.num_cycles,
            f"the schedule {options.lr_scheduler!r} has no waves; set lr_scheduler to 'cosine', or leave it out",
        )
    return OptimizerSpec(
        name=name,  # type: ignore[arg-type]
        learning_rate=given.lr or training.learning_rate or default_lr,
        weight_decay=given.weight_decay or 0.0,
        warmup_steps=given.num_warmup_steps or 0,
        warmup_ratio=given.warmup_ratio or 0.0,
        scheduler=options.lr_scheduler,
        decay_steps=options.lr_decay_steps,
        num_cycles=0.5 if options.num_cycles is None else options.num_cycles,
        max_grad_norm=options.max_grad_norm,
        **_adam(options, name),
    )


def _adam(options: ProviderOptions, optimizer: str) -> dict[str, float]:
    """Adam's coefficients that the request sets, by the names of `OptimizerSpec`."""
    names = ("adam_beta1", "adam_beta2", "adam_epsilon")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if given and optimizer == "sgd":
        name, value = next(iter(given.items()))
        hint = "optimizer_type 'sgd' has no such coefficient; use 'adamw' or 'adam', or leave it out"
        raise InvalidRequest(f"provider_options.{name}", value, hint)
    return given
