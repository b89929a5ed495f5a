"""Runs a recipe on one file, with its result in another: what `python -m` of such a recipe does."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .failures import classify


def write_result(argv: list[str], run: Callable[[str], dict[str, Any]]) -> int:
    """Run a recipe; returns the exit status (0 done, 1 failed).

    Args:
        argv: the program, the file with the specification, and the file for one JSON object: what `run` returns, or
            `reason` and `message` of its failure.
        run: takes the content of the specification.
    """
    spec = Path(argv[1]).read_text()
    try:
        found, failed = run(spec), False
    except Exception as error:
        traceback.print_exc()
        failure = classify(error)
        found, failed = {"reason": failure.reason, "message": failure.message}, True
    Path(argv[2]).write_text(json.dumps(found))
    return int(failed)
