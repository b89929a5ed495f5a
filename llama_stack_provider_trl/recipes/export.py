"""The end of a job: a checkpoint that plain transformers (or peft) loads, whole or not there at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import faults
from ..files import put_in_place, write_manifest
from .models import DTYPES
from .spec import JobSpec


def export_final(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: JobSpec,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the trained model to `<checkpoint_dir>/final`: under LoRA the adapter alone, else the whole model.

    With `dtype` bf16 or fp16 a whole model is written in it, half the size of the fp32 weights it was trained in.

    Args:
        state: the weights of a model that was trained in parts, gathered; None: `model` holds them.
    """
    if isinstance(model, PeftModel):
        return _export(model, tokenizer, spec, "final", state)
    if state is None:
        _to_export_dtype(model, spec)
    else:
        state = {name: weight.to(_export_dtype(spec)) for name, weight in state.items()}
        model.config.dtype = _export_dtype(spec)
    return _export(model, tokenizer, spec, "final", state)


def export_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, spec: JobSpec) -> Path:
    """Write the base model with the adapter merged into it to `<checkpoint_dir>/merged`. `model` is used up."""
    merged = model.merge_and_unload()
    _to_export_dtype(merged, spec)
    return _export(merged, tokenizer, spec, "merged")


def _to_export_dtype(model: PreTrainedModel, spec: JobSpec) -> None:
    model.to(_export_dtype(spec))
    model.config.dtype = _export_dtype(spec)


def _export_dtype(spec: JobSpec) -> torch.dtype:
    return DTYPES[spec.dtype]


def _export(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: JobSpec,
    name: str,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write beside the final place, fsync, rename: a reader sees all of it or nothing."""
    target, staging = spec.checkpoint_dir / name, spec.checkpoint_dir / f"{name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    # Training switched the cache off; a checkpoint that kept this would generate slowly for ever.
    model.config.use_cache = True
    try:
        model.save_pretrained(staging, **({} if state is None else {"state_dict": state}))
        verify_weights(model, staging)
        tokenizer.save_pretrained(staging)
        (staging / "training_job.json").write_text(spec.model_dump_json(indent=2) + "\n")
        faults.reach(f"exporting-{name}")
        write_manifest(staging)
        put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    faults.reach(f"exported-{name}")
    return target


def verify_weights(model: PreTrainedModel | PeftModel, directory: Path) -> None:
    """Look into what was written: every trained weight must be there, in its shape.

    `save_pretrained` writes what it is given; under sharding that has been nothing, or one rank's part.

    Raises:
        AssertionError: naming what is missing. It is a bug, and the job must not look like a success.
    """
    written: dict[str, tuple[int, ...]] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = _expected(model)
    wrong = [name for name, shape in expected.items() if written.get(name) != shape]
    if wrong or not expected:
        raise AssertionError(
            f"{len(wrong)} of {len(expected)} weights are missing in {directory} or have another shape, such as "
            f"{', '.join(wrong[:3])}"
        )


def _expected(model: PreTrainedModel | PeftModel) -> dict[str, tuple[int, ...]]:
    """Name in the file -> shape; of weights that are tied, one."""
    weights = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else dict(model.named_parameters())
    return {name: tuple(weight.shape) for name, weight in weights.items()}
