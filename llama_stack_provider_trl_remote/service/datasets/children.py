"""Runs a program to its end and returns its output; the program is killed at its time limit or when its caller
stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NICENESS = 10
"""Lower priority for programs: a flood of registrations kept `GET /v1/health` waiting for 1.3 s without it."""


class OutOfTime(Exception):
    """Raised when a program is not over at its time limit. No TimeoutError: a disk may raise that."""


class Done(NamedTuple):
    """Result of a program."""

    exit_code: int
    """Exit status; negative: minus the signal that ended it."""
    output: bytes
    errors: str
    """The last line of its standard error."""


async def run(
    argv: Sequence[str], *, cwd: Path, environ: Mapping[str, str], limit: float, descriptors: Sequence[int] = ()
) -> Done:
    """Run a program without standard input. Raises OutOfTime; OSError: it cannot be started.

    Args:
        limit: seconds.
        descriptors: of open files that it inherits.
    """
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=environ,
        start_new_session=True,
        pass_fds=tuple(descriptors),
    )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    try:
        output, errors = await asyncio.wait_for(child.communicate(), limit)
    except TimeoutError as error:
        raise OutOfTime from error
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    assert child.returncode is not None
    lines = errors.decode(errors="replace").strip().splitlines()
    return Done(child.returncode, output, lines[-1] if lines else "")
