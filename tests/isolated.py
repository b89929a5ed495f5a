"""Isolation as tests use it: on wherever this machine allows it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llama_stack_provider_trl.launch.isolation import Isolation, probe
from tests.required import lacking

_probe = cache(probe)


def isolation(*directories: Path) -> Isolation:
    """Isolation that hides these directories. Skips the test where there is none, and fails it where CI runs as root
    on Linux: there it must work."""
    found = _probe()
    if not found.how:
        lacking(f"trainings cannot be isolated here: {found.why_not}")
    return Isolation(found.how, "", directories)
