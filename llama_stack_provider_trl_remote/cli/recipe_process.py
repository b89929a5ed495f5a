"""Runs a recipe in a process of this machine, whose libraries print progress and warnings of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.specs.chat_templates import UNENDED
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY
from llama_stack_provider_trl.system.files import tail
from llama_stack_provider_trl.system.process import child_environment

from .waiting import waiting


def run_recipe(module: str, spec: str, what: str) -> dict[str, Any]:
    """Run `python -m module SPEC RESULT`; returns its result. Raises JobFailure: the recipe reports a failure, or ended
    without a result.

    Args:
        what: the recipe in a message, such as `evaluation`.
    """
    with tempfile.TemporaryDirectory(prefix=f"trl-{what}-") as directory:
        given, result, log = (Path(directory, name) for name in ("spec.json", "result.json", "log"))
        given.write_text(spec)
        with open(log, "wb") as output, waiting(what):
            done = subprocess.run(
                [sys.executable, "-m", module, str(given), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ, {}),
            )
        if done.returncode == -ENDED_BY:
            raise JobFailure(Reason.invalid_model, UNENDED)
        if not result.exists():
            lines = " ".join(tail(log, 3).split())
            raise JobFailure("no_result", f"the {what} ended with {done.returncode}: {lines}")
        found: dict[str, Any] = json.loads(result.read_text())
    if "reason" in found:
        raise JobFailure(found["reason"], f"{found['reason']}: {' '.join(found['message'].split())}")
    return found
