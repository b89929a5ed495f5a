"""The job store of a test, its clock, and settings; the first case of each test alone, where that is requested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.settings import Settings
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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Those of a provider that trains on the CPU."""
    return Settings(data_dir=tmp_path / "data", devices=("cpu",))


OF_TEXTS = (
    *("test_architecture.py", "test_deploy.py", "test_docs_code_paths.py", "test_docs_picture.py", "test_space.py"),
    *("test_state_words.py", "test_troubleshooting.py", "test_tutorials.py"),
)
"""Files of tests that read this repository, in which every Python finds the same."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen = set[str]()

    def is_first(item: pytest.Item) -> bool:
        name = item.nodeid.partition("[")[0]
        return item.path.name not in OF_TEXTS and name not in seen and not seen.add(name)  # type: ignore[func-returns-value]

    if FIRST:
        keep(config, items, is_first)
