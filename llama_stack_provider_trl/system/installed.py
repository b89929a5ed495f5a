"""The version of a package that is installed for an interpreter, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .process import child_environment

_TIMEOUT = 60.0
"""Seconds for another interpreter. It takes 0.1; a cold network disk takes longer."""
_PROBE = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is not None:
    print(importlib.metadata.version(sys.argv[1]))
"""


def version_for(python: Path | None, module: str) -> str | None:
    """The version of the package that has a top-level module, of the same name; None: it is not installed there. Raises
    OSError: the interpreter cannot be started, or takes too long.

    Args:
        python: None: the interpreter of this process.
    """
    if python is None or str(python) == sys.executable:
        try:
            return importlib.metadata.version(module) if importlib.util.find_spec(module) is not None else None
        except importlib.metadata.PackageNotFoundError:
            return None
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            cwd="/",  # not the server's working directory, so that nothing is imported from there
            env=child_environment(os.environ, {}),
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"it has not answered within {_TIMEOUT:g} s") from error
    return done.stdout.strip() or None
