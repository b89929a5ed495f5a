"""Runs the source of graders of type python: each call in a process of its own, which can do nothing but compute.

It has limits of time and memory (`system.limited`), and no files, network or other processes (`system.strict`). What it
may import is imported before these are taken from it.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import numbers
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...errors import LimitReached
from ...system.limited import Limited, LimitExceeded, TooLate
from ...system.strict import can_be_strict, only_compute
from .errors import GradingError, NotInTimeError

LIMITS = Limited(seconds=5, memory=512 << 20, values=1)
"""Of a call."""
WALL_S = 10.0
"""Seconds after which an answer's graders are ended: one may wait for ever, and hold a thread of the service."""
_STANDARD = (
    *("array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime"),
    *("decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "html", "itertools", "json", "math"),
    *("numbers", "operator", "pprint", "random", "re", "statistics", "string", "textwrap", "time", "typing"),
    *("unicodedata", "__future__"),
)
_INSTALLED = ("numpy", "rapidfuzz", "regex")
"""Where they are installed."""
_SOURCE = "<grader>"


def problem_of_machine() -> str:
    """Why source cannot be run on this machine; empty: it can."""
    if can_be_strict():
        return ""
    return "source runs on Linux on x86_64 and aarch64 alone, where it can be kept from files and the network"


@lru_cache(maxsize=64)
def problem_of_source(source: str) -> str:
    """Why a source can never grade, with its line; empty: it may. It is parsed in a process with limits, which imports
    what it does, and does not run it. Raises LimitReached: the machine is too busy, or the caller whose request orders
    it has used its CPU time; OSError: no process can be started."""
    try:
        found = LIMITS.call(_problems, source)
    except (LimitExceeded, RuntimeError):
        return f"to parse it takes more than {LIMITS.seconds} s or {LIMITS.memory >> 20} MiB: make it simpler"
    return str(found[0]) if found and found[0] else ""


def _problems(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source, _SOURCE)
        compile(tree, _SOURCE, "exec")
        _import_for(tree)
    except SyntaxError as error:
        yield f"line {error.lineno or 1}: {error.msg}, expected Python that defines grade(sample, item)"
    except ImportError as error:
        yield str(error)
    except (ValueError, RecursionError) as error:
        yield f"it cannot be parsed ({error}), expected Python that defines grade(sample, item)"
    else:
        yield "" if _defines_grade(tree) else "the source defines no function grade(sample, item)"


def _defines_grade(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="grade") | ast.ClassDef(name="grade") | ast.Name(id="grade", ctx=ast.Store()):
                return True
            case ast.alias(name=name, asname=given) if (given or name) in ("grade", "*"):
                return True
    return False


def reward_of_source(
    source: str, sample: Mapping[str, Any], item: Mapping[str, Any], deadline: float | None = None
) -> float:
    """What `grade(sample, item)` returns.

    Args:
        item: what is no JSON value, such as a date, is read as its text.
        deadline: of the clock `time.monotonic`; None: `WALL_S` from now on.

    Raises:
        GradingError: it raises, returns no number, or exceeds a limit; or no process can be started.
        NotInTimeError: it has not ended at the deadline.
        LimitReached: the machine is too busy, or the caller whose request orders it has used its CPU time.
    """
    try:
        given = json.dumps([sample, item], default=str)
        left = WALL_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise _too_late()
        found = LIMITS.call(_called, source, given, within=left)
        return _reward(found)
    except TooLate as error:
        raise _too_late() from error
    except LimitExceeded as error:
        raise _runtime(f"it takes more than {LIMITS.seconds} s or {LIMITS.memory >> 20} MiB, or has crashed") from error
    except LimitReached:
        raise
    except (OSError, RuntimeError) as error:
        raise GradingError("python_grader_server_error", str(error)) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # it has written to the socket itself
        raise _runtime("it has damaged its result") from error


def _too_late() -> NotInTimeError:
    sentence = f"it has not ended in {WALL_S:g} s, which all graders of an answer have together"
    return NotInTimeError("python_grader_runtime_error", sentence)


def _runtime(sentence: str) -> GradingError:
    return GradingError("python_grader_runtime_error", sentence)


def _reward(found: list[Any]) -> float:
    kind, value = found[0]
    if kind == "reward" and isinstance(value, float):
        return value
    if kind == "server":
        raise GradingError("python_grader_server_error", str(value))
    raise _runtime(str(value))


def _called(source: str, arguments: str) -> Iterator[tuple[str, Any]]:
    """The reward, or what is wrong: in a process of its own."""
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    sample, item = json.loads(arguments)
    try:
        tree = ast.parse(source, _SOURCE)
        _import_for(tree)
        code = compile(tree, _SOURCE, "exec")
    except (SyntaxError, ValueError, RecursionError, ImportError) as error:
        yield "runtime", f"{type(error).__name__}: {error}"
        return
    try:
        only_compute()
    except OSError as error:
        yield "server", f"source cannot be kept from files and the network here: {error}"
        return
    yield _graded(code, sample, item)


def _graded(code: Any, sample: Any, item: Any) -> tuple[str, Any]:
    names: dict[str, Any] = {"__name__": "grader"}
    try:
        exec(code, names)  # nothing can be reached from here
        grade = names.get("grade")
        if not callable(grade):
            return "runtime", "the source defines no function grade(sample, item)"
        value = grade(sample, item)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return "runtime", f"grade returned {type(value).__name__}, expected a float"
        number = float(value)
        if number - number != 0.0:
            return "runtime", f"grade returned {number}, expected a finite number"
    except MemoryError:
        raise
    except BaseException as error:  # also SystemExit: what it raises is its result
        return "runtime", _shown(error)
    return "reward", number


def _shown(error: BaseException) -> str:
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == _SOURCE]
    at = f"line {lines[-1]}: " if lines else ""
    return f"{at}{type(error).__name__}: {' '.join(str(error).split())}"[:400]


class _Import(NamedTuple):
    module: str
    members: tuple[str, ...]
    """What is taken of it, each a module below it or something in it."""
    line: int


def _import_for(tree: ast.Module) -> None:
    """Import what a source does, since no file can be read later. Raises ImportError: it may not, or cannot."""
    _refuse_imports(tree)
    for module, members, line in _imported(tree):
        try:
            found = importlib.import_module(module)
            for member in members:
                if member != "*" and not hasattr(found, member):
                    importlib.import_module(f"{module}.{member}")
        except ImportError as error:
            what = f"{', '.join(members)} of {module!r}" if members else repr(module)
            raise ImportError(f"line {line}: it imports {what}, which is not there: {error}") from error


def _imported(tree: ast.Module) -> Iterator[_Import]:
    """What a source imports, and in which line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, (), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            members = tuple(alias.name for alias in node.names)
            yield _Import("." * node.level + (node.module or ""), members, node.lineno)


def _refuse_imports(tree: ast.Module) -> None:
    """Raises ImportError: a source imports what it may not."""
    for name, members, line in _imported(tree):
        top, *below = name.split(".")
        runs = "__main__" in (*below, *members)  # a program, which would run
        if runs or (top not in _STANDARD and (top not in _INSTALLED or find_spec(top) is None)):
            here = [one for one in _INSTALLED if find_spec(one) is not None]
            more = "".join(f", {one}" for one in here)
            raise ImportError(
                f"line {line}: it imports {name!r}, expected a module of the standard library that only computes, such "
                f"as json, math or re{more}"
            )
