"""The best evaluation and the step at which a job stops early: pure decisions."""

from __future__ import annotations

import json
from typing import Any

from llama_stack_provider_trl.specs.evaluations import HIGHER_IS_BETTER, METRICS, EarlyStoppingTracker, best_step
from llama_stack_provider_trl.specs.job import EarlyStoppingSpec
from tests.fakes import job_spec


def early_stopping(**fields: Any) -> EarlyStoppingTracker:
    return EarlyStoppingTracker(job_spec(**fields), {})


def losses(*values: float) -> list[dict[str, float]]:
    return [{"eval_loss": value} for value in values]


def test_the_best_is_the_first_of_equals_and_higher_or_lower_as_the_metric_has_it() -> None:
    evaluations = [
        (1, {"eval_loss": 2.0, "eval_rewards/accuracies": 0.5}),
        (2, {"eval_loss": 1.0}),
        (3, {"eval_loss": 1.0}),
    ]
    assert best_step("eval_loss", evaluations) == 2
    assert best_step("eval_rewards/accuracies", [*evaluations, (4, {"eval_rewards/accuracies": 0.9})]) == 4
    assert best_step("eval_loss", []) is None
    assert {metric for metrics in METRICS.values() for metric in metrics} == set(HIGHER_IS_BETTER)


def test_decisions_restored_from_a_checkpoint_are_those_of_an_uninterrupted_job() -> None:
    rule = EarlyStoppingSpec(patience=2, min_delta=0.1)
    values = losses(3.0, 2.0, 1.95, 1.95, 1.0, 1.2, 0.95)
    whole = early_stopping(best_checkpoint="eval_loss", early_stopping=rule)
    expected = [(whole.is_best(m, {"step": n}), whole.should_stop(m, n)) for n, m in enumerate(values, 1)]
    assert [best for best, _ in expected] == [True, True, True, False, True, False, True]
    assert [stops for _, stops in expected] == [False, False, False, True, False, False, True]
    assert whole.best == {"value": 0.95, "standing": {"step": 7}}
    notes: dict[str, Any] = {}
    for step, metrics in enumerate(values, 1):
        fresh = EarlyStoppingTracker(whole.spec, json.loads(json.dumps(notes)))
        assert (fresh.is_best(metrics, {"step": step}), fresh.should_stop(metrics, step)) == expected[step - 1]
        notes = fresh.notes
    assert "ended at step 7 of 9, because eval_loss was not better than 1 (step 5) by more than min_delta=0.1 in 2" in (
        whole.stop_message(7, 9)
    )


def test_without_options_an_evaluation_has_no_consequence_and_nothing_is_recorded() -> None:
    without = early_stopping()
    assert not any(
        without.is_best(metrics, {"step": 1}) or without.should_stop(metrics, 1) for metrics in losses(1.0, 2.0)
    )
    assert without.notes == {}


def test_an_evaluation_without_the_metric_counts_for_nothing() -> None:
    waiting = early_stopping(best_checkpoint="eval_loss", early_stopping=EarlyStoppingSpec(patience=1))
    assert not waiting.is_best({}, {"step": 1})
    assert not waiting.should_stop({}, 1)
