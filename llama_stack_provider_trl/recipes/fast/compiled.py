"""Blocks of a model that torch's compiler turns into few kernels, with their attention as one operator.

The compiler knows the operator by its shapes alone, so that a block is one graph whatever rows a batch has, and calls
the kernels of `fast.attention` and `fast.cpu_attention` for it. It chooses kernels by the first shape that it sees,
which is that of a batch made for it (`first_batch`), so that a resumed attempt computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.methods import METHODS
from ..model.fsdp import blocks_of
from ..model.quantization import let_4bit_be_traced
from .attention import (
    attend_in_one_kernel,
    attend_in_rows,
    check_scores,
    differentiate_one_kernel,
    has_kernel_of_rows,
)
from .batches import Inputs, collate_rows, largest_groups
from .cpu_attention import attend_to_plan, differentiate_plan, planned
from .float8 import products_in_float8
from .larger_batches import why_random
from .layout import Layout, decoded
from .mlp import is_of_tokens, why_whole

NAME = "rows_as_one_operator"
"""Of this implementation of attention, in the configuration of a model that trains."""
COMPILED = "used"
"""How the record of compiled blocks begins."""
_SIZES = (4093, 2039, 1021, 509, 251, 127, 61, 31, 17)
"""Tokens of the first batch. Primes, which no size of a model is: the compiler takes equal sizes for the same one."""
_GRAPHS = 32
"""That one kind of block may have: for training and evaluation, by kind of attention."""


def why_eager(spec: JobSpec, device: str) -> str:
    """Why the blocks of a job are not compiled; empty: they are, if its model's can be.

    Args:
        device: its type.
    """
    if spec.compute.compile_blocks != "always":
        return f"compile_blocks is {spec.compute.compile_blocks!r}"
    return _why_model(spec) or _why_batches(spec, device) or why_random(spec)


def _why_model(spec: JobSpec) -> str:
    if spec.lora and spec.lora.use_dora:
        return "torch's compiler cannot trace PEFT's DoRA"
    return "ranks divide the tokens of a row" if spec.context_parallel_size > 1 else ""


def _why_batches(spec: JobSpec, device: str) -> str:
    if because := METHODS[spec.algorithm].padded_because:
        return f"batches have padding: {because}"
    if not spec.compute.padding_free:
        return "batches have padding"
    if {"cpu": ("fp32",), "cuda": ("bf16", "fp16")}.get(device, ()).count(spec.compute.dtype) == 0:
        return f"attention in {spec.compute.dtype} on {device} is several operations"
    if not why_whole(spec, device):
        return "networks compute in tiles"
    if spec.compute.activation_offloading:
        return "activations wait in CPU memory"
    return "the model is quantized" if spec.train.qat else ""


def compile_blocks(policy: PreTrainedModel, spec: JobSpec, device: str) -> str:
    """Have the blocks of a job's model compiled when a batch in one sequence first reaches them.

    Args:
        device: its type.

    Returns:
        What was done, for the job's record.
    """
    if reason := why_eager(spec, device):
        return f"not used: {reason}"
    blocks = list(blocks_of(policy).values())
    if reason := _why_blocks(policy, blocks):
        return f"not used: {reason}"
    _prepare_compiler()
    kinds = {kind: _compiled(kind) for kind in {type(block) for block in blocks}}
    for block in blocks:
        block.__class__ = kinds[type(block)]
    let_4bit_be_traced(policy)
    policy.set_attn_implementation(NAME)
    return f"{COMPILED} in {len(blocks)} of {len(blocks)} blocks"


def _why_blocks(policy: PreTrainedModel, blocks: list[torch.nn.Module]) -> str:
    if not all(is_of_tokens(getattr(block, "mlp", None)) for block in blocks) or not blocks:
        return "a block has no mlp of linear layers alone"
    config: Any = policy.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    has_windows = getattr(config, "sliding_window", None) and (not kinds or "sliding_attention" in kinds)
    return "its attention has a sliding window" if has_windows else ""


def _prepare_compiler() -> None:
    import torch._dynamo.config as graphs
    import torch._inductor.config as kernels

    kernels.deterministic = True  # no kernel is chosen by timing
    kernels.cpp_cache_precompile_headers = False  # torch shares them in /tmp between jobs, whose code they would become
    kernels.compile_threads = 1  # no processes of its own, which would have to end with the job
    graphs.recompile_limit = _GRAPHS
    graphs.optimize_ddp = False  # would divide the graph of a block by DDP's buckets
    graphs.skip_fsdp_guards = False  # adapters are switched on and off in sharded blocks


def _compiled(kind: Any) -> type[torch.nn.Module]:
    """The class of blocks of a kind whose forwards of batches in one sequence are compiled.

    A class, as FSDP2 has its own: transformers' checkpointing of activations and hooks stay around the compiled graph,
    and all blocks share it.
    """
    # transformers wraps it to compute activations again, which is decided outside of the graph.
    computed = kind.forward.__wrapped__ if issubclass(kind, GradientCheckpointingLayer) else kind.forward
    graph = torch.compile(computed, dynamic=True, fullgraph=True)

    def forward(self: Any, *args: Any, layout: Any = None, scored: Any = None, **kwargs: Any) -> Any:
        if layout is None:  # answers that are generated, and exports that are compared
            return kind.forward(self, *args, **kwargs)
        # For one token, as of a rank that has a filler alone, the compiler would make a graph of its own.
        compute = graph if layout.tokens > 1 else computed
        with products_in_float8():
            return compute(self, *args, layout=layout.encoded, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@contextmanager
def compiler_failures(spec: JobSpec) -> Iterator[None]:
    """While this is open, what the compiler cannot do ends a job whose blocks are compiled as its own failure: at its
    first batch, or at a later one that needs another graph.

    Raises:
        JobFailure: invalid_request, with what the compiler reports.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        found = (error.__cause__ or error) if isinstance(error, FailOnRecompileLimitHit) else error
        has_float8 = spec.compute.float8 == "always"
        advice = "Leave float8 out, and if that fails compile_blocks, too" if has_float8 else "Leave compile_blocks out"
        raise JobFailure(
            Reason.invalid_request,
            f"compile_blocks is 'always', and the blocks of {spec.source.model!r} cannot be compiled here"
            f"{' with float8' if has_float8 else ''}: {' '.join(str(found).split())[:600]}. {advice}, or send 'never'.",
        ) from error


