"""What computes the answers of jobs that answer prompts, or train on answers: transformers in their own process, or
vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ..errors import InvalidRequest
from ..specs.adapters import LoraSpec
from ..specs.methods import MethodSpec, VllmCorrection, VllmMode, VllmSpec, VllmSync
from ..specs.work import Work
from .bodies import GRPOConfig
from .choices import nearest_choice
from .options import ProviderOptions
from .settings import Settings

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, but for 0."""
_MOST_RANK = 512
"""Of an adapter: vLLM's LoRAConfig.max_lora_rank (0.32.0, vllm/config/lora.py:24)."""
_FIELDS = (
    "gpu_memory_utilization",
    "sync",
    "mode",
    "tensor_parallel_size",
    "importance_sampling_correction",
    "importance_sampling_mode",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
)
"""A request has them with `vllm_` before."""
_OF_THE_CORRECTION = _FIELDS[-3:]
_SHARE_OF_A_SERVER = 0.9
"""Of the memory of a GPU that vLLM has for itself: what vLLM leaves free is for the weights as they arrive."""
_CHOICES: dict[str, Any] = {
    "sync": VllmSync,
    "mode": VllmMode,
    "importance_sampling_mode": VllmCorrection,
}


def is_answered_by_vllm(work: Work | None) -> bool:
    """Whether vLLM computes the answers of a job."""
    answering = None if work is None else work.answering
    return answering is not None and answering.engine == "vllm"


def with_engine(work: Work, settings: Settings) -> Work:
    """The work with the interpreter that its answers are computed by. Raises InvalidRequest: there is none, or vLLM
    would answer at another temperature."""
    answering = work.answering
    if answering is None or not is_answered_by_vllm(work):
        return work
    python = _python("engine", answering.engine, settings)
    if 0 < answering.temperature < _LEAST_TEMPERATURE:
        hint = f"vLLM has no temperature below {_LEAST_TEMPERATURE} but 0: send one of these, or leave engine out"
        raise InvalidRequest("temperature", answering.temperature, hint)
    return work.answered_by(python)


def resolve_vllm(config: GRPOConfig, options: ProviderOptions, where: str) -> VllmSpec | None:
    """How vLLM answers the prompts of a job that trains, but for its interpreter; None: transformers does. Raises
    InvalidRequest: names a field that vLLM cannot honour, or that has no effect."""
    given = {name: value for name in _FIELDS if (value := getattr(config, f"vllm_{name}")) is not None}
    if not config.use_vllm:
        for name, value in given.items():
            hint = "it belongs to use_vllm, which has vLLM compute the answers: set that, or leave this out"
            raise InvalidRequest(f"{where}.vllm_{name}", value, hint)
        return None
    if config.temperature is not None and config.temperature < _LEAST_TEMPERATURE:
        hint = f"vLLM has no temperature below {_LEAST_TEMPERATURE}: send at least that, or leave use_vllm out"
        raise InvalidRequest(f"{where}.temperature", config.temperature, hint)
    if options.resources is not None:
        hint = "vLLM answers on the service's machine only: leave it out, or leave use_vllm out"
        raise InvalidRequest("provider_options.resources", options.resources.model_dump(exclude_unset=True), hint)
    for name, choices in _CHOICES.items():
        if (value := given.get(name)) is not None and value not in get_args(choices):
            raise InvalidRequest(f"{where}.vllm_{name}", value, nearest_choice(value, get_args(choices)))
    if options.device == "cpu" and "gpu_memory_utilization" in given:
        hint = "it is a share of a GPU's memory, and the device is cpu: leave it out"
        raise InvalidRequest(f"{where}.vllm_gpu_memory_utilization", given["gpu_memory_utilization"], hint)
    if config.vllm_importance_sampling_correction is False:
        for name in _OF_THE_CORRECTION:
            if name in given:
                hint = "it has no effect without vllm_importance_sampling_correction: leave one of them out"
                raise InvalidRequest(f"{where}.vllm_{name}", given[name], hint)
    if given.get("mode") == "server":
        given.setdefault("gpu_memory_utilization", _SHARE_OF_A_SERVER)
    found = VllmSpec(**given)
    least = found.importance_sampling_clip_min
    if least is not None and least >= found.importance_sampling_clip_max:
        hint = f"it must be less than vllm_importance_sampling_clip_max, {found.importance_sampling_clip_max:g}"
        raise InvalidRequest(f"{where}.vllm_importance_sampling_clip_min", least, hint)
    return found


