"""Estimates the memory of a job: a traced step, plus optimizer state, gathered shards and exports, which it lacks."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ...specs.job import JobSpec
from ...specs.memory import MemoryEstimate
from ...specs.model_source import ModelSource
from ...specs.optimizer_state import moment_bytes
from ...specs.rewards import RewardModel
from ..fast.attention import accumulator_bytes, fixed_order_bytes
from ..fast.compiled import why_eager
from ..fast.layout import Layout
from ..model.configs import invalid_model
from ..model.fsdp import keeps_whole_gradients, num_shards, ranks_per_machine
from ..model.loading import DTYPES, WeightStorage, auto_class, load_config
from ..model.vllm_process import CPU_CACHE_GIB
from ..trainer.loader import num_workers
from ..trainer.reference import precomputes
from ..trainer.reward_models import storage_of
from .trace import Batch, Traced, Window, is_quantized, loads_reference
from .trace_cache import trace

_CUDA_CONTEXT = 768 << 20
"""Bytes of a GPU beyond our tensors: the CUDA context, cuBLAS's workspace, NCCL's buffers."""


_CUDA_SLACK = 0.05
"""Fraction of everything else: fragmentation of the caching allocator."""


_CPU_PROCESS = 96 << 20
"""Bytes of a CPU process beyond its tensors and the libraries as imported: threads, kernels, the data."""


_CPU_SLACK = 0.02
"""Fraction of everything else: pages, and glibc's heap, which holds the blocks below 1 MiB (`malloc.FRUGAL`)."""


_HOST_PROCESS = 1 << 30
"""Bytes of CPU memory of a rank that trains on another device, beyond its weights: the libraries as imported (measured
on a CPU: 0.8 GiB)."""


_PINNED = 2
"""Most bytes of page-locked CPU memory per byte in it: torch rounds each allocation up to a power of two. vLLM keeps
its weights there while it sleeps, an allocation for each layer's."""


_LOADER_WORKER = 128 << 20
"""Bytes of a process that prepares batches, beyond the pages that it shares with its rank."""


_FOUR_BIT = 0.5
"""Bytes per packed weight (bitsandbytes nf4)."""


_CONSTANTS = 1 / 64 + 4 / (64 * 256)
"""Bytes per packed weight of its constants, which every rank has whole: a scale of 8 bits for each block of 64 weights,
and one in fp32 for each 256 of those."""


_QUANTIZING = 14
"""CPU: bytes per weight of a layer while bitsandbytes quantizes it (measured: 10 beside weights in fp32, 14 in bf16).
"""


def estimate(spec: JobSpec, batch: Batch, device: str, baseline: int = 0) -> MemoryEstimate:
    """The memory that each device (or, on a CPU, each rank) needs at its peak.

    `gradient_sync` auto counts as micro_step and `keep_attention` auto as never, which always remain possible.

    Args:
        batch: the largest one that a rank will see.
        device: cuda, mps or cpu.
        baseline: bytes of the process before it does anything (CPU); counted as overhead.

    Raises:
        JobFailure: invalid_model, when the configuration cannot be read or names no causal language model.
    """
    kind = device.partition(":")[0]
    model = trace(spec, batch, kind)
    beside = flash_bytes(spec, batch, kind) + exchanged_bytes(spec, batch) + float8_bytes(spec, batch, kind, model)
    placed = _Placed(spec, model, kind, beside)
    moments = [placed.at(window) for window in model.windows]
    if model.reference_scoring is not None:
        moments.append(placed.reference_scoring(model.reference_scoring))
    if spec.method.answer_tokens is not None and spec.method.answered_by_vllm is None and spec.compute.padding_free:
        # Padded batches of the step itself take more.
        moments.append(placed.at(_answering(spec, batch)))
    peak = max(moments, key=lambda memory: memory.total)
    used = peak.total
    if kind == "cpu":
        overhead = _CPU_PROCESS + int(_CPU_SLACK * used) + baseline
        loading = max(0, placed.loading - used)
    else:
        overhead, loading = _CUDA_CONTEXT + int(_CUDA_SLACK * used), 0
    workers = num_workers(spec, kind) * _LOADER_WORKER
    # On a CPU they keep every page as it was that their rank changes after the fork.
    overhead += used + workers if kind == "cpu" and workers else 0
    most_host, host_loading = max(moments, key=lambda memory: memory.host), placed.host_loading
    vllm, of_vllms = _vllm_bytes(spec, model, kind)
    rank = used + overhead + loading if kind == "cpu" else max(most_host.host, host_loading) + _HOST_PROCESS + workers
    return replace(
        peak,
        overhead=overhead,
        loading=loading,
        vllm=vllm,
        host=most_host.host,
        host_offloaded=most_host.host_offloaded,
        host_loading=host_loading,
        page_cache=placed.page_cache,
        machine=rank * ranks_per_machine(spec) + of_vllms,
    )


