"""The job store of a test, and the clock that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    """An empty one. A module that needs jobs in it extends this fixture by one of the same name."""
    store = Store(tmp_path / "jobs.db", clock)
    yield store
    store.close()
