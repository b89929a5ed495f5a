"""The frozen model that the policy is compared with: DPO's reference, or the teacher of a distillation.

A reference is the base model (under LoRA the policy with its adapter switched off, else a second, frozen copy), the
policy with the adapter that it began with, or another model that the job names. A teacher is always a model of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.methods import OTHER_VOCABULARY
from ...specs.model_source import ModelSource
from ..data.images import digest_of
from ..data.pieces import Pieces, pieces_of
from ..distributed import ranks
from ..fast.compiled import COMPILED, compile_blocks
from ..fast.float8 import USED, use_float8
from ..fast.liger import use_liger
from ..fast.lora import fuse_lora
from ..fast.mlp import tile_mlp
from ..fast.model import use_rows
from ..model.adapters import frozen, has_reference_adapter
from ..model.attention import set_attention
from ..model.deferred import DeferredWeights
from ..model.fsdp import describe, is_sharded, shard_frozen
from ..model.loading import WeightStorage, commit_of, load_model, load_tokenizer, vocabulary_size
from ..model.positions import check_length
from ..model.quantization import move_constants
from .reference_cache import LogProbCache, pair_lengths, row_bytes
from .trl_patches import fuse_head


class NoReference(PreTrainedModel):
    """An empty model. Without one TRL would load a reference of its own, and shard it as one unit."""

    config_class = PreTrainedConfig

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())

    def forward(self) -> None:
        """Never called."""


def is_needed(spec: JobSpec) -> bool:
    """Whether the reference is a model of its own, rather than the policy without its adapter."""
    if spec.method.kl_weight:
        return spec.lora is None
    return spec.reference is not None and (spec.lora is None or spec.reference.source is not None)


def check_vocabulary(spec: JobSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a reference model whose vocabulary differs from that of the base model's tokenizer. Raises JobFailure:
    invalid_model, naming both models and where they differ."""
    reference = spec.reference_source
    if spec.method.other_vocabulary is not None:
        check_pieces(spec, tokenizer)
        return
    if reference.model == spec.source.model:
        return
    if problem := vocabulary_problem(tokenizer, reference):
        if spec.method.has_teacher:
            raise JobFailure(
                Reason.invalid_model,
                f"algorithm_config.teacher {reference.model!r} does not fit the model {spec.source.model!r}: {problem}"
                f". {OTHER_VOCABULARY[0].upper()}{OTHER_VOCABULARY[1:]}.",
            )
        raise JobFailure(
            Reason.invalid_model,
            f"reference_model {reference.model!r} does not fit the model {spec.source.model!r}: {problem}. Name a "
            "reference with the same tokenizer, such as an earlier checkpoint of the model, or leave it out: the base "
            "model.",
        )


