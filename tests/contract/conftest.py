"""One Llama Stack for the whole session, a browser for a module; the log of a server beside every test that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.contract import browser
from tests.contract.stack import LlamaStack, Server, serving
from tests.required import ALL_SERVERS, keep

SERVERS = ("kind", "stack")
"""Fixtures whose parameter is the server under test."""

pytest.register_assert_rewrite("tests.contract.crashing")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaStack]:
    with serving(LlamaStack(tmp_path_factory.mktemp("stack"))) as stack:
        yield stack


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Of a module and no longer: playwright has an event loop meanwhile, so that no test can run one of its own."""
    with browser.chromium() as found:
        yield found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark `in_turn`, CI tries one on the first of two servers, the next one on the
    other, and so on; of a module's tests with this mark that have one case each, likewise."""
    cases: Counter[tuple[str, int]] = Counter()

    def has_its_turn(item: pytest.Item) -> bool:
        if ALL_SERVERS or not isinstance(item, pytest.Function) or item.get_closest_marker("in_turn") is None:
            return True
        # pytest numbers the cases on, over both servers: of an odd number of cases both would have the same ones.
        (server,) = (index % 2 for name, index in item.callspec.indices.items() if name in SERVERS)
        has_cases = len(item.callspec.indices) > 1
        counted = item.nodeid.partition("[")[0] if has_cases else str(item.path), server
        number = cases[counted]
        cases[counted] += 1
        return number % 2 == server

    keep(config, items, has_its_turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server):
                report.sections.append((f"end of {value.log}", value.log_tail()))
    return report
