"""How much memory a training step takes on each device, before any weight is read.

The real loss runs forward and backward on fake tensors (torch.FakeTensorMode: shapes, dtypes and lifetimes of every
tensor, no storage), so what autograd saves is counted and not modelled, for any architecture that transformers loads.
What a trace cannot show is added by arithmetic: optimizer state, shards and what is gathered of them, the reference.
docs/memory.md compares the result with measured peaks.
"""

from __future__ import annotations

import copy
import math
import weakref
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
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head

from .models import invalid_model, linear_modules, lora_config, source
from .sharding import is_sharded
from .spec import JobSpec

_CUDA_CONTEXT = 768 << 20
"""Bytes of a GPU that no tensor of ours takes: the CUDA context, cuBLAS's workspace, NCCL's buffers."""
_CUDA_SLACK = 0.05
"""Of all else: what the caching allocator cannot use because its blocks are cut otherwise."""
_CPU_PROCESS = 96 << 20
"""Bytes of a CPU process beyond its tensors and the libraries as imported: threads, kernels, the data."""
_CPU_SLACK = 0.02
"""Of all else: pages, and glibc's heap, which takes the blocks below 1 MiB (`launch.torchrun.MALLOC`)."""
_FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight in blocks of 64 with a scale in fp32 (bitsandbytes nf4)."""
_LAYERS = (2, 4)
"""Depths that are traced where all blocks are alike; both even, see `_Trace`."""


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
    """DPO's frozen copy of the model; none under LoRA."""
    overhead: int
    """Context, workspaces and slack of the allocator. On a CPU: the libraries as imported, too."""
    loading: int = 0
    """CPU: what loading the model takes beyond all of the above together; 0 where it takes less."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


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
    placed = _Placed(spec, model)
    windows = [placed.at(window) for window in model.windows]
    peak = max(windows, key=lambda memory: memory.total)
    used = peak.total
    if kind == "cpu":
        overhead = _CPU_PROCESS + int(_CPU_SLACK * used) + baseline
        loading = max(0, placed.loading - used)
    else:
        overhead, loading = _CUDA_CONTEXT + int(_CUDA_SLACK * used), 0
    return replace(peak, overhead=overhead, loading=loading)


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


class _Placed:
    """A traced model with its optimizer, shared out over the ranks of a job."""

    def __init__(self, spec: JobSpec, model: Traced) -> None:
        self.spec, self.model = spec, model
        self.shards = spec.ranks if is_sharded(spec) else 1
        self.offload = bool(spec.sharding and is_sharded(spec) and spec.sharding.cpu_offload)
        self.compute = 2 if spec.dtype == "bf16" else 4
        self.quantized = _quantized(spec)

    @property
    def whole(self) -> int:
        """Bytes of the weights, not shared out."""
        model = self.model
        frozen = model.frozen * (2 if self.spec.dtype == "bf16" and self.spec.lora else 4)
        if self.quantized:
            frozen = (model.frozen - model.block_linear) * 2 + int(model.block_linear * _FOUR_BIT)
        return model.trainable * 4 + frozen

    @property
    def loading(self) -> int:
        """CPU: weights of the files' own dtype are mapped and never copied; others are copied while the files stay
        mapped. A reference is loaded after the model."""
        copied = 0 if self.model.stored_alike else (self.model.trainable + self.model.frozen) * 4
        return (2 if self._has_reference else 1) * self.whole + copied

    def at(self, window: Window) -> Memory:
        spec, model = self.spec, self.model
        gradients, gathered, reference = window.gradients, 0, 0
        if spec.ranks > 1 and self.shards == 1:
            gradients += model.trainable * 4  # DDP's buckets
        if self.shards > 1:
            whole_grads = spec.gradient_accumulation_steps > 1  # accelerate reduces them at the last micro step only
            gradients = gradients / self.shards if not whole_grads else max(gradients, model.trainable * 4)
            gathered = self._gathered()
        if self._has_reference:
            # TRL shards the reference as one unit: all of it is gathered while it computes.
            reference = self.whole // self.shards
            reference += (model.trainable + model.frozen) * self.compute if self.shards > 1 else 0
        resident = 0 if self.offload else 1
        if self.offload:
            gradients, reference = min(gradients, model.block * 4), max(0, reference - self.whole // self.shards)
        dequantized = 2 * model.largest_linear if self.quantized else 0
        return Memory(
            weights=resident * (self.whole // self.shards) + gathered + dequantized,
            gradients=int(gradients),
            optimizer=resident * model.trainable * 4 * _moments(spec) // self.shards,
            activations=int(window.activations),
            logits=int(window.logits),
            reference=reference,
            overhead=0,
        )

    @property
    def _has_reference(self) -> bool:
        return self.spec.algorithm == "dpo" and self.spec.lora is None

    def _gathered(self) -> int:
        """Of a sharded model: embeddings, the head (TRL gathers it whole, in fp32), the block at hand and the next
        one, and the gradient of a block on its way to the ranks that keep it."""
        model = self.model
        blocks = model.blocks if self.spec.sharding and self.spec.sharding.strategy == "SHARD_GRAD_OP" else 2
        trained = 0 if self.spec.lora else model.block
        return (model.embeddings + blocks * model.block) * self.compute + model.head * 4 + trained * (self.compute + 4)


def _moments(spec: JobSpec) -> int:
    return 0 if spec.optimizer.name == "sgd" else 2


def _quantized(spec: JobSpec) -> bool:
    return bool(spec.lora and getattr(spec.lora, "quantize_base", False))


def _export_bytes(spec: JobSpec) -> int:
    return 2 if spec.dtype == "bf16" else 4


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
        self.bytes = {"activations": 0, "logits": 0, "gradients": 0, "ignored": 0}
        self.gradients_weigh = gradients_weigh
        self.windows = [Window(0, 0, 0)]
        self._known: dict[int, list[Any]] = {}
        self._most = -1.0

    def ignore(self, tensor: torch.Tensor) -> None:
        """A parameter: counted elsewhere."""
        self._add(tensor, "ignored")

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
        weighed = now["activations"] + now["logits"] + self.gradients_weigh * now["gradients"]
        if weighed > self._most:
            self._most = weighed
            self.windows[-1] = Window(now["activations"], now["logits"], now["gradients"])


def _key(spec: JobSpec) -> str:
    """What decides a trace: everything else of a job may change without a new one."""
    relevant = {"model", "revision", "trust_remote_code", "algorithm", "dtype", "gradient_checkpointing", "lora"}
    accumulates, sharded = spec.gradient_accumulation_steps > 1, spec.ranks if is_sharded(spec) else 1
    return f"{spec.model_dump_json(include=relevant)}{accumulates}{sharded}"


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
    if depth <= _LAYERS[1] + 2 or not _blocks_are_alike(config, spec):
        return _trace(config, spec, batch, kind)
    one, other = (_trace(_with_depth(config, layers), spec, batch, kind) for layers in _LAYERS)
    return _extrapolated(one, other, depth)


def _extrapolated(one: Traced, other: Traced, depth: int) -> Traced:
    """Both traces have the same windows, and every number in them is linear in depth."""
    steps = (depth - one.blocks) / (other.blocks - one.blocks)

    def line(a: float, b: float) -> float:
        return a + (b - a) * steps

    windows = tuple(
        Window(*(line(getattr(a, field.name), getattr(b, field.name)) for field in fields(Window)))
        for a, b in zip(one.windows, other.windows, strict=True)
    )
    numbers = {
        field.name: round(line(getattr(one, field.name), getattr(other, field.name)))
        for field in fields(Traced)
        if field.name not in ("windows", "stored_alike")
    }
    return Traced(**numbers, stored_alike=one.stored_alike, windows=windows)


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
    dtype = torch.bfloat16 if spec.dtype == "bf16" and (spec.lora or is_sharded(spec)) else torch.float32
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
    weigh = 1.0 / spec.ranks if is_sharded(spec) else 1.0
    live = _Live(weigh)
    with ExitStack() as stack:
        with torch.device("meta"):
            model = _built(config, spec)
            add_fused_lm_head(model, outputs=("log_probs", "is_top1") if spec.algorithm == "sft" else ("log_probs",))
            blocks = _blocks(model)
            numbers = _numbers(model, blocks)
            trained: Any = get_peft_model(model, lora_config(model, spec.lora)) if spec.lora else model
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _make_fake(trained)
        trained.train()
        if spec.gradient_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=_KEEP_GRAPH)
            if spec.lora:
                model.enable_input_require_grads()
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
        _step(trained, spec, batch)
    trainable = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in trained.parameters())
    scale = 4 / (2 if spec.dtype == "bf16" and is_sharded(spec) and not spec.lora else 4)
    windows = tuple(replace(window, gradients=window.gradients * scale) for window in live.windows)
    loaded = torch.bfloat16 if spec.dtype == "bf16" and spec.lora else torch.float32
    alike = getattr(config, "dtype", None) == loaded
    return Traced(trainable=trainable, frozen=total - trainable, stored_alike=alike, windows=windows, **numbers)


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


def _step(model: Any, spec: JobSpec, batch: Batch) -> None:
    """What `recipes.sft` and `recipes.dpo` do with a batch."""
    ids = torch.zeros(batch.sequences, batch.tokens, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0  # some row is padded: attention gets a mask, and grouped keys and values are repeated for it
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    def score() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if spec.dtype == "bf16" else nullcontext():
            return model(**inputs, use_cache=False, fused_lm_head=True).log_probs.sum()

    loss = score()
    if spec.algorithm == "dpo":
        # The reference costs what the policy costs without a graph, whether it is a copy or the model itself.
        with torch.no_grad(), disable_gradient_checkpointing(model, _KEEP_GRAPH):
            reference = score()
        loss = loss - reference
    loss.backward()


def _numbers(model: PreTrainedModel, blocks: list[tuple[str, torch.nn.Module]]) -> dict[str, int]:
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
