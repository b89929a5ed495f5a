"""FSDP2: shards a model over the ranks of a job. The only module that uses it.

Trainer and accelerate do the wrapping, with two faults (both measured, accelerate 1.15). On CPU ranks accelerate
accepts FSDP's settings and trains with DDP, without a warning. `save_model` under sharded state dicts writes nothing.
So this module switches sharding on for CPU ranks, proves it before the first step, and gathers models explicitly.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, fsdp_utils
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec, ShardingSpec
from ..distributed import ranks


def is_sharded(spec: JobSpec) -> bool:
    """Whether the job shards the model, rather than using one process or DDP."""
    return spec.is_sharded


def accumulates_shards(spec: JobSpec) -> bool:
    """Whether the job accumulates gradients on ranks that shard the model: whole or in parts, by `gradient_sync`."""
    return is_sharded(spec) and spec.train.gradient_accumulation_steps > 1


def keeps_whole_gradients(spec: JobSpec) -> bool:
    """Whether each rank holds the gradients of all weights between the micro steps of an optimizer step."""
    return accumulates_shards(spec) and spec.train.gradient_sync == "step"


def num_shards(spec: JobSpec) -> int:
    """Number of parts of the model. Under HYBRID_SHARD every node has a copy, in as many parts as it has ranks."""
    if not is_sharded(spec):
        return 1
    within_node = spec.sharding is not None and spec.sharding.strategy == "HYBRID_SHARD"
    return spec.ranks * ranks.local_world_size() // ranks.world_size() if within_node else spec.ranks


def ranks_per_machine(spec: JobSpec) -> int:
    """Number of the job's ranks on each machine: as they run, else as the job requests its nodes."""
    if ranks.world_size() > 1:
        return spec.ranks * ranks.local_world_size() // ranks.world_size()
    return max(1, spec.ranks_per_node)


def fsdp_arguments(spec: JobSpec) -> dict[str, Any]:
    """Trainer's arguments for sharding; none where nothing is sharded. Raises JobFailure: invalid_request, for
    HYBRID_SHARD where every node has one rank, so that nothing would be sharded."""
    if not is_sharded(spec) or spec.sharding is None:
        return {}
    config = {
        "version": 2,
        "reshard_after_forward": spec.sharding.strategy != "SHARD_GRAD_OP",
        "cpu_offload": spec.sharding.cpu_offload,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # every block that the architecture lists in _no_split_modules
    }
    # Without it every rank keeps whole gradients until the last micro batch of a step: 28 GB for 7B weights.
    accumulation = {"gradient_accumulation_kwargs": {"sync_each_batch": not keeps_whole_gradients(spec)}}
    return {"fsdp": True, "fsdp_config": config, "accelerator_config": accumulation, **_mesh(spec)}


class _NodesApart(ParallelismConfig):
    """Parts within a node, without a reduction of gradients across nodes."""

    @property
    def fsdp_dim_names(self) -> list[str]:
        return ["dp_shard_cp"]


def _mesh(spec: JobSpec) -> dict[str, Any]:
    """HYBRID_SHARD over several nodes: parts within a node, copies across nodes. On one node it is FULL_SHARD."""
    sharding = spec.sharding or ShardingSpec()
    per_node = ranks.local_world_size()
    copies = ranks.world_size() // per_node
    if sharding.strategy != "HYBRID_SHARD" or copies == 1:
        return {}
    if per_node == 1:
        raise JobFailure(
            Reason.invalid_request,
            f"HYBRID_SHARD shards within a node, and each of the {copies} nodes has one rank: every rank would hold "
            "everything. Use sharding_strategy FULL_SHARD, or NO_SHARD for plain data parallelism.",
        )
    config = _NodesApart if spec.train.averaging else ParallelismConfig
    return {"parallelism_config": config(dp_replicate_size=copies, dp_shard_size=per_node)}


@contextmanager
def sharding_on_any_device() -> Iterator[None]:
    """While this is open, accelerate applies FSDP's settings on CPU ranks too, and `mixed_precision`.

    accelerate switches to FSDP only for the distributed types of accelerators, and MULTI_CPU is none of them.
    """
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        on_cpu = PartialState._shared_state.get("distributed_type") is DistributedType.MULTI_CPU
        if plugin is not None and on_cpu:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
                plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU's driver
        original(self, *args, **kwargs)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = mixed_precision(plugin.mixed_precision_policy.param_dtype)

    with patch.object(AcceleratorState, "__init__", init):
        yield


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of a model by their names: the modules of the classes that the architecture lists in
    `_no_split_modules`, sharded or not."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = model.named_modules()
    return {name: module for name, module in found if any(kind.__name__ in kinds for kind in type(module).__mro__)}


def name_blocks(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Have accelerate make a unit of every block that the model has.

    It takes all names that the architecture lists, and refuses a model without one of them: the text model of Qwen3.5
    lists the block of the vision model that it belongs to.
    """
    _find_final_norms()
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks_of(model).values()})


@functools.cache
def _find_final_norms() -> None:
    """Have accelerate find the last norm of a model whose base model has none itself, but its decoder.

    Output weights that are not tied are one unit with that norm, whose forward gathers them: a fused head reads them
    without calling theirs. In a unit of their own they stayed in parts, and each rank trained its part by its own rows
    alone (vision-language models, accelerate 1.15).
    """
    find = fsdp_utils._find_final_norm

    def found(model: torch.nn.Module) -> torch.nn.Module | None:
        norm: torch.nn.Module | None = find(model)
        decoder = getattr(model, "get_decoder", lambda: None)()
        if norm is None and isinstance(decoder, torch.nn.Module):
            norms = [child for child in decoder.children() if "Norm" in type(child).__name__]
            norm = norms[-1] if norms else None
        return norm

    fsdp_utils._find_final_norm = found


def mixed_precision(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy of every unit: it computes in `dtype`, gradients are summed in fp32, and outputs stay as they are.

    accelerate would sum in `dtype`, and round the outputs of every unit to it: log-probabilities to 3 digits, of which
    DPO takes differences (its first loss was 0.69141 instead of 0.69315). Outputs in fp32 would make the head compute
    in fp32 and double the memory of the inputs that activation checkpointing keeps.
    """
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None)


