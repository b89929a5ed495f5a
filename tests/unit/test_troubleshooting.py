"""docs/reference/troubleshooting.md quotes messages of the programs, and has every reason and kind of answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl_remote.service.http.errors import _MEANING

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "reference" / "troubleshooting.md").read_text()
QUOTING = {"message", "`detail`", "`error.message`", "`warnings`"}
"""Headings of the columns that quote."""


def tables() -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table."""
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()
        )
        yield header, rows


def quotes() -> list[str]:
    found = []
    for header, rows in tables():
        (column,) = (number for number, name in enumerate(header) if name in QUOTING)
        for row in rows:
            found += re.findall(r"`([^`]+)`", row[column])
    return found


def sources() -> str:
    """Every text of the packages, one per line, with `…` for the values that an f-string puts in; and the scripts."""
    texts = [
        text
        for package in ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for node in _nodes(ast.parse(path.read_text()))
        if (text := _text(node)) is not None
    ]
    scripts = [re.sub(r"\{\w+\}", "…", path.read_text()) for path in sorted((REPOSITORY / "scripts").glob("*.sh"))]
    return "\n".join([text.replace("\n", " ") for text in texts] + scripts)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All but docstrings, which no program prints."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield child
            yield from _nodes(child)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def test_a_quoted_message_is_one_that_a_program_prints() -> None:
    found, printed = [], sources()
    for quote in sorted({*quotes()}):
        parts = [re.escape(part) for part in quote.removesuffix("…").split("…")]
        assert max(len(part.strip()) for part in quote.split("…")) >= 8, f"{quote!r} is too short to identify it"
        if not re.search("…[^\n]*?".join(parts), printed):
            found.append(quote)
    assert not found, "no program prints them: correct docs/reference/troubleshooting.md"


def test_every_reason_of_a_failure_has_a_row() -> None:
    table = TEXT.split("<!-- reasons -->")[1].split("<!-- /reasons -->")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {*Reason}


def test_every_kind_of_refusal_has_a_row() -> None:
    (refusals,) = (rows for header, rows in tables() if header[0] == "answer")
    assert {int(row[0]) for row in refusals} == set(_MEANING)
