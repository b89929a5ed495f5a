"""The numbers of a training on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama_stack_provider_trl.specs.events import Evaluated, Failed, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.ranks import Ranks
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec, of_kind

GLOBAL_BATCH = 4
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


ROWS = {"sft": SFT_ROWS[:11], "dpo": DPO_ROWS[:11]}  # the last batch of an epoch is not full


def spec_of(root: Path, algorithm: str, ranks: int, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    """The same job for any number of ranks: the same global batch, a learning rate that shows a wrong gradient."""
    changes.setdefault("sharding", ShardingSpec(strategy=strategy) if ranks > 1 else None)
    changes.setdefault("rows", ROWS.get(algorithm))
    return job_spec(
        root,
        changes.pop("model", None) or tiny_model(tied=changes.pop("tied", True)),
        algorithm,
        **{
            "ranks": ranks,
            "batch_size": GLOBAL_BATCH // ranks,
            "n_epochs": 2,
            "optimizer": OptimizerSpec(learning_rate=5e-3),
            **changes,
        },
    )


class _AttentionOnce(TorchDispatchMode):
    """Fails where a backward pass computes attention."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() >= 0
        assert func is not _ATTENTION or not in_backward, "attention is computed again"
        return func(*args, **(kwargs or {}))


def fail_where_attention_is_computed_again() -> None:
    """For each rank of a job that keeps outputs of attention."""
    _AttentionOnce().__enter__()


def trained(ranks: Ranks, root: Path, spec: JobSpec, resume_from: Path | None = None) -> list[Any]:
    more: dict[str, Any] = {}
    if spec.ranks > 1 and spec.compute.keep_attention == "always":
        more["before"] = f"{__name__}.{fail_where_attention_is_computed_again.__name__}"
    if spec.ranks > 1 and spec.compute.tile_mlp == "always":
        more["constants"] = {"fast.mlp.LONG": 20, "fast.mlp.TILE": 8}  # one rank computes whole batches
    codes, events = ranks.run(root / "run", spec, resume_from, **more)
    assert codes == [0] * spec.ranks, [event.message for event in of_kind(events, Failed)]
    return events


def numbers(events: list[Any]) -> list[dict[str, float]]:
    """Every metric point, without what the clock decides."""
    points = of_kind(events, Progress) + of_kind(events, Evaluated)
    timed = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    return [{name: value for name, value in point.metrics.items() if name not in timed} for point in points]


def assert_same_numbers(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
