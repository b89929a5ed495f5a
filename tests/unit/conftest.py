"""The job store of a test, and the clock that it reads; the first case of each test alone, where that is requested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from tests.fakes import FakeClock
from tests.required import FIRST, keep


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    """An empty one. A module that needs jobs in it extends this fixture by one of the same name."""
    store = Store(tmp_path / "jobs.db", clock)
    yield store
    store.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen = set[str]()

    def is_first(item: pytest.Item) -> bool:
        name = item.nodeid.partition("[")[0]
        return name not in seen and not seen.add(name)  # type: ignore[func-returns-value]

    if FIRST:
        keep(config, items, is_first)
