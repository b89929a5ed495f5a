"""Code of other packages in the processes that serve requests: without training libraries, within a deadline.

A package is imported by a thread of its own, which a deadline leaves behind. What has failed is remembered until the
package's files, or what is installed, change.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import MethodUnavailable
from ..system.process import child_environment

TRAINING_LIBRARIES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")
"""What the request part of a method may not import."""
DEADLINE_S = 30.0
_MOST_FILES = 2000
_INSTALLED = (".dist-info", ".egg-info", ".pth")

_TRY_SECONDS = DEADLINE_S
_ENDED = b"ended"
_TRY = f"""
import importlib, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import without_training_libraries
try:
    with without_training_libraries():
        importlib.import_module(sys.argv[2])
except BaseException:
    pass
os.write(int(sys.argv[3]), {_ENDED!r})
os._exit(0)
"""

Files = tuple[tuple[str, int, int], ...]
"""Path, time of change and size of each file that decides about an import; of distributions, the path alone."""


@contextmanager
def reported(what: str, *, names_fields: bool = False) -> Iterator[None]:
    """Turn what a package's own code raises into one sentence.

    Args:
        names_fields: a ValidationError is about what the caller has given, and is raised as it is.
    """
    try:
        yield
    except MethodUnavailable:
        raise
    except (Exception, SystemExit) as error:
        if names_fields and isinstance(error, ValidationError):
            raise
        text = first_problem(error) if isinstance(error, ValidationError) else _one_line(str(error))
        raise MethodUnavailable(f"{what}: {type(error).__name__}{f': {text}' if text else ''}") from error


def first_problem(error: ValidationError) -> str:
    """The first field that a model does not accept, and why, on one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    at = ".".join(map(str, first["loc"]))
    return _one_line(f"{at}: {first['msg']}" if at else first["msg"])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


@contextmanager
def without_training_libraries() -> Iterator[None]:
    """Refuse the first import of training libraries in this thread: a service would hold 0.5 GiB more."""
    finder = _Refusing(threading.get_ident())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Refusing:
    """A finder of the import system that finds nothing."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in TRAINING_LIBRARIES and threading.get_ident() == self._thread:
            raise ImportError(f"it imports {fullname}, which only its trainer's module may", name=fullname)


@dataclass
class _Attempt[T]:
    files: Files
    until: float
    ended: threading.Event = field(default_factory=threading.Event)
    value: T | None = None
    problem: str = ""


class Imports[T]:
    """Objects of modules, each imported once per process.

    A failed import is repeated when the package's files have changed, or what is installed: it may have been what was
    missing. One that takes longer than `DEADLINE_S` has failed until it ends.
    """

    def __init__(self) -> None:
        self._attempts: dict[Any, _Attempt[T]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, module: str, load: Callable[[], T], what: str, *, tries_first: bool = True) -> T:
        """What `load` returns, which imports `module`. Raises MethodUnavailable: it raised that, or has not ended in
        time; `what` is the subject of that sentence.

        Args:
            tries_first: another process imports it before this one does.
        """
        with self._lock:
            attempt = self._attempts.get(key)
            if attempt is None or (attempt.ended.is_set() and attempt.problem and attempt.files != _files_of(module)):
                attempt = _Attempt(_files_of(module), time.monotonic() + DEADLINE_S)
                self._attempts[key] = attempt
                name = f"import {module}"
                threading.Thread(
                    target=_load, args=(attempt, module, load, what if tries_first else ""), name=name, daemon=True
                ).start()
        if not attempt.ended.wait(max(0.0, attempt.until - time.monotonic())):
            raise MethodUnavailable(
                f"{what} cannot be imported: its import has not ended in {DEADLINE_S:g} s; its author has to make it "
                "shorter, and this process has to be started again if it never ends"
            )
        if attempt.problem or attempt.value is None:
            raise MethodUnavailable(attempt.problem)
        return attempt.value


def _load[T](attempt: _Attempt[T], module: str, load: Callable[[], T], what: str) -> None:
    before = set(sys.modules)
    try:
        if what and (problem := _tried_elsewhere(module)):
            attempt.problem = f"{what} cannot be imported: {problem}"
            return
        with without_training_libraries():
            attempt.value = load()
    except BaseException as error:  # of another package's code, and in a thread of its own
        attempt.problem = str(error) or type(error).__name__
        _forget(module, before)
    finally:
        attempt.ended.set()


def _tried_elsewhere(module: str) -> str:
    """Import a module in another process first: one that ends its process, or never ends, must not do that here.
    Returns why it cannot be imported; empty: it can, or it raises an error, as it will here."""
    read, write = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _TRY, json.dumps(sys.path), module, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(os.environ, {}),
            pass_fds=(write,),
            start_new_session=True,
        )
    except OSError:
        os.close(read)
        return ""  # out of processes: the import here has its deadline
    finally:
        os.close(write)
    with open(read, "rb", buffering=0) as pipe:
        try:
            status = child.wait(_TRY_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return (
                f"its import has not ended in {_TRY_SECONDS:g} s; its author has to make it shorter, and it is tried "
                "again once the package's files have changed"
            )
        # Without a read that waits: what it has started may have the pipe.
        os.set_blocking(read, False)
        ended = pipe.read(len(_ENDED))
    return "" if ended == _ENDED else f"its import ends the process (status {status}); its author has to correct that"


def _forget(module: str, before: set[str]) -> None:
    """Forget the modules of a package whose import has failed: the next attempt reads their files again."""
    package = module.partition(".")[0]
    for name in set(sys.modules) - before:
        if name == package or name.startswith(f"{package}."):
            sys.modules.pop(name, None)


def _files_of(module: str) -> Files:
    """The Python files of a module's package, and what is installed."""
    found: list[Path] = []
    with suppress(ImportError, ValueError, AttributeError):
        spec = PathFinder.find_spec(module.partition(".")[0])
        if spec is not None:
            found += [Path(spec.origin)] if spec.origin else []
            for place in spec.submodule_search_locations or ():
                found += _python_files(place)
    return (*_installed(), *(entry for path in found if (entry := _state(path)) is not None))


def _installed() -> Iterator[tuple[str, int, int]]:
    for place in filter(None, sys.path):
        with suppress(OSError):
            for name in sorted(os.listdir(place)):
                if name.endswith(_INSTALLED):
                    yield str(Path(place, name)), 0, 0


def _python_files(place: str) -> list[Path]:
    found: list[Path] = []
    for directory, directories, names in os.walk(place):
        directories.sort()
        found += [Path(directory, name) for name in sorted(names) if name.endswith(".py")]
        if len(found) >= _MOST_FILES:
            break
    return found[:_MOST_FILES]


def _state(path: Path) -> tuple[str, int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return str(path), status.st_mtime_ns, status.st_size
    return None
