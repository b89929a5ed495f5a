"""GRPO on several ranks: they answer and train what one process does, whatever each of them has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.distributed.replicas import Heartbeats
from llama_stack_provider_trl.recipes.trainer.grpo import GrpoRecipe
from llama_stack_provider_trl.specs.events import Failed
from llama_stack_provider_trl.specs.job import LoraSpec, ShardingSpec
from tests.process.grpo_jobs import given_answers
from tests.process.on_policy_ranks import (
    METHOD,
    ROWS,
    Alone,
    assert_equal_and_continued,
    assert_same,
    numbers,
    spec_of,
    trained,
)
from tests.process.on_policy_ranks import alone as alone
from tests.ranks import Ranks
from tests.required import in_full
from tests.training import LORA, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("lora", "strategy"),
    [
        pytest.param(LORA, "NO_SHARD", id="adapters-NO_SHARD"),
        pytest.param(None, "FULL_SHARD", id="whole-FULL_SHARD"),
        *in_full(
            pytest.param(LORA, "FULL_SHARD", id="adapters-FULL_SHARD"),
            pytest.param(LORA, "SHARD_GRAD_OP", id="adapters-SHARD_GRAD_OP"),
            pytest.param(None, "NO_SHARD", id="whole-NO_SHARD"),
        ),
    ],
)
def test_two_ranks_give_the_answers_and_weights_of_one_process_and_continue_exactly(
    ranks: Ranks, alone: Alone, tmp_path: Path, lora: LoraSpec | None, strategy: str
) -> None:
    single, expected = alone(lora)
    assert any(abs(point["reward_std"]) > 0.1 for point in numbers(expected))
    together = spec_of(tmp_path / "together", 2, strategy, lora=lora)
    assert_equal_and_continued(ranks, tmp_path, together, expected, single)


def give_answers() -> None:
    """In a rank: answers that follow from the prompts."""
    GrpoRecipe.answer = lambda self, prompts, rows: given_answers(prompts, self._grpo.num_generations)  # type: ignore[method-assign]


@pytest.mark.parametrize("changes", [{"loss_type": "grpo", "scale_rewards": "batch"}, {"scale_rewards": "none"}])
def test_given_answers_have_the_losses_of_one_process(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    method = METHOD.model_copy(update=changes)
    found = {}
    for number in (1, 3):  # of three ranks one has fillers only, of the last row of an epoch two
        root = tmp_path / str(number)
        spec = spec_of(root, 1, method=method, batch_size=4, gradient_accumulation_steps=1, sharding=ShardingSpec())
        given = "tests.process.test_grpo_ranks.give_answers"
        codes, events = ranks.run(root / "run", spec, world_size=number, before=given)
        assert codes == [0] * number, [event.message for event in of_kind(events, Failed)]
        found[number] = spec, events
    assert_same(found[3][1], found[3][0], found[1][1], found[1][0])


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


def test_a_rank_that_the_first_one_waits_for_shows_its_progress(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 2, n_epochs=1, rows=ROWS[:4], gradient_accumulation_steps=1, save_steps=100)
    trained(ranks, tmp_path, spec, before="tests.process.test_grpo_ranks.count_heartbeats")
    answered, rewarded = map(int, (spec.checkpoint_dir / "heartbeats-1").read_text().split())
    assert 1 <= answered <= METHOD.max_completion_length
    assert rewarded > answered
