from __future__ import annotations

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import Outcome
from llama_stack_provider_trl.jobs.supervision.verdict import Verdict, verdict
from llama_stack_provider_trl.launch.base import Observation, TaskState
from llama_stack_provider_trl.specs.events import Failed, Reason
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY

NOTHING = Outcome(offset=0, finished=False, failed=None)
FINISHED = Outcome(offset=9, finished=True, failed=None)


def ended(exit_code: int | None, **seen: str) -> Observation:
    return Observation(TaskState.exited, exit_code, **seen)


@pytest.mark.parametrize("exit_code", [0, 1, -9, -15, None])
@pytest.mark.parametrize("state", [JobState.launching, JobState.in_progress, JobState.cancelling])
def test_a_job_that_reported_finished_is_completed_whatever_came_after(state: JobState, exit_code: int | None) -> None:
    assert verdict(state, FINISHED, ended(exit_code), "log") == Verdict(JobState.completed)


@pytest.mark.parametrize("exit_code", [0, 1, -15, None])
def test_a_job_that_was_ordered_to_stop_is_cancelled_whatever_its_exit_code(exit_code: int | None) -> None:
    assert verdict(JobState.cancelling, NOTHING, ended(exit_code), "log") == Verdict(JobState.cancelled)


def test_a_failure_keeps_the_reason_and_the_end_of_the_traceback() -> None:
    traceback = "\n".join(f"frame {number}" for number in range(40)) + "\nOutOfMemoryError: 3 GiB"
    failed = Failed(reason=Reason.out_of_memory, message="no memory left on cuda:0", traceback=traceback)
    found = verdict(JobState.in_progress, Outcome(9, False, failed), ended(1), "log")
    assert (found.state, found.reason) == (JobState.failed, Reason.out_of_memory)
    assert found.message.startswith("no memory left on cuda:0\n")
    assert found.message.endswith("OutOfMemoryError: 3 GiB")
    assert "frame 0" not in found.message


def test_a_failure_without_a_traceback_is_one_sentence() -> None:
    failed = Failed(reason=Reason.invalid_model, message="no such model")
    assert verdict(JobState.in_progress, Outcome(9, False, failed), ended(1), "log").message == "no such model"


def test_exit_0_without_a_result_is_a_failure() -> None:
    found = verdict(JobState.in_progress, NOTHING, ended(0), "bye")
    assert found.reason is Reason.no_result
    assert "exited with 0" in found.message
    assert found.message.endswith("bye")


def test_a_crash_shows_its_exit_code_and_the_end_of_the_log() -> None:
    found = verdict(JobState.in_progress, NOTHING, ended(7), "Segmentation detail")
    assert found.reason is Reason.rank_failed
    assert "exited with 7" in found.message
    assert "Segmentation detail" in found.message


def test_a_kill_names_the_signal_and_its_likely_cause() -> None:
    killed = verdict(JobState.in_progress, NOTHING, ended(-9), "")
    assert killed.reason is Reason.rank_failed
    assert "SIGKILL" in killed.message
    assert "out-of-memory killer" in killed.message
    crashed = verdict(JobState.in_progress, NOTHING, ended(-11), "")
    assert "SIGSEGV" in crashed.message
    assert "out-of-memory" not in crashed.message


def test_a_chat_template_that_the_kernel_has_ended_is_the_models_fault_and_not_tried_again() -> None:
    found = verdict(JobState.in_progress, NOTHING, ended(-ENDED_BY), "")
    assert found.reason is Reason.invalid_model
    assert "a chat template, or the tokenizer, did not end within 10 s of CPU time" in found.message


def test_an_end_without_an_exit_status_is_a_lost_node() -> None:
    log = "\n".join(f"line {number}" for number in range(20))
    seen = ended(None, detail="node c is silent since 12:00:03 UTC")
    lost = verdict(JobState.in_progress, NOTHING, seen, log, log_file="/jobs/a/rank-0.log").message
    assert lost.splitlines()[1:] == ["Last lines of its log (/jobs/a/rank-0.log):", "line 17", "line 18", "line 19"]
    found = verdict(JobState.in_progress, NOTHING, ended(None, detail="the runner was killed"), "")
    assert found.reason is Reason.node_lost
    assert "the runner was killed" in found.message


def test_a_process_that_could_not_be_started_has_its_reason() -> None:
    found = verdict(JobState.launching, NOTHING, ended(None, launch_error="cannot start /x/python"), "")
    assert found == Verdict(JobState.failed, Reason.launch_failed, "cannot start /x/python")
