"""Recipes that `trl-remote` runs in processes of their own, without their imports."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forked


def fork_recipes(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Have what a test runs forked from a process that has imported torch, and work in `directory`."""

    def run(argv: list[str], *, env: dict[str, str], stdout: Any, **more: Any) -> Any:
        process = forked.start_program(argv, env, stdout, directory)
        if process is None:  # a test before this one has left other conditions: it is started, and not forked
            return start(argv, env=env, stdout=stdout, **more)
        process.wait()
        return process

    start = subprocess.run
    replaced = SimpleNamespace(**{**vars(subprocess), "run": run})
    monkeypatch.setattr("llama_stack_provider_trl_remote.cli.recipe_process.subprocess", replaced)
