"""What a test needs of its machine: without it the test is skipped, but not in CI."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """Skip the test; fail it where CI runs as root on Linux, which installs and may do whatever tests need."""
    assert not (os.environ.get("CI") == "true" and sys.platform == "linux" and os.getuid() == 0), reason
    pytest.skip(reason)
