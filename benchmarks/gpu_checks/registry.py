"""Every check with its time limit, in the order of their value. Standard library only, as `gpu.py` itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .report import Finding
from .setting import Setting


@dataclass(frozen=True)
class Check:
    name: str
    place: str
    """`module:function`."""
    seconds: float
    """Time limit."""
    gpus: int = 1


def load(place: str) -> Callable[[Setting], Finding]:
    """The function of a check."""
    module, _, function = place.partition(":")
    found: Callable[[Setting], Finding] = getattr(importlib.import_module(module), function)
    return found


CHECKS = (
    Check("environment", "gpu_checks.environment:environment", 60),
    Check("tests/gpu", "gpu_checks.environment:tests_gpu", 300),
    Check("FSDP2 output dtype", "gpu_checks.sharding:output_dtype", 120),
    Check("cpu_offload", "gpu_checks.sharding:cpu_offload", 90),
    Check("tokens per second", "gpu_checks.speed:clock", 90),
    Check("attention mask", "gpu_checks.speed:masks", 90),
    Check("padding-free batches", "gpu_checks.numerics:padding_free", 150),
    Check("packed attention", "gpu_checks.numerics:packed_attention", 120),
    Check("activation offloading", "gpu_checks.peak_memory:offloading", 90),
    Check("repeat and resume", "gpu_checks.recovery:repeat_and_resume", 120),
    Check("repeat at 1B", "gpu_checks.recovery:repeat_at_1b", 150),
    Check("repeat of all weights", "gpu_checks.recovery:repeat_all_weights", 240),
    Check("repeat of a long row", "gpu_checks.recovery:repeat_a_long_row", 150),
    Check("memory estimate", "gpu_checks.peak_memory:estimate", 150),
    Check("export", "gpu_checks.numerics:export", 150),
    Check("fp16", "gpu_checks.numerics:fp16", 90),
    Check("SIGTERM", "gpu_checks.recovery:sigterm", 120),
    Check("QLoRA", "gpu_checks.numerics:qlora", 90),
    Check("QAT", "gpu_checks.numerics:qat", 60),
    Check("methods", "gpu_checks.methods:methods", 150),
    Check("own answers", "gpu_checks.methods:own_answers", 150),
    Check("answers", "gpu_checks.methods:answers", 120),
    Check("speed on rows of many lengths", "gpu_checks.speed:many_lengths", 150),
    Check("speed on rows of many lengths at 1B", "gpu_checks.speed:many_lengths_at_1b", 270),
    Check("merged micro steps", "gpu_checks.speed:merged", 180),
    Check("metrics a step later", "gpu_checks.speed:later_metrics", 120),
    Check("LoRA as one operation", "gpu_checks.operations:fused_lora", 150),
    Check("gradients of the head", "gpu_checks.operations:head_gradients", 150),
    Check("Liger's kernels", "gpu_checks.operations:ligers_kernels", 150),
    Check("networks in tiles", "gpu_checks.operations:mlp_tiles", 150),
    Check("kept attention", "gpu_checks.operations:kept_attention", 150),
    Check("compiled blocks", "gpu_checks.operations:compiled_blocks", 480),
    Check("float8", "gpu_checks.operations:float8", 540),
    Check("speed at 1B", "gpu_checks.speed:throughput", 300),
    Check("SFT at 1B", "gpu_checks.targets:sft_at_1b", 480),
    Check("DPO at 1B", "gpu_checks.targets:dpo_at_1b", 300),
    Check("LoRA at 8B, rows of 1,024", "gpu_checks.targets:lora_at_8b", 420),
    Check("LoRA at 8B, rows of 4,096", "gpu_checks.targets:lora_at_8b_longer", 420),
    Check("host time of LoRA at 8B", "gpu_checks.targets:host_time", 240),
    Check("rows of 32k and 64k at 8B", "gpu_checks.targets:long_rows", 480),
    Check("a row of 128k at 8B", "gpu_checks.targets:longest_row", 540),
    Check("weights for vLLM at 8B", "gpu_checks.targets:weights_for_vllm", 420),
    Check("two ranks", "gpu_checks.sharding:two_ranks", 300, gpus=2),
    Check("NCCL hang", "gpu_checks.recovery:hang", 120, gpus=2),
    Check("contexts", "gpu_checks.peak_memory:contexts", 90, gpus=2),
    Check("NCCL memory", "gpu_checks.peak_memory:nccl_memory", 90, gpus=2),
    Check("HYBRID_SHARD", "gpu_checks.sharding:hybrid", 120, gpus=2),
)
