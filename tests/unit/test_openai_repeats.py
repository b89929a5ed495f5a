"""Which job a request that OpenAI's SDK repeats finds: one whose answer may have been lost, and no other."""

from __future__ import annotations

from llama_stack_provider_trl_remote.openai.jobs import BACK_OFF, Repeats


def test_an_answer_may_be_lost_until_the_sdk_would_have_tried_again() -> None:
    repeats = Repeats(started=0)
    repeats.answer("a", begun=1000, now=1030)
    assert repeats.may_be("a", 1029, None, 1030 + 30 + BACK_OFF)
    assert not repeats.may_be("a", 1029, None, 1031 + 30 + BACK_OFF)
    repeats.answer("a", begun=1050, now=1050)  # of the second try, which does not shorten it
    assert repeats.may_be("a", 1029, None, 1030 + 30 + BACK_OFF)


def test_an_answer_that_was_seen_is_not_lost_and_neither_is_a_job_that_ended_before() -> None:
    repeats = Repeats(started=0)
    repeats.answer("a", begun=1000, now=1001)
    assert repeats.may_be("a", 1001, 1002, 1003)
    assert not repeats.may_be("a", 1001, 1002, 1003 + BACK_OFF)
    repeats.see("a")
    assert not repeats.may_be("a", 1001, None, 1003)


def test_after_a_restart_the_times_decide() -> None:
    repeats = Repeats(started=1000)
    assert repeats.may_be("a", 950, None, 1005)  # its answer was lost with the service
    assert not repeats.may_be("a", 950, None, 1001 + BACK_OFF)
    assert not repeats.may_be("a", 900, None, 1005)
    assert not repeats.may_be("a", 950, 960, 1005)


def test_the_record_is_bounded() -> None:
    repeats = Repeats(started=0)
    for number in range(5000):
        repeats.see(f"{number}")
    assert len(repeats._until) == 4096
    assert not repeats.may_be("4999", 10_000, None, 10_000)
