from __future__ import annotations

import pytest

from llama_stack_provider_trl.jobs.decisions.states import ACTIVE, REASONS, TERMINAL, TRANSITIONS, JobState, shown
from llama_stack_provider_trl.specs.events import Reason

LLAMA_STACK_WORDS = {"scheduled", "in_progress", "completed", "failed", "cancelled"}


def test_every_state_is_shown_in_a_word_of_llama_stack() -> None:
    assert {shown(state) for state in JobState} == LLAMA_STACK_WORDS


def test_a_job_without_a_device_is_shown_as_scheduled_and_one_that_stops_as_in_progress() -> None:
    assert shown(JobState.launching) == shown(JobState.paused) == "scheduled"
    assert shown(JobState.cancelling) == shown(JobState.pausing) == "in_progress"


def test_every_reason_has_advice_in_a_full_sentence() -> None:
    assert set(REASONS) == set(Reason)
    for remedy in REASONS.values():
        assert remedy.advice[0].isupper()
        assert remedy.advice.endswith(".")


def test_no_advice_submits_a_job_under_a_name_that_is_taken() -> None:
    for remedy in REASONS.values():
        asked, named = remedy.advice.count("submit "), remedy.advice.count("under another job_uuid")
        assert asked == named, remedy.advice


def test_every_state_has_a_row_in_the_table_and_the_end_is_the_end() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert all((not TRANSITIONS[state]) == (state in TERMINAL) for state in JobState)


@pytest.mark.parametrize("state", [state for state in JobState if state not in TERMINAL])
def test_every_job_can_still_be_cancelled(state: JobState) -> None:
    targets = TRANSITIONS[state]
    assert (JobState.cancelling in targets) == (state in ACTIVE - {JobState.cancelling})
    assert (JobState.cancelled in targets) == (state not in ACTIVE or state is JobState.cancelling)


def test_finished_wins_over_a_late_cancel() -> None:
    assert JobState.completed in TRANSITIONS[JobState.cancelling]
