"""Maps a JobSpec to TRL's argument objects. The only module with TRL's and Trainer's argument names.

TRL renames arguments between releases and refuses unknown ones with a TypeError, so each of them is here, once.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec, OptimizerSpec
from ...specs.schedules import warmup_steps
from ..distributed.ranks import COLLECTIVE_TIMEOUT
from ..fast.kept_attention import checkpoint_arguments
from ..model.fsdp import fsdp_arguments, is_sharded
from .adamw_8bit import AdamW8Bit
from .loader import loader_arguments


def sft_arguments(spec: JobSpec, device: torch.device) -> SFTConfig:
    """Arguments for TRL's SFTTrainer; its datasets are tokenized already (`recipes.data.prepare`)."""
    return SFTConfig(
        **_trl_arguments(spec, device),
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=False,
        loss_type="nll",
    )


def pair_arguments(spec: JobSpec, device: torch.device) -> DPOConfig:
    """Arguments for TRL's DPOTrainer; our trainers on pairs compute their losses from the JobSpec itself."""
    return DPOConfig(
        **_trl_arguments(spec, device),
        loss_type=["sigmoid"],  # TRL's loss, which is never called
        disable_dropout=True,
        precompute_ref_log_probs=False,
    )


def prompt_arguments(spec: JobSpec, device: torch.device) -> TrainingArguments:
    """Arguments for Trainer, whose rows are prompts, which `recipes.trainer.answering` answers and collates."""
    return TrainingArguments(**_trainer_arguments(spec, device), remove_unused_columns=False)


def reward_arguments(spec: JobSpec, device: torch.device) -> RewardConfig:
    """Arguments for TRL's RewardTrainer; `recipes.trainer.reward` collates pairs and computes the loss."""
    return RewardConfig(**_trl_arguments(spec, device), disable_dropout=True, remove_unused_columns=False)


def kto_arguments(spec: JobSpec, device: torch.device) -> KTOConfig:
    """Arguments for TRL's KTOTrainer; `recipes.trainer.kto` pairs rows, collates them and computes the loss."""
    return KTOConfig(
        **_trl_arguments(spec, device),
        loss_type="apo_zero_unpaired",  # never called; with the other one TRL refuses a batch_size of 1
        disable_dropout=True,
        remove_unused_columns=False,
        precompute_ref_log_probs=False,
    )


def optimizer_class(spec: JobSpec, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer class and its arguments beyond weight decay (which Trainer sets per parameter group)."""
    optimizer = spec.train.optimizer
    shared: dict[str, Any] = {"lr": optimizer.learning_rate}
    adam_arguments = {"betas": (optimizer.adam_beta1, optimizer.adam_beta2), "eps": optimizer.adam_epsilon}
    if optimizer.name == "adamw_8bit":
        return AdamW8Bit, {**shared, **adam_arguments}
    if device.type in ("cuda", "cpu") and not (optimizer.name == "sgd" and is_sharded(spec)):
        # One kernel for all parameters, Trainer's own default where torch has it: for SGD on shards it has none.
        shared["fused"] = True
    if optimizer.name == "sgd":
        return torch.optim.SGD, shared
    adam = torch.optim.AdamW if optimizer.name == "adamw" else torch.optim.Adam
    return adam, {**shared, **adam_arguments}


def scheduler_arguments(optimizer: OptimizerSpec, total_steps: int) -> dict[str, Any]:
    """Arguments of transformers' schedule beyond the warmup. Raises JobFailure: invalid_request, where the job is too
    short for its warmup and decay."""
    if optimizer.scheduler == "cosine":
        return {"num_cycles": optimizer.num_cycles}
    if optimizer.scheduler != "warmup_stable_decay":
        return {}
    decay = optimizer.decay_steps or max(1, total_steps // 10)
    warmup = warmup_steps(optimizer, total_steps)
    if warmup + decay > total_steps:
        raise JobFailure(
            Reason.invalid_request,
            f"num_warmup_steps {warmup} and lr_decay_steps {decay} are more than the {total_steps} "
            "optimizer steps of this job. Lower them, or train for more epochs.",
        )
    return {"num_decay_steps": decay}


def _trl_arguments(spec: JobSpec, device: torch.device) -> dict[str, Any]:
    return {
        **_trainer_arguments(spec, device),
        "trust_remote_code": spec.source.trust_remote_code,
        # The old name of activation_checkpointing. It warns in transformers 5.23, and TRL sets it to True unless it is
        # None.
        "gradient_checkpointing": None,
        "activation_offloading": spec.compute.activation_offloading,
        "max_length": spec.data.max_seq_length,
    }


def _trainer_arguments(spec: JobSpec, device: torch.device) -> dict[str, Any]:
    optimizer, sharding = spec.train.optimizer, fsdp_arguments(spec)
    return {
        "output_dir": str(spec.checkpoint_dir),
        "num_train_epochs": spec.train.n_epochs,
        "per_device_train_batch_size": spec.data.batch_size,
        "per_device_eval_batch_size": spec.data.evaluated_batch_size,
        "gradient_accumulation_steps": spec.train.gradient_accumulation_steps,
        "activation_checkpointing": spec.compute.gradient_checkpointing,
        "activation_checkpointing_kwargs": {
            "every_n_layers": spec.compute.checkpoint_every,
            **checkpoint_arguments(spec, device.type),
        }
        if spec.compute.gradient_checkpointing
        else None,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        # transformers 5 reads a number below 1 as a share of all steps, rounded up.
        "warmup_steps": optimizer.warmup_steps or optimizer.warmup_ratio,
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(optimizer.scheduler, optimizer.scheduler),
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": spec.compute.dtype == "bf16",
        "fp16": spec.compute.dtype == "fp16",
        "seed": spec.data.seed,
        "use_cpu": device.type == "cpu",
        **loader_arguments(spec, device.type),
        "logging_steps": spec.train.logging_steps,
        # With periodic averaging no step waits for other workers: `RecipeTrainer` counts those of each.
        "average_tokens_across_devices": spec.train.averaging is None,
        # With the filter on, Trainer reports the last finite loss in place of a NaN; a NaN fails the job.
        "logging_nan_inf_filter": False,
        # Saving, evaluating and reporting are decided by `recipes.trainer.callbacks`.
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        # The last blocks of many vision parts are unused. Without the search DDP orders its buckets anew after the
        # first step of an attempt: from three ranks on, a resumed job would add in another order.
        "ddp_find_unused_parameters": True,
        "ddp_timeout": int(COLLECTIVE_TIMEOUT.total_seconds()),
        **sharding,
        "accelerator_config": {"non_blocking": device.type == "cuda", **sharding.get("accelerator_config", {})},
    }
