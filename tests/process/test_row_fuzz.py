"""Damaged rows are trained or refused by a sentence; 100,000 of them by command (`tests.process.row_fuzz`)."""

from __future__ import annotations

import random

import pytest

from tests.process.row_fuzz import chats, damaged, outcome

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_damaged_rows_are_trained_or_refused() -> None:
    templates, outcomes = chats(), set()
    for number in range(2000):
        generator = random.Random(f"ci-{number}")
        use, row = damaged(generator)
        try:
            outcomes.add(outcome(use, row, generator.choice(templates)))
        except Exception as error:
            pytest.fail(f"row {number}: {use} {row!r}: {error!r}")
    assert outcomes == {"trained", "refused"}
