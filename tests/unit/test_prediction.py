"""When waiting jobs start, as far as the ends of the jobs before them are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llama_stack_provider_trl.jobs.decisions import prediction
from llama_stack_provider_trl.jobs.decisions.demands import Queued
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.decisions.prediction import PredictedStart, RunningJob, StepPace, WaitingJob, predict
from llama_stack_provider_trl.jobs.decisions.states import JobState

NOW = 1000.0
ONE = [Node("head", ("cpu",), head=True)]
TWO = [Node("head", ("cuda:0", "cuda:1"), head=True)]
UNKNOWN = StepPace()


def waiting(
    name: str, age: int, pace: StepPace = UNKNOWN, not_before: float = 0.0, priority: int = 0, ranks: int = 1
) -> WaitingJob:
    job = Queued(name, "auto", age, priority, ranks=ranks, scheduled_at=NOW)
    return WaitingJob(job, not_before, pace)


def running(name: str, pace: StepPace = UNKNOWN, state: JobState = JobState.in_progress) -> RunningJob:
    return RunningJob(name, state, pace)


def starts(
    jobs: Sequence[WaitingJob], held: dict[str, str], at_work: Sequence[RunningJob], nodes: Sequence[Node] = ONE
) -> dict[str, float | str]:
    """Job -> seconds until it starts, or why that is not known."""
    found = predict(jobs, nodes, held, at_work, NOW)
    return {name: start.why if start.at is None else start.at - NOW for name, start in found.items()}


def test_a_job_starts_when_the_one_before_it_has_done_its_steps_and_the_next_is_not_known() -> None:
    jobs = [waiting("next", 1), waiting("later", 2)]
    assert starts(jobs, {"cpu": "runs"}, [running("runs", StepPace(30, 2.0, NOW - 1))]) == {
        "next": 59.0,
        "later": "next starts before it and has not trained yet",
    }


def test_a_free_device_is_taken_at_once_and_a_job_that_has_trained_before_has_a_duration() -> None:
    jobs = [waiting("late", 3), waiting("urgent", 2, StepPace(10, 3.0, 5.0), priority=1), waiting("old", 1)]
    assert starts(jobs, {}, []) == {
        "urgent": 0.0,
        "old": 30.0,
        "late": "old starts before it and has not trained yet",
    }


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (running("runs"), "runs has done no step yet"),
        (running("runs", state=JobState.launching), "runs has done no step yet"),
        (running("runs", StepPace(9, 1.0, NOW), JobState.pausing), "runs is pausing"),
        (running("runs", StepPace(0, 1.0, NOW)), "runs has done its steps and saves its result"),
        (running("other", StepPace(9, 1.0, NOW)), "processes of job runs have not ended yet"),
    ],
)
def test_an_end_that_is_not_known_is_named(job: RunningJob, why: str) -> None:
    assert starts([waiting("next", 1)], {"cpu": "runs"}, [job]) == {"next": why}


def test_a_job_that_makes_no_more_steps_does_not_come_closer_to_its_end() -> None:
    stuck = running("runs", StepPace(10, 2.0, NOW - 500))
    assert starts([waiting("next", 1)], {"cpu": "runs"}, [stuck]) == {"next": 18.0}


def test_a_job_of_two_ranks_waits_for_both_devices() -> None:
    held = {"cuda:0": "short", "cuda:1": "long"}
    at_work = [running("short", StepPace(10, 1.0, NOW)), running("long", StepPace(90, 1.0, NOW))]
    assert starts([waiting("pair", 1, ranks=2), waiting("single", 2)], held, at_work, TWO) == {
        "single": 10.0,
        "pair": "single starts before it and has not trained yet",
    }
    assert starts([waiting("pair", 1, ranks=2)], held, at_work, TWO) == {"pair": 90.0}


def test_a_job_that_waits_for_its_next_attempt_starts_then_at_the_earliest() -> None:
    jobs = [waiting("retried", 1, not_before=NOW + 300)]
    assert starts(jobs, {}, []) == {"retried": 300.0}
    assert starts(jobs, {"cpu": "runs"}, [running("runs", StepPace(900, 1.0, NOW))]) == {"retried": 900.0}


def test_where_no_machine_can_serve_a_job_nothing_is_predicted() -> None:
    closed = [Node("head", ("cuda:0",), head=True, why_closed="cordoned")]
    assert predict([waiting("next", 1)], closed, {}, [], NOW) == {
        "next": PredictedStart(None, "no machine that takes jobs now can serve it")
    }


def test_a_job_that_comes_after_others_starts_when_their_steps_are_done() -> None:
    after = waiting("after", 1)._replace(after=frozenset({"runs"}))
    later = waiting("later", 2)._replace(after=frozenset({"paused"}))
    at_work = [running("runs", StepPace(30, 2.0, NOW - 1))]
    assert starts([after, later], {"cuda:0": "runs"}, at_work, TWO) == {
        "after": 59.0,
        "later": "it waits for job paused",
    }


def at_work(
    name: str, pace: StepPace, age: int = 0, attempt: int = 1, state: JobState = JobState.in_progress
) -> RunningJob:
    return RunningJob(name, state, pace, Queued(name, "auto", age, scheduled_at=NOW), attempt, NOW - 60)


def preempted(
    jobs: Sequence[WaitingJob], held: dict[str, str], runs: Sequence[RunningJob], *, preempts: bool = True
) -> dict[str, float | str]:
    found = predict(jobs, ONE, held, runs, NOW, preempts=preempts)
    return {name: start.why if start.at is None else start.at - NOW for name, start in found.items()}


def test_a_critical_job_starts_where_others_save_and_wait_and_these_continue_after_it() -> None:
    runs, held = [at_work("runs", StepPace(30, 2.0, NOW))], {"cpu": "runs"}
    critical = waiting("critical", 2, StepPace(5, 4.0), priority=2)
    jobs = [waiting("next", 1), critical]
    assert preempted(jobs, held, runs, preempts=False) == {"critical": 60.0, "next": 80.0}
    # The job that was paused for it is older than the next one, and has 60 seconds left.
    assert preempted(jobs, held, runs) == {"critical": 0.0, "next": 80.0}
    assert preempted([*jobs, waiting("second", 3, priority=2)], held, runs) == {
        "critical": 0.0,
        "second": 20.0,
        "next": "second starts before it and has not trained yet",
    }


def test_a_critical_job_waits_for_a_job_that_is_not_paused_again_and_for_one_that_ends() -> None:
    critical, held = [waiting("critical", 2, priority=2)], {"cpu": "runs"}
    pace = StepPace(30, 2.0, NOW)
    assert preempted(critical, held, [at_work("runs", pace, attempt=2)]) == {"critical": 60.0}
    # A job that was paused before trains for an hour: it began 60 s ago.
    assert preempted(critical, held, [at_work("runs", StepPace(50_000, 2.0, NOW), attempt=2)]) == {"critical": 3540.0}
    assert preempted(critical, held, [at_work("runs", UNKNOWN)]) == {"critical": 0.0}
    pausing = at_work("runs", pace, state=JobState.pausing)
    assert preempted(critical, held, [pausing]) == {"critical": "runs is pausing"}


def test_a_critical_job_that_comes_later_pauses_one_that_is_predicted_to_have_started() -> None:
    long = waiting("long", 1, StepPace(100, 1.0))
    late = waiting("critical", 2, StepPace(10, 1.0), not_before=NOW + 50, priority=2)
    assert preempted([long, late, waiting("last", 3)], {}, []) == {"long": 0.0, "critical": 50.0, "last": 110.0}


def test_more_jobs_and_machines_than_can_be_compared_soon_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [waiting(f"job-{number}", number, StepPace(10, 1.0)) for number in range(5)]
    monkeypatch.setattr(prediction, "_MOST_COMPARED", 2)
    assert starts(jobs, {}, []) == {
        **{"job-0": 0.0, "job-1": 10.0, "job-2": 20.0},
        **dict.fromkeys(["job-3", "job-4"], "too many jobs and machines are before it"),
    }


def test_what_is_examined_to_pause_jobs_for_critical_ones_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 critical jobs and 800 others on 100 nodes took 9 s."""
    monkeypatch.setattr(prediction, "_MOST_COMPARED", 2)
    jobs = [waiting(f"job-{number}", number, priority=2) for number in range(3)]
    runs, held = [at_work("runs", StepPace(30, 2.0, NOW))], {"cpu": "runs"}
    too_many = "too many jobs and machines are before it"
    assert preempted(jobs, held, runs) == dict.fromkeys(["job-0", "job-1", "job-2"], too_many)
    assert preempted(jobs, held, runs, preempts=False)["job-0"] == 60.0
