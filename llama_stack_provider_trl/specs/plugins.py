"""Entry points of installed packages, read so that one damaged package disturbs neither the others nor the caller."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points

from ..system.console import shown


def points_of(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name. Read at each call, so that a package is found which was installed
    meanwhile."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _points(group):
        if point not in found.setdefault(point.name, []):  # one distribution may be on two entries of sys.path
            found[point.name].append(point)
    return found


def damaged_packages() -> list[str]:
    """Why the entry points of some installed packages cannot be read, one sentence each."""
    found = []
    for one in distributions():
        try:
            list(one.entry_points)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found.append(f"the entry points of {_name(one)} cannot be read ({shown(text)}): install it again")
    return found


def package_of(point: EntryPoint) -> str:
    """The distribution that has an entry point, with its version."""
    return _name(point.dist) if point.dist else "an unknown package"


def _points(group: str) -> Iterator[EntryPoint]:
    importlib.invalidate_caches()
    try:
        yield from list(entry_points(group=group))
        return
    except Exception:  # of the metadata of any package
        pass
    for one in distributions():
        try:
            points = [point for point in one.entry_points if point.group == group]
        except Exception:
            continue  # `damaged_packages` reports it
        yield from points


def _name(one: Distribution) -> str:
    try:
        metadata = one.metadata
        name, version = metadata.get("Name"), metadata.get("Version")
    except Exception:  # of the metadata of any package
        name = version = None
    return shown(f"{name} {version}") if name and version else "a package without readable metadata"
