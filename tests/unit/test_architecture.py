"""Packages import what docs/explanation/architecture.md allows them, and nothing below themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.unit.packages import PACKAGE, REPOSITORY, imports, modules, package_of, packages, tree

STDLIB = set(sys.stdlib_module_names)
HEAVY = ("torch", "trl", "transformers", "peft", "datasets", "accelerate")


def allowed_modules(patterns: list[str]) -> list[str]:
    """Patterns of our modules that a package may import: those of the packages it names."""
    table = packages()
    return [pattern for name in patterns if name in table for pattern in table[name][0]]


def test_a_module_imports_only_what_its_package_may() -> None:
    found = []
    for module, path in sorted(modules().items()):
        home = package_of(module)
        own, may = packages()[home]
        ours = ["__init__", *own, *allowed_modules(may)]
        for imported in imports(path):
            name = imported.removeprefix("our:")
            allowed = STDLIB.union(may) if name == imported else {name for one in ours if fnmatch(name, one)}
            if name not in allowed:
                found.append(f"{module} (package {home}) imports {name}")
    assert not found, f"docs/explanation/architecture.md does not allow: {found}"


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


def test_no_directory_of_the_jobs_package_has_more_than_twelve_entries() -> None:
    jobs = REPOSITORY / PACKAGE / "jobs"
    for directory in (jobs, *(path for path in jobs.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        entries = [path.name for path in directory.iterdir() if not path.name.startswith("__")]
        assert len(entries) <= 12, f"{directory.name}: {sorted(entries)}"


def test_no_module_of_tests_imports_one_that_holds_tests() -> None:
    """What several files of tests share is in a module beside them, without `test_`, or in conftest.py."""
    found = []
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                if any(part.startswith("test_") for name in names for part in name.split(".")):
                    found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert found == []
