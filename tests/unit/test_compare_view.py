"""The difference of jobs' configurations, and their results."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl_remote.service.pages.compare_view import (
    ComparedQuery,
    ComparedRun,
    answers_link,
    compared,
    in_order,
    measured,
    rate_of,
)
from llama_stack_provider_trl_remote.service.pages.job_view import Setting
from llama_stack_provider_trl_remote.service.pages.settings_view import in_groups


def test_runs_are_sorted_by_a_column_and_the_address_keeps_what_was_chosen() -> None:
    def run(job: str, loss: float | None) -> ComparedRun:
        progress = {"loss": loss, "step": 3, "total_steps": 9, "tokens_per_second": None, "peak_memory_bytes": None}
        return ComparedRun.of(
            job, {"state": "completed", "progress": progress, "device": "cpu", "effective_config": {}}, None
        )

    runs = [run("b", 2.0), run("none", None), run("a", 1.0), run("c", 2.0)]
    assert [[one.job for one in in_order(runs, sort)] for sort in ("", "loss", "-loss", "job")] == [
        ["b", "none", "a", "c"],
        ["a", "b", "c", "none"],
        ["b", "c", "a", "none"],
        ["a", "b", "c", "none"],
    ]
    query = ComparedQuery(("a", "b/c"), frozenset({"b/c"}), "-loss")
    assert (query.direction("loss"), query.direction("job")) == ("descending", "")
    assert query.sorted_by("loss") == "/compare?job=a&job=b%2Fc&hide=b%2Fc"
    assert query.sorted_by("eval") == "/compare?job=a&job=b%2Fc&hide=b%2Fc&sort=eval"
    assert query.without("b/c") == "/compare?job=a&sort=-loss"


def test_settings_are_beside_each_other_and_those_that_differ_are_known() -> None:
    one = [
        Setting("job_uuid", "one", ""),
        Setting("memory.estimate_bytes", "", "1"),
        Setting("seed", "1", ""),
        Setting("batch", "4", "2"),
        Setting("lr", "1", ""),
    ]
    other = [
        Setting("job_uuid", "two", ""),
        Setting("seed", "1", ""),
        Setting("batch", "2", ""),
        Setting("dora", "a", ""),
    ]
    found = {setting.name: setting for setting in compared([one, other])}
    assert [*found] == ["seed", "batch", "lr", "dora"]
    assert [name for name, setting in found.items() if setting.differs] == ["lr", "dora"]
    assert (found["lr"].values, found["dora"].values) == (["1", ""], ["", "a"])


def test_a_job_alone_differs_from_nothing() -> None:
    assert not [one for one in compared([[Setting("seed", "1", "")]]) if one.differs]
    assert compared([]) == []


def test_results_are_beside_each_other_under_the_model_or_checkpoint_that_was_measured() -> None:
    base = {"job_uuid": "tune", "checkpoint": "checkpoint-2"}
    before = {"result": {"loss": 2.5, "checks": {"json": 0.25}}, "effective_config": {"model": "org/a", "bases": []}}
    below = {"job_uuid": "before-tune", "checkpoint": "final"}
    within: dict[str, Any] = {
        "result": {"loss": 2.25, "rows": 8},
        "effective_config": {"model": "org/a", "made_by": base, "bases": [base, below]},
    }
    training = {"effective_config": {"model": "org/a", "bases": []}}
    assert [(one.name, one.values) for one in measured([before, within, training])] == [
        ("model", ["org/a", "job:tune/checkpoint-2", ""]),
        ("loss", ["2.5", "2.25", ""]),
        ("checks.json", ["0.25", "", ""]),
        ("rows", ["", "8", ""]),
    ]
    assert measured([training]) == []
    of_jobs = ["/jobs/tune/checkpoint-2", "/jobs/before-tune/final"]
    members = [
        {"model": of_jobs[0], "made_by": base},
        {"model": "org/b", "adapter": {"model": of_jobs[1], "made_by": below}},
    ]
    both = {**within["effective_config"], "work": {"kind": "evaluate", "members": members}}
    assert measured([{**within, "effective_config": both}])[0].values == [
        "job:tune/checkpoint-2, job:before-tune/final"
    ]
    adapter = {"model": "org/a", "bases": [], "adapter": {"model": "/adapters/a"}}
    assert measured([{**before, "effective_config": adapter}])[0].values == ["/adapters/a"]
    assert not compared([[Setting("result.loss", "", "2.5")], [Setting("result.loss", "", "2.25")]])


def test_judges_and_models_that_no_job_has_made_are_not_taken_for_what_was_measured() -> None:
    judged = {"kind": "evaluate", "answers": {"judges": [{"model": "/jobs/judge/final", "made_by": {}}]}}
    judge = {"job_uuid": "judge", "checkpoint": "final"}
    tune = {"job_uuid": "tune", "checkpoint": "final"}
    made = {"model": "/jobs/tune/final", "made_by": tune}
    merge = {"inputs": [made, {"model": "org/b"}], "base": {"model": "org/a"}}
    members = [
        {"model": "org/a"},
        {"model": "org/b", "adapter": {"model": "/adapters/b"}},
        made,
    ]
    cases: list[tuple[dict[str, Any], dict[str, Any], list[Any], str]] = [
        (members[0], judged, [judge], "org/a"),
        (made, judged, [tune, judge], "job:tune/final"),
        (members[0], {"members": members}, [tune], "job:tune/final, org/a, /adapters/b"),
        (members[0], {"members": members[:2]}, [], "org/a, /adapters/b"),
        (members[0], {"kind": "merge", "merge": merge}, [tune], "job:tune/final, org/b, org/a"),
    ]
    for source, work, bases, expected in cases:
        config = {**source, "bases": bases, "work": work}
        assert measured([{"result": {"loss": 2.5}, "effective_config": config}])[0].values == [expected]


def test_settings_that_differ_stand_in_the_groups_of_a_job() -> None:
    one = [
        Setting("model", "a", ""),
        Setting("optimizer.learning_rate", "1", ""),
        Setting("global_batch_size", "", "8"),
    ]
    other = [Setting("model", "b", ""), Setting("optimizer.learning_rate", "2", ""), Setting("seed", "1", "")]
    groups = in_groups(setting for setting in compared([one, other]) if setting.differs)
    assert [(group.title, [row.name for row in group.settings]) for group in groups] == [
        ("Model", ["model"]),
        ("Data", ["seed"]),
        ("Optimizer", ["optimizer.learning_rate"]),
        ("Reported by the training", ["global_batch_size"]),
    ]


def test_the_link_to_answers_says_of_which_jobs_they_are() -> None:
    assert answers_link([]) is None
    few = answers_link(["a", "b&"])
    assert few == ("/answers?job=a&job=b%26", "Their answers beside each other")
    many = answers_link([f"j{number}" for number in range(8)])
    assert many is not None
    assert many.address == "/answers?job=j0&job=j1&job=j2&job=j3"
    assert many.text == "Answers of the first 4 of 8 jobs beside each other"


def test_only_a_job_that_trains_itself_has_a_learning_rate() -> None:
    config: dict[str, Any] = {"optimizer": {"learning_rate": 1e-3}, "work": None}
    assert rate_of(config) == 1e-3
    assert rate_of({**config, "work": {"kind": "evaluate"}}) is None
    assert rate_of({**config, "search": {"method": "grid"}}) is None
