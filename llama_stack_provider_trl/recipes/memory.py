"""How much memory a training step takes on each device, before any weight is read.

The real loss runs forward and backward on fake tensors (torch.FakeTensorMode: shapes, dtypes and lifetimes of every
tensor, no storage), so what autograd saves is counted and not modelled, for any architecture that transformers loads.
What a trace cannot show is added by arithmetic: optimizer state, shards and what is gathered of them, the reference.
docs/reference/memory-measurements.md compares the result with measured peaks.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import torch
import trl.kernels.chunked_logprob as head
import trl.trainer.utils as trl_utils
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from .dpo import nothing_recomputed
from .models import DTYPES, invalid_model, linear_modules, lora_config, quantize, source
from .reference import is_needed, loading_spec, precomputes
from .sharding import is_sharded, parts
from .spec import JobSpec

_CUDA_CONTEXT = 768 << 20
"""Bytes of a GPU that no tensor of ours takes: the CUDA context, cuBLAS's workspace, NCCL's buffers."""
_CUDA_SLACK = 0.05
"""Of all else: what the caching allocator cannot use because its blocks are cut otherwise."""
_CPU_PROCESS = 96 << 20
"""Bytes of a CPU process beyond its tensors and the libraries as imported: threads, kernels, the data."""
_CPU_SLACK = 0.02
"""Of all else: pages, and glibc's heap, which takes the blocks below 1 MiB (`malloc.FRUGAL`)."""
_FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight in blocks of 64 with a scale in fp32 (bitsandbytes nf4)."""
_STASH = 5
"""Tensors on their way to CPU memory at a time (TRL's OffloadActivations, max_fwd_stash_size)."""
_OFFLOADED = 1024
"""Bytes: smaller tensors stay where they are (min_offload_size there)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the moment at which most are taken; the parts add up to `total`."""

    weights: int
    """Base model and adapters; under sharding this rank's part and the blocks that are gathered at a time."""
    gradients: int
    optimizer: int
    activations: int
    """What forward keeps for backward, and what both compute with."""
    logits: int
    """The output head: tiles of logits and their gradients; TRL never makes all logits at once."""
    reference: int
    """DPO's reference, where it is a model of its own; under sharding as `weights`."""
    overhead: int
    """Context, workspaces and slack of the allocator. On a CPU: the libraries as imported, too."""
    checkpoint_copy: int = 0
    """CPU: the copy of trained weights and optimizer that step checkpoints are written from. It stays from the first
    one on, and every job that runs for half an hour, or is paused, saves one."""
    loading: int = 0
    """CPU: what loading the model takes beyond all of the above together; 0 where it takes less."""
    host: int = 0
    """Not on the device, so in no total: CPU memory that a rank takes for it while it trains. The copy for checkpoints,
    offloaded activations, parts that rest there."""

    @property
    def parts(self) -> dict[str, int]:
        """What is on the device, by name."""
        return {name: size for name, size in asdict(self).items() if name != "host"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Batch:
    """The largest batch of a job, for one rank and micro step: sequences padded to one length."""

    sequences: int
    """Rows; for DPO two per pair."""
    tokens: int
    """Tokens of each, padding included."""


def estimate(spec: JobSpec, batch: Batch, device: str, baseline: int = 0) -> Memory:
    """The memory that each device (or, on a CPU, each rank) needs at its peak.

    Args:
        batch: the largest one that a rank will see.
        device: cuda, mps or cpu.
        baseline: bytes of the process before it does anything (CPU); counted as overhead.

    Raises:
        JobFailure: invalid_model, when the configuration cannot be read or names no causal language model.
    """
    kind = device.partition(":")[0]
    model = trace(spec, batch, kind)
    placed = _Placed(spec, model, kind)
    moments = [placed.at(window) for window in model.windows]
    if model.asking is not None:
        moments.append(placed.asking(model.asking))
    peak = max(moments, key=lambda memory: memory.total)
    used = peak.total
    if kind == "cpu":
        overhead = _CPU_PROCESS + int(_CPU_SLACK * used) + baseline
        loading = max(0, placed.loading - used)
    else:
        overhead, loading = _CUDA_CONTEXT + int(_CUDA_SLACK * used), 0
    return replace(peak, overhead=overhead, loading=loading, host=max(memory.host for memory in moments))


def model_config(spec: JobSpec) -> Any:
    """The model's configuration.

    Raises:
        JobFailure: invalid_model.
    """
    try:
        return AutoConfig.from_pretrained(spec.model, **source(spec))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise invalid_model(spec.model, "its config.json cannot be read", error) from error


def disk_bytes(spec: JobSpec, model: Traced) -> dict[str, int]:
    """Bytes that a job writes: of one step checkpoint, `final` and `merged`."""
    moments = _moments(spec)
    step = model.trainable * 4 * (1 + moments)
    final = model.trainable * 4 if spec.lora else (model.trainable + model.frozen) * _export_bytes(spec)
    merged = (model.frozen * _export_bytes(spec)) if spec.lora and spec.merge_adapter else 0
    return {"step_checkpoint": step, "final": final, "merged": merged}


@dataclass(frozen=True)
class Window:
    """A moment of the traced step: bytes of what is not a parameter."""

    activations: float
    logits: float
    gradients: float
    host: float = 0
    """What has been offloaded to CPU memory, at its most."""


@dataclass(frozen=True)
class Traced:
    """What is known of a model without its weights."""

    trainable: int
    """Parameters that get a gradient; tied ones count once."""
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
    stored_alike: bool
    """Whether the files hold the weights in the dtype in which they are loaded."""
    windows: tuple[Window, ...]
    """Of the step; none for a model that only scores."""
    asking: Window | None = None
    """DPO, where a model of its own is asked before training: one batch of that."""
    reference: Traced | None = None
    """DPO: another model that is the reference."""


class _Placed:
    """A traced model with its optimizer, shared out over the ranks of a job."""

    def __init__(self, spec: JobSpec, model: Traced, kind: str) -> None:
        self.spec, self.model, self.on_cpu = spec, model, kind == "cpu"
        self.shards = parts(spec)
        # On a CPU what rests in CPU memory is where it was.
        self.offload = bool(spec.sharding and self.shards > 1 and spec.sharding.cpu_offload and not self.on_cpu)
        self.compute = 4 if spec.dtype == "fp32" else 2
        self.quantized = _quantized(spec)
        self.reference = (model.reference or model) if _loads_reference(spec) else None

    def whole(self, model: Traced) -> int:
        """Bytes of a model's weights, not shared out."""
        frozen = model.frozen * (self.compute if self.spec.lora else 4)
        if self.quantized:
            frozen = (model.frozen - model.block_linear) * self.compute + int(model.block_linear * _FOUR_BIT)
        return model.trainable * 4 + frozen

    @property
    def loading(self) -> int:
        """CPU: weights of the files' own dtype are mapped and never copied; others are copied while the files stay
        mapped. A reference is loaded after the model."""

        def needed(model: Traced) -> int:
            return self.whole(model) + (0 if model.stored_alike else (model.trainable + model.frozen) * 4)

        both = self.whole(self.model) + needed(self.reference) if self.reference else 0
        return max(needed(self.model), both)

    def at(self, window: Window) -> Memory:
        """While it trains."""
        spec, model = self.spec, self.model
        gradients, gathered, at_rest = window.gradients, 0, 0
        weights = self.whole(model) // self.shards
        optimizer = model.trainable * 4 * _moments(spec) // self.shards
        if spec.ranks > 1 and self.shards == 1:
            gradients += model.trainable * 4  # DDP's buckets
        if self.shards > 1:
            gradients /= self.shards
            blocks = model.blocks if spec.sharding and spec.sharding.strategy == "SHARD_GRAD_OP" else 2
            trained = 0 if spec.lora else model.block
            gathered = self._gathered(model, blocks) + trained * (self.compute + 4)
        reference, resting = (0, 0) if self.reference is None or precomputes(spec) else self._reference()
        if self.offload:
            at_rest = weights + optimizer + model.trainable * 4 // self.shards + resting
            weights, optimizer, gradients = 0, 0, min(gradients, model.block * 4)
        dequantized = (2 if spec.dtype == "bf16" else 4) * model.largest_linear if self.quantized else 0
        copied = model.trainable * 4 * (1 + _moments(spec)) // self.shards
        return Memory(
            weights=weights + gathered + dequantized,
            gradients=int(gradients),
            optimizer=optimizer,
            activations=int(window.activations),
            logits=int(window.logits),
            reference=reference,
            overhead=0,
            checkpoint_copy=copied if self.on_cpu else 0,
            host=0 if self.on_cpu else copied + int(window.host) + at_rest,
        )

    def asking(self, window: Window) -> Memory:
        """While the reference is asked before training. Where the policy is to be shared out it waits in CPU memory."""
        reference, _ = self._reference()
        here = self.on_cpu or self.shards == 1
        return Memory(
            weights=self.whole(self.model) if here else 0,
            gradients=0,
            optimizer=0,
            activations=int(window.activations),
            logits=int(window.logits),
            reference=reference,
            overhead=0,
        )

    def _reference(self) -> tuple[int, int]:
        """Bytes of the reference on the device, and of its parts that rest in CPU memory."""
        if self.reference is None:
            raise AssertionError("the policy is its own reference")
        part = self.whole(self.reference) // self.shards
        if self.shards == 1:
            return part, 0
        gathered = self._gathered(self.reference, 2)
        return (gathered, part) if self.offload else (part + gathered, 0)

    def _gathered(self, model: Traced, blocks: int) -> int:
        """Of a sharded model: embeddings, the head (TRL gathers it whole, in fp32), the block at hand and the next
        one, or as many as stay gathered."""
        return (model.embeddings + blocks * model.block) * self.compute + model.head * 4


def _loads_reference(spec: JobSpec) -> bool:
    """Whether DPO's reference is ever a model of its own: one process asks the policy itself before training."""
    if spec.dpo is None or not is_needed(spec):
        return False
    return not precomputes(spec) or is_sharded(spec) or spec.dpo.reference.model is not None


def _moments(spec: JobSpec) -> int:
    return 0 if spec.optimizer.name == "sgd" else 2


def _quantized(spec: JobSpec) -> bool:
    return bool(spec.lora and getattr(spec.lora, "quantize_base", False))


def _export_bytes(spec: JobSpec) -> int:
    return 4 if spec.dtype == "fp32" else 2


# Tracing

_KEEP_GRAPH = {"use_reentrant": False}
"""Trainer's own choice."""


class _Live(TorchDispatchMode):
    """Counts the bytes of every storage that is alive, by kind, and what they are at their most.

    The peak is kept for two windows: until the middle block's backward is over, and from then on. Between blocks that
    are alike all that is alive changes by the same amount from one to the next, so the most in each window is a linear
    function of depth, where the most of the whole step is not.
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
        """A parameter: counted elsewhere."""
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
        self._look()

    def next_window(self) -> None:
        self.windows.append(Window(0, 0, 0))
        self._most = -1.0
        self._look()

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
        self._look()
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

    def _look(self) -> None:
        now = self.bytes
        self.most_host = max(self.most_host, now["host"])
        weighed = now["activations"] + now["logits"] + self.gradients_weigh * now["gradients"]
        if weighed > self._most:
            self._most = weighed
            self.windows[-1] = Window(now["activations"], now["logits"], now["gradients"], self.most_host)


def _key(spec: JobSpec) -> str:
    """What decides a trace: everything else of a job may change without a new one."""
    relevant = {"model", "revision", "trust_remote_code", "algorithm", "dtype", "gradient_checkpointing", "lora"}
    relevant |= {"checkpoint_every", "activation_offloading", "packed", "qat"}
    accumulates, sharded = spec.gradient_accumulation_steps > 1, parts(spec)
    reference = spec.dpo and spec.dpo.reference.model_dump_json(exclude={"cache"})
    return f"{spec.model_dump_json(include=relevant)}{accumulates}{sharded}{reference}"


_ALIKE: dict[str, bool] = {}
_TRACES: dict[tuple[str, Batch, str], Traced] = {}


def trace(spec: JobSpec, batch: Batch, device: str) -> Traced:
    """What is known of the job's model and one step of it, without its weights. Traced once per process.

    Raises:
        JobFailure: invalid_model.
    """
    kind = device.partition(":")[0]
    key = _key(spec), batch, "cuda" if kind == "cuda" else "other"
    if key not in _TRACES:
        _TRACES[key] = _trace_model(spec, batch, kind)
    return _TRACES[key]


def attention_modules(spec: JobSpec) -> list[str]:
    """Names of the linear layers of the model's attention, such as q_proj. Raises what `trace` raises."""
    with torch.device("meta"):
        attention, _ = linear_modules(_built(_with_depth(model_config(spec), 1), spec))
    return sorted({name.rpartition(".")[2] for name in attention})


def _trace_model(spec: JobSpec, batch: Batch, kind: str) -> Traced:
    config = model_config(spec)
    depth = config.get_text_config().num_hidden_layers
    shallow = _depths(depth, spec.checkpoint_every if spec.gradient_checkpointing else 1)
    if depth <= shallow[1] + 2 or not _blocks_are_alike(config, spec):
        traced = _trace(config, spec, batch, kind)
    else:
        one, other = (_trace(_with_depth(config, layers), spec, batch, kind) for layers in shallow)
        traced = _extrapolated(one, other, depth)
    return replace(traced, reference=_sizes(loading_spec(spec))) if _other_reference(spec) else traced


def _depths(depth: int, period: int) -> tuple[int, int]:
    """What is traced of blocks that are alike, where of every `period` of them one is recomputed: depths of which the
    halves, too (see `_Live`), begin and end at the same place in a period as those of the whole."""
    shallow = 2 * period + depth % (2 * period)
    return shallow, shallow + 2 * period


def _other_reference(spec: JobSpec) -> bool:
    return spec.dpo is not None and spec.dpo.reference.model is not None


def _sizes(spec: JobSpec) -> Traced:
    """A model that is only asked: nothing of it is traced."""
    config = model_config(spec)
    with torch.device("meta"):
        model = _built(config, spec)
    total = sum(weight.numel() for weight in model.parameters())
    numbers = _numbers(model, _blocks(model))
    return Traced(trainable=0, frozen=total, stored_alike=_stored_alike(config, spec), windows=(), **numbers)


def _stored_alike(config: Any, spec: JobSpec) -> bool:
    return getattr(config, "dtype", None) == (DTYPES[spec.dtype] if spec.lora else torch.float32)


def _extrapolated(one: Traced, other: Traced, depth: int) -> Traced:
    """Both traces have the same windows, and every number in them is linear in depth."""
    steps = (depth - one.blocks) / (other.blocks - one.blocks)

    def line(a: float, b: float) -> float:
        return a + (b - a) * steps

    def between(a: Window, b: Window) -> Window:
        return Window(*(line(getattr(a, field.name), getattr(b, field.name)) for field in fields(Window)))

    windows = tuple(between(a, b) for a, b in zip(one.windows, other.windows, strict=True))
    numbers: dict[str, Any] = {
        field.name: round(line(getattr(one, field.name), getattr(other, field.name)))
        for field in fields(Traced)
        if field.name not in ("windows", "stored_alike", "asking", "reference")
    }
    asking = between(one.asking, other.asking) if one.asking and other.asking else None
    return Traced(**numbers, stored_alike=one.stored_alike, windows=windows, asking=asking)


def _with_depth(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _blocks_are_alike(config: Any, spec: JobSpec) -> bool:
    """Whether every block has the same parameters and the same kind of attention."""
    if len(set(getattr(config.get_text_config(), "layer_types", None) or ())) > 1:
        return False
    known = config.to_json_string()
    if known not in _ALIKE:  # the whole depth is built for this, which for 80 blocks takes a second
        with torch.device("meta"):
            blocks = _blocks(_built(config, spec))
        _ALIKE[known] = len({sum(weight.numel() for weight in block.parameters()) for _, block in blocks}) == 1
    return _ALIKE[known]


def _built(config: Any, spec: JobSpec) -> PreTrainedModel:
    # fp16 takes what bf16 takes, which every CPU kernel knows.
    dtype = torch.bfloat16 if spec.dtype != "fp32" and (spec.lora or is_sharded(spec)) else torch.float32
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise invalid_model(spec.model, "its config.json describes no causal language model", error) from error


def _blocks(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    names = set(model._no_split_modules or ())
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]


def _trace(config: Any, spec: JobSpec, batch: Batch, kind: str) -> Traced:
    """One micro step, forward and backward, on fake tensors in CPU memory: of those torch knows every kernel's memory
    whether or not there is a GPU, and flash attention saves the same there."""
    weigh = 1.0 / parts(spec)
    live = _Live(weigh)
    with ExitStack() as stack:
        with torch.device("meta"):
            model = _built(config, spec)
            add_fused_lm_head(model, outputs=("log_probs", "is_top1") if spec.algorithm == "sft" else ("log_probs",))
            blocks = _blocks(model)
            numbers = _numbers(model, blocks)
            if spec.qat:
                quantize(spec, model)
            trained: Any = get_peft_model(model, lora_config(model, spec.lora)) if spec.lora else model
            reference = _shallow_reference(spec) if _other_reference(spec) else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _make_fake(trained)
        trained.train()
        if reference:
            _make_fake(reference)
        if spec.gradient_checkpointing:
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=_KEEP_GRAPH, every_n_layers=spec.checkpoint_every
            )
            if spec.lora:
                model.enable_input_require_grads()
        frozen = list(reference.parameters()) if reference else []
        asking = None
        if precomputes(spec) and _loads_reference(spec):
            asking = _asked(trained, spec, batch, kind, reference, [*trained.parameters(), *frozen])
        for weight in frozen:
            live.ignore(weight)
        for weight in trained.parameters():
            live.ignore(weight)
            if weight.requires_grad:
                if spec.gradient_accumulation_steps > 1:
                    weight.grad = torch.zeros_like(weight)
                    live.became_gradient(weight.grad)
                weight.register_post_accumulate_grad_hook(lambda weight: live.became_gradient(weight.grad))
        _mark_middle([block for _, block in blocks], live)
        stack.enter_context(_head_of(kind, live, config))
        stack.enter_context(live)
        if spec.activation_offloading:
            stack.enter_context(_offloading(live))
        _step(trained, spec, batch, reference)
    trainable = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in trained.parameters())
    scale = 4 / (2 if spec.dtype != "fp32" and is_sharded(spec) and not spec.lora else 4)
    windows = tuple(replace(window, gradients=window.gradients * scale) for window in live.windows)
    return Traced(
        trainable=trainable,
        frozen=total - trainable,
        stored_alike=_stored_alike(config, spec),
        windows=windows,
        asking=asking,
        **numbers,
    )


def _shallow_reference(spec: JobSpec) -> PreTrainedModel:
    """Another model as the reference: asked without a graph, it takes no more with more blocks."""
    asked = loading_spec(spec)
    config = model_config(asked)
    model = _built(_with_depth(config, 2) if _blocks_are_alike(config, asked) else config, asked)
    add_fused_lm_head(model, outputs=("log_probs",))
    return model.requires_grad_(False).eval()


def _asked(
    model: Any, spec: JobSpec, batch: Batch, kind: str, reference: Any, weights: list[torch.nn.Parameter]
) -> Window:
    """One batch of what the reference is asked before training."""
    live = _Live(1.0)
    for weight in weights:
        live.ignore(weight)
    with _head_of(kind, live, model.config), live:
        _ask(model, spec, _inputs(spec, batch), reference)
    return live.windows[0]


@contextmanager
def _offloading(live: _Live) -> Iterator[None]:
    """What TRL's OffloadActivations does to tensors that are saved for backward: a copy in CPU memory takes their
    place, the last few are still on their way there, and what several operations save stays on the device, too."""
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
            # A broadcast tensor travels as the storage that it has.
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
    """Parameters and buffers from the meta device become fake ones in CPU memory; tied ones stay tied."""
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


def _step(model: Any, spec: JobSpec, batch: Batch, reference: Any = None) -> None:
    """What `recipes.sft` and `recipes.dpo` do with a batch."""
    inputs = _inputs(spec, batch)
    loss = _score(model, spec, inputs)
    if spec.algorithm == "dpo" and not precomputes(spec):
        loss = loss - _ask(model, spec, inputs, reference)
    loss.backward()


def _inputs(spec: JobSpec, batch: Batch) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch.sequences, batch.tokens, dtype=torch.long)
    if spec.packed:  # several rows in each sequence, which attention tells apart by their positions
        positions = torch.arange(batch.tokens) % max(1, batch.tokens // 2)
        return {"input_ids": ids, "position_ids": positions.repeat(batch.sequences, 1), "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0  # some row is padded: attention gets a mask, and grouped keys and values are repeated for it
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _score(model: Any, spec: JobSpec, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16) if spec.dtype != "fp32" else nullcontext():
        log_probs: torch.Tensor = model(**inputs, use_cache=False, fused_lm_head=True).log_probs
        return log_probs.sum()


def _ask(model: Any, spec: JobSpec, inputs: dict[str, torch.Tensor], reference: Any) -> torch.Tensor:
    """The base model as the reference costs what the policy costs without a graph, be it a copy or the model itself."""
    with torch.no_grad(), nothing_recomputed(model):
        return _score(reference or model, spec, inputs)


def _numbers(model: PreTrainedModel, blocks: list[tuple[str, torch.nn.Module]]) -> dict[str, Any]:
    sizes = [sum(weight.numel() for weight in block.parameters()) for _, block in blocks]
    linear = [
        module.weight.numel()
        for _, block in blocks
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    embeddings = {
        id(part.weight): part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    return {
        "block": max(sizes, default=0),
        "block_linear": sum(linear),
        "largest_linear": max(linear, default=0),
        "embeddings": sum(weight.numel() for weight in embeddings.values()),
        "head": model.get_output_embeddings().weight.numel(),
        "blocks": len(blocks),
    }


def _mark_middle(blocks: list[torch.nn.Module], live: _Live) -> None:
    """Begin the second window when the middle block's backward has reached its first trained weight."""
    weights = [weight for weight in blocks[len(blocks) // 2].parameters() if weight.requires_grad] if blocks else []
    begun: list[bool] = []

    def begin(_: torch.Tensor) -> None:
        if not begun:
            begun.append(True)
            live.next_window()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(begin)


@contextmanager
def _head_of(kind: str, live: _Live, config: Any) -> Iterator[None]:
    """TRL's fused head, its memory counted as logits, with the kernels that it has on this kind of device."""

    class Head(head.ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with live.counting("logits"):
                return head.ChunkedLogProbFunction.forward(ctx, *arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with live.counting("logits"):
                return head.ChunkedLogProbFunction.backward(ctx, *gradients)

    with ExitStack() as stack:
        stack.enter_context(patch.object(trl_utils, "_ChunkedLogProbFunction", Head))
        if kind == "cuda":  # a Triton kernel that works in the tile itself, and a product that adds to its result
            for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
                stack.enter_context(patch.object(head, name, lambda *_, **__: None))
        else:  # a tile is as wide as 32,768 tokens; what a smaller vocabulary leaves of it is never touched
            width = min(trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, config.get_text_config().vocab_size)
            stack.enter_context(patch.object(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", math.ceil(width)))
        yield
