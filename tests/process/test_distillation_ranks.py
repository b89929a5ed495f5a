"""Distillation on several ranks: they answer and train what one process does, whatever each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.trainer.distillation import DistillationRecipe
from llama_stack_provider_trl.specs.events import Failed
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, ShardingSpec
from tests.process import on_policy_ranks as grpo
from tests.process.distillation_jobs import method_of, teacher_model
from tests.process.grpo_jobs import given_answers
from tests.process.on_policy_ranks import Alone, assert_equal_and_continued, assert_same, numbers, trained_alone
from tests.ranks import Ranks
from tests.required import in_full
from tests.training import LORA, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def spec_of(root: Path, ranks: int, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    """The same job for any number of ranks, as in GRPO's test: the last step of an epoch leaves a rank fillers only."""
    root.mkdir(parents=True, exist_ok=True)
    method = method_of(teacher_model(root / "teacher"), max_completion_length=6, beta=0.5, temperature=0.9)
    spec = grpo.spec_of(root, ranks, strategy, **changes)
    return spec.changed(method=method)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return trained_alone(ranks, tmp_path_factory, spec_of)


# test_grpo_ranks.py has the strategies in CI.
@pytest.mark.parametrize(
    ("lora", "strategy"), [(LORA, "FULL_SHARD"), *in_full((LORA, "NO_SHARD"), (None, "FULL_SHARD"), (None, "NO_SHARD"))]
)
def test_two_ranks_give_the_answers_and_weights_of_one_process_and_continue_exactly(
    ranks: Ranks, alone: Alone, tmp_path: Path, lora: LoraSpec | None, strategy: str
) -> None:
    single, expected = alone(lora)
    assert all(point["loss"] > 0.01 for point in numbers(expected))
    together = spec_of(tmp_path / "together", 2, strategy, lora=lora)
    assert_equal_and_continued(ranks, tmp_path, together, expected, single)


def give_answers() -> None:
    """In a rank: answers that follow from the prompts."""
    DistillationRecipe.answer = lambda self, prompts, rows: given_answers(prompts, 1)  # type: ignore[method-assign]


@pytest.mark.parametrize("beta", [0.0, *in_full(1.0)])
def test_given_answers_have_the_losses_of_one_process(ranks: Ranks, tmp_path: Path, beta: float) -> None:
    found = {}
    for number in (1, 3):  # of three ranks one has fillers only, of the last row of an epoch two
        root = tmp_path / str(number)
        spec = spec_of(root, 1, batch_size=4, gradient_accumulation_steps=1, sharding=ShardingSpec())
        assert spec.method is not None
        spec = spec.changed(method=spec.method.model_copy(update={"beta": beta}))
        given = "tests.process.test_distillation_ranks.give_answers"
        codes, events = ranks.run(root / "run", spec, world_size=number, before=given)
        assert codes == [0] * number, [event.message for event in of_kind(events, Failed)]
        found[number] = spec, events
    assert_same(found[3][1], found[3][0], found[1][1], found[1][0])