def with_vllm(method: MethodSpec, settings: Settings, where: str) -> MethodSpec:
    """The method with the interpreter that its answers are computed by. Raises InvalidRequest: there is none.

    Args:
        where: the field of the request that has those of the method.
    """
    if method.answered_by_vllm is None:
        return method
    vllm = method.answered_by_vllm.model_copy(update={"python": _python(f"{where}.use_vllm", True, settings)})
    return method.model_copy(update={"vllm": vllm})


def resolve_vllm_in_job(fields: Mapping[str, Any], options: ProviderOptions, settings: Settings) -> dict[str, Any]:
    """The method with what vLLM gets in each optimizer step, by a job's resolved fields: its adapter, where the request
    leaves it open and vLLM can add that. Raises InvalidRequest: it cannot, or the job has no devices for vLLM."""
    method: MethodSpec = fields["method"]
    if (vllm := method.answered_by_vllm) is None:
        return {}
    where = "algorithm_config" if options.method is None else "provider_options.method"
    kind = (settings.devices[0] if fields["device"] == "auto" else fields["device"]).partition(":")[0]
    _check_devices(vllm, fields, kind, settings, where)
    requested = vllm.sync if "sync" in vllm.model_fields_set else None
    why_not = _why_merged(fields["lora"], fields["dtype"], kind)
    if why_not and requested == "adapter":
        raise InvalidRequest(f"{where}.vllm_sync", requested, f"{why_not}: send 'weights', or leave it out")
    sync: VllmSync = requested or ("weights" if why_not else "adapter")
    return {"method": method.model_copy(update={"vllm": vllm.model_copy(update={"sync": sync})})}


def _check_devices(vllm: VllmSpec, fields: Mapping[str, Any], kind: str, settings: Settings, where: str) -> None:
    """Refuse a vLLM that the devices of a job, or of this machine, cannot be divided for. Raises InvalidRequest."""
    size, ranks, most = vllm.tensor_parallel_size, fields["ranks"], settings.max_ranks
    field = f"{where}.vllm_tensor_parallel_size"
    if vllm.mode == "colocate" and ranks % size:
        hint = f"it divides the ranks of a job, and this one has {ranks}: set nproc_per_node to a multiple of {size}, "
        raise InvalidRequest(field, size, f"{hint}or vllm_mode 'server', with devices of its own")
    if vllm.mode != "server":
        return
    if kind != "cuda":
        # Its processes have the CPU together with those of the ranks.
        if size > most:
            raise InvalidRequest(field, size, f"this machine has CPU cores for {most} processes: send at most that")
        return
    if ":" in fields["device"]:
        hint = f"the job trains on {fields['device']}, and vLLM needs a GPU beside it: leave the option device out"
        raise InvalidRequest(f"{where}.vllm_mode", vllm.mode, hint)
    if ranks + size > most:
        hint = f"{ranks} for nproc_per_node and {size} for vLLM are {ranks + size} GPUs, and a job may take {most} here"
        todo = "set nproc_per_node to fewer, or 'colocate'" if most > size else "send 'colocate'"
        raise InvalidRequest(f"{where}.vllm_mode", vllm.mode, f"{hint}: {todo}")


def _why_merged(lora: LoraSpec | None, dtype: str, kind: str) -> str:
    """Why vLLM cannot add an adapter to the base model that it has; empty: it can (its PEFTHelper.validate_legal and
    the assertions of lora_shrink_op.py, release 0.32.0)."""
    if lora is None:
        return "the job trains every weight, and has no adapter"
    if lora.method != "lora":
        return f"vLLM adds adapters of LoRA only, and peft_method is {lora.method!r}"
    if lora.use_dora:
        return "vLLM adds no adapters with use_dora"
    if lora.rank > _MOST_RANK:
        return f"vLLM adds adapters of rank {_MOST_RANK} at most, and the job's has {lora.rank}"
    return "vLLM adds no adapters in fp32 on a GPU" if dtype == "fp32" and kind == "cuda" else ""


def _python(field: str, value: object, settings: Settings) -> Path:
    """The interpreter with vLLM. Raises InvalidRequest: there is none."""
    if settings.vllm_python is None:
        hint = "this service has no vLLM: leave it out, or have the operator name an interpreter with it (vllm_python)"
        raise InvalidRequest(field, value, hint)
    return settings.vllm_python
