"""Which jobs may start after others."""

from __future__ import annotations

import pytest

from llama_stack_provider_trl.jobs.decisions.graph import Blocked, Decisions, Predecessor, cycle, decide
from llama_stack_provider_trl.jobs.decisions.states import JobState


def after(name: str, state: JobState | None = JobState.scheduled, **more: object) -> Predecessor:
    return Predecessor(name, state, **more)  # type: ignore[arg-type]


def blocked(name: str, *predecessors: Predecessor, detail: str = "", cancel_with: bool = False) -> Blocked:
    return Blocked(name, 0, detail, cancel_with, predecessors)


def ends(decided: Decisions) -> dict[str, tuple[str, str]]:
    return {job.job_uuid: (state.value, why) for job, state, why in decided.ended}


def test_a_job_starts_when_all_before_it_have_completed() -> None:
    done, open_ = after("a", JobState.completed), after("b", JobState.in_progress, step=40, total_steps=100)
    assert decide([blocked("c", done)]).ready == ("c",)
    assert decide([blocked("c", done, open_)]).waiting == (("c", "waits for job b (in_progress, step 40 of 100)"),)


def test_the_reason_for_waiting_names_three_jobs_and_counts_the_others() -> None:
    (_, two), (_, five) = decide(
        [
            blocked("x", after("a"), after("b", JobState.paused)),
            blocked("y", *(after(name) for name in "abcde")),
        ]
    ).waiting
    assert two == "waits for job a (scheduled) and job b (paused)"
    assert five == "waits for job a (scheduled), job b (scheduled), job c (scheduled) and 2 more"


def test_a_reason_that_has_not_changed_is_not_written_again() -> None:
    assert decide([blocked("b", after("a"), detail="waits for job a (scheduled)")]) == Decisions((), (), ())


def test_a_job_that_was_deleted_fails_what_waits_for_it() -> None:
    assert ends(decide([blocked("b", after("a", None))])) == {
        "b": ("failed", "job 'a', which it waited for, was deleted before it completed")
    }


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({}, []),
        ({"a": ["x"], "b": ["a", "x"], "c": ["a", "b"]}, []),
        ({"a": ["a"]}, ["a", "a"]),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b", "c", "b"]),
        ({"d": ["a"], "a": ["b"], "b": ["c", "d"], "c": []}, ["d", "a", "b", "d"]),
    ],
)
def test_jobs_that_wait_for_one_another_are_found(graph: dict[str, list[str]], found: list[str]) -> None:
    assert cycle(graph) == found


def test_a_chain_of_ten_thousand_jobs_has_no_cycle_and_no_recursion() -> None:
    chain = {f"job-{number}": [f"job-{number + 1}"] for number in range(10_000)}
    assert cycle(chain) == []
    assert len(cycle({**chain, "job-10000": ["job-0"]})) == 10_002
