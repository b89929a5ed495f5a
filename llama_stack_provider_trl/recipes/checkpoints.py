"""The end of a job: a checkpoint that plain transformers (or peft) loads, whole or not there at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import fsync_tree
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
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "training_job.json").write_text(spec.model_dump_json(indent=2) + "\n")
    fsync_tree(staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return target
