"""The files of an export beside its weights: written, and tried before training on a model without weights.

A configuration that cannot be written, or not read back, fails every attempt at its last step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from peft import PeftConfig
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import align_special_tokens

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import Dtype, JobSpec
from ...specs.methods import METHODS
from .agreement import read_generation_config
from .loading import DTYPES, adapted_modules, adapter_config, load_config, outline

Kind = Literal["final", "merged"]

_NAMES: dict[torch.dtype | str | None, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
UNLOADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ImportError,
    AssertionError,
    AttributeError,
    SafetensorError,
)
"""What libraries raise for files that they cannot load."""
SAMPLE = "The quick brown fox jumps over the lazy dog. On the 3rd of May 2017, is 17 + 25 = 42?\n" * 2


def exports(spec: JobSpec) -> tuple[Kind, ...]:
    """The kinds of export that the job writes at its end."""
    if spec.work is not None:
        return ()
    return ("final", "merged") if spec.lora and spec.train.merge_adapter else ("final",)


def export_dtype(spec: JobSpec, kind: Kind) -> Dtype:
    """In which numbers an export is written: those of the job, and `merged` in those of its base model where the job
    computes in fp32 and the base has fewer bits, since nobody asked for a base of twice the size. Raises JobFailure:
    invalid_model."""
    if kind == "merged" and spec.compute.dtype == "fp32":
        return _NAMES.get(load_config(spec.source).dtype, "fp32")
    return spec.compute.dtype


def write_configuration(model: PreTrainedModel, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write all files of a whole model but its weights, before those: save_pretrained removes files of weights. Raises
    JobFailure: invalid_model, where its configuration cannot be written; OSError: the disk is full.

    Args:
        dtype: that the configuration names; None: the model's own.
    """
    try:
        model.save_pretrained(directory, state_dict={})
        if dtype is not None:
            model.config.dtype = dtype
            model.config.save_pretrained(directory)
    except (OSError, MemoryError, RuntimeError):
        raise
    except Exception as error:  # of transformers, and of each configuration's own checks
        raise JobFailure(
            Reason.invalid_model,
            f"model {model.name_or_path!r}: its config.json and generation_config.json cannot be written again: "
            f"{describe(error)}. Correct the values that this names in the files of the model.",
        ) from error


def try_exports(spec: JobSpec, tokenizer: PreTrainedTokenizerBase, warn: Callable[[str], None]) -> None:
    """Write and read back the exports of a job, without weights: a failure must be known before training. Raises
    JobFailure: invalid_model, with the file and the problem; invalid_request, as `adapter_config`.

    Args:
        tokenizer: with the chat template that the job trains with.
        warn: called with each sentence of `model_warnings`.
    """
    kinds, fault = exports(spec), None
    if not kinds:
        return
    with TemporaryDirectory() as name:
        directory = Path(name)
        if spec.lora:
            fault = _try_adapter(spec, directory)
        if not fault and _is_whole(spec):
            directory = directory / "model"
            fault = _try_model(spec, tokenizer, directory)
        if not fault:
            tokenizer.save_pretrained(directory)
            # transformers chooses a tokenizer's class by the model's type, too.
            fault = tokenizer_fault(directory, tokenizer, spec)
    if fault:
        raise JobFailure(
            Reason.invalid_model,
            f"model {spec.source.model!r} was saved without its weights and loaded again, as at the end of a job, and "
            f"{fault}. Correct its config.json, or name a model whose tokenizer_config.json names the "
            "right tokenizer_class.",
        )
    for message in model_warnings(spec):
        warn(message)


def model_warnings(spec: JobSpec) -> list[str]:
    """A sentence where layers are too small for the rank of their adapters, and for each file of the model of which the
    exports will lack a part."""
    found = [_rank_beyond_layers(spec)]
    if _is_whole(spec) and not spec.trains_reward:  # which generates nothing
        found.append(read_generation_config(spec.source).warning)
    return [*filter(None, found)]


def _rank_beyond_layers(spec: JobSpec) -> str | None:
    if spec.lora is None or spec.lora.method != "lora" or (spec.adapter and spec.adapter.use == "continue"):
        return None
    model = _built(spec, load_config(spec.source))
    if isinstance(model, str):
        return None
    sizes = {name: min(model.get_submodule(name).weight.shape) for name in adapted_modules(model, spec.lora)}
    small = {name: size for name, size in sizes.items() if size < spec.lora.rank}
    if not small:
        return None
    name = min(small, key=lambda name: small[name])
    return (
        f"{METHODS[spec.algorithm].lora_field}.rank {spec.lora.rank} is larger than the smaller size of {len(small)} "
        f"of {len(sizes)} adapted layers, such as {name} with {small[name]}: there it trains more weights and can "
        f"express no more than rank {small[name]} can. Send a smaller rank"
    )


def _is_whole(spec: JobSpec) -> bool:
    kinds = exports(spec)
    return bool(kinds) and (spec.lora is None or "merged" in kinds)


def _try_adapter(spec: JobSpec, directory: Path) -> str | None:
    assert spec.lora is not None
    model = _built(spec, load_config(spec.source))
    if isinstance(model, str):
        return None
    adapter_config(model, spec.lora, is_reward=spec.trains_reward).save_pretrained(str(directory))
    try:
        PeftConfig.from_pretrained(str(directory))
    except UNLOADABLE as error:
        return f"its adapter_config.json cannot be loaded: {describe(error)}"
    return None


def _try_model(spec: JobSpec, tokenizer: PreTrainedTokenizerBase, directory: Path) -> str | None:
    config = load_config(spec.source)
    model = _built(spec, config)
    if isinstance(model, str):  # loading reports it, or it can be built with weights only
        config.save_pretrained(directory)
        return None
    if model.can_generate():
        model.generation_config = read_generation_config(spec.source).config
    model.name_or_path = spec.source.model
    align_special_tokens(model, tokenizer)  # as Trainer does
    write_configuration(model, directory, DTYPES[export_dtype(spec, "merged" if spec.lora else "final")])
    try:
        written = AutoConfig.from_pretrained(directory, trust_remote_code=spec.source.trust_remote_code)
        if model.can_generate():
            GenerationConfig.from_pretrained(directory)
    except UNLOADABLE as error:
        return f"its configuration cannot be loaded: {describe(error)}"
    found = _built(spec, written, directory)
    return f"it cannot be built: {found}" if isinstance(found, str) else None


def _built(spec: JobSpec, config: PreTrainedConfig, directory: Path | None = None) -> PreTrainedModel | str:
    """The model of a configuration without weights, or why it cannot be built."""
    source = spec.source if directory is None else spec.source.model_copy(update={"path": directory})
    try:
        return outline(source, config, DTYPES[spec.compute.dtype], is_reward=spec.trains_reward)
    except Exception as error:  # of any architecture
        return describe(error)


def tokenizer_fault(directory: Path, tokenizer: PreTrainedTokenizerBase, spec: JobSpec) -> str | None:
    """How the tokenizer of a directory differs from the one that trained; None where it does not."""
    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=spec.source.trust_remote_code)
    except UNLOADABLE as error:
        return f"its tokenizer cannot be loaded: {describe(error)}"
    if found.chat_template != tokenizer.chat_template:
        return "its chat template is not the one that was trained with"
    if found(SAMPLE)["input_ids"] != tokenizer(SAMPLE)["input_ids"]:
        return f"its tokenizer gives other tokens than the one that was trained with, for {SAMPLE[:40]!r}"
    return None


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
