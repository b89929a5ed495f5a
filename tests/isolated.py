"""Isolation as tests use it: on wherever this machine allows it."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch.isolation import Isolation, probe

_probe = cache(probe)


def isolation(*directories: Path) -> Isolation:
    """Isolation that hides these directories. Skips the test where there is none, and fails it where CI runs as root
    on Linux: there it must work."""
    found = _probe()
    if not found.how:
        reason = f"trainings cannot be isolated here: {found.why_not}"
        assert not (os.environ.get("CI") == "true" and sys.platform == "linux" and os.getuid() == 0), reason
        pytest.skip(reason)
    return Isolation(found.how, "", directories)
