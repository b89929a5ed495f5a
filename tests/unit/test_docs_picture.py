"""The pictures in docs/explanation/architecture.md name processes, modules and files that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
PAGE = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text()
PICTURES: dict[str, str] = dict(re.findall(r"<!-- picture: (\w+) -->\n(.+?)<!-- /picture -->", PAGE, re.DOTALL))
NODE = re.compile(r'\b(\w+)(\(\[|\[\(|\[)"([^"]+)"')
"""Identifier, shape and label: `[` is a process or module, `[(` files, `([` what is outside of the code."""


def nodes(picture: str, shape: str) -> list[tuple[str, str]]:
    """Identifier and label of the nodes with a shape; a title of a subgraph is no node."""
    lines = [line for line in PICTURES[picture].splitlines() if not line.strip().startswith("subgraph ")]
    return [(name, label) for name, found, label in NODE.findall("\n".join(lines)) if found == shape]


def is_module(dotted: str) -> bool:
    path = REPOSITORY.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_there_is_a_picture_of_the_processes_and_one_of_a_job() -> None:
    assert set(PICTURES) == {"processes", "job"}
    assert all("```mermaid\n" in text for text in PICTURES.values())


@pytest.mark.parametrize("picture", ["processes", "job"])
def test_every_process_and_step_of_a_picture_names_a_module_that_exists(picture: str) -> None:
    found = nodes(picture, "[")
    assert len(found) >= 9
    for name, label in found:
        modules = re.findall(rf"\b(?:{'|'.join(PACKAGES)})[\w.]*", label)
        assert len(modules) == 1, f"{name} ({label!r}) must name one module of {PACKAGES}"
        assert is_module(modules[0]), f"{name} names {modules[0]}, which is no module: correct the picture of {picture}"


def test_every_file_of_a_picture_is_one_that_the_code_names() -> None:
    sources = "\n".join(path.read_text() for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
    files = [
        file for picture in PICTURES for _, label in nodes(picture, "[(") for file in re.findall(r"[\w-]+\.\w+", label)
    ]
    assert len(files) >= 4
    for file in files:
        pattern = re.escape(file).replace("0", r"(?:0|\{\w+\})")
        assert re.search(rf'"{pattern}"', sources), f"no module names {file}: correct the picture"


@pytest.mark.parametrize("picture", ["processes", "job"])
def test_an_arrow_joins_nodes_that_the_picture_has(picture: str) -> None:
    declared = {name for shape in ("[", "[(", "([") for name, _ in nodes(picture, shape)}
    plain = re.sub(r'(\(\[|\[\(|\[)"[^"]+"(\]\)|\)\]|\])', "", PICTURES[picture])
    arrow = re.compile(r'\s+--(?:\s+"[^"]+"\s+--)?>\s+')
    ends = {end for line in plain.splitlines() if "-->" in line for end in arrow.split(line.strip())}
    assert ends == declared, f"arrows of {picture}: {ends ^ declared} is at one end only"
