"""The trials of a search as its page shows them."""

from __future__ import annotations

import math
import random
from typing import Any

from llama_stack_provider_trl_remote.service.pages.trial_view import LEAST_TRIALS, MOST_COMPARED, shown

LR, RANK = "training_config.learning_rate", "algorithm_config.rank"


def trial(number: int, value: float | None, **more: Any) -> dict[str, Any]:
    values = more.pop("values", {LR: 10.0 ** -(number % 5 + 1), RANK: 8})
    done = {"state": "completed" if value is not None else "failed", "step": 9, "total_steps": 9, "pruned": None}
    return {"job_uuid": f"s-{number}", "values": values, "value": value, **done, **more}


def search(trials: list[dict[str, Any]], direction: str = "minimize") -> dict[str, Any]:
    has = [one for one in trials if one["value"] is not None]
    best = min(has, key=lambda one: one["value"] if direction == "minimize" else -one["value"], default=None)
    return {"objective": "eval_loss", "direction": direction, "trials": trials, "best": best}


def test_the_best_trials_come_first_and_those_without_a_value_last_whatever_the_direction() -> None:
    trials = [trial(0, 2.0), trial(1, None), trial(2, 1.0), trial(3, 3.0)]

    def order(sort: str, direction: str = "minimize") -> list[str]:
        return [row.job_uuid for row in shown("s", search(trials, direction), sort).rows]

    assert order("") == ["s-2", "s-0", "s-3", "s-1"]
    assert order("", "maximize") == ["s-3", "s-0", "s-2", "s-1"]
    assert order("-value") == ["s-3", "s-0", "s-2", "s-1"]
    assert order("-trial") == ["s-3", "s-2", "s-1", "s-0"]
    assert order(LR) == ["s-3", "s-2", "s-1", "s-0"]
    assert order("state")[-1] == "s-1"
    assert {*order("no such column")} == {"s-0", "s-1", "s-2", "s-3"}
    page = shown("s", search(trials), "-value")
    assert [row.is_best for row in page.rows] == [False, False, True, False]
    directions = {one.text: one.direction for one in page.headings}
    assert directions == {
        "Trial": "",
        "learning_rate": "",
        "rank": "",
        "State": "",
        "Steps": "",
        "eval_loss": "descending",
    }
    assert next(one.address for one in page.headings if one.text == "eval_loss") == "/jobs/s/trials?sort=value"
    assert page.compared == "/compare?job=s-2&job=s-0&job=s-3"


def test_values_of_any_kind_are_sorted_and_drawn() -> None:
    values: list[Any] = [True, "cosine", 3, None, 0.5]
    trials = [trial(number, float(number), values={"a.b": value}) for number, value in enumerate(values)]
    page = shown("s", search(trials), "a.b")
    assert len(page.rows) == 5
    assert page.plot is not None
    assert [axis.name for axis in page.plot.axes] == ["b", "eval_loss"]
    assert len(page.plot.lines) == 5


def test_lines_lead_through_each_axis_and_the_best_one_is_drawn_last() -> None:
    trials = [trial(number, float(number + 1)) for number in range(5)]
    plot = shown("s", search(trials)).plot
    assert plot is not None
    rate, rank, value = plot.axes
    assert (rate.is_log, rank.is_log, value.is_log) == (True, False, False)
    assert [tick.text for tick in rate.ticks] == ["1e-05", "0.0001", "0.001", "0.01", "0.1"]
    near = shown("s", search([trial(number, value) for number, value in enumerate((1.0, 1.01, 5.0, 5.02))])).plot
    assert near is not None
    assert [tick.text for tick in near.axes[-1].ticks] == ["1", "5.02"], "labels that would touch are left out"
    last = plot.lines[-1]
    assert (last.job_uuid, last.kind) == ("s-0", "best")
    assert (
        last.points
        == f"{rate.x:g},{plot.top:g} {rank.x:g},{(plot.top + plot.bottom) / 2:g} {value.x:g},{plot.bottom:g}"
    )
    assert plot.lines[0].kind == "shade-3"
    assert shown("s", search(trials[:1])).plot is None
    assert shown("s", search([])).plot is None


