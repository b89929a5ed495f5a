"""docs/explanation/read-the-code.md: every file is there, and has what its row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiny import REPOSITORY

PAGE = REPOSITORY / "docs" / "explanation" / "read-the-code.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "`" in line]


def place(path: str) -> Path:
    if path.startswith("remote/"):
        return REPOSITORY / "llama_stack_provider_trl_remote" / path.removeprefix("remote/")
    return REPOSITORY / "llama_stack_provider_trl" / path


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_files_that_are_there_and_have_what_it_names(row: str) -> None:
    terms = re.findall(r"`([^`]+)`", row)
    beside = [place(f"recipes/trainer/{term}") for term in terms if term in ("sft.py", "dpo.py")]
    paths = [place(term) for term in terms if "/" in term] + beside
    assert paths
    assert [str(path) for path in paths if not path.exists()] == []
    text = "".join(path.read_text() for path in paths if path.is_file())
    folders = [file for path in paths if path.is_dir() for file in path.glob("*.py")]
    text += "".join(file.read_text() for file in folders)
    names = [term for term in terms if "/" not in term and not term.endswith((".py", ".json"))]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
