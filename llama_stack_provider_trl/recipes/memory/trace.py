"""Traces the memory of a training step on each device, without reading weights.

The real loss runs forward and backward on fake tensors (torch.FakeTensorMode: shapes, dtypes and lifetimes of every
tensor, no storage), so what autograd saves is counted, not modelled, for any architecture that transformers loads.
`estimate` adds what a trace lacks: optimizer state, gathered shards and the reference.
docs/reference/memory-measurements.md compares the result with measured peaks.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from ...specs.job import JobSpec
from ...specs.methods import DistillationSpec
from ...specs.model_source import ModelSource
from ...specs.optimizer_state import elements_in_8_bits
from ..fast.kept_attention import checkpoint_arguments
from ..fast.layout import Group, Layout
from ..fast.lora import fuse_lora
from ..fast.mlp import tile_mlp
from ..fast.model import use_rows
from ..model.adapters import REFERENCE, has_reference_adapter
from ..model.attention import passes_padding_mask, set_attention
from ..model.configs import DAMAGE, invalid_model
from ..model.files import stored_dtype
from ..model.fsdp import blocks_of, is_sharded, num_shards
from ..model.loading import (
    WeightStorage,
    adapter_config,
    auto_class,
    expert_parameters,
    linear_modules,
    load_config,
    loading_dtype,
    quantize,
    with_depth,
)
from ..trainer.reference import is_needed, precomputes
from ..trainer.scoring import no_recomputation
from ..trainer.trl_patches import (
    fast_head,
    fuse_head,
    has_fast_head,
    traced_attention,
    traced_divergence,
    traced_experts,
    traced_head,
    weighs_tokens_alike,
)
from .distillation import traced_divergence_loss, traced_span_loss

_STASH = 5
"""Tensors that are copied to CPU memory at a time (TRL's OffloadActivations, max_fwd_stash_size)."""


_OFFLOADED = 1024
"""Bytes: smaller tensors are not offloaded (min_offload_size there)."""


@dataclass(frozen=True)
class Batch:
    """The largest batch of a job, for one rank and micro step: sequences padded to one length, or in one sequence."""

    sequences: int
    """Rows; for DPO two per pair."""
    tokens: int
    """Tokens of the longest; in a padded batch of each."""
    groups: tuple[Group, ...] = ()
    """In one sequence: its groups; empty: rows of `tokens` tokens each, which share nothing."""
    scored: int = 0
    """In one sequence: tokens that the head computes; 0: all."""

    @property
    def shown(self) -> dict[str, int]:
        """For users."""
        return {"sequences": self.sequences, "tokens": self.tokens}

    def reduced(self, sequences: int, tokens: int) -> Batch:
        """The batch with fewer and shorter sequences."""

        def cut(group: Group) -> Group:
            prefix = min(group[0], tokens)
            return prefix, tuple(min(size, tokens - prefix) for size in group[1])

        kept = self.groups[: -(-len(self.groups) * sequences // self.sequences)]
        groups = tuple(cut(group) for group in kept)
        before = sum(prefix + sum(sizes) for prefix, sizes in self.groups)
        after = sum(prefix + sum(sizes) for prefix, sizes in groups)
        scored = -(-self.scored * after // before) if before else 0
        return Batch(sequences, tokens, groups, scored)


@dataclass(frozen=True)
class Window:
    """The peak of a part of the traced step: bytes of everything but parameters."""

    activations: float
    logits: float
    gradients: float
    host: float = 0
    """Peak of the offloaded bytes in CPU memory."""


@dataclass(frozen=True)
class Traced:
    """The sizes of a model, found without its weights."""

    trainable: int
    """Parameters that get a gradient; tied ones count once."""
    in_8_bits: int
    """Of those: parameters whose moments adamw_8bit holds in 8 bits."""
    frozen: int
    block: int
    """Parameters of the largest block."""
    block_linear: int
    """Of all blocks together: those of linear layers, which a 4-bit base compresses."""
    largest_linear: int
    embeddings: int
    """Parameters of input and output embeddings."""
    head: int
    """Parameters of the output projection, tied or not."""
    blocks: int
    experts: int
    """Of all blocks together: those of mixtures of experts, each in one tensor, which the files hold one by one."""
    stored_alike: bool
    """Whether the files hold the weights in the dtype in which they are loaded."""
    bytes_in_files: int
    """Of each parameter in the files."""
    is_mapped: bool
    """Whether the weights are loaded without a copy, but for experts of a model that is not sharded."""
    windows: tuple[Window, ...]
    """Of the step; empty for a model that only scores."""
    reference_scoring: Window | None = None
    """DPO, where a separate reference scores rows before training: one batch of that."""
    reference: Traced | None = None
    """DPO: another model that is the reference."""


def loads_reference(spec: JobSpec) -> bool:
    """Whether DPO loads a separate reference; before training, one process scores with the policy itself."""
    if not is_needed(spec):
        return False
    if spec.reference is None:
        return True  # of GRPO's KL divergence
    return not precomputes(spec) or is_sharded(spec) or spec.reference.source is not None


def is_quantized(spec: JobSpec) -> bool:
    return bool(spec.lora and getattr(spec.lora, "quantize_base", False))


class _LiveMemory(TorchDispatchMode):
    """Counts the bytes of all live storages, by kind, and their peak.

    The peak is recorded for two windows: until the middle block's backward has ended, and after it. Between equal
    blocks the live bytes change by a constant amount, so the peak of each window is a linear function of depth. The
    peak of the whole step is not.
    """

    def __init__(self, gradients_weigh: float) -> None:
        super().__init__()
        self.kind = "activations"
        self.bytes = {"activations": 0, "logits": 0, "gradients": 0, "host": 0, "ignored": 0}
        self.most_host = 0
        self.gradients_weigh = gradients_weigh
        self.windows = [Window(0, 0, 0)]
        self._known: dict[int, list[Any]] = {}
        self._most = -1.0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a parameter: `estimate` counts it."""
        self._add(tensor, "ignored")

    def ignores(self, tensor: torch.Tensor) -> bool:
        entry = self._known.get(id(tensor.untyped_storage()))
        return entry is not None and entry[1] == "ignored"

    def became_gradient(self, tensor: torch.Tensor) -> None:
        self._add(tensor, "gradients")
        entry = self._known[id(tensor.untyped_storage())]
        self._count(entry[1], -entry[2])
        self._count("gradients", entry[2])
        entry[1] = "gradients"
        self._update_peak()

    def next_window(self) -> None:
        self.windows.append(Window(0, 0, 0))
        self._most = -1.0
        self._update_peak()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor):
                self._add(value, self.kind)
        self._update_peak()
        return output

    def _add(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            _, kind, size = self._known.pop(key)
            self._count(kind, -size)

        self._known[key] = [weakref.ref(storage, gone), kind, size]
        self._count(kind, size)

    def _count(self, kind: str, size: int) -> None:
        self.bytes[kind] += size

    def _update_peak(self) -> None:
        now = self.bytes
        self.most_host = max(self.most_host, now["host"])
        weighed = now["activations"] + now["logits"] + self.gradients_weigh * now["gradients"]
        if weighed > self._most:
            self._most = weighed
            self.windows[-1] = Window(now["activations"], now["logits"], now["gradients"], self.most_host)


_ALIKE: dict[str, bool] = {}


def attention_modules(spec: JobSpec) -> list[str]:
    """Names of the linear layers of the model's attention, such as q_proj. Raises what `trace_model` raises."""
    with torch.device("meta"):
        attention, _ = linear_modules(_built(with_depth(load_config(spec.source), 1), spec.source, spec))
    return sorted({name.rpartition(".")[2] for name in attention})


def trace_model(spec: JobSpec, batch: Batch, kind: str) -> Traced:
    """What is known of the job's model and one step of it. `trace_cache` keeps it. Raises JobFailure: invalid_model.

    Args:
        kind: of the device: cuda, mps or cpu.
    """
    config = load_config(spec.source)
    depth = config.get_text_config().num_hidden_layers
    shallow = _depths(depth, spec.compute.checkpoint_every if spec.compute.gradient_checkpointing else 0)
    if depth <= shallow[1] + 2 or not _blocks_are_alike(config, spec.source, spec):
        traced = _trace(config, spec, batch, kind)
    else:
        one, other = (_trace(with_depth(config, layers), spec, batch, kind) for layers in shallow)
        traced = _extrapolated(one, other, depth)
    return replace(traced, reference=_sizes(spec.reference_source, spec)) if _has_other_reference(spec) else traced


def _depths(depth: int, period: int) -> tuple[int, int]:
    """Two shallow depths to trace where one of every `period` blocks is recomputed; 0: none is.

    Their halves (see `_LiveMemory`) begin and end at the same position in a period as those of the whole depth. Each
    has a recomputed block as a whole: the middle one may get its first gradient before its own peak.
    """
    least, period = (4 if period else 2), max(1, period)
    shallow = least * period + depth % (2 * period)
    return shallow, shallow + 2 * period


def _has_other_reference(spec: JobSpec) -> bool:
    return spec.reference is not None and spec.reference.source is not None


def _sizes(source: ModelSource, spec: JobSpec) -> Traced:
    """The sizes of a model that only scores: its step is not traced."""
    config = load_config(source)
    with torch.device("meta"):
        model = _built(config, source, spec)
    total = sum(weight.numel() for weight in model.parameters())
    numbers = _numbers(model)
    return Traced(trainable=0, in_8_bits=0, frozen=total, **_files(config, source, spec), windows=(), **numbers)


def _files(config: Any, source: ModelSource, spec: JobSpec) -> dict[str, Any]:
    storage, configured = WeightStorage.of(spec), getattr(config, "dtype", None)
    # Where there are neither files nor a dtype: transformers takes that for fp32.
    stored = stored_dtype(source.location, source.revision, configured or torch.float32)
    return {
        "stored_alike": configured == storage.dtype,
        "bytes_in_files": (stored or torch.float32).itemsize,
        "is_mapped": stored is not None and stored == loading_dtype(source, storage, config, stored),
    }


_OF_ANY_DEPTH = {"windows", "stored_alike", "bytes_in_files", "is_mapped", "reference_scoring", "reference"}


def _extrapolated(one: Traced, other: Traced, depth: int) -> Traced:
    """Extrapolate two traces with the same windows, whose numbers are linear in depth."""
    steps = (depth - one.blocks) / (other.blocks - one.blocks)

    def line(a: float, b: float) -> float:
        return a + (b - a) * steps

    def between(a: Window, b: Window) -> Window:
        return Window(*(line(getattr(a, field.name), getattr(b, field.name)) for field in fields(Window)))

    windows = tuple(between(a, b) for a, b in zip(one.windows, other.windows, strict=True))
    numbers: dict[str, Any] = {
        field.name: round(line(getattr(one, field.name), getattr(other, field.name)))
        for field in fields(Traced)
        if field.name not in _OF_ANY_DEPTH
    }
    scoring = None
    if one.reference_scoring and other.reference_scoring:
        scoring = between(one.reference_scoring, other.reference_scoring)
    same = {name: getattr(one, name) for name in ("stored_alike", "bytes_in_files", "is_mapped")}
    return Traced(**numbers, **same, windows=windows, reference_scoring=scoring)


def _blocks_are_alike(config: Any, source: ModelSource, spec: JobSpec) -> bool:
    """Whether every block has the same parameters and the same kind of attention."""
    if len(set(getattr(config.get_text_config(), "layer_types", None) or ())) > 1:
        return False
    known = config.to_json_string()
    if known not in _ALIKE:  # this builds the whole depth, which takes a second for 80 blocks
        with torch.device("meta"):
            blocks = blocks_of(_built(config, source, spec)).values()
        _ALIKE[known] = len({sum(weight.numel() for weight in block.parameters()) for block in blocks}) == 1
    return _ALIKE[known]


def _built(config: Any, source: ModelSource, spec: JobSpec) -> PreTrainedModel:
    # fp16 takes the memory of bf16, which every CPU kernel supports.
    in_half = spec.frozen_dtype != "fp32" if spec.lora else spec.compute.dtype != "fp32" and is_sharded(spec)
    dtype = torch.bfloat16 if in_half else torch.float32
    config = copy.deepcopy(config)  # its dtype is set, and the given one has that of the files
    auto, head = auto_class(config, is_reward=spec.trains_reward)
    if head:
        config.num_labels = head["num_labels"]
        config.get_text_config().pad_token_id = config.get_text_config().pad_token_id or 0
    try:
        return auto.from_config(config, dtype=dtype, trust_remote_code=source.trust_remote_code)
    except (*DAMAGE, RuntimeError) as error:
        raise invalid_model(source.model, "its config.json describes no causal language model", error) from error


def _trace(config: Any, spec: JobSpec, batch: Batch, kind: str) -> Traced:
    """Trace one micro step, forward and backward, on fake tensors in CPU memory.

    torch knows every CPU kernel's memory without a GPU, and flash attention saves the same tensors there.
    """
    # Ranks that keep whole gradients accumulate them: all are there throughout the step, and move no peak.
    live = _LiveMemory(1.0 / num_shards(spec))
    with ExitStack() as stack:
        with torch.device("meta"):
            model = _built(config, spec.source, spec)
            if not spec.uses_flash_kernels:  # which hold what torch's own flash kernel holds
                set_attention(spec, model)
            if spec.compute.padding_free:
                use_rows(model, kind)
            tile_mlp(model, spec, kind)
            if not spec.trains_reward:
                fuse_head(model, ("log_probs",) if spec.has_pairs else ("log_probs", "is_top1"))
            blocks = list(blocks_of(model).values())
            numbers = _numbers(model)
            if spec.train.qat:
                quantize(spec, model)
            trained: Any = (
                get_peft_model(model, adapter_config(model, spec.lora, is_reward=spec.trains_reward))
                if spec.lora
                else model
            )
            if has_reference_adapter(spec):
                trained.add_adapter(REFERENCE, copy.deepcopy(trained.peft_config["default"]))
            if spec.lora:
                fuse_lora(trained, spec, kind)
            reference = _shallow_reference(spec, kind) if _has_other_reference(spec) else None
        stack.enter_context(traced_attention(packed=spec.data.packed and not spec.uses_flash_kernels))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _make_fake(trained)
        trained.train()
        if reference:
            _make_fake(reference)
        if spec.compute.gradient_checkpointing:
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=checkpoint_arguments(spec, kind),
                every_n_layers=spec.compute.checkpoint_every,
            )
            if spec.lora:
                model.enable_input_require_grads()
        frozen = list(reference.parameters()) if reference else []
        reference_scoring = None
        if precomputes(spec) and loads_reference(spec):
            reference_scoring = _trace_reference_scoring(
                trained, spec, batch, kind, reference, [*trained.parameters(), *frozen]
            )
        for weight in frozen:
            live.ignore(weight)
        for weight in trained.parameters():
            live.ignore(weight)
            if weight.requires_grad:
                if spec.train.gradient_accumulation_steps > 1:
                    weight.grad = torch.zeros_like(weight)
                    live.became_gradient(weight.grad)
                weight.register_post_accumulate_grad_hook(lambda weight: live.became_gradient(weight.grad))
        _mark_middle(blocks, live)
        stack.enter_context(traced_experts())
        stack.enter_context(_head_of(spec, kind, live, config))
        stack.enter_context(live)
        if spec.compute.activation_offloading:
            stack.enter_context(_offloading(live))
        _step(trained, spec, batch, kind, reference, partial(live.counting, "logits"))
    shapes = [weight.shape for weight in trained.parameters() if weight.requires_grad]
    trainable = sum(shape.numel() for shape in shapes)
    total = sum(weight.numel() for weight in trained.parameters())
    scale = 4 / (2 if spec.compute.dtype != "fp32" and is_sharded(spec) and not spec.lora else 4)
    windows = tuple(replace(window, gradients=window.gradients * scale) for window in live.windows)
    return Traced(
        trainable=trainable,
        in_8_bits=elements_in_8_bits(shapes),
        frozen=total - trainable,
        **_files(config, spec.source, spec),
        windows=windows,
        reference_scoring=reference_scoring,
        **numbers,
    )


def _shallow_reference(spec: JobSpec, kind: str) -> PreTrainedModel:
    """Another model as the reference. It scores without a graph, so its memory does not grow with its depth."""
    source = spec.reference_source
    config = load_config(source)
    is_shallow = _blocks_are_alike(config, source, spec)
    model = _built(with_depth(config, 2) if is_shallow else config, source, spec)
    if spec.compute.padding_free:
        use_rows(model, kind)
    tile_mlp(model, spec, kind)
    fuse_head(model, outputs=("log_probs",))
    return model.requires_grad_(False).eval()


def _trace_reference_scoring(
    model: Any, spec: JobSpec, batch: Batch, kind: str, reference: Any, weights: list[torch.nn.Parameter]
) -> Window:
    """Trace one batch that the reference scores before training."""
    live = _LiveMemory(1.0)
    for weight in weights:
        live.ignore(weight)
    with _head_of(spec, kind, live, model.config), live:
        _score_reference(model, spec, batch, kind, reference)
    return live.windows[0]


@contextmanager
def _offloading(live: _LiveMemory) -> Iterator[None]:
    """Simulate TRL's OffloadActivations: a copy in CPU memory replaces tensors that are saved for backward.

    The last few are still being copied, and what several operations save stays on the device, too.
    """
    stash: deque[torch.Tensor] = deque(maxlen=_STASH)
    shared: set[int] = set()

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if live.ignores(tensor) or tensor.nbytes < _OFFLOADED:
            return tensor.detach()
        if id(storage) in shared or any(one.untyped_storage() is storage for one in stash):
            shared.add(id(storage))
            return tensor.detach()
        stash.append(tensor.detach())
        with live.counting("host"):
            # Of a broadcast tensor only its storage is copied.
            away = torch.empty(min(storage.nbytes(), tensor.nbytes), dtype=torch.uint8)
        return away, tensor.shape, tensor.stride(), tensor.dtype

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        _, shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype) if 0 in stride else torch.empty(shape, dtype=dtype)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _make_fake(model: torch.nn.Module) -> None:
    """Replace meta parameters and buffers by fake ones in CPU memory; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    fake = torch.empty(weight.shape, dtype=weight.dtype)
                    made[id(weight)] = torch.nn.Parameter(fake, requires_grad=weight.requires_grad)
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _step(
    model: Any,
    spec: JobSpec,
    batch: Batch,
    kind: str,
    reference: Any = None,
    counting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run the step of `recipes.trainer.sft`, `recipes.trainer.dpo`, `recipes.trainer.distillation` or
    `recipes.trainer.gold` on a batch."""
    if isinstance(spec.method, DistillationSpec):
        return _distill(model, spec, spec.method, batch, kind, reference, counting).backward()
    loss = _score(model, spec, batch, kind)
    if (spec.reference is not None and not precomputes(spec)) or spec.method.kl_weight:
        loss = loss - _score_reference(model, spec, batch, kind, reference)
    loss.backward()


def _distill(
    model: Any,
    spec: JobSpec,
    method: DistillationSpec,
    batch: Batch,
    kind: str,
    teacher: Any,
    counting: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    # A teacher with another vocabulary may read as many tokens of an answer again as the model has given.
    read = replace(batch, tokens=batch.tokens + method.max_completion_length) if method.uld else batch

    def forward(one: Any, of: Batch = batch) -> Any:
        return one(**_inputs(one, spec, of, kind), use_cache=False, fused_lm_head=True)

    def unrecomputed() -> None:
        with no_recomputation(model):
            forward(teacher, read)

    answer_tokens = batch.sequences * method.max_completion_length
    with torch.autocast("cpu", torch.bfloat16) if spec.compute.dtype != "fp32" else nullcontext():
        if method.uld:
            return traced_span_loss(
                lambda: forward(model),
                unrecomputed,
                answer_tokens=answer_tokens,
                method=method,
                copied=is_sharded(spec),
                counting=counting,
            )
        return traced_divergence_loss(
            lambda: forward(model),
            unrecomputed,
            answer_tokens=answer_tokens,
            beta=method.beta,
            temperature=method.temperature,
            copied=is_sharded(spec),
        )


def _inputs(model: Any, spec: JobSpec, batch: Batch, kind: str) -> dict[str, Any]:
    if spec.compute.padding_free:
        groups = batch.groups or ((0, (batch.tokens,)),) * batch.sequences
        if (sharers := spec.context_parallel_size) > 1:
            # As many tokens of all heads as attention has of all tokens of this rank's heads: the same bytes.
            groups = tuple((0, (-(-sum(sizes) // sharers),)) for _, sizes in groups)
        ids = torch.zeros(1, sum(prefix + sum(sizes) for prefix, sizes in groups), dtype=torch.long)
        # A share may have most of what is scored.
        scored = torch.zeros(min(batch.scored or ids.shape[1], ids.shape[1]), dtype=torch.long)
        inputs = {"input_ids": ids, "position_ids": ids.clone(), "scored": scored}
        return {**inputs, "shift_labels": scored[None].clone(), "layout": Layout(groups)}
    ids = torch.zeros(batch.sequences, batch.tokens, dtype=torch.long)
    if spec.data.packed:  # several rows in each sequence, which attention separates by their positions
        positions = torch.arange(batch.tokens) % max(1, batch.tokens // 2)
        return {"input_ids": ids, "position_ids": positions.repeat(batch.sequences, 1), "labels": ids.clone()}
    if not passes_padding_mask(spec, model, kind):
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0  # some row is padded: attention gets a mask, and grouped keys and values are repeated for it
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _score(model: Any, spec: JobSpec, batch: Batch, kind: str) -> torch.Tensor:
    inputs = _inputs(model, spec, batch, kind)
    with torch.autocast("cpu", torch.bfloat16) if spec.compute.dtype != "fp32" else nullcontext():
        if spec.trains_reward:
            del inputs["labels"]
            rewards: torch.Tensor = model(**inputs, use_cache=False).logits
            return rewards.sum()
        log_probs: torch.Tensor = model(**inputs, use_cache=False, fused_lm_head=True).log_probs
        return log_probs.sum()


def _score_reference(model: Any, spec: JobSpec, batch: Batch, kind: str, reference: Any) -> torch.Tensor:
    """Score a batch with the reference: another model, or the policy without a graph."""
    with torch.no_grad(), no_recomputation(model):
        return _score(reference or model, spec, batch, kind)


def _numbers(model: PreTrainedModel) -> dict[str, Any]:
    blocks = blocks_of(model).values()
    sizes = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    linear = [
        module.weight.numel() for block in blocks for module in block.modules() if isinstance(module, torch.nn.Linear)
    ]
    head: Any = model.get_output_embeddings() or model.score  # of a reward model
    embeddings = {id(part.weight): part.weight for part in (model.get_input_embeddings(), head)}
    return {
        "block": max(sizes, default=0),
        "block_linear": sum(linear),
        "largest_linear": max(linear, default=0),
        "embeddings": sum(weight.numel() for weight in embeddings.values()),
        "head": head.weight.numel(),
        "blocks": len(blocks),
        "experts": sum(model.get_parameter(name).numel() for name in expert_parameters(model)),
    }


def _mark_middle(blocks: list[torch.nn.Module], live: _LiveMemory) -> None:
    """Begin the second window when backward has reached the first trained weight of the middle block."""
    weights = [weight for weight in blocks[len(blocks) // 2].parameters() if weight.requires_grad] if blocks else []
    begun: list[bool] = []

    def begin(_: torch.Tensor) -> None:
        if not begun:
            begun.append(True)
            live.next_window()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(begin)


@contextmanager
def _head_of(spec: JobSpec, kind: str, live: _LiveMemory, config: Any) -> Iterator[None]:
    """While this is open, the memory of the fused head counts as logits, with the kernels of this kind of device."""
    counting = partial(live.counting, "logits")
    with ExitStack() as stack:
        stack.enter_context(traced_head(kind, config.get_text_config().vocab_size, counting))
        if has_fast_head(spec, kind):
            stack.enter_context(fast_head(counting, kind=kind, alike=weighs_tokens_alike(spec)))
        if spec.method.has_teacher:
            stack.enter_context(traced_divergence(kind, config.get_text_config().vocab_size, counting))
        yield
