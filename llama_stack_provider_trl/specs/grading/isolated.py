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
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ...errors import LimitReached
from ...system.limited import Limited, LimitExceeded, TooLate
from ...system.strict import can_be_strict, only_compute
from .errors import GradingError

LIMITS = Limited(seconds=5, memory=512 << 20, values=1)
"""Of a call."""
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


def reward_of_source(source: str, sample: Mapping[str, Any], item: Mapping[str, Any]) -> float:
    """What `grade(sample, item)` returns.

    Raises:
        GradingError: it raises, returns no number, or exceeds a limit; or no process can be started.
        LimitReached: the machine is too busy, or the caller whose request orders it has used its CPU time.
    """
    try:
        found = LIMITS.call(_called, source, json.dumps([sample, item]))
        return _reward(found)
    except TooLate as error:
        raise _runtime(f"it has not ended in {LIMITS.wall_seconds:g} s") from error
    except LimitExceeded as error:
        raise _runtime(f"it takes more than {LIMITS.seconds} s or {LIMITS.memory >> 20} MiB, or has crashed") from error
    except LimitReached:
        raise
    except (OSError, RuntimeError) as error:
        raise GradingError("python_grader_server_error", str(error)) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # it has written to the socket itself
        raise _runtime("it has damaged its result") from error


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


def _import_for(tree: ast.Module) -> None:
    """Import what a source does, since no file can be read later. Raises ImportError: it may not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in _STANDARD and (top not in _INSTALLED or find_spec(top) is None):
                here = [one for one in _INSTALLED if find_spec(one) is not None]
                more = "".join(f", {one}" for one in here)
                raise ImportError(
                    f"it imports {name!r}, expected a module of the standard library that only computes, such as json, "
                    f"math or re{more}"
                )
            importlib.import_module(name)