def check_pieces(spec: JobSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[Pieces, Pieces, PreTrainedTokenizerBase]:
    """The pieces of a model and of its teacher with another vocabulary, and the teacher's tokenizer. Raises JobFailure:
    invalid_model, naming the model whose tokens cannot be compared."""
    theirs = load_tokenizer(spec.reference_source)
    pieces_of_both = []
    for name, source, own in (
        ("model", spec.source, tokenizer),
        ("algorithm_config.teacher", spec.reference_source, theirs),
    ):
        pieces, problem = pieces_of(own), ""
        if pieces is None:
            problem = "its tokens are not known to write bytes, as those of byte-level tokenizers and of SentencePiece "
            problem += "ones that fall back to bytes are"
        elif vocabulary_size(source) < len(pieces.written):
            problem = f"it has embeddings for {vocabulary_size(source)} tokens of {len(pieces.written)}"
        if pieces is None or problem:
            hint = "name another one: use_uld_loss compares the bytes of tokens"
            raise JobFailure(Reason.invalid_model, f"{name} {source.model!r}: {problem}; {hint}.")
        pieces_of_both.append(pieces)
    return pieces_of_both[0], pieces_of_both[1], theirs


def vocabulary_problem(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> str:
    """Why a model cannot score what a tokenizer has made, as a sentence's end; empty: it can. Raises JobFailure:
    invalid_model, where the model's own tokenizer cannot be loaded."""
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(source).get_vocab()
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        return f"{len(different)} tokens have another number or are in one of them only, such as {different[0]!r}"
    if (rows := vocabulary_size(source)) <= (largest := max(ours.values())):
        return f"it has embeddings for {rows} tokens, and the tokenizer's numbers go up to {largest}"
    return ""


def load_reference(trainer: Any) -> torch.nn.Module:
    """The reference model, frozen and ready to score; under FSDP2 each rank holds a part of every layer. Raises
    JobFailure: invalid_model or invalid_request, as for the policy.

    Args:
        trainer: a RecipeTrainer that has its policy.
    """
    spec, device, accelerator = trainer.spec, trainer.args.device, trainer.accelerator
    storage = WeightStorage.of(spec)
    model = load_model(spec.reference_source, storage, device).requires_grad_(False).eval()
    set_attention(spec, model)
    if spec.compute.padding_free:
        use_rows(model, device.type)
    use_liger(model, spec, device.type)
    tile_mlp(model, spec, device.type)
    if trainer.compiled_blocks.startswith(COMPILED):
        found = compile_blocks(model, spec, device.type)
        if trainer.float8.startswith(USED):
            use_float8(model, spec, device, is_compiled=found.startswith(COMPILED))
        if not found.startswith(COMPILED):
            trainer.compiled_blocks += f"; of the reference {found}"
    role = "teacher" if spec.method.has_teacher else "reference"
    check_length(model, spec.data.max_seq_length, f"the {role} {spec.reference_source.model!r}")
    fuse_head(model, outputs=("log_probs",), temperature=spec.method.temperature_of_scores)
    deferred = DeferredWeights(model, storage.dtype, device) if storage.is_deferred else None
    scored = frozen(spec, model).eval() if has_reference_adapter(spec) else model
    if has_reference_adapter(spec):
        fuse_lora(scored, spec, device.type)  # as the policy: equal weights have equal numbers
    if not is_sharded(spec):
        return scored
    sharded = shard_frozen(scored, accelerator, deferred.fully_shard) if deferred else shard_frozen(scored, accelerator)
    move_constants(sharded, device)
    return sharded


def precomputes(spec: JobSpec) -> bool:
    """Whether the reference's log-probabilities are computed once, before training."""
    return spec.reference is not None and spec.reference.precompute


class Precomputation:
    """Computes the reference's log-probabilities of every row before training, or reads them from the cache.

    Rows are scored longest first, as many at a time as in an evaluation, divided among the ranks. The results become
    columns of the trainer's datasets, which its collator puts into every batch, so the order of the rows does not
    matter. Under FSDP2 the policy is not sharded yet: there a reference is loaded, and freed afterwards.

    Args:
        trainer: a DpoRecipe that has not begun to train.
        should_stop: called after every batch, on all ranks.
    """

    def __init__(self, trainer: Any, heartbeat: Callable[[], None], should_stop: Callable[[], bool]) -> None:
        self._trainer, self._spec = trainer, trainer.spec
        self._heartbeat, self._should_stop = heartbeat, should_stop
        self._sharding: dict[str, Any] = {}
        directory = self._spec.reference.cache
        self._cache = LogProbCache(directory, heartbeat) if directory and ranks.rank() == 0 else None

    def run(self) -> dict[str, Any] | None:
        """Add the columns; returns what was done, for the job's record, or None where the job is to stop."""
        began = time.perf_counter()
        done: dict[str, Any] = {}
        try:
            for name in ("train_dataset", "eval_dataset"):
                rows = getattr(self._trainer, name)
                if rows is None:
                    continue
                values, source = self._log_probs(rows)
                if values is None:
                    return None
                setattr(self._trainer, name, _with_columns(rows, values))
                done[name.replace("eval", "validation")] = source
        finally:
            self._trainer.ref_model = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        seconds = round(time.perf_counter() - began, 3)
        return {"log_probs": "precomputed", **done, "seconds": seconds, **self._sharding}

    def _log_probs(self, rows: Dataset) -> tuple[torch.Tensor | None, str]:
        """Log-probabilities in CPU memory, shape (rows, 2), and their source; None where the job is to stop."""
        num_rows = self._trainer.rows_of(rows)
        key = self._key(self._cache, rows, num_rows) if self._cache else None
        cached = self._cache.find(key, num_rows) if self._cache and key else None
        if ranks.broadcast_number(int(cached is not None)):
            kept = torch.zeros(num_rows, 2) if cached is None else cached
            return broadcast(kept.to(self._trainer.args.device)).cpu(), "cache"
        values = self._score(rows, num_rows)
        if values is not None and self._cache and key and self._cache.store(key, values):
            return values, "computed"
        return values, "computed, not kept"

    def _key(self, cache: LogProbCache, rows: Dataset, num_rows: int) -> str | None:
        policy = self._trainer.model.get_base_model() if self._spec.lora else self._trainer.model
        reference = self._spec.reference_source
        commit = None if Path(reference.location).is_dir() else commit_of(reference)
        return cache.key(
            reference.location,
            commit,
            row_bytes(rows, num_rows),
            dtype=self._spec.compute.dtype,
            weights=str(policy.dtype),
            quantization=str(getattr(policy.config, "quantization_config", None)),
            # Of batches in one sequence, too: they differ from padded ones by rounding.
            attention="sdpa" if self._spec.compute.padding_free else policy.config._attn_implementation,
            device=self._trainer.args.device.type,
            # Where bf16 rounds depends on it.
            precision="units" if is_sharded(self._spec) and self._spec.compute.dtype != "fp32" else "autocast",
            **({"products": "float8"} if self._trainer.float8.startswith(USED) else {}),
            **self._adapter_of_key(cache),
            **({"images": digest_of(self._spec.source)} if self._spec.data.has_images else {}),
        )

    def _adapter_of_key(self, cache: LogProbCache) -> dict[str, str]:
        adapter = self._spec.adapter
        return {"adapter": cache.content(adapter.directory)} if adapter and has_reference_adapter(self._spec) else {}

    def _score(self, rows: Dataset, num_rows: int) -> torch.Tensor | None:
        trainer, spec, world = self._trainer, self._spec, ranks.world_size()
        size = spec.data.evaluated_batch_size
        if trainer.ref_model is None and (is_sharded(spec) or spec.reference.source):
            trainer.ref_model = load_reference(trainer)
            if is_sharded(spec):
                self._sharding = {"sharding": describe(trainer.ref_model, spec)}
        order = pair_lengths(rows, num_rows).argsort(descending=True, stable=True).tolist()
        if world > 1:
            order += [num_rows] * (-num_rows % (world * size))  # the filler
        log_probs = torch.zeros(len(rows), 2, device=trainer.args.device)
        trainer.model.eval()
        for start in range(ranks.rank() * size, len(order), world * size):
            batch = order[start : start + size]
            inputs = trainer._prepare_inputs(trainer.data_collator([rows[number] for number in batch]))
            log_probs[batch] = trainer.reference_logps(inputs).view(2, -1).T
            self._heartbeat()
            if self._should_stop():
                return None
        total: torch.Tensor = trainer.accelerator.reduce(log_probs)
        return total[:num_rows].cpu().contiguous()


def _with_columns(rows: Dataset, values: torch.Tensor) -> Dataset:
    """The rows with the reference's log-probabilities, in the columns that TRL's collator reads; 0 for a filler."""
    filled = torch.cat([values, torch.zeros(len(rows) - len(values), 2)]).double().numpy()
    for column, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
        rows = rows.add_column(name, filled[:, column])
    return rows
