"""Loaned nodes: what their owner's load means for jobs, how it is measured, and what agent and service do about it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl_remote.nodes.owner import (
    SAVING_SECONDS,
    Loan,
    LoanTerms,
    OwnerWatch,
    Processes,
    ProcessTime,
    owner_load,
    spent,
    tree,
)
from llama_stack_provider_trl_remote.nodes.start import worker_settings
from llama_stack_provider_trl_remote.wire import OwnerUse
from tests.fakes import FakeClock

TERMS = LoanTerms(max_load=0.5, idle_seconds=10.0)


def after(loads: Iterable[float], step: float = 2.0, loan: Loan | None = None, begin: float = 0.0) -> list[str]:
    """What each load, of so many seconds, means."""
    loan = loan or Loan(TERMS)
    found = []
    for number, load in enumerate(loads):
        loan.note(load, begin + number * step, begin + (number + 1) * step)
        found.append(str(loan.use))
    return found


def test_a_machine_takes_jobs_once_its_owners_load_was_low_for_long_enough() -> None:
    assert after([0.1] * 6) == [*["unknown"] * 4, "low", "low"]


def test_a_short_load_changes_nothing_and_one_that_lasts_gives_the_machine_back() -> None:
    assert after([*[0.1] * 5, 0.9, 0.1, 0.9, 0.9, 0.1])[4:] == ["low", "low", "low", "low", "high", "high"]
    assert after([0.9, 0.9]) == ["unknown", "high"]


def test_a_load_at_the_limit_lets_jobs_neither_come_nor_go() -> None:
    loan = Loan(TERMS)
    assert after([*[0.1] * 5, *[0.5] * 20], loan=loan)[-1] == "low"
    assert after([0.9, 0.9], loan=loan, begin=50.0)[-1] == "high"
    assert after([0.45] * 20, loan=loan, begin=54.0)[-1] == "high"
    assert after([0.1] * 4, loan=loan, begin=94.0)[-1] == "high"
    assert after([0.45, 0.1, 0.1, 0.1, 0.1, 0.1], loan=loan, begin=102.0) == [*["high"] * 5, "low"]


def test_what_has_not_saved_in_time_is_overdue_however_the_load_continues() -> None:
    loan = Loan(TERMS)
    assert after([*[0.1] * 5, 0.9, 0.9, 0.2], loan=loan)[-1] == "high"
    assert not loan.is_overdue(10.0 + SAVING_SECONDS - 0.1)
    assert loan.is_overdue(10.0 + SAVING_SECONDS)
    after([0.1] * 5, loan=loan, begin=16.0)
    assert (loan.use, loan.is_overdue(1e6)) == (OwnerUse.low, False)
    assert not Loan(TERMS).is_overdue(1e6)


# Measurement


def processes(*found: tuple[int, int, float], uid: int = 7, created: float = 1.0) -> Processes:
    """Each as pid, parent, CPU seconds."""
    return {pid: ProcessTime(pid, parent, created, uid, seconds) for pid, parent, seconds in found}


def test_a_tree_has_all_that_descend_from_its_roots() -> None:
    found = processes((1, 0, 0.0), (2, 1, 0.0), (3, 2, 0.0), (4, 3, 0.0), (5, 1, 0.0))
    assert (tree([2, 9], found), tree([], found)) == ({2, 3, 4}, set())


def test_time_of_processes_that_have_ended_counts_once() -> None:
    before = processes((2, 1, 5.0), (3, 2, 4.0))
    assert spent(before, processes((2, 1, 6.0), (3, 2, 4.5), (4, 2, 0.25))) == 1.75  # 4 is new
    assert spent(before, processes((2, 1, 10.5))) == 1.5  # 3 has ended after 4.5 s, which its parent has now, too
    other = {2: ProcessTime(2, 1, 99.0, 7, 0.5)}  # another process with the number of the first
    assert spent(processes((2, 1, 5.0)), other) == 0.5
    assert spent(before, {}) == 0.0


def test_the_owners_share_is_without_ours() -> None:
    before = {**processes((2, 1, 5.0)), **processes((8, 1, 1.0), uid=9)}
    now = {**processes((2, 1, 7.0)), **processes((8, 1, 2.0), uid=9)}
    assert owner_load(before, now, {2}, None, busy=3.0, total=4.0) == 0.25
    assert owner_load(before, now, {2}, 9, busy=3.0, total=4.0) == 0.25
    assert owner_load(before, now, {8}, 9, busy=3.0, total=4.0) == 0.0
    assert owner_load(before, now, set(), None, busy=9.0, total=4.0) == 1.0
    assert owner_load(before, now, set(), None, busy=0.0, total=0.0) == 0.0


def test_a_watch_follows_the_load_and_the_time_of_this_agent_is_not_the_owners(tmp_path: Path) -> None:
    clock, ours, busy = FakeClock(0.0), [0.0], [0.0]
    watch = OwnerWatch(
        TERMS,
        lambda: processes((os.getpid(), 1, ours[0])),
        lambda: (busy[0], clock.now * 2),
        clock,
    )
    assert not watch.measure([])
    for _ in range(5):
        clock.advance(2.0)
        ours[0], busy[0] = ours[0] + 4.0, busy[0] + 4.0  # all cores, and all of it ours
        changed = watch.measure([tmp_path / "no such task"])
    assert (changed, watch.use) == (True, OwnerUse.low)
    for _ in range(2):
        clock.advance(2.0)
        busy[0] += 4.0
        watch.measure([])
    assert (watch.use, watch.is_overdue()) == (OwnerUse.high, False)
    clock.advance(SAVING_SECONDS)
    assert watch.is_overdue()


def test_a_machine_that_can_no_longer_be_measured_takes_no_further_jobs() -> None:
    loan = Loan(TERMS)
    assert after([0.1] * 5, loan=loan)[-1] == "low"
    assert (loan.lose_sight(), loan.use, loan.lose_sight()) == (True, OwnerUse.unknown, False)
    assert after([0.1] * 5, loan=loan, begin=20.0) == [*["unknown"] * 4, "low"]
    after([0.9] * 2, loan=loan, begin=30.0)
    assert (loan.lose_sight(), loan.use, loan.is_overdue(30.0 + SAVING_SECONDS)) == (False, OwnerUse.high, True)


def test_a_machine_that_cannot_be_measured_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Processes:
        raise PermissionError("/proc")

    watch = OwnerWatch(TERMS, fails)
    assert (watch.measure([]), watch.measure([]), watch.use) == (False, False, OwnerUse.unknown)
    assert caplog.text.count("the load of this machine's owner cannot be measured: /proc") == 1


# Settings


ENVIRON = {"TRL_SERVICE_NODE_TOKEN": "t", "TRL_NODE_ADDRESS": "10.0.0.1", "TRL_NODE_DEVICE": "cpu"}


def terms(environ: dict[str, str] | None = None, **given: Any) -> LoanTerms | None:
    return worker_settings("http://10.0.0.9:8322", {**ENVIRON, **(environ or {})}, name="b", **given).loan


def test_a_measurement_that_fails_in_any_way_does_not_end_the_watch() -> None:
    def fails() -> Processes:
        raise RuntimeError("dictionary changed size during iteration")

    watch = OwnerWatch(TERMS, fails)
    assert (watch.measure([]), watch.use) == (False, OwnerUse.unknown)


def test_the_terms_of_a_loan_come_from_options_and_the_environment() -> None:
    assert terms() is None
    assert terms(loaned=True) == LoanTerms(0.3, 60.0, None)
    environ = {"TRL_NODE_LOANED": "on", "TRL_NODE_LOANED_MAX_LOAD": "0.2", "TRL_NODE_LOANED_IDLE_SECONDS": "5"}
    assert terms({**environ, "TRL_NODE_LOANED_USER": "root"}) == LoanTerms(0.2, 5.0, "root")
    assert terms(environ, loaned_max_load="1") == LoanTerms(1.0, 5.0, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loaned_max_load": "0.5"}, "loaned_max_load='0.5': this machine is not loaned; set --loaned too"),
        ({"loaned": True, "loaned_max_load": "30"}, "expected a share of the cores above 0, at most 1"),
        ({"loaned": True, "loaned_max_load": "much"}, "loaned_max_load='much': expected a share"),
        ({"loaned": True, "loaned_idle_seconds": "0"}, "expected seconds above 0, at most 86400"),
        ({"loaned": True, "loaned_user": "no-such-user"}, "loaned_user='no-such-user': this machine has no such user"),
        ({"environ": {"TRL_NODE_LOANED": "yes"}}, "loaned='yes': use on or off"),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TrlError, match=message):
        terms(**given)
