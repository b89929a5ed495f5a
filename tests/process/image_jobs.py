"""Jobs that train tiny vision-language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.tiny_vision import image_rows, tiny_vision_model
from tests.training import job_spec

RATE = 5e-3
SGD = OptimizerSpec(name="sgd", learning_rate=RATE, scheduler="constant", weight_decay=0.0, max_grad_norm=0.0)
"""The plainest: whose steps show a gradient of another size, too."""


def image_job(root: Path, family: str = "llava", ranks: int = 1, **changes: Any) -> JobSpec:
    """Steps of two rows, in their order. `changes` has fields of `job_spec`, and `algorithm`."""
    fields = {
        "rows": image_rows(5),
        "ranks": ranks,
        "batch_size": 2 // ranks,
        "shuffle": False,
        "sharding": ShardingSpec() if ranks > 1 else None,
        "optimizer": SGD,
    }
    return job_spec(root, tiny_vision_model(family), **{**fields, **changes})