def describe(model: torch.nn.Module, spec: JobSpec) -> dict[str, Any]:
    """How the model is sharded, for the job's record, proven on the parameters themselves. Raises JobFailure:
    not_sharded, where the job shards and a parameter is whole on every rank."""
    strategy = spec.sharding.strategy if spec.sharding else "NO_SHARD"
    if not is_sharded(spec):
        return {"strategy": strategy, "ranks": spec.ranks, "sharded_parameters": 0}
    names = {name: _placement(parameter) for name, parameter in model.named_parameters()}
    whole = [name for name, placement in names.items() if placement is None]
    if whole:
        raise JobFailure(
            Reason.not_sharded,
            f"{strategy} was requested, and {len(whole)} of {len(names)} parameters are whole on every rank, such as "
            f"{', '.join(whole[:3])}. Use sharding_strategy NO_SHARD for plain data parallelism, or report this as a "
            "bug: accelerate did not shard the model.",
        )
    parameters = dict(model.named_parameters())
    return {
        "strategy": strategy,
        "ranks": spec.ranks,
        "sharded_parameters": len(names),
        "placements": dict(Counter(names.values())),
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "local_elements": sum(local(parameter).numel() for parameter in parameters.values()),
        "total_elements": sum(parameter.numel() for parameter in parameters.values()),
    }


def shard_frozen(
    model: PreTrainedModel, accelerator: Accelerator, fully_shard: Callable[..., Any] = fully_shard
) -> torch.nn.Module:
    """Shard a model that only runs forward, with the settings of the one that is trained.

    Every block is a unit, and so are embeddings that are not tied to the output weights; the root holds the rest. TRL
    makes one unit of the whole model, which a forward gathers. Parts are freed after use even under SHARD_GRAD_OP,
    since no backward follows that would free them.
    """
    plugin = accelerator.state.fsdp_plugin
    mesh = getattr(accelerator, "torch_device_mesh", None)
    options = {
        "reshard_after_forward": True,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    # The inner ones first: Mamba lists its mixers beside the blocks that have them, and what is sharded stays so.
    for block in reversed(blocks_of(model).values()):
        fully_shard(block, **options)
    embeddings = model.get_input_embeddings()
    if embeddings.weight is not getattr(model.get_output_embeddings(), "weight", None):
        fully_shard(embeddings, **options)
    return fully_shard(model, **options)


def prefetch(model: torch.nn.Module, sharding: ShardingSpec) -> None:
    """Set for every unit what to fetch while it computes; FSDP2 has no option for it."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    for unit, following in itertools.pairwise(units):
        if sharding.forward_prefetch:
            unit.set_modules_to_forward_prefetch([following])
        if sharding.backward_prefetch == "BACKWARD_PRE":
            following.set_modules_to_backward_prefetch([unit])


def reshard(model: torch.nn.Module) -> None:
    """Reshard every parameter. After an evaluation under SHARD_GRAD_OP parameters are whole: other tensors than those
    of the optimizer, whose changes the next step loses."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def frees_blocks(spec: JobSpec) -> bool:
    """Whether each forward gathers the blocks of the model and frees them."""
    return is_sharded(spec) and spec.sharding is not None and spec.sharding.strategy != "SHARD_GRAD_OP"


@contextmanager
def answering(model: Any, *, keeps_gathered: bool) -> Iterator[None]:
    """While this is open, a sharded model answers prompts; then every parameter is resharded.

    Args:
        keeps_gathered: the first forward gathers the blocks and embeddings, and no other one does. Else each forward,
            and so each token, gathers all of them.
    """
    units = list(_freed_units(model)) if keeps_gathered else []
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def _freed_units(model: Any) -> Iterator[FSDPModule]:
    """The units that a forward frees unless the strategy is SHARD_GRAD_OP. accelerate keeps the root, and the unit of
    the head, to which tied embeddings belong."""
    embeddings = model.get_input_embeddings()
    is_tied = embeddings.weight is getattr(model.get_output_embeddings(), "weight", None)
    for module in [*blocks_of(model).values(), *([] if is_tied else [embeddings])]:
        if isinstance(module, FSDPModule):
            yield module


def gather(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """One whole weight in CPU memory on rank 0, None on the others. A collective.

    Args:
        dtype: to cast it to before it is sent; None: its own.
    """
    weight = weight.detach()
    if isinstance(weight, DTensor):
        # Parts in CPU memory are gathered on the device: its process group has no other tensors.
        weight = weight.to(device=weight.device_mesh.device_type, dtype=dtype).full_tensor()
    return weight.to(device="cpu", dtype=dtype) if ranks.rank() == 0 else None


def _placement(parameter: torch.Tensor) -> str | None:
    """Such as `Shard(0)`; None where the parameter is whole."""
    if not isinstance(parameter, DTensor) or not any(isinstance(part, Shard) for part in parameter.placements):
        return None
    return ", ".join(f"Shard({part.dim})" if isinstance(part, Shard) else "Replicate" for part in parameter.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a gradient; all of one that is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
