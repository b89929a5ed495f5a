"""Runs the commands of systems that own machines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .base import PoolUnavailable

TIMEOUT = 60.0
"""Seconds that a command may take."""
_PASSED_ON = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG"})
"""Variables of the service that every command gets. Others may hold its tokens."""


class Ran(NamedTuple):
    """How a command has ended."""

    status: int
    output: str
    errors: str


Run = Callable[[Sequence[str], str], Ran]
"""Runs a command with a text as its standard input. Raises PoolUnavailable: it is not there, or takes too long."""


def run_command(
    argv: Sequence[str], text: str, remedy: str, names: Iterable[str] = (), prefixes: tuple[str, ...] = ()
) -> Ran:
    """See `Run`.

    Args:
        remedy: what to do where the command is not there.
        names, prefixes: of variables of the service that this command gets besides.
    """
    kept = _PASSED_ON.union(names)
    environ = {name: value for name, value in os.environ.items() if name in kept or name.startswith(("LC_", *prefixes))}
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environ
        )
    except FileNotFoundError as error:
        raise PoolUnavailable(f"there is no {argv[0]} here: {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise PoolUnavailable(f"{argv[0]} has not ended within {TIMEOUT:g} s") from error
    except OSError as error:
        raise PoolUnavailable(f"{argv[0]} cannot be run: {error}") from error
    return Ran(done.returncode, done.stdout, done.stderr)