def test_importance_is_that_of_ranks_and_is_not_shown_below_a_number_of_trials() -> None:
    chance = random.Random(1)

    def tried(count: int) -> list[dict[str, Any]]:
        return [
            trial(
                number,
                1000.0 * number**3,  # no straight line: ranks see none
                values={LR: 1e-5 * 2**number, "seed": chance.random(), RANK: 8, "kind": "ab"[number % 2]},
            )
            for number in range(count)
        ]

    assert shown("s", search(tried(LEAST_TRIALS - 1))).importances == []
    found = {one.path: one for one in shown("s", search(tried(30))).importances}
    assert found.keys() == {LR, "seed", "kind"}, "a field with one value has no importance"
    assert found[LR].share > 0.999
    assert "larger values go with a higher eval_loss" in found[LR].text
    assert found["seed"].share < 0.5
    assert found["kind"].share < 0.3
    by_name = [trial(number, float(number // 5), values={"kind": "abcdef"[number // 5]}) for number in range(30)]
    (one,) = shown("s", search(by_name)).importances
    assert one.share > 0.99
    assert "lowest with a" in one.text
    each_its_own = [trial(number, float(number), values={"kind": f"name-{number}"}) for number in range(30)]
    assert shown("s", search(each_its_own)).importances == []


def noise(fields: int, chance: random.Random) -> list[dict[str, Any]]:
    values = [{f"f.{number}": chance.random() for number in range(fields)} for _ in range(LEAST_TRIALS)]
    return [trial(number, chance.random(), values=one) for number, one in enumerate(values)]


def test_what_chance_gives_is_said_and_a_field_below_it_is_marked() -> None:
    chance = random.Random(2)
    told = 0
    for _ in range(40):
        page = shown("s", search(noise(4, chance)))
        assert 0.7 < page.chance < 0.9
        told += any(one.is_told for one in page.importances)
    assert told <= 6, "5 % of the searches, and what chance adds in 40 of them"
    trials = noise(4, chance)
    assert shown("s", search(trials)).chance == shown("s", search(trials)).chance, "the seed is fixed"
    assert shown("s", search(noise(1, random.Random(3)))).chance < shown("s", search(noise(8, random.Random(3)))).chance
    for number, one in enumerate(trials):
        one["value"] = float(number)
        one["values"] |= {"real": number, "kind": "ab"[number >= 5]}
    page = shown("s", search(trials))
    assert {one.path for one in page.importances if one.is_told} >= {"real", "kind"}
    assert all(one.is_told == (one.share > page.chance) for one in page.importances)


def test_a_value_that_is_not_finite_is_missing() -> None:
    given: list[Any] = [10, math.nan, 9, 10**400, 100, math.inf, 1e308, -1e308]
    trials = [trial(number, float(number), values={"a": value}) for number, value in enumerate(given)]
    trials[2]["value"], trials[4]["value"] = 10**400, math.nan
    page = shown("s", search(trials), "a")
    assert [row.job_uuid for row in page.rows] == [f"s-{number}" for number in (7, 2, 0, 4, 6, 1, 3, 5)]
    assert {row.job_uuid for row in page.rows if row.value is None} == {"s-2", "s-4"}
    assert page.plot is not None
    assert "nan" not in " ".join(line.points for line in page.plot.lines)
    assert "inf" not in " ".join(line.points for line in page.plot.lines)
    many = [trial(number, float(number), values={"a": number or math.nan}) for number in range(20)]
    assert "rank correlation +1.00" in shown("s", search(many)).importances[0].text


def test_trials_that_were_pruned_or_still_run_count_for_no_importance() -> None:
    trials = [trial(number, float(number)) for number in range(LEAST_TRIALS)]
    assert shown("s", search(trials)).importances
    trials[0] |= {"pruned": "it was among the worst half"}
    assert not shown("s", search(trials)).importances
    trials[0] |= {"pruned": None, "state": "in_progress"}
    page = shown("s", search(trials))
    assert not page.importances
    assert page.completed == LEAST_TRIALS - 1


def test_as_many_trials_are_compared_as_the_page_of_comparisons_takes() -> None:
    from llama_stack_provider_trl_remote.service.pages.compare_pages import MOST

    assert MOST_COMPARED == MOST
    trials = [trial(number, float(number)) for number in range(20)]
    assert shown("s", search(trials)).compared.count("job=") == MOST
    assert shown("s", search(trials[:1])).compared == ""
