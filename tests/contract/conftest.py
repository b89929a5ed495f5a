"""One Llama Stack for the whole session; its log beside every test that fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.contract.stack import LlamaStack, Server, serving

pytest.register_assert_rewrite("tests.contract.crashing")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaStack]:
    with serving(LlamaStack(tmp_path_factory.mktemp("stack"))) as stack:
        yield stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server):
                report.sections.append((f"end of {value.log}", value.log_tail()))
    return report
