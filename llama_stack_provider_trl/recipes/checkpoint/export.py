"""Exports a trained model to a checkpoint that transformers or peft loads: complete and verified, or not at all.

Weights are written as they are gathered (`recipes.checkpoint.weights`), so no rank ever holds the whole model. Before
the checkpoint is reported it is read back: every weight bit for bit, the tokenizer, and, where the model fits into the
free memory of rank 0's machine, the logits of the model loaded from it. transformers maps files that have
the model's dtype into memory, so a reloaded model costs page cache that the kernel can drop, no second copy.

The CPU memory that writing takes is in `recipes.checkpoint.weights`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME

from ... import faults
from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...system.files import fsync_tree, put_in_place, write_manifest
from ...system.process import available_memory
from ..distributed import ranks
from ..model.files import copy_processor
from ..model.fsdp import gather, reshard
from ..model.loading import DTYPES, auto_class, load_adapter, load_config, quantize
from ..model.saving import SAMPLE, UNLOADABLE, Kind, describe, export_dtype, tokenizer_fault, write_configuration
from .adapter_card import write_card
from .fencing import FencingToken
from .step import need_space
from .weights import Weight, adapter_tensors, differences, digest, export_bytes, write_weights

ROUNDING = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.1}
"""Up to which fraction of their own scale logits may differ, by the job's dtype. Measured on tiny models of a dozen
architectures: 1e-6 at most in fp32, 1e-2 in bf16, whose weights are rounded; an untied head: 1.4. Of models of 1B on
an H200: 0.026 in bf16."""
_WHERE_QUANTIZED = 3
"""Factor of that under quantization-aware training: a weight that rounding moves over the border between two of 16
values changes by a fifteenth of their range. Weights are compared bit for bit before. Measured: 0.11 in bf16 (H200)."""

_ADAPTER = "adapter_model.safetensors"
_SAMPLE_TOKENS = 32


class Exported(NamedTuple):
    """A complete export, and how it was verified."""

    path: Path
    logits_difference: float | None
    """As a fraction of the logits' scale; None: only weights were compared."""
    unchecked_reason: str | None
    """The reason why logits were not compared, as a warning."""


class Sample(NamedTuple):
    """The logits of the trained model for a few tokens."""

    ids: torch.Tensor
    """[1, tokens]"""
    logits: torch.Tensor
    """[tokens, vocabulary], fp32 in CPU memory; of a reward model [1, tokens], the rewards of its beginnings."""


def bytes_needed(model: PreTrainedModel | PeftModel, spec: JobSpec, kind: Kind) -> int:
    if kind == "final" and isinstance(model, PeftModel):
        return sum(weight.numel() * weight.element_size() for weight in adapter_tensors(model).values())
    return export_bytes(model, _dtype(spec, kind))


def take_sample(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, spec: JobSpec
) -> Sample:
    """Compute the trained model's logits for a few tokens. A collective under FSDP2. Raises JobFailure: diverged, where
    they are not finite: the last step ruined the model."""
    embeddings = model.get_input_embeddings().weight.shape[0]
    ids = [token for token in tokenizer(SAMPLE)["input_ids"] if token < embeddings]
    sample = torch.tensor(ids[: min(_SAMPLE_TOKENS, spec.data.max_seq_length)] or [0, 0])[None]
    was_training = model.training
    model.eval()
    logits = _logits(model, sample.to(device), is_reward=spec.trains_reward)
    reshard(model)
    model.train(was_training)
    if not torch.isfinite(logits).all():
        raise JobFailure(
            Reason.diverged,
            "after the last step the model's logits are not finite, so there is nothing worth exporting: earlier "
            "checkpoints are kept.",
        )
    return Sample(sample, logits)