def first_batch(spec: JobSpec, dataset: Dataset) -> Inputs:
    """The batch for which blocks are compiled: the same in every attempt, no larger than those of the job, and without
    a row that is longer than theirs, for which a model may have no positions."""
    groups, _ = largest_groups(dataset, spec.data.batch_size)
    most = sum(prefix + sum(parts) for prefix, parts in groups)
    tokens = next((size for size in _SIZES if size <= most), _SIZES[-1])
    rows = -(-tokens // max(1, Layout(groups).longest))
    rows += rows % 2  # see `Layout.encoded`
    sizes = [max(1, tokens // rows + (row < tokens % rows)) for row in range(rows)]
    # The last token of each row is not computed.
    return collate_rows([{"input_ids": [0] * (size + 1), "labels": [0] * (size + 1)} for size in sizes])


def attend_as_operator(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What `attend_in_rows` does, with the same arguments, but for the encoded layout. Without one that computes."""
    if layout is None:
        return attend_in_rows(module, query, key, value, attention_mask, **options)
    check_scores(module, attention_mask, options)
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu" and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if options.get("dropout") or options.get("sliding_window") is not None:
        raise ValueError("its attention has dropout or a sliding window")
    attended, _ = _attend(query, key, value, layout, options.get("scaling"))
    return attended, None


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor layout, float? scaling"


@torch.library.custom_op("llama_stack_provider_trl::attend", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, shape (1, tokens, heads, head size), and the logarithms of the sums."""
    rows = decoded(layout)
    if query.device.type == "cpu":
        return attend_to_plan(query, key, value, planned(rows), scaling)
    attended, log_sums = attend_in_one_kernel(query, key, value, rows, scaling, None)
    return attended[None].contiguous(), log_sums  # the kernel's output has the strides of the query


@_attend.register_fake
def _shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Any, scaling: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, tokens, size = query.shape
    is_on_cpu = query.device.type == "cpu"
    if not (query.shape[-1] == value.shape[-1] if is_on_cpu else has_kernel_of_rows(query, value)):
        raise ValueError(f"no kernel computes rows of heads of sizes {query.shape[-1]} and {value.shape[-1]} here")
    sums = (1, tokens, heads) if is_on_cpu else (heads, tokens)
    return query.new_empty(1, tokens, heads, size), query.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op(
    "llama_stack_provider_trl::differentiate_attend",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor attended, Tensor log_sums, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def _differentiate(
    gradient: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor,
    scaling: float | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value, in their shapes, the heads of a token next to each other."""
    rows, tensors = decoded(layout), (query, key, value, attended, log_sums)
    if query.device.type == "cpu":
        return tuple(differentiate_plan(gradient, *tensors, planned(rows), scaling))
    of_tokens = differentiate_one_kernel(gradient[0], query, key, value, attended[0], log_sums, rows, scaling, None)
    return tuple(one[None].transpose(1, 2) for one in of_tokens)


@_differentiate.register_fake
def _shapes_of_gradients(gradient: Any, attended: Any, log_sums: Any, *tensors: Any) -> tuple[torch.Tensor, ...]:
    found = []
    for tensor in tensors[:3]:
        _, heads, tokens, size = tensor.shape
        found.append(tensor.new_empty(1, tokens, heads, size).transpose(1, 2))
    return tuple(found)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *_differentiate(gradient.contiguous(), *ctx.saved_tensors, ctx.scaling), None, None


_attend.register_autograd(_backward, setup_context=_keep)
AttentionInterface.register(NAME, attend_as_operator)
