"""Which trials of a search continue, which are pruned, and how the search ends: `jobs.decisions.search.decide`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.search import SearchDecisions, Trial, best_trial, decide
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.search import PruningSpec, SearchSpec, rung_steps

RUNNING, PAUSED, WAITING = JobState.in_progress, JobState.paused, JobState.scheduled
COMPLETED, FAILED, CANCELLED = JobState.completed, JobState.failed, JobState.cancelled
HALVING = PruningSpec(eta=3, min_steps=2)
TOTAL = 18
"""Steps of a trial: its rungs are at 2 and 6."""


def search(pruning: PruningSpec | None = HALVING, **changes: Any) -> SearchSpec:
    fields = {"method": "grid", "parameters": {"a": [1]}, "trials": 1, "objective": "eval_loss"}
    return SearchSpec.model_validate({**fields, "direction": "minimize", "pruning": pruning, **changes})


def trial(number: int, state: JobState, *values: tuple[int, float], **changes: Any) -> Trial:
    evaluations = tuple((step, {"eval_loss": value}) for step, value in values)
    step = max((step for step, _ in values), default=0)
    fields = {"attempt": 1, "step": step, "total_steps": TOTAL, "evaluations": evaluations}
    if state is PAUSED:
        fields["paused_at_step"] = step
    return Trial(number, f"s-trial-{number}", state, **{**fields, **changes})


def numbers(trials: Sequence[Trial]) -> list[int]:
    return [one.number for one in trials]


def pruned(decided: SearchDecisions) -> dict[int, str]:
    return {one.number: why for one, why in decided.pruned}


def at_rung(*values: float) -> list[Trial]:
    return [trial(number, PAUSED, (2, value)) for number, value in enumerate(values, 1)]


# --- rungs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pruning", "total", "steps"),
    [
        (PruningSpec(eta=3, min_steps=2), 18, (2, 6)),
        (PruningSpec(eta=3, min_steps=2), 19, (2, 6, 18)),
        (PruningSpec(eta=3, min_steps=18), 18, ()),
        (PruningSpec(eta=2, fraction=0.25), 100, (25, 50)),
        (PruningSpec(eta=3, fraction=1 / 9), 18, (2, 6)),
        (PruningSpec(eta=3, fraction=1 / 9), 3, (1,)),
        (PruningSpec(eta=2, fraction=0.01), 10, (1, 2, 3, 6)),
        (PruningSpec(eta=2, fraction=0.5), 1, ()),
        (None, 18, ()),
    ],
)
def test_rungs_are_ascending_steps_before_the_last_one(
    pruning: PruningSpec | None, total: int, steps: tuple[int, ...]
) -> None:
    assert rung_steps(pruning, total) == steps


# --- a rung -----------------------------------------------------------------------------------------------------------


def test_the_best_third_continues_and_the_others_are_pruned_with_their_value_and_the_cut() -> None:
    decided = decide(search(), RUNNING, at_rung(3.0, 1.0, 2.0, 4.0, 0.5, 6.0))
    assert numbers(decided.promoted) == [5, 2]
    assert sorted(pruned(decided)) == [1, 3, 4, 6]
    assert pruned(decided)[3] == "pruned at step 2: eval_loss 2, cut 1"
    assert (decided.resume, decided.cancel, decided.ending) == ((), (), None)  # it is recorded first


def test_the_highest_values_win_where_the_objective_is_maximized() -> None:
    decided = decide(search(direction="maximize"), RUNNING, at_rung(3.0, 1.0, 2.0))
    assert (numbers(decided.promoted), sorted(pruned(decided))) == ([1], [2, 3])


def test_of_equal_trials_the_first_ones_continue() -> None:
    assert numbers(decide(search(), RUNNING, at_rung(1.0, 1.0, 1.0)).promoted) == [1]


def test_one_trial_always_continues() -> None:
    decided = decide(search(), RUNNING, at_rung(1.0, 2.0))
    assert (numbers(decided.promoted), sorted(pruned(decided))) == ([1], [2])


@pytest.mark.parametrize(
    "late",
    [
        trial(3, WAITING, attempt=0, total_steps=None),
        trial(3, RUNNING, step=1),
        trial(3, RUNNING, (2, 0.1)),  # it has evaluated and saves
        trial(3, JobState.pausing, (2, 0.1)),
        trial(3, PAUSED, step=1, paused_at_step=1),  # by its user
    ],
    ids=["waits", "trains", "saves", "is saving", "paused elsewhere"],
)
def test_nothing_is_decided_before_all_have_reached_the_rung(late: Trial) -> None:
    decided = decide(search(), RUNNING, [*at_rung(1.0, 2.0), late])
    assert decided == SearchDecisions(detail="0 of 3 trials have ended")


def test_who_wins_does_not_depend_on_the_order_in_which_trials_arrive() -> None:
    final = at_rung(3.0, 1.0, 2.0, 4.0)
    expected = decide(search(), RUNNING, final)
    for order in itertools.permutations(range(4)):
        arrived = [trial(number, WAITING, attempt=0, total_steps=None) for number in range(1, 5)]
        for position in order[:-1]:
            arrived[position] = final[position]
            found = decide(search(), RUNNING, arrived)
            assert (found.promoted, found.pruned, found.cancel, found.resume) == ((), (), (), ())
        arrived[order[-1]] = final[order[-1]]
        assert decide(search(), RUNNING, arrived) == expected


def test_a_trial_that_failed_or_was_cancelled_cannot_win_and_counts_as_one_of_the_compared() -> None:
    trials = [trial(1, FAILED, (2, 0.1)), trial(2, CANCELLED), *at_rung(0, 0, 3.0, 2.0, 1.0, 4.0)[2:]]
    decided = decide(search(), RUNNING, trials)
    assert (numbers(decided.promoted), sorted(pruned(decided))) == ([5, 4], [3, 6])


def test_a_trial_that_ended_before_the_rung_is_compared_by_its_result() -> None:
    trials = [trial(1, COMPLETED, (1, 0.5), total_steps=18), *at_rung(0, 1.0, 2.0)[1:]]
    decided = decide(search(), RUNNING, trials)
    assert (numbers(decided.promoted), sorted(pruned(decided))) == ([1], [2, 3])
    assert decide(search(), RUNNING, [trials[0]._replace(evaluations=((1, {"eval_loss": 9.0}),)), *trials[1:]]).pruned


def test_a_trial_whose_evaluation_is_not_finite_is_pruned() -> None:
    lost = trial(2, PAUSED, step=2, paused_at_step=2)
    decided = decide(search(), RUNNING, [*at_rung(1.0), lost])
    assert (numbers(decided.promoted), pruned(decided)) == ([1], {2: "pruned at step 2: eval_loss none, cut 1"})
    assert decide(search(), RUNNING, [lost]).promoted == ()


def test_a_trial_with_nan_is_never_the_best() -> None:
    decided = decide(search(), RUNNING, at_rung(math.nan, 1.0, math.nan))
    assert numbers(decided.promoted) == [2]


def test_trials_of_different_lengths_are_compared_at_their_own_steps() -> None:
    share = search(PruningSpec(eta=2, fraction=0.5))
    trials = [trial(1, PAUSED, (5, 1.0), total_steps=10), trial(2, PAUSED, (50, 2.0), total_steps=100)]
    decided = decide(share, RUNNING, trials)
    assert (numbers(decided.promoted), pruned(decided)) == ([1], {2: "pruned at step 50: eval_loss 2, cut 1"})


def test_a_trial_without_that_rung_is_waited_for_to_its_end() -> None:
    short = trial(1, RUNNING, step=1, total_steps=2)
    assert decide(search(), RUNNING, [short, *at_rung(0, 2.0)[1:]]).promoted == ()
    ended = short._replace(state=COMPLETED, evaluations=((2, {"eval_loss": 1.0}),), step=2)
    assert numbers(decide(search(), RUNNING, [ended, *at_rung(0, 2.0)[1:]]).promoted) == [1]


def test_a_trial_that_its_user_resumed_beyond_the_rung_is_compared_there() -> None:
    eager = trial(1, RUNNING, (2, 3.0), step=4)
    decided = decide(search(), RUNNING, [eager, *at_rung(0, 1.0)[1:]])
    assert (numbers(decided.promoted), sorted(pruned(decided))) == ([2], [1])


# --- acting on what is recorded ---------------------------------------------------------------------------------------


def test_what_is_recorded_is_acted_on_until_it_is_done() -> None:
    winner = trial(1, PAUSED, (2, 1.0), rung=1)
    loser = trial(2, PAUSED, (2, 2.0), pruned="pruned at step 2")
    decided = decide(search(), RUNNING, [winner, loser])
    assert (numbers(decided.resume), numbers(decided.cancel), decided.promoted, decided.pruned) == ([1], [2], (), ())
    half = decide(search(), RUNNING, [winner, loser._replace(state=CANCELLED)])
    assert (numbers(half.resume), half.cancel, half.detail) == ([1], (), "1 of 2 trials have ended, 1 of them pruned")
    done = decide(search(), RUNNING, [winner._replace(state=WAITING), loser._replace(state=JobState.cancelling)])
    assert (done.resume, done.cancel) == ((), ())


def test_a_winner_that_its_user_pauses_stays_paused() -> None:
    resumed = trial(1, PAUSED, (2, 1.0), rung=1, resumed_attempt=1)  # paused while it waited for a device
    assert decide(search(), RUNNING, [resumed]).resume == ()
    later = trial(1, PAUSED, (2, 1.0), rung=1, resumed_attempt=1, attempt=2, step=4, paused_at_step=4)
    assert decide(search(), RUNNING, [later]).resume == ()


def test_a_winner_that_began_again_before_its_rung_is_resumed_there_again() -> None:
    again = trial(1, PAUSED, (2, 1.0), rung=1, resumed_attempt=1, attempt=3)
    assert numbers(decide(search(), RUNNING, [again]).resume) == [1]


def test_the_second_rung_compares_those_that_passed_the_first() -> None:
    left = [trial(number, PAUSED, (2, 1.0), (6, value), rung=1) for number, value in [(2, 0.7), (4, 0.6), (5, 0.8)]]
    lost = [trial(number, CANCELLED, (2, 0.1), pruned="pruned") for number in (1, 3, 6)]
    decided = decide(search(), RUNNING, [*left, *lost])
    assert numbers(decided.promoted) == [4]
    assert pruned(decided)[2] == "pruned at step 6: eval_loss 0.7, cut 0.6"


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_best_completed_trial_is_the_result() -> None:
    trials = [
        trial(1, COMPLETED, (18, 0.5)),
        trial(2, COMPLETED, (2, 0.1), (18, 0.4)),
        trial(3, CANCELLED, (2, 0.2), pruned="pruned"),
        trial(4, FAILED, (2, 0.1)),
    ]
    ending = decide(search(), RUNNING, trials).ending
    assert ending is not None
    assert (ending.state, ending.best and ending.best.number) == (COMPLETED, 2)
    assert decide(search(), RUNNING, [*trials, trial(5, RUNNING)]).ending is None


def test_a_trial_whose_best_checkpoint_is_its_result_is_compared_by_that_one() -> None:
    kept = trial(1, COMPLETED, (9, 0.3), (18, 0.9), best_checkpoint="eval_loss")
    found = best_trial(search(), [kept, trial(2, COMPLETED, (9, 0.2), (18, 0.4))])
    assert found is kept
    assert kept.result("eval_loss") == 0.3


def test_a_search_of_which_no_trial_completed_fails_and_names_some() -> None:
    ending = decide(search(), RUNNING, [trial(number, FAILED) for number in range(1, 6)]).ending
    assert ending is not None
    assert (ending.state, ending.reason) == (FAILED, Reason.no_trial_completed)
    assert "s-trial-1 (failed), s-trial-2 (failed), s-trial-3 (failed) and 2 more" in ending.message


# --- whole searches ---------------------------------------------------------------------------------------------------


def played(losses: dict[int, list[float]], order: random.Random, stop_after: int = 10**9) -> list[Trial]:
    """A whole search, whose trials and supervisor do one thing after the other in a random order.

    Args:
        losses: number -> the loss at each step, from 1.
    """
    spec = search()
    trials = {number: trial(number, WAITING, attempt=0, total_steps=None) for number in losses}
    while (decided := decide(spec, RUNNING, list(trials.values()))).ending is None:
        choices: list[tuple[str, Any]] = [("train", n) for n, one in trials.items() if one.state in (WAITING, RUNNING)]
        if decided.promoted or decided.pruned:
            choices.append(("record", None))
        choices += [("resume", one.number) for one in decided.resume]
        choices += [("cancel", one.number) for one in decided.cancel]
        what, number = order.choice(choices)
        if what == "record":
            trials |= {one.number: one._replace(rung=one.rung + 1) for one in decided.promoted}
            trials |= {one.number: one._replace(pruned=why) for one, why in decided.pruned}
        elif what == "train":
            trials[number] = stepped(trials[number], losses[number])
        elif what == "resume":
            one = trials[number]
            trials[number] = one._replace(state=WAITING, resumed_attempt=one.attempt)
        else:
            trials[number] = trials[number]._replace(state=CANCELLED)
    return list(trials.values())


def stepped(one: Trial, losses: list[float]) -> Trial:
    if one.state is WAITING:
        return one._replace(state=RUNNING, attempt=one.attempt + 1, total_steps=TOTAL, paused_at_step=None)
    step = one.step + 1
    evaluated = (*one.evaluations, (step, {"eval_loss": losses[step - 1]}))
    if step in rung_steps(HALVING, TOTAL):
        return one._replace(step=step, state=PAUSED, paused_at_step=step, evaluations=evaluated)
    if step == TOTAL:
        return one._replace(step=step, state=COMPLETED, evaluations=evaluated)
    return one._replace(step=step)


def test_a_search_of_12_has_the_same_table_in_any_order_and_spends_a_quarter_of_the_grid() -> None:
    source = random.Random(1)
    speeds = {number: source.random() for number in range(1, 13)}
    losses = {number: [math.exp(-speed * step) for step in range(1, TOTAL + 1)] for number, speed in speeds.items()}
    expected = None
    for seed in range(40):
        trials = played(losses, random.Random(seed))
        table = [(one.number, one.state, one.step, one.pruned, one.evaluations) for one in trials]
        expected = expected or table
        assert table == expected
    assert sum(step for _, _, step, _, _ in expected or []) == 8 * 2 + 3 * 6 + 1 * 18 <= 0.45 * 12 * TOTAL
    found = best_trial(search(), trials)
    assert found is not None
    assert found.number == max(speeds, key=lambda number: speeds[number])
