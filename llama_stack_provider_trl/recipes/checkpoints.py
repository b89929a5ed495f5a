"""The end of a job: a checkpoint that plain transformers (or peft) loads, whole or not there at all."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import faults
from ..files import free_bytes, put_in_place, write_manifest
from .spec import JobSpec


def export_final(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, spec: JobSpec) -> Path:
    """Write the trained model to `<checkpoint_dir>/final`: under LoRA the adapter alone, else the whole model.

    With `dtype` bf16 a whole model is written in bf16, half the size of the fp32 weights it was trained in.
    """
    if not isinstance(model, PeftModel):
        _to_export_dtype(model, spec)
    return _export(model, tokenizer, spec, "final")


def export_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, spec: JobSpec) -> Path:
    """Write the base model with the adapter merged into it to `<checkpoint_dir>/merged`. `model` is used up."""
    merged = model.merge_and_unload()
    _to_export_dtype(merged, spec)
    return _export(merged, tokenizer, spec, "merged")


def _to_export_dtype(model: PreTrainedModel, spec: JobSpec) -> None:
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    model.to(dtype)
    model.config.dtype = dtype


def _export(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, spec: JobSpec, name: str) -> Path:
    """Write beside the final place, fsync, rename: a reader sees all of it or nothing."""
    target, staging = spec.checkpoint_dir / name, spec.checkpoint_dir / f"{name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    # Training switched the cache off; a checkpoint that kept this would generate slowly for ever.
    model.config.use_cache = True
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / "training_job.json").write_text(spec.model_dump_json(indent=2) + "\n")
        faults.reach(f"exporting-{name}")
        write_manifest(staging)
        put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    faults.reach(f"exported-{name}")
    return target


def need_space(spec: JobSpec, num_bytes: int) -> None:
    """Raises what a full disk raises where `num_bytes` more would not leave `min_free_bytes` free."""
    free = free_bytes(spec.checkpoint_dir)
    if free < num_bytes + spec.min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the next checkpoint takes about {num_bytes >> 20} MiB in {spec.checkpoint_dir}, {free >> 20} MiB are "
            f"free and {spec.min_free_bytes >> 20} MiB must stay free",
        )


def step_bytes(model: torch.nn.Module, spec: JobSpec) -> int:
    """About how large a step checkpoint is: the trained weights and the optimizer's moments of them."""
    moments = 0 if spec.optimizer.name == "sgd" else 2
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return sum(weight.numel() * (weight.element_size() + moments * 4) for weight in weights)
