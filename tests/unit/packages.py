"""The packages of the table in architecture.md, and their modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


PACKAGE = "llama_stack_provider_trl"


PACKAGES = {"": PACKAGE, "remote.": "llama_stack_provider_trl_remote"}
"""What the names of a package's modules begin with in the table -> the package."""


@cache
def packages() -> dict[str, tuple[list[str], list[str]]]:
    """Package -> (patterns of its modules, patterns of what it may import), from the table in the docs."""
    text = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text()
    table = text.split("<!-- packages -->")[1].split("<!-- /packages -->")[0]
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


@cache
def package_of(module: str) -> str:
    homes = [
        name for name, (patterns, _) in packages().items() if any(fnmatch(module, pattern) for pattern in patterns)
    ]
    assert len(homes) == 1, f"{module} must be in one package of docs/explanation/architecture.md, found: {homes}"
    return homes[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level packages that a module imports; modules of ours as `our:` and their name in the table."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = path.relative_to(REPOSITORY).parts[:-1]
    for node in ast.walk(tree(path)):
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
