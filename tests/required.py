"""What a test needs of its machine: without it the test is skipped, but not in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

FULL = os.environ.get("TRL_TESTS") == "full"
"""Whether every variant of a behaviour is tried, and what takes minutes: `TRL_TESTS=full ./scripts/test.sh FILE`."""
FIRST = os.environ.get("TRL_TESTS") == "first"
"""Whether of each unit test only its first case is tried: scripts/test-pythons.sh."""
ALL_SERVERS = FULL or "TRL_RELEASES" in os.environ
"""Whether what is the same under several servers is tried on each: scripts/test-matrix.sh, too."""
IN_FULL = pytest.mark.skipif(not FULL, reason="TRL_TESTS=full runs it")


def in_full[Case](*cases: Case) -> tuple[Case, ...]:
    """Cases of a behaviour of which CI tries others: `[("sft", 1), *in_full(("dpo", 1))]`."""
    return cases if FULL else ()


def keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    """Deselect the tests that are not wanted."""
    left = [item for item in items if wanted(item)]
    kept = {id(item) for item in left}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = left


def lacking(reason: str) -> NoReturn:
    """Skip the test; fail it where CI runs as root on Linux, which installs and may do whatever tests need."""
    assert not (os.environ.get("CI") == "true" and sys.platform == "linux" and os.getuid() == 0), reason
    pytest.skip(reason)
