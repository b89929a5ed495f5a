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
    """`module:function` in this package."""
    seconds: float
    """Time limit."""
    gpus: int = 1

    def load(self) -> Callable[[Setting], Finding]:
        module, _, function = self.place.partition(":")
        found: Callable[[Setting], Finding] = getattr(importlib.import_module(f"gpu_checks.{module}"), function)
        return found


CHECKS = (
    Check("environment", "environment:environment", 60),
    Check("tests/gpu", "environment:tests_gpu", 180),
    Check("FSDP2 output dtype", "sharding:output_dtype", 120),
    Check("cpu_offload", "sharding:cpu_offload", 90),
    Check("tokens per second", "speed:clock", 90),
    Check("attention mask", "speed:masks", 90),
    Check("activation offloading", "peak_memory:offloading", 90),
    Check("repeat and resume", "recovery:repeat_and_resume", 120),
    Check("memory estimate", "peak_memory:estimate", 150),
    Check("export", "numerics:export", 150),
    Check("fp16", "numerics:fp16", 90),
    Check("SIGTERM", "recovery:sigterm", 120),
    Check("QLoRA", "numerics:qlora", 90),
    Check("QAT", "numerics:qat", 60),
    Check("speed at 1B", "speed:throughput", 240),
    Check("NCCL hang", "recovery:hang", 120, gpus=2),
    Check("contexts", "peak_memory:contexts", 90, gpus=2),
    Check("NCCL memory", "peak_memory:nccl_memory", 90, gpus=2),
    Check("HYBRID_SHARD", "sharding:hybrid", 120, gpus=2),
)
