"""Packages import what docs/explanation/architecture.md allows them, and nothing below themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "llama_stack_provider_trl"
PACKAGES = {"": PACKAGE, "remote.": "llama_stack_provider_trl_remote"}
"""What the names of a package's modules begin with in the table -> the package."""
STDLIB = set(sys.stdlib_module_names)
HEAVY = ("torch", "trl", "transformers", "peft", "datasets", "accelerate")


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


def allowed_modules(patterns: list[str]) -> list[str]:
    """Patterns of our modules that a package may import: those of the packages it names."""
    table = packages()
    return [pattern for name in patterns if name in table for pattern in table[name][0]]


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_its_package_may(module: str) -> None:
    home = package_of(module)
    own, may = packages()[home]
    ours = own + allowed_modules(may)
    for imported in imports(modules()[module]):
        if imported.startswith("our:"):
            name = imported.removeprefix("our:")
            assert name == "__init__" or any(fnmatch(name, pattern) for pattern in ours), (
                f"{module} (package {home}) imports {name}, which docs/explanation/architecture.md does not allow"
            )
        else:
            assert imported in STDLIB or imported in may, (
                f"{module} (package {home}) imports {imported}, which docs/explanation/architecture.md does not allow"
            )


def test_a_package_imports_only_packages_above_it() -> None:
    names = list(packages())
    for position, name in enumerate(names):
        below = [other for other in packages()[name][1] if other in names and names.index(other) >= position]
        assert not below, f"package {name} may import {below}, which stand below it"


def edges() -> set[tuple[str, str]]:
    """(package, package that one of its modules imports)."""
    found = set()
    for module, path in modules().items():
        for imported in imports(path):
            name = imported.removeprefix("our:")
            if imported.startswith("our:") and name != "__init__":
                found.add((package_of(module), package_of(name)))
    return {(one, other) for one, other in found if one != other}


def test_every_import_that_the_table_allows_is_made() -> None:
    libraries = {(package_of(module), name) for module, path in modules().items() for name in imports(path)}
    made = edges() | libraries
    unused = [
        (name, allowed) for name, (_, may) in packages().items() for allowed in may if (name, allowed) not in made
    ]
    assert not unused


@pytest.mark.parametrize(("inside", "most"), [("recipes", 25), ("service", 40)])
def test_few_imports_run_between_the_packages_of(inside: str, most: int) -> None:
    within = {name for name in packages() if name == inside or name.startswith(f"{inside}.")}
    between = {(one, other) for one, other in edges() if one in within and other in within}
    assert len(between) <= most, sorted(between)


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {found.removeprefix("our:") for found in imports(path) if found.startswith("our:")} - {name, "__init__"}
        for name, path in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def classes() -> Iterator[tuple[str, str]]:
    """(class, module) for each class at the top of a module; private classes too."""
    for name, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, name


def test_two_classes_never_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, module in classes():
        homes.setdefault(name, []).append(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_only_compat_imports_llama_stack() -> None:
    stacks = {"llama_stack", "llama_stack_api", "ogx", "ogx_api"}
    users = {name for name, path in modules().items() if stacks & imports(path)}
    assert users == {"stack.compat", "stack.external"}


def test_jobs_know_launchers_by_their_interface_only() -> None:
    used = {
        (name, imported)
        for name, path in modules().items()
        for imported in imports(path)
        if name.startswith("jobs.") and imported.startswith("our:launch.")
    }
    assert {imported for _, imported in used} == {"our:launch.base"}, sorted(used)


@pytest.mark.parametrize(
    "module", ["launch.runner", "jobs.supervision.supervisor", "launch.local", "requests.resolve", "recipes.train"]
)
def test_the_processes_that_serve_and_start_jobs_import_no_torch(module: str) -> None:
    script = f"import sys, {PACKAGE}.{module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names: of two that are alike it runs one only, where both are collected."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
