"""Every way to train keeps its word: the numbers of one process, exact checkpoints, an export that loads.

Here cells run in which every family occurs (`families`).
`TRL_TESTS=full ./scripts/test.sh tests/matrix` runs all, for three times the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.specs.events import Evaluated, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.matrix.cells import Cell, all_cells, covering
from tests.ranks import Ranks, trained
from tests.required import FULL
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, digests, job_spec, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

CELLS = all_cells() if FULL else covering(all_cells())
EPOCHS, PER_EPOCH = (4, 5) if FULL else (2, 3)
STEPS, SAVED = EPOCHS * PER_EPOCH, EPOCHS * PER_EPOCH // 2
GLOBAL_BATCH = 4
NUM_ROWS = PER_EPOCH * GLOBAL_BATCH - 1
ROWS = {"sft": (SFT_ROWS * 2)[:NUM_ROWS], "dpo": (DPO_ROWS * 2)[:NUM_ROWS]}
"""The last step of an epoch is not full."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "dora": {"lora": LORA.model_copy(update={"use_dora": True})},
    "qlora": {"lora": LORA.model_copy(update={"quantize_base": True})},
}
TOLERANCE = {"rel": 1e-3, "abs": 1e-4}
TIMED = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")

Numbers = list[dict[str, float]]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], tuple[JobSpec, list[Any]]]:
    """What one process makes of a cell's job, trained once for all layouts."""

    @cache
    def train(algorithm: str, method: str, embeddings: str) -> tuple[JobSpec, list[Any]]:
        root = tmp_path_factory.mktemp("alone")
        spec = spec_of(root, Cell(algorithm, method, "1 process", embeddings))
        return spec, trained(ranks, root / "run", spec)

    return lambda cell: train(cell.algorithm, cell.method, cell.embeddings)


def spec_of(root: Path, cell: Cell) -> JobSpec:
    return job_spec(
        root,
        tiny_model(tied=cell.embeddings == "tied"),
        cell.algorithm,
        rows=ROWS[cell.algorithm],
        validation_rows=ROWS[cell.algorithm][:5],
        ranks=cell.ranks,
        batch_size=GLOBAL_BATCH // cell.ranks,
        sharding=ShardingSpec(strategy=cell.layout) if cell.ranks > 1 else None,
        n_epochs=EPOCHS,
        save_steps=SAVED,
        optimizer=OptimizerSpec(learning_rate=2e-3),
        **METHODS[cell.method],
    )


def numbers(events: list[Any]) -> Numbers:
    """Every metric point, the training's and then the evaluations', without what the clock decides."""
    points = of_kind(events, Progress) + of_kind(events, Evaluated)
    return [{name: value for name, value in point.metrics.items() if name not in TIMED} for point in points]


def after(events: list[Any], step: int) -> list[Any]:
    return [event for event in events if isinstance(event, Progress | Evaluated) and event.step > step]


def assert_close(found: Numbers, expected: Numbers) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, **TOLERANCE)


def assert_sharded(cell: Cell, sharding: dict[str, Any] | None) -> None:
    """What the job's record shows of its parameters' DTensor placements."""
    if cell.ranks == 1:
        assert sharding is None
        return
    assert sharding is not None
    assert (sharding["strategy"], sharding["ranks"]) == (cell.layout, cell.ranks)
    if cell.layout == "NO_SHARD":
        assert sharding["sharded_parameters"] == 0
        return
    assert set(sharding["placements"]) == {"Replicate, Shard(0)" if cell.layout == "HYBRID_SHARD" else "Shard(0)"}
    assert sharding["local_elements"] <= 0.6 * sharding["total_elements"]


def logits(spec: JobSpec) -> torch.Tensor:
    """Of what plain transformers (or peft) loads from the export, for some fixed tokens."""
    final = spec.checkpoint_dir / "final"
    if spec.lora:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(spec.source.model, dtype=torch.float32), final
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_keeps_its_word(
    ranks: Ranks, alone: Callable[[Cell], tuple[JobSpec, list[Any]]], tmp_path: Path, cell: Cell
) -> None:
    single, expected = alone(cell)
    spec = spec_of(tmp_path, cell)
    # Two ranks to a machine, so that HYBRID_SHARD has copies as well as parts.
    events = trained(ranks, tmp_path / "whole", spec, per_node=min(cell.ranks, 2))
    assert of_kind(events, Prepared)[0].total_steps == STEPS
    assert_sharded(cell, of_kind(events, Prepared)[0].effective["sharding"])
    assert_close(numbers(events), numbers(expected))
    assert torch.allclose(logits(spec), logits(single), rtol=1e-3, atol=5e-3)

    exported, checkpoint = digests(spec), spec.checkpoint_dir / f"checkpoint-{SAVED}"
    resumed = trained(ranks, tmp_path / "resumed", spec, checkpoint, per_node=min(cell.ranks, 2))
    assert numbers(after(resumed, 0)) == numbers(after(events, SAVED))
    assert digests(spec) == exported

    elsewhere = trained(ranks, tmp_path / "elsewhere", spec, checkpoint, world_size=2 if cell.ranks == 1 else 1)
    assert_close(numbers(after(elsewhere, 0)), numbers(after(events, SAVED)))