def disk_bytes(spec: JobSpec, model: Traced) -> dict[str, int]:
    """Bytes on disk of one step checkpoint, `final` and `merged`."""
    step = model.trainable * 4 + _moment_bytes(spec, model) * _workers(spec) + _outer_bytes(spec, model) // 2
    final = model.trainable * 4 if spec.lora else (model.trainable + model.frozen) * _export_bytes(spec)
    merged = (model.frozen * _export_bytes(spec)) if spec.lora and spec.train.merge_adapter else 0
    return {"step_checkpoint": step, "final": final, "merged": merged}


class _Placed:
    """A traced model with its optimizer, sharded over the ranks of a job.

    Args:
        of_block: bytes of a block's passes that the trace lacks.
    """

    def __init__(self, spec: JobSpec, model: Traced, kind: str, of_block: int = 0) -> None:
        self.spec, self.model, self.on_cpu = spec, model, kind == "cpu"
        self.of_block = of_block
        self.shards = num_shards(spec)
        # On a CPU offloading moves nothing.
        self.offload = bool(spec.sharding and self.shards > 1 and spec.sharding.cpu_offload and not self.on_cpu)
        self.compute = 4 if spec.compute.dtype == "fp32" else 2
        self.whole_gradients = keeps_whole_gradients(spec)
        self.quantized = is_quantized(spec)
        self.is_deferred = WeightStorage.of(spec).is_deferred
        self.reference = (model.reference or model) if loads_reference(spec) else None
        self.rewards = reward_sizes(spec)

    def whole(self, model: Traced) -> int:
        """Bytes of a model's weights without sharding."""
        frozen = model.frozen * (self.compute if self.spec.lora and not self.spec.trains_reward else 4)
        if self.quantized:
            packed = int(model.block_linear * _FOUR_BIT) + self.constants(model)
            frozen = (model.frozen - model.block_linear) * self.compute + packed
        return model.trainable * 4 + frozen

    def constants(self, model: Traced) -> int:
        """Bytes of a model's quantization constants, which are not sharded."""
        return int(model.block_linear * _CONSTANTS) if self.quantized else 0

    def part(self, model: Traced) -> int:
        """Bytes of a model's weights on each rank."""
        constants = self.constants(model)
        return (self.whole(model) - constants) // self.shards + constants

    def mapped(self, model: Traced) -> int:
        """CPU: bytes of a model's files beside its weights. Experts are copied into one tensor; the files stay mapped
        for the weights that are not, and what was read of them counts as memory of the process."""
        if not self.on_cpu or not model.stored_alike:
            return 0
        return model.experts * (self.compute if self.spec.lora else 4)

    def copied(self, model: Traced) -> int:
        """Bytes of a model's weights that loading copies out of the files, on every rank; mapped ones are not, and one
        in 4 bits is quantized when it is sharded."""
        if not model.is_mapped or (self.quantized and not self.is_deferred):
            return self.whole(model)
        return 0 if self.is_deferred else model.experts * model.bytes_in_files

    def loading_shards(self, model: Traced) -> int:
        """CPU: bytes of a rank while it loads a model and copies its rows, with the pages of files that it reads: those
        of its rows, and of every layer that it quantizes or merges."""
        read = 0
        if model.is_mapped:
            whole = (model.experts + (model.block_linear if self.quantized else 0)) * model.bytes_in_files
            read = whole + (self.in_files(model) - whole) // self.shards
        # Two weights of an expert are stacked, then concatenated.
        merging = 2 * model.experts // max(1, model.blocks) * model.bytes_in_files
        quantizing = _QUANTIZING * model.largest_linear if self.quantized else 0
        return self.copied(model) + self.part(model) + read + max(merging, quantizing)

    def in_files(self, model: Traced) -> int:
        """Bytes of a model's files."""
        return (model.frozen if self.spec.lora else model.trainable + model.frozen) * model.bytes_in_files

    @property
    def host_loading(self) -> int:
        """Bytes of CPU memory while a rank loads for another device. Without sharding a model is moved there before the
        next is loaded, and one in 4 bits is quantized there."""
        if self.on_cpu:
            return 0
        copies = [self.copied(model) for model in (self.model, self.reference) if model is not None]
        if self.shards > 1:
            return max(sum(copies), *self.rewards) if self.rewards else sum(copies)
        return 0 if self.quantized else max([*copies, *self.rewards])

    @property
    def page_cache(self) -> int:
        """Bytes of the files of all models."""
        other = self.model.reference if self.reference is not None else None
        return self.in_files(self.model) + (self.in_files(other) if other else 0)

    @property
    def loading(self) -> int:
        """CPU: as `_loading`; then reward models, whose files are mapped while they are copied."""
        if not self.rewards:
            return self._loading
        reference = self.part(self.reference) if self.reference is not None else 0
        held = self.part(self.model) + self.mapped(self.model) + reference + sum(self.rewards)
        return max(self._loading, held + 2 * max(self.rewards))

    @property
    def _loading(self) -> int:
        """CPU: weights of the files' own dtype are mapped and never copied, but for experts; others are copied while
        the files stay mapped. A reference is loaded after the model, and sharded before it."""
        if self.shards > 1:
            if self.reference is None:
                return self.loading_shards(self.model)
            of_reference = self.copied(self.model) + self.loading_shards(self.reference)
            return max(of_reference, self.part(self.reference) + self.loading_shards(self.model))

        def needed(model: Traced) -> int:
            files = self.mapped(model) if model.stored_alike else (model.trainable + model.frozen) * 4
            return self.whole(model) + files

        both = self.whole(self.model) + self.mapped(self.model) + needed(self.reference) if self.reference else 0
        return max(needed(self.model), both)

    def at(self, window: Window) -> MemoryEstimate:
        """The memory of a moment of training."""
        spec, model = self.spec, self.model
        gradients, gathered, at_rest = window.gradients, 0, 0
        weights = self.part(model) + (self.mapped(model) if self.shards == 1 else 0)
        optimizer = (_moment_bytes(spec, model) + _outer_bytes(spec, model)) // self.shards
        if spec.ranks > 1 and self.shards == 1 and spec.train.averaging is None:
            gradients += model.trainable * 4  # DDP's buckets
        if self.shards > 1:
            gradients /= 1 if self.whole_gradients else self.shards
            gathered = self._gathered(model)
        reference, resting = (0, 0) if self.reference is None or precomputes(spec) else self._reference()
        if self.offload:
            at_rest = weights + optimizer + model.trainable * 4 // self.shards + resting
            weights, optimizer = self.constants(model), 0
            gradients = gradients if self.whole_gradients else min(gradients, model.block * 4)
        dequantized = (2 if spec.compute.dtype == "bf16" else 4) * model.largest_linear if self.quantized else 0
        outer = _outer_bytes(spec, model) // 2  # checkpoints hold its momentum: common weights are the model's
        copied = (model.trainable * 4 + _moment_bytes(spec, model) + outer) // self.shards
        return MemoryEstimate(
            weights=weights + gathered + dequantized,
            gradients=int(gradients),
            optimizer=optimizer,
            activations=int(window.activations) + self.of_block,
            logits=int(window.logits),
            reference=reference + sum(self.rewards),
            overhead=0,
            checkpoint_copy=copied if self.on_cpu else 0,
            host=0 if self.on_cpu else copied + int(window.host) + at_rest,
            host_offloaded=0 if self.on_cpu else int(window.host) + at_rest,
        )

    def reference_scoring(self, window: Window) -> MemoryEstimate:
        """The memory while the reference scores rows before training. A policy to be sharded is not sharded yet: what
        loading copied of it is in CPU memory."""
        reference, _ = self._reference()
        if self.shards == 1:
            weights = self.whole(self.model) + self.mapped(self.model)
        else:
            weights = self.copied(self.model) if self.on_cpu else 0
        return MemoryEstimate(
            weights=weights,
            gradients=0,
            optimizer=0,
            activations=int(window.activations),
            logits=int(window.logits),
            reference=reference,
            overhead=0,
        )

    def _reference(self) -> tuple[int, int]:
        """Bytes of the reference on the device, and of its offloaded parts in CPU memory."""
        if self.reference is None:
            raise AssertionError("the policy is its own reference")
        part = self.part(self.reference)
        if self.shards == 1:
            return part + self.mapped(self.reference), 0
        head, block = self.reference.head, self.reference.block
        inputs = (
            self.reference.embeddings - head
        )  # its head stays gathered while it scores, and the input embeddings do not
        gathered = self.compute * (head + max(head + block, 3 * block, 2 * inputs))
        return (gathered, part) if self.offload else (part + gathered, 0)

    def _gathered(self, model: Traced) -> int:
        """Bytes that a rank holds whole at a time of a sharded model, with the gradients that it reduces.

        FSDP2 gathers a unit into a buffer and copies it out, and keeps the buffer of the unit before until then: three
        units in the forward pass. In the backward pass there are two, that at hand and the next one's buffer, with the
        gradients of one in the dtype of the computation and those of the one before in fp32, which are being summed.
        tests/process/test_memory.py compares this with torch's FSDPMemTracker.
        """
        compute, block, head = self.compute, model.block, model.head
        inputs = model.embeddings - head
        is_kept = self.spec.sharding is not None and self.spec.sharding.strategy == "SHARD_GRAD_OP"
        reduced = 0 if self.spec.lora else compute * block + 4 * max(block, head if inputs else 0)
        if is_kept:
            return compute * (model.blocks * block + model.embeddings) + max(compute * (head + block), reduced)
        tied = 0 if inputs else compute * head  # gathered throughout the step
        forward = max(compute * (2 * head + block), tied + compute * 3 * block)
        backward = tied + compute * 2 * block + reduced
        last = 2 * compute * inputs + (0 if self.spec.lora else 4 * block)
        return max(forward, backward, last)


