"""What computes the answers of jobs that answer prompts, or train on answers: transformers in their own process, or
vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ..errors import InvalidRequest
from ..specs.methods import MethodSpec, VllmCorrection, VllmSpec
from ..specs.work import Work
from .bodies import GRPOConfig
from .choices import nearest_choice
from .options import ProviderOptions
from .settings import Settings

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, but for 0."""
_FIELDS = (
    "gpu_memory_utilization",
    "importance_sampling_correction",
    "importance_sampling_mode",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
)
"""Of a VllmSpec; a request has them with `vllm_` before."""
_OF_THE_CORRECTION = _FIELDS[2:]


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
    if options.device == "cpu" and "gpu_memory_utilization" in given:
        hint = "it is a share of a GPU's memory, and the device is cpu: leave it out"
        raise InvalidRequest(f"{where}.vllm_gpu_memory_utilization", given["gpu_memory_utilization"], hint)
    mode = config.vllm_importance_sampling_mode
    if mode is not None and mode not in get_args(VllmCorrection):
        hint = nearest_choice(mode, get_args(VllmCorrection))
        raise InvalidRequest(f"{where}.vllm_importance_sampling_mode", mode, hint)
    if config.vllm_importance_sampling_correction is False:
        for name in _OF_THE_CORRECTION:
            if name in given:
                hint = "it has no effect without vllm_importance_sampling_correction: leave one of them out"
                raise InvalidRequest(f"{where}.vllm_{name}", given[name], hint)
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


def check_vllm_ranks(fields: Mapping[str, Any]) -> None:
    """Refuse several ranks for a job whose answers vLLM computes, by its resolved fields. Raises InvalidRequest."""
    if fields["method"].answered_by_vllm is not None and fields["ranks"] > 1:
        hint = "vLLM answers for a job of one process: send 1, or leave use_vllm out"
        raise InvalidRequest("provider_options.nproc_per_node", fields["ranks"], hint)


def _python(field: str, value: object, settings: Settings) -> Path:
    """The interpreter with vLLM. Raises InvalidRequest: there is none."""
    if settings.vllm_python is None:
        hint = "this service has no vLLM: leave it out, or have the operator name an interpreter with it (vllm_python)"
        raise InvalidRequest(field, value, hint)
    return settings.vllm_python
