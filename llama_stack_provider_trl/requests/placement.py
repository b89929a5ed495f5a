"""Where a job may run: device, ranks, nodes, resources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..specs.job import ResourcesSpec, ShardingSpec
from ..specs.model_files import why_not_sent
from .bases import Base
from .checks import NO_SAVERS
from .choices import nearest_choice
from .options import ProviderOptions, Resources
from .settings import Request, Settings


def resolve_placement(
    request: Request,
    options: ProviderOptions,
    settings: Settings,
    base: Base,
    method: dict[str, Any],
    warnings: list[str],
) -> dict[str, Any]:
    """Resolve the fields of this module. Raises InvalidRequest: names the field.

    Args:
        method: the resolved fields of the training method.
        warnings: gets one where the job uses no GPU though other machines have some.
    """
    device = resolve_device(options, settings, settings.max_nodes)
    resources, why_here = resolve_resources(options, settings, base, method)
    _warn_of_gpus_elsewhere(device, why_here, settings, warnings)
    is_open = device == "auto" and resources is not None
    return {
        "device": device,
        "dtype_by_device": is_open and request.training_config.dtype is None,
        "resources": resources,
        **resolve_ranks(request, options, settings, resources),
    }


def resolve_single_node(
    options: ProviderOptions, settings: Settings, base: Base, dtype: str | None, warnings: list[str] | None
) -> dict[str, Any]:
    """Resolve the fields of this module for a job that does not train: its processes hold the whole model each, and run
    on one node, that of the service where the job requests no resources. Raises InvalidRequest: names the field.

    Args:
        dtype: that the request sets.
        warnings: as `resolve_placement`; None: the job has no choice that a warning could name.
    """
    requested, resources = options.resources, None
    device = resolve_device(options, settings, 1 if requested is None else settings.max_nodes)
    if requested is not None:
        _refuse_without_service(requested, settings)
        resources = _requested(requested, 1, options, base)
    elif warnings is not None:
        _warn_of_gpus_elsewhere(device, _NO_OTHER_MACHINE, settings, warnings)
    ranks = options.nproc_per_node or 1
    if resources is None:
        _refuse_more_ranks(ranks, settings)
    return {
        "device": device,
        "dtype_by_device": device == "auto" and resources is not None and dtype is None,
        "resources": resources,
        "ranks": ranks,
        "sharding": ShardingSpec(strategy="NO_SHARD") if ranks > 1 and settings.sharding is not None else None,
    }


def _warn_of_gpus_elsewhere(device: str, why_here: str, settings: Settings, warnings: list[str]) -> None:
    own = settings.devices[0].partition(":")[0]
    if why_here and device == "auto" and own != "cuda" and (elsewhere := settings.gpus_elsewhere()):
        warnings.append(
            f"the job runs on device {own} of the service's machine, and on no GPU of {', '.join(elsewhere)}: "
            f"{why_here}, or send device {own} to choose this"
        )


def on_reserved_cores(options: ProviderOptions, settings: Settings) -> ProviderOptions:
    """The options of a job with device `cpu` where it reserves cores; the inline provider refuses that later."""
    requested = options.resources
    cores = None if requested is None or settings.sharding is None else requested.reserve_cpus
    if requested is None or cores is None:
        return options
    field = "provider_options.resources.reserve_cpus"
    if options.device not in (None, "cpu"):
        raise InvalidRequest(field, cores, f"a job on {options.device} reserves no cores; leave one of the two out")
    if requested.gpu_memory_gb:
        raise InvalidRequest(field, cores, "the job trains on the CPU then; leave it or gpu_memory_gb out")
    if "cpu" not in settings.devices and settings.max_nodes == 1:
        hint = f"jobs train on {', '.join(settings.devices)} here, and no other machine can join; leave it out"
        raise InvalidRequest(field, cores, hint)
    if options.nproc_per_node and options.nproc_per_node > cores:
        hint = f"each of the {options.nproc_per_node} processes of nproc_per_node needs a core; reserve as many"
        raise InvalidRequest(field, cores, hint)
    return options.model_copy(update={"device": "cpu"})


def resolve_resources(
    options: ProviderOptions, settings: Settings, base: Base, method: dict[str, Any]
) -> tuple[ResourcesSpec | None, str]:
    """What the job asks of its nodes; None: it stays on this machine, with the reason and what to do about it."""
    requested = options.resources
    if base.adapter is not None and base.adapter.use == "merge":  # requests for machines are refused (`bases`)
        return None, "it merges an adapter, and later jobs read the merged model there; continue the adapter instead"
    if method["method"].answered_by_vllm is not None:
        return None, "vLLM answers there; leave use_vllm out"
    if requested is not None:
        _refuse_without_service(requested, settings)
    nodes = (requested.nodes if requested else None) or settings.nodes
    if nodes > settings.max_nodes:
        hint = "no other machine can join this service, which listens on loopback: set TRL_SERVICE_HOST and its token"
        raise InvalidRequest("provider_options.resources.nodes", nodes, hint)
    if requested is None:
        why_here = "" if nodes > 1 else _why_here(options, settings, base, method)
        return None if why_here else ResourcesSpec(nodes=nodes, min_nodes=nodes), why_here
    return _requested(requested, nodes, options, base), ""


def _refuse_without_service(requested: Resources, settings: Settings) -> None:
    if settings.sharding is None:
        hint = "this provider trains on its own machine; leave it out, or use the service (remote::trl_remote)"
        raise InvalidRequest("provider_options.resources", requested.model_dump(exclude_unset=True), hint)


def _requested(requested: Resources, nodes: int, options: ProviderOptions, base: Base) -> ResourcesSpec:
    """The resources that a job requests, on a number of nodes. Raises InvalidRequest."""
    if requested.min_nodes is not None and requested.min_nodes > nodes:
        raise InvalidRequest("provider_options.resources.min_nodes", requested.min_nodes, f"use at most nodes, {nodes}")
    if requested.model_present and Path(base.source.model).is_absolute():
        hint = "a model that is a directory is in no node's cache; name a model id, or leave it out"
        raise InvalidRequest("provider_options.resources.model_present", True, hint)
    if requested.gpu_memory_gb and options.device in ("cpu", "mps"):
        hint = f"device {options.device} has no memory of its own; leave one of the two out"
        raise InvalidRequest("provider_options.resources.gpu_memory_gb", requested.gpu_memory_gb, hint)
    given = requested.model_dump(exclude={"nodes", "min_nodes"}, exclude_none=True)
    return ResourcesSpec(nodes=nodes, min_nodes=requested.min_nodes or nodes, **given)


def _why_here(options: ProviderOptions, settings: Settings, base: Base, method: dict[str, Any]) -> str:
    """The reason for which a job that requests no resources stays on this machine, and what to do about it; empty: any
    machine may train it."""
    if settings.max_nodes == 1:
        return _NO_OTHER_MACHINE
    if ":" in (options.device or ""):
        return "it names one of its devices"
    sources = [base.source, *([base.adapter] if base.adapter else [])]
    if (reference := method["method"].compared_with) is not None and reference.source is not None:
        sources.append(reference.source)
    for source in sources:
        if source.made_by is not None or not Path(source.model).is_absolute():
            continue  # a job's checkpoint is sent once it is there
        if why := why_not_sent(Path(source.model), has_code=source.trust_remote_code):
            return (
                f"no other machine gets the directory {source.model}, since {why}; send resources "
                f"{_ANY_NODE} where other machines have it at this path"
            )
    return ""


_ANY_NODE = {"nodes": 1}
_NO_OTHER_MACHINE = f"it requests no other machine; send resources {_ANY_NODE}"
_FSDP = "provider_options.fsdp_config"


def with_sharding(options: ProviderOptions, settings: Settings) -> Settings:
    """The settings with the job's own `fsdp_config`, which has the configuration's values where it sets none. Raises
    InvalidRequest: this provider trains in one process."""
    if options.fsdp_config is None:
        return settings
    given = options.fsdp_config.model_dump(exclude_none=True)
    if settings.sharding is None:
        hint = "this provider trains in one process; leave it out, or use the service (remote::trl_remote)"
        raise InvalidRequest(_FSDP, given, hint)
    given["strategy"] = given.pop("sharding_strategy", settings.sharding.strategy)
    if given["strategy"] == "NO_SHARD":  # what the configuration has for parts does not apply
        return settings.model_copy(update={"sharding": ShardingSpec(strategy="NO_SHARD")})
    return settings.model_copy(update={"sharding": settings.sharding.model_copy(update=given)})


def resolve_ranks(
    request: Request, options: ProviderOptions, settings: Settings, resources: ResourcesSpec | None
) -> dict[str, Any]:
    """Resolve the number of processes, and how they share the model."""
    nodes = resources.nodes if resources else 1
    cores = resources.reserve_cpus if resources else None
    per_node = options.nproc_per_node or min(settings.ranks, cores or settings.ranks)
    ranks = per_node * nodes
    # The devices and cores of other machines are checked at placement: a job that requests too many waits and names
    # them in its status.
    if resources is None:
        _refuse_more_ranks(per_node, settings)
    if settings.sharding is None:
        return {"ranks": ranks}
    savers = request.training_config.efficiency_config or NO_SAVERS
    if ranks == 1:
        if options.fsdp_config is not None:
            hint = "one process shards nothing: set nproc_per_node or resources.nodes, or leave it out"
            raise InvalidRequest(_FSDP, options.fsdp_config.model_dump(exclude_none=True), hint)
        for name in ("memory_efficient_fsdp_wrap", "fsdp_cpu_offload"):
            if getattr(savers, name):
                hint = "one process shards nothing: ask for more with the provider option nproc_per_node, or set false"
                raise InvalidRequest(f"training_config.efficiency_config.{name}", True, hint)
        return {"ranks": 1}
    if options.peft_method == "vera" and settings.sharding.strategy != "NO_SHARD":
        raise InvalidRequest(
            "provider_options.peft_method",
            "vera",
            f"{ranks} ranks shard the model, and FSDP2's mixed precision leaves out the matrices that VeRA's modules "
            "share; use 'lora' or 'ia3', one rank, or fsdp_config.sharding_strategy NO_SHARD",
        )
    offload = settings.sharding.cpu_offload or bool(savers.fsdp_cpu_offload)
    if offload and settings.sharding.strategy == "NO_SHARD":
        raise InvalidRequest(
            "training_config.efficiency_config.fsdp_cpu_offload",
            True,
            "sharding_strategy is NO_SHARD, which keeps everything on the device; set false",
        )
    if savers.enable_activation_offloading and settings.sharding.strategy != "NO_SHARD":
        raise InvalidRequest(
            "training_config.efficiency_config.enable_activation_offloading",
            True,
            f"{ranks} ranks shard the model, and it would move the gathered weights to the CPU too (16 GB per step and "
            "rank of an 8B model); set enable_activation_checkpointing instead, or nproc_per_node 1",
        )
    return {"ranks": ranks, "sharding": settings.sharding.model_copy(update={"cpu_offload": offload})}


def resolve_context_parallel(options: ProviderOptions, settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks that share rows. What the model decides is refused by its attempt (`recipes.fast.context_parallel`).

    Args:
        fields: of the JobSpec, resolved without them.

    Raises:
        InvalidRequest: there are no such ranks, or the job trains in a way that is not proven with them.
    """
    size = options.context_parallel_size
    if size == 1:
        return {}
    resources, lora, field = fields["resources"], fields["lora"], "provider_options.context_parallel_size"
    per_node = fields["ranks"] // (resources.nodes if resources else 1)
    if settings.sharding is None:
        hint = "this provider trains in one process; leave it out, or use the service (remote::trl_remote)"
        raise InvalidRequest(field, size, hint)
    if per_node % size:
        hint = (
            f"it divides the ranks of a node, and this job has {per_node}: set nproc_per_node to a multiple of {size}"
        )
        raise InvalidRequest(field, size, hint)
    unproven = {
        f"the method {fields['method'].algorithm}": fields["method"].algorithm != "sft",
        "padding_free false": not fields["padding_free"],
        "attention_mask 'always'": fields["attention_mask"] == "always",
        f"attn_implementation {fields['attn_implementation']!r}": fields["attn_implementation"] not in (None, "sdpa"),
        "quantize_base": lora is not None and lora.quantize_base,
        f"peft_method {options.peft_method!r}": lora is not None and lora.method != "lora",
        "use_dora": lora is not None and lora.use_dora,
        "lora_dropout": lora is not None and lora.dropout > 0,
        "QAT": fields.get("qat") is not None,
        "mixture": options.mixture is not None,
        "averaging": options.averaging is not None,
        "enable_activation_offloading": fields["activation_offloading"],
    }
    if found := next((name for name, has in unproven.items() if has), None):
        hint = f"it is proven for SFT with all weights or LoRA and batches without padding, not with {found}"
        raise InvalidRequest(field, size, f"{hint}: leave one of the two out")
    return {"context_parallel_size": size}


def _refuse_more_ranks(per_node: int, settings: Settings) -> None:
    """Refuse more processes than this machine has devices for."""
    if per_node > settings.max_ranks:
        if settings.sharding is None:
            hint = "this provider trains in one process; leave it out, or use the service (remote::trl_remote)"
        else:
            hint = f"this node has devices for {settings.max_ranks}"
        raise InvalidRequest("provider_options.nproc_per_node", per_node, hint)


def resolve_device(options: ProviderOptions, settings: Settings, max_nodes: int) -> str:
    """The device that a job names, one of this machine's or, with several nodes, a kind; auto: it names none."""
    if options.device is None:
        return "auto"
    kinds = ("cpu", "cuda") if max_nodes > 1 else ()
    if options.device not in (*settings.devices, *kinds):
        raise InvalidRequest(
            "provider_options.device", options.device, nearest_choice(options.device, settings.devices)
        )
    return options.device
