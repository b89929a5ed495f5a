"""What no test may leave behind for the tests after it in the same process."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llama_stack_provider_trl.recipes.imports import quick_imports
from tests import forked
from tests.traces import SHARED

_TESTS = Path(__file__).parent
_IN_TURN = pytest.StashKey[bool]()
"""Whether this worker of pytest has collected its directories in another order."""
# Imported modules and collected tests are a million objects, none of them garbage: without the collector each worker
# collects its tests in 20 s of CPU time where it took 25. What trl and transformers read at their imports is 1 s more.
_COLLECTION = ExitStack()
_COLLECTION.enter_context(quick_imports())
atexit.register(_COLLECTION.close)  # of a process that collects nothing


@pytest.fixture(autouse=True)
def umask_and_working_directory_are_kept() -> Iterator[None]:
    """A process has one of each, so one test could make the modes or paths of all that follow wrong."""
    before = _umask(), Path.cwd()
    yield
    assert (_umask(), Path.cwd()) == before, "this test has changed the umask or working directory of the process"


def pytest_collection_finish() -> None:
    _COLLECTION.close()
    gc.enable()


def _in_turn(number: int, workers: int) -> list[str]:
    """The directories of tests, for each worker from another one on: each compiles others, and finds the rest compiled.
    In a new checkout, where no file is, every worker would compile all of them: 7 s of CPU time each."""
    found = sorted(path for path in _TESTS.iterdir() if any(path.glob("test_*.py")))
    files = [len(list(path.glob("test_*.py"))) for path in found]
    begin = next(at for at in range(len(found)) if sum(files[: at + 1]) > sum(files) * number // workers)
    return [str(path) for path in (*found[begin:], *found[:begin])]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the order of a worker that begins with the first directory: all have the same one."""
    if config.stash.get(_IN_TURN, False):
        items.sort(key=lambda item: item.path.parent)


def _umask() -> int:
    os.umask(umask := os.umask(0o077))
    return umask


def pytest_configure(config: pytest.Config) -> None:
    """Begin without traces of earlier runs: what a trace does to a training would show in the first run only. The
    workers of this run fork from the same processes."""
    if worker := getattr(config, "workerinput", None):
        if [Path(one).resolve() for one in config.args] == [_TESTS]:
            config.args = _in_turn(int(worker["workerid"].removeprefix("gw")), int(worker["workercount"]))
            config.stash[_IN_TURN] = True
    else:
        shutil.rmtree(SHARED, ignore_errors=True)
        config.add_cleanup(lambda: shutil.rmtree(SHARED, ignore_errors=True))
        shared = ExitStack()
        os.environ[forked.DIRECTORY] = shared.enter_context(forked.shared_directory())
        config.add_cleanup(shared.close)
