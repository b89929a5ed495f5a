"""Trainings on a model's own answers, alone and on several ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_stack_provider_trl.recipes.distributed.replicas import Heartbeats
from llama_stack_provider_trl.recipes.trainer.distillation import DistillationRecipe
from llama_stack_provider_trl.recipes.trainer.gold import GoldRecipe
from llama_stack_provider_trl.recipes.trainer.grpo import GrpoRecipe
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from tests.process import gold_jobs
from tests.process.grpo_jobs import DIGITS, LETTER, given_answers
from tests.ranks import Ranks
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind

METHOD = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=3, max_completion_length=6, beta=0.2, temperature=0.9)


ROWS = [{"prompt": f"What is {n} plus {n}?" + " Please." * (n % 3)} for n in range(9)]
"""In steps of four: the last one of an epoch has one row, and the other rank fillers only."""


def ending_model(root: Path) -> Path:
    """The tiny model, whose answers are ended by a fifth of all tokens: they have several lengths."""
    shutil.copytree(tiny_model(), root)
    config = json.loads((root / "generation_config.json").read_text())
    (root / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, *range(300, 500)]}))
    return root


def spec_of(root: Path, ranks: int, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    """The same job for any number of ranks: the same rows in each step, a learning rate that shows a wrong gradient."""
    fields = {
        "rows": ROWS,
        "n_epochs": 2,
        "ranks": ranks,
        "batch_size": 2 // ranks,
        "gradient_accumulation_steps": 2,
        "sharding": ShardingSpec(strategy=strategy) if ranks > 1 else None,
        "optimizer": OptimizerSpec(name="sgd", learning_rate=0.5),
        "method": METHOD,
        "save_steps": 2,
    }
    return job_spec(root, ending_model(root / "model"), "grpo", **{**fields, **changes})


Alone = Callable[[LoraSpec | None], tuple[JobSpec, list[Any]]]


def trained_alone(ranks: Ranks, factory: pytest.TempPathFactory, spec_of: Callable[..., JobSpec]) -> Alone:
    """What one process makes of the job: its spec and its events, trained once for all strategies."""

    @cache
    def train(lora: LoraSpec | None) -> tuple[JobSpec, list[Any]]:
        root = factory.mktemp("alone")
        spec = spec_of(root, 1, lora=lora)
        return spec, trained(ranks, root, spec)

    return train


def trained(ranks: Ranks, root: Path, spec: JobSpec, *arguments: Any, **others: Any) -> list[Any]:
    codes, events = ranks.run(root / "run", spec, *arguments, **others)
    assert codes == [0] * spec.ranks, [event.message for event in of_kind(events, Failed)]
    return events


def numbers(events: list[Any]) -> list[dict[str, float]]:
    """Every metric point, without what the clock decides."""
    points = [event.metrics for event in of_kind(events, Progress)]
    return [{name: value for name, value in point.items() if name != "tokens_per_second"} for point in points]


def weights_of(spec: JobSpec) -> dict[str, torch.Tensor]:
    (file,) = (spec.checkpoint_dir / "final").glob("*model.safetensors")
    return load_file(file)


def assert_same(found: list[Any], spec: JobSpec, expected: list[Any], alone: JobSpec) -> None:
    assert len(numbers(found)) == len(numbers(expected)) > 0
    for point, other in zip(numbers(found), numbers(expected), strict=True):
        assert point == pytest.approx(other, rel=1e-3, abs=1e-5)
    own, others = weights_of(spec), weights_of(alone)
    assert own.keys() == others.keys()
    for name, weight in own.items():
        assert torch.allclose(weight, others[name], rtol=1e-4, atol=2e-6), name


def assert_equal_and_continued(ranks: Ranks, root: Path, spec: JobSpec, expected: list[Any], alone: JobSpec) -> None:
    """Train on ranks, and once more from a checkpoint in the middle."""
    assert len({point["completions/mean_length"] for point in numbers(expected)}) > 1  # they end at different lengths
    found = trained(ranks, root / "together", spec)
    assert spec.sharding is not None
    assert of_kind(found, Prepared)[0].effective["sharding"]["strategy"] == spec.sharding.strategy
    assert_same(found, spec, expected, alone)
    weights = weights_of(spec)
    (spec.checkpoint_dir / "final").rename(root / "first-final")
    resumed = trained(ranks, root / "again", spec, spec.checkpoint_dir / "checkpoint-4")
    assert numbers(resumed) == numbers(found)[4:]
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(spec).items())


def give_answers() -> None:
    """In a rank: answers that follow from the prompts."""
    GrpoRecipe.answer = lambda self, prompts, rows: given_answers(prompts, self._grpo.num_generations)  # type: ignore[method-assign]
    DistillationRecipe.answer = lambda self, prompts, rows: given_answers(prompts, 1)  # type: ignore[method-assign]
    GoldRecipe.answer = lambda self, prompts, rows: gold_jobs.given_answers(prompts)  # type: ignore[method-assign]


def count_heartbeats() -> None:
    """In a rank beyond the first: note its heartbeats, once it has answered and once it has rewarded."""
    heartbeat, collate, count = Heartbeats.heartbeat, GrpoRecipe._groups, [0]

    def counted(self: Heartbeats) -> None:
        heartbeat(self)
        count[0] += 1

    def groups(self: GrpoRecipe, *arguments: Any) -> Any:
        answered = count[0]
        found = collate(self, *arguments)
        (self.spec.checkpoint_dir / f"heartbeats-{os.environ['RANK']}").write_text(f"{answered} {count[0]}")
        count[0] = 0
        return found

    Heartbeats.heartbeat, GrpoRecipe._groups = counted, groups  # type: ignore[method-assign]
