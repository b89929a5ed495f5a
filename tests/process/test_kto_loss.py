"""KTO's loss is its formula, and its rows are paired with others in a way that no batch plan changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.recipes.data.sampling import BatchPlan, MismatchingSampler, pair_of_number
from llama_stack_provider_trl.recipes.trainer.kto import kto_loss
from llama_stack_provider_trl.specs.methods import KtoSpec

pytestmark = pytest.mark.process
LOGRATIOS, LABELS = [0.5, -2.0, 3.0, 0.0], [True, False, False, True]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_the_loss_is_its_formula(kl: float) -> None:
    spec = KtoSpec(beta=0.3, desirable_weight=1.5, undesirable_weight=0.25)
    losses = kto_loss(torch.tensor(LOGRATIOS), torch.tensor(LABELS), torch.tensor(kl), spec)
    expected = [
        1.5 * (1 - sigmoid(0.3 * (ratio - kl))) if label else 0.25 * (1 - sigmoid(0.3 * (kl - ratio)))
        for ratio, label in zip(LOGRATIOS, LABELS, strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    if not kl:  # apo_zero_unpaired as TRL writes it
        apo = [
            1.5 * (1 - sigmoid(0.3 * ratio)) if label else 0.25 * sigmoid(0.3 * ratio)
            for ratio, label in zip(LOGRATIOS, LABELS, strict=True)
        ]
        assert losses.tolist() == pytest.approx(apo, rel=1e-6)


def steps(sampler: MismatchingSampler, slots: int) -> list[list[tuple[int, int]]]:
    """The real rows of each optimizer step, with the rows whose answers they get."""
    numbers = [pair_of_number(number, sampler.num_rows) for number in sampler]
    found = [numbers[start : start + slots] for start in range(0, len(numbers), slots)]
    return [[pair for pair in step if pair[0] != sampler.num_rows] for step in found]


@pytest.mark.parametrize("lengths", [None, list(range(11))])
def test_no_batch_plan_changes_whose_answer_a_prompt_gets(lengths: Any) -> None:
    one, several = BatchPlan.of(4, 4, 1), BatchPlan.of(4, 1, 3)
    found = {}
    for epoch in (0, 1):
        plans = []
        for plan in (one, several):
            sampler = MismatchingSampler(
                11, None, shuffle=True, seed=1, batch_plan=plan, lengths=None if plan is one else lengths
            )
            sampler.set_epoch(epoch)
            plans.append([sorted(step) for step in steps(sampler, plan.slots_per_step)])
        assert plans[0] == plans[1]
        assert all({row for row, _ in step} == {other for _, other in step} for step in plans[0])
        assert all(row != other for step in plans[0] for row, other in step)
        found[epoch] = plans[0]
    assert found[0] != found[1]


def test_an_ordered_step_is_paired_as_trl_pairs_it_and_an_evaluation_as_one_step() -> None:
    sampler = MismatchingSampler(5, None, shuffle=False, seed=1, batch_plan=BatchPlan.of(3, 3, 1))
    assert steps(sampler, 3) == [[(0, 2), (1, 0), (2, 1)], [(3, 4), (4, 3)]]
    evaluation = MismatchingSampler(4, None, shuffle=False, seed=1, multiple_of=3)
    assert steps(evaluation, 6) == [[(0, 3), (1, 0), (2, 1), (3, 2)]]