def _answering(spec: JobSpec, batch: Batch) -> Window:
    """The memory while prompts are answered: keys and values of all tokens, the networks of a block, which read each
    prompt as often as it is answered, and the logits of a token with a copy in fp32."""
    config: Any = load_config(spec.source).get_text_config()
    tokens, compute = batch.sequences * batch.tokens, 4 if spec.compute.dtype == "fp32" else 2
    heads = config.num_attention_heads  # batches without padding are those of attention
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = 2 * size * (getattr(config, "num_key_value_heads", None) or heads)
    inner = _inner(config)
    cached, block = config.num_hidden_layers * width * tokens, (4 * config.hidden_size + 3 * inner) * tokens
    return Window((cached + block) * compute, batch.sequences * config.vocab_size * (compute + 4), 0)


def _inner(config: Any) -> int:
    """The width of a block's network, or of the widest one."""
    found = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(found if isinstance(found, int) else max(found))


def _vllm_bytes(spec: JobSpec, model: Traced, kind: str) -> tuple[int, int]:
    """What vLLM takes on a rank's device beside the training at its peak, and all vLLMs of a job of CPU memory.

    On a GPU it sleeps then, or has devices of its own. While it answers, training holds no activations, and vLLM itself
    refuses to start where its share of the memory is not free beside the model. Asleep it keeps the base model of
    adapters in CPU memory; all weights that change are there once, in memory that training and every vLLM have. Over
    several devices it has a process for each, and one that these answer to.
    """
    if (vllm := spec.method.answered_by_vllm) is None:
        return 0, 0
    weights = (model.trainable if spec.lora is None else 0) + model.frozen
    weights *= 4 if spec.compute.dtype == "fp32" else 2
    shared, kept = (weights, 0) if vllm.sync == "weights" else (0, weights)
    size, many = vllm.tensor_parallel_size, ranks_per_machine(spec)
    vllms = many // vllm.ranks_of_one(many)
    processes = (size + (size > 1)) * _HOST_PROCESS
    if kind == "cpu":
        own = weights + size * (CPU_CACHE_GIB << 30) + processes
        return -(-own * vllms // many) + shared, vllms * own + shared
    if vllm.own_devices:
        return 0, processes + shared
    return _CUDA_CONTEXT, vllms * (_PINNED * kept + processes) + shared


def _moment_bytes(spec: JobSpec, model: Traced) -> int:
    return moment_bytes(spec.train.optimizer.name, model.trainable, model.in_8_bits)


def _workers(spec: JobSpec) -> int:
    """How many have moments of their own."""
    return spec.ranks // num_shards(spec) if spec.train.averaging else 1


def _outer_bytes(spec: JobSpec, model: Traced) -> int:
    """Bytes of periodic averaging: the last common weights, and the momentum of the steps between those."""
    return 8 * model.trainable if spec.train.averaging else 0


def _export_bytes(spec: JobSpec) -> int:
    return 4 if spec.compute.dtype == "fp32" else 2


def flash_bytes(spec: JobSpec, batch: Batch, kind: str) -> int:
    """Bytes for which each attention of a backward pass has a use of its own; 0: it is not by flash kernels, or not in
    a fixed order.

    Raises:
        JobFailure: invalid_model.
    """
    if kind != "cuda" or spec.compute.dtype == "fp32" or not spec.compute.padding_free:
        return 0
    call = _flash_call(spec, batch)
    if call is None:
        return 0
    # The limit is what the worst batch of packed rows takes, which is not the one with the most tokens.
    packed = spec.compute.accumulator_bytes or 0 if spec.data.packed else 0
    return max(packed, accumulator_bytes(*call, spec.compute.accumulator_bytes))


def fixed_order_limits(
    spec: JobSpec, batch: Batch, kind: str, largest_head: int, packed: tuple[int, int] | None = None
) -> list[int]:
    """Bytes, the most first, with which each attention of a job adds in a fixed order: where one call computes the rows
    of a batch, and where each row has one. Empty: its attention is not by such calls.

    Args:
        largest_head: of flash attention on its GPU.
        packed: as of `fixed_order_bytes`.

    Raises:
        JobFailure: invalid_model.
    """
    call = _flash_call(spec, batch) if flash_bytes(spec, batch, kind) else None
    config: Any = load_config(spec.source).get_text_config()
    if call is None or call[2] > largest_head or getattr(config, "v_head_dim", None):
        return []
    has_window = getattr(config, "sliding_window", None)
    if has_window and call[2] % 8:  # no kernel of rows takes them, and a call for each has masks
        return []
    together, alone = fixed_order_bytes(*call, packed)
    # One call computes rows with a window, whatever it takes: a call for each would need masks. So it does in compiled
    # blocks.
    is_one_call = has_window or not why_eager(spec, kind)
    return [together] if is_one_call or alone >= together else [together, alone]


def _flash_call(spec: JobSpec, batch: Batch) -> tuple[list[int], int, int] | None:
    """Tokens of each row of a batch, heads, and their size; None: the model has no attention."""
    config: Any = load_config(spec.source).get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return None
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = batch.groups or ((0, (batch.tokens,)),) * batch.sequences
    return Layout(groups).sizes(), max(1, heads // spec.context_parallel_size), head_size


def exchanged_bytes(spec: JobSpec, batch: Batch) -> int:
    """Bytes of an attention's queries, keys and values while ranks that share rows exchange them: what is sent, what is
    received, and that by heads.

    Raises:
        JobFailure: invalid_model.
    """
    size = spec.context_parallel_size
    if size == 1:
        return 0
    config: Any = load_config(spec.source).get_text_config()
    heads, groups = config.num_attention_heads, batch.groups or ((0, (batch.tokens,)),) * batch.sequences
    tokens = -(-sum(Layout(groups).sizes()) // size)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    exchanged = heads + 2 * math.lcm(config.num_key_value_heads, size)
    return 3 * tokens * exchanged * head_size * (4 if spec.compute.dtype == "fp32" else 2)


def float8_bytes(spec: JobSpec, batch: Batch, kind: str, model: Traced) -> int:
    """Bytes of a block's products in 8 bits beside those of the same block without them. torchao's autograd function
    keeps what torch's keeps, the input and the weight in the dtype of the computation; it casts the operands of a
    product, copies one into the other order, and frees both after it. The compiler may cast all weights of a block
    first. Emulated products are in fp32, with a copy of each operand before and after it is divided by its scale.

    Raises:
        JobFailure: invalid_model.
    """
    if spec.compute.float8 != "always" or why_eager(spec, kind):
        return 0
    config: Any = load_config(spec.source).get_text_config()
    widest = max(config.hidden_size, _inner(config))
    groups = batch.groups or ((0, (batch.tokens,)),) * batch.sequences
    tokens = sum(prefix + sum(sizes) for prefix, sizes in groups)
    return (10 if kind == "cpu" else 2) * (model.block_linear // max(1, model.blocks) + tokens * widest)


def reward_sizes(spec: JobSpec) -> list[int]:
    """Bytes of the weights of each, without its adapter. A grader's model that another job has not written yet is left
    out: it is there when the job starts. Raises JobFailure: invalid_model."""
    bytes_each = storage_of(spec.compute.dtype).dtype.itemsize
    found = [_parameters(_source(model), is_reward=True) * bytes_each for model in spec.method.reward_models]
    own_bytes = DTYPES[spec.compute.dtype].itemsize
    for model in spec.method.grading_models:
        if model.made_by is None or (model.directory / "config.json").is_file():
            found.append(_parameters(model.source, is_reward=False) * own_bytes)
    return found


def _source(model: RewardModel) -> ModelSource:
    """What has the sizes of a reward model: its own files, once its job has written them, else what that began with."""
    if model.base is not None:
        return model.base
    if model.trained_from is None or (model.own.directory / "config.json").is_file():
        return model.own
    return ModelSource(**dict(model.trained_from))


@lru_cache(maxsize=16)
def _parameters(source: ModelSource, *, is_reward: bool) -> int:
    config = copy.deepcopy(load_config(source))
    auto, head = auto_class(config, is_reward=is_reward)
    if is_reward:
        config.num_labels = head["num_labels"]
    try:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise invalid_model(
            source.model, f"its config.json describes no {'reward' if is_reward else 'language'} model", error
        ) from error
    return sum(weight.numel() for weight in model.parameters())