def export(
    kind: Kind,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: JobSpec,
    sample: Sample,
    heartbeat: Callable[[], None] = lambda: None,
    fencing_token: FencingToken | None = None,
    require_space: Callable[[int], None] | None = None,
) -> Exported | None:
    """Write `<checkpoint_dir>/<kind>` to a staging directory, verify, fsync and rename it. A collective.

    `final` is the model, under LoRA the adapter alone; `merged` the model with the adapter merged into its weights.
    With `dtype` bf16 or fp16 a whole model is written in it, half the size of the fp32 weights it was trained in; and
    `merged` in that of its base model (`export_dtype`). Returns on rank 0 what was written, None on the others.

    Args:
        heartbeat: called after every unit of work.
        fencing_token: None: no other attempt writes there.
        require_space: raises where so many bytes do not fit; None: `need_space`.

    Raises:
        JobFailure: export_failed, naming the check that failed and what differed; node_lost, where the fencing token
            names another attempt. The export does not exist then.
        OSError: the disk is, or would be, full.
    """
    fencing_token = fencing_token or FencingToken()
    target, staging = spec.checkpoint_dir / kind, spec.checkpoint_dir / fencing_token.private_name(f"{kind}.tmp")
    try:
        if ranks.rank() == 0:
            (require_space or partial(need_space, spec))(bytes_needed(model, spec, kind))
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        if kind == "final" and isinstance(model, PeftModel):
            file, expected = _ADAPTER, _write_adapter(model, spec, staging, heartbeat)
        else:
            file, expected = SAFE_WEIGHTS_NAME, _write_model(model, spec, kind, staging, heartbeat)
        if ranks.rank() != 0:
            return None
        tokenizer.save_pretrained(staging)
        copy_processor(spec.source, staging)
        (staging / "training_job.json").write_text(spec.without_model_paths().model_dump_json(indent=2) + "\n")
        fsync_tree(staging)
        faults.reach(f"written-{kind}")
        if wrong := differences(expected, staging, file, heartbeat):
            raise _failed(
                kind, f"{len(wrong)} of {len(expected)} weights are not what was trained: {'; '.join(wrong[:3])}"
            )
        if fault := tokenizer_fault(staging, tokenizer, spec):
            raise _failed(kind, fault)
        difference, unchecked_reason = None, _insufficient_memory(model, spec, kind)
        if unchecked_reason is None:
            difference = _check_logits(kind, staging, expected, spec, sample, heartbeat)
        faults.reach(f"exporting-{kind}")
        write_manifest(staging)
        put_in_place(staging, target, fencing_token.check)
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
    faults.reach(f"exported-{kind}")
    return Exported(target, difference, unchecked_reason)


def _write_adapter(
    model: PeftModel, spec: JobSpec, directory: Path, heartbeat: Callable[[], None]
) -> dict[str, Weight]:
    # An adapter is small enough for rank 0 to hold all of it.
    state: dict[str, torch.Tensor] = {}
    for name, weight in adapter_tensors(model).items():
        whole = gather(weight)
        heartbeat()
        if whole is not None:
            state[name] = whole
    if ranks.rank() != 0:
        return {}
    model.save_pretrained(directory, selected_adapters=["default"], state_dict=state)
    write_card(directory, spec)
    return {name: digest(weight) for name, weight in get_peft_model_state_dict(model, state_dict=state).items()}


def _write_model(
    model: PreTrainedModel | PeftModel, spec: JobSpec, kind: Kind, directory: Path, heartbeat: Callable[[], None]
) -> dict[str, Weight]:
    if ranks.rank() == 0:
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        # Training switched the cache off, without which the exported model would generate slowly.
        plain.config.use_cache = True
        write_configuration(plain, directory, _dtype(spec, kind))
    return write_weights(model, directory, _dtype(spec, kind), heartbeat)


def _dtype(spec: JobSpec, kind: Kind) -> torch.dtype:
    return DTYPES[export_dtype(spec, kind)]


def _insufficient_memory(model: PreTrainedModel | PeftModel, spec: JobSpec, kind: Kind) -> str | None:
    needed, there = export_bytes(model, _dtype(spec, kind)), available_memory()
    if needed <= there:
        return None
    return (
        f"{kind}: every weight was compared with the trained model, its logits were not: loading it takes "
        f"{needed >> 20} MiB of memory and {there >> 20} MiB are free"
    )


