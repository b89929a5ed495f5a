"""docs/explanation/security.md names tests that exist."""

from __future__ import annotations

import re

from tests.tiny import REPOSITORY


def test_every_test_that_the_page_names_exists() -> None:
    page = (REPOSITORY / "docs" / "explanation" / "security.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*test_\w+\.py)`", page))
    tests = REPOSITORY / "tests"
    missing = {name for name in named if not any((tests / home / name).is_file() for home in ("security", "", ".."))}
    assert len(named) > 10
    assert missing == set()
