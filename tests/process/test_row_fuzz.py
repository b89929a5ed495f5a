"""Damaged rows are trained or refused by a sentence; 100,000 of them by command (`tests.process.row_fuzz`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process import row_fuzz

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_damaged_rows_are_trained_or_refused() -> None:
    counts = row_fuzz.hunt(500, seed=1)
    assert counts.total() >= 500
    assert counts.keys() == {"trained", "refused"}


def test_a_fault_is_shown_with_the_smallest_row_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(use: str, row: dict[str, Any], chat: Any) -> str:
        assert (use, row) in row_fuzz.ROWS
        return "trained"

    monkeypatch.setattr(row_fuzz, "outcome", faulty)
    with pytest.raises(AssertionError) as failed:
        row_fuzz.hunt(200, seed=1)
    (shown,) = [note for note in failed.value.__notes__ if "try_row(" in note]
    assert len(shown) < 1000  # one value of one of the rows is changed
