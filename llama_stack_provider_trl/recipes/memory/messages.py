"""The message of a job that does not fit: what it needs, the cause, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.job import JobSpec
from ...specs.memory import MemoryEstimate
from ..model.fsdp import is_sharded, ranks_per_machine
from ..model.loading import WeightStorage
from .nearest import MARGIN, Capacity, Proposal
from .trace import Traced, is_quantized


def misfit(
    spec: JobSpec,
    model: Traced,
    memory: MemoryEstimate,
    device: str,
    capacity: Capacity,
    found: Proposal | None,
) -> str:
    """Everything that does not fit, with its causes, and the nearest job that does.

    Args:
        model: as traced for `memory`.
        found: the nearest job that fits; None: there is none.
    """
    on_cpu, sentences, sizes, hints = device.partition(":")[0] == "cpu", [], [], []
    misses_device = not capacity.device_holds(memory)
    if misses_device:
        sentences.append(_device(memory, capacity.device, on_cpu))
        sizes.append(gib(found.memory.total) if found else "")
        hints.append("No setting makes it fit: use a smaller model, or more or larger devices.")
    # On a CPU the limit of a rank is its part of the machine's memory.
    if capacity.machine is not None and not capacity.machine_holds(memory) and not (on_cpu and misses_device):
        sentences.append(_machine(spec, memory, capacity.machine, on_cpu))
        sentences += _causes(spec, model, memory)
        sizes.append(f"{gib(found.memory.machine)} of CPU memory on each machine" if found else "")
        hints.append("Use machines with more memory, or fewer ranks on each.")
    if found is None:
        return " ".join([*sentences, *hints])
    return " ".join([*sentences, f"The nearest that fits takes {' and '.join(sizes)}: {_changes(found)}."])


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size < 10 << 30 else f"{size / 2**30:.1f} GiB"


def _device(memory: MemoryEstimate, limit: int, on_cpu: bool) -> str:
    return (
        f"the job needs about {gib(memory.total)} per {'process' if on_cpu else 'GPU'} "
        f"({_largest(memory.parts, memory.total)}), which with a margin of {round(100 * MARGIN) - 100} % does not fit "
        f"in {gib(limit)}."
    )


def _machine(spec: JobSpec, memory: MemoryEstimate, limit: int, on_cpu: bool) -> str:
    here = ranks_per_machine(spec)
    if on_cpu:
        moment, parts = "", {name: size * here for name, size in memory.parts.items()}
    elif _loads_most(memory):
        moment, parts = " while they load", {"copies of weights": memory.host_loading * here}
    else:
        copies = memory.host - memory.host_offloaded
        moment = " while they train"
        parts = {"copies for checkpoints": copies * here, "offloaded from the GPUs": memory.host_offloaded * here}
    if not on_cpu:
        parts["libraries"] = memory.machine - sum(parts.values())
    return (
        f"the job needs about {gib(memory.machine)} of CPU memory on each machine, for {here} of its ranks{moment} "
        f"({_largest(parts, memory.machine)}), which with a margin of {round(100 * MARGIN) - 100} % does not fit in "
        f"{gib(limit)}."
    )


def _causes(spec: JobSpec, model: Traced, memory: MemoryEstimate) -> list[str]:
    """Why ranks on another device take this CPU memory, where a setting or the model's files decide that."""
    if _loads_most(memory):
        return [_why_copied(spec, model)]
    causes = []
    if memory.host_offloaded > memory.host // 50:
        if spec.sharding and spec.sharding.cpu_offload:
            causes.append("Set fsdp_cpu_offload to false.")
        if spec.compute.activation_offloading:
            causes.append("Set enable_activation_offloading to false.")
    if spec.lora is None and memory.host - memory.host_offloaded > memory.host // 50:
        causes.append(
            "Checkpoints are written from a copy of the trained weights and their optimizer state: adapters (LoRA) "
            "have less of both."
        )
    return causes


def _loads_most(memory: MemoryEstimate) -> bool:
    return memory.host_loading > memory.host


def _why_copied(spec: JobSpec, model: Traced) -> str:
    """Why loading copies weights out of the files."""
    if is_quantized(spec) and not WeightStorage.of(spec).is_deferred:
        return "Under quantize_base each rank holds the whole base in 4 bits until the model is sharded."
    if all(one.is_mapped for one in (model, model.reference) if one):
        return "Loading copies the experts of the model, which are one tensor in memory and several in its files."
    if spec.lora and spec.lora.use_dora:
        return (
            f"Under use_dora each rank copies all weights where their files have another dtype than "
            f"{spec.compute.dtype}: save the model in that dtype, or set use_dora to false."
        )
    if not is_sharded(spec):
        held = spec.compute.dtype if spec.lora else "fp32"
        return (
            f"Without sharding each rank copies all weights where their files have another dtype than {held}: use a "
            "sharding_strategy other than NO_SHARD with several ranks, or save the model in that dtype."
        )
    return (
        "Each rank copies all weights, since their files are no safetensors files of one dtype, or the architecture "
        "keeps some in fp32: save the model as safetensors in one dtype (save_pretrained)."
    )


def _largest(parts: Mapping[str, int], total: int) -> str:
    """The parts of at least 2 %, the largest first."""
    shown = {name: size for name, size in parts.items() if size >= total // 50}
    return ", ".join(f"{name} {gib(size)}" for name, size in sorted(shown.items(), key=lambda part: -part[1]))


def _changes(found: Proposal) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in found.changes.items())
