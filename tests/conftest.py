"""What no test may leave behind for the tests after it in the same process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Imported modules and collected tests are a million objects, none of them garbage: without the collector each worker
# collects its tests in 20 s of CPU time where it took 25.
gc.disable()


@pytest.fixture(autouse=True)
def umask_and_working_directory_are_kept() -> Iterator[None]:
    """A process has one of each, so one test could make the modes or paths of all that follow wrong."""
    before = _umask(), Path.cwd()
    yield
    assert (_umask(), Path.cwd()) == before, "this test has changed the umask or working directory of the process"


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _umask() -> int:
    os.umask(umask := os.umask(0o077))
    return umask
