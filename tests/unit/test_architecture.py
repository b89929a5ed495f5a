"""The table of rooms in docs/explanation/architecture.md is kept: a room imports only what the table lets it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "llama_stack_provider_trl"
PACKAGES = {"": PACKAGE, "remote.": "llama_stack_provider_trl_remote"}
"""What the names of a package's modules begin with in the table -> the package."""
STDLIB = set(sys.stdlib_module_names)
HEAVY = ("torch", "trl", "transformers", "peft", "datasets", "accelerate")


def rooms() -> dict[str, tuple[list[str], list[str]]]:
    """Room -> (patterns of its modules, patterns of what it may import), from docs/explanation/architecture.md."""
    text = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text()
    table = text.split("<!-- rooms -->")[1].split("<!-- /rooms -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    found = {}
    for name, modules, _, imports in rows[1:]:
        found[name] = (re.findall(r"`([^`]+)`", modules), re.findall(r"`([^`]+)`", imports))
    return found


@cache
def modules() -> dict[str, Path]:
    """Name in the table -> file; `remote.__init__` is the second package itself."""
    found = {}
    for prefix, package in PACKAGES.items():
        root = REPOSITORY / package
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[prefix + (name.removesuffix(".__init__") or "__init__")] = path
    return found


def room_of(module: str) -> str:
    homes = [name for name, (patterns, _) in rooms().items() if any(fnmatch(module, pattern) for pattern in patterns)]
    assert len(homes) == 1, f"{module} must be in one room of docs/explanation/architecture.md, found: {homes}"
    return homes[0]


def imports(path: Path) -> Iterator[str]:
    """Top-level packages that a module imports; modules of ours as `our:` and their name in the table."""
    package = path.relative_to(REPOSITORY).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _ours(alias.name) or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else list(package[: len(package) - node.level + 1])
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield _ours(f"{target}.{alias.name}") or _ours(target) or target.partition(".")[0]


def _ours(dotted: str) -> str | None:
    """`our:` and the name in the table, if that is a module of ours."""
    for prefix, package in PACKAGES.items():
        if dotted == package or dotted.startswith(package + "."):
            name = prefix + (dotted.removeprefix(package).lstrip(".") or "__init__")
            return f"our:{name}" if name in modules() else None
    return None


def allowed_modules(patterns: list[str]) -> list[str]:
    """Patterns of our modules that a room may import: those of the rooms it names."""
    table = rooms()
    return [pattern for name in patterns if name in table for pattern in table[name][0]]


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    home = room_of(module)
    own, may = rooms()[home]
    ours = own + allowed_modules(may)
    for imported in imports(modules()[module]):
        if imported.startswith("our:"):
            name = imported.removeprefix("our:")
            assert name == "__init__" or any(fnmatch(name, pattern) for pattern in ours), (
                f"{module} (room {home}) imports {name}, which docs/explanation/architecture.md does not let it"
            )
        else:
            assert imported in STDLIB or imported in may, (
                f"{module} (room {home}) imports {imported}, which docs/explanation/architecture.md does not let it"
            )


def test_a_room_imports_only_rooms_above_it() -> None:
    names = list(rooms())
    for position, name in enumerate(names):
        below = [other for other in rooms()[name][1] if other in names and names.index(other) >= position]
        assert not below, f"room {name} may import {below}, which stand below it"


def test_only_compat_imports_llama_stack() -> None:
    stacks = {"llama_stack", "llama_stack_api", "ogx", "ogx_api"}
    users = {name for name, path in modules().items() if stacks & set(imports(path))}
    assert users == {"compat", "external"}


@pytest.mark.parametrize("door", ["launch.runner", "jobs.supervisor", "launch.local", "resolve", "recipes.train"])
def test_the_processes_that_serve_and_start_jobs_import_no_torch(door: str) -> None:
    script = f"import sys, {PACKAGE}.{door}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