def _check_logits(
    kind: Kind,
    directory: Path,
    expected: dict[str, Weight],
    spec: JobSpec,
    sample: Sample,
    heartbeat: Callable[[], None],
) -> float:
    try:
        with _heartbeat_per_module(heartbeat):
            if (directory / _ADAPTER).exists():
                loaded = load_adapter(spec, directory, as_trained=True)
                adapter = {name: digest(weight) for name, weight in get_peft_model_state_dict(loaded).items()}
                strange = [name for name in expected if adapter.get(name) != expected[name]]
            else:
                auto, _ = auto_class(load_config(spec.source), is_reward=spec.trains_reward)
                loaded, report = auto.from_pretrained(
                    directory, output_loading_info=True, trust_remote_code=spec.source.trust_remote_code
                )
                strange = [*report["missing_keys"], *report["unexpected_keys"]]
            if strange:
                raise _failed(
                    kind,
                    f"a {type(loaded).__name__} loaded from its files has other weights than they hold, such as "
                    f"{', '.join(sorted(strange)[:3])}",
                )
            if spec.train.qat:
                quantize(spec, loaded)
            found = _logits(loaded.eval(), sample.ids, is_reward=spec.trains_reward)
    except UNLOADABLE as error:
        if isinstance(error, torch.OutOfMemoryError | JobFailure):
            raise
        problem = f"it cannot be loaded: {describe(error)}"
        if isinstance(error, OSError | ValueError | RuntimeError | SafetensorError):  # perhaps of the disk
            raise _failed(kind, problem) from error
        raise JobFailure(Reason.invalid_model, _thrown_away(kind, problem)) from error
    difference = logits_difference(sample.logits, found, is_reward=spec.trains_reward)
    explained = explained_by_rounding(spec, kind)
    if not difference <= explained:  # nor a NaN
        raise _failed(
            kind,
            f"loaded from its files it gives other logits than the trained model: they differ by {difference:.2g} of "
            f"their scale, where rounding in {export_dtype(spec, kind)} explains {explained:g}",
        )
    return difference


def explained_by_rounding(spec: JobSpec, kind: Kind) -> float:
    return ROUNDING[export_dtype(spec, kind)] * (_WHERE_QUANTIZED if spec.train.qat else 1)


def logits_difference(expected: torch.Tensor, found: torch.Tensor, *, is_reward: bool = False) -> float:
    """How far logits [tokens, vocabulary] are from others, as a fraction of their spread: the median over the tokens.

    Not the maximum: rounding sends a token to another expert now and then, and all of its logits change. Rewards are
    compared with their size: a constant added to all logits of a token means nothing, one added to rewards does.
    """
    if expected.shape != found.shape:
        return float("inf")
    spread = (expected if is_reward else expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / spread.clamp(min=1e-6)).median())


def _logits(model: PreTrainedModel | PeftModel, ids: torch.Tensor, *, is_reward: bool = False) -> torch.Tensor:
    with torch.no_grad():
        if is_reward:
            ends = range(4, ids.shape[1] + 1, 4)
            rewards = [model(input_ids=ids[:, :end], use_cache=False).logits.flatten() for end in ends]
            return torch.cat(rewards)[None].float().cpu()
        return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


@contextmanager
def _heartbeat_per_module(heartbeat: Callable[[], None]) -> Iterator[None]:
    heartbeat()
    hook = register_module_forward_pre_hook(lambda *_: heartbeat())
    try:
        yield
    finally:
        hook.remove()
    heartbeat()


def _failed(kind: Kind, found: str) -> JobFailure:
    return JobFailure(
        Reason.export_failed,
        f"{_thrown_away(kind, found)}, and a retry resumes from the newest one.",
    )


def _thrown_away(kind: Kind, found: str) -> str:
    return (
        f"the export {kind} was written, checked and thrown away: {found}. Checkpoints that were listed before are kept"
    )
