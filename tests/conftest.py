"""What no test may leave behind for the tests after it in the same process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.recipes.imports import quick_imports
from tests import compiled, forked
from tests.ranks import Ranks, forked_ranks
from tests.traces import SHARED

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


@pytest.fixture(autouse=True)
def logs_go_nowhere_that_is_closed() -> Iterator[None]:
    """A program that a test calls logs to that test's standard error. What is logged after it, by a task that is freed
    by then, would be an error in the output of another test."""
    yield
    for handler in [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]:
        logging.root.removeHandler(handler)


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of faults of all trainings of a module, as soon as one of its tests uses it or `ranks`."""
    directory = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, str(directory))
        yield directory


@pytest.fixture(scope="module")
def ranks(armed: Path) -> Iterator[Ranks]:
    with forked_ranks() as ranks:
        yield ranks


def pytest_collection_finish() -> None:
    _COLLECTION.close()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS:  # all tests
        compiled.compile_tests()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (started := forked.started(os.environ[forked.DIRECTORY])):
        terminalreporter.section("processes that were started, and not forked")
        for reason, times in Counter(started).most_common():
            terminalreporter.line(f"{times} x {reason}"[:300])


def _umask() -> int:
    os.umask(umask := os.umask(0o077))
    return umask


def pytest_configure(config: pytest.Config) -> None:
    """Begin without traces of earlier runs: what a trace does to a training would show in the first run only. The
    workers of this run fork from the same processes."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(SHARED, ignore_errors=True)
        config.add_cleanup(lambda: shutil.rmtree(SHARED, ignore_errors=True))
        shared = ExitStack()
        os.environ[forked.DIRECTORY] = shared.enter_context(forked.shared_directory())
        config.add_cleanup(shared.close)
