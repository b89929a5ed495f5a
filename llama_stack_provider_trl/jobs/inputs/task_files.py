"""Reads the task files of lm-evaluation-harness in the directories that the operator names, without the library.

The names are those that the library finds there: of two files of a directory with the same name the first counts, in
the order of their paths, and of two directories the last. No function that a file names is imported. A file that would
stop or fill the process that serves requests (a pipe, a device, one whose aliases grow without end) is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ...specs.harness import IGNORED, PROBLEM, TaskEntry, Unusable
from ...system.bounded_yaml import LARGEST, MOST_VALUES, check_levels, repeated_key, values_of

MOST_FILES = 2000
_MOST_ABOVE = 64
"""Files that include each other."""
type _Stamp = tuple[int, int, int]
type _Merged = dict[Path, dict[str, Any] | None]
"""Files with what they include; None: one that cannot be read, or is being read."""


class _TaskLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads a file of a task; a function is the text that names it. The library keeps the last of two equal keys."""

    twice = ""
    """A key that a mapping has twice, and where; empty: none has."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if (key := repeated_key(node)) is not None:
            self.twice = f"the key {key[:100]!r} twice in the mapping of line {node.start_mark.line + 1}"
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


_TaskLoader.add_constructor("!function", lambda loader, node: str(loader.construct_scalar(node)))

_known: dict[Path, tuple[_Stamp, dict[str, Any] | None]] = {}
"""Files that were read, without those that they include; None: one that cannot be."""


def read_task_files(roots: Iterable[Path]) -> dict[str, TaskEntry]:
    """The tasks, groups and tags of some directories, by name. A file that the library cannot read is left out. Raises
    Unusable: they have too many files, or too many include each other."""
    found: dict[str, TaskEntry] = {}
    merged: _Merged = {}
    files = 0
    for root in roots:
        paths = sorted(islice(_files(root), MOST_FILES + 1 - files), key=Path.as_posix)
        files += len(paths)
        if files > MOST_FILES:
            hint = f"the configured harness_roots have more than {MOST_FILES} task files"
            raise Unusable(f"{hint}: the operator names directories of those that are used")
        of_root: dict[str, TaskEntry] = {}
        for path in paths:
            if (config := _with_included(path, merged)) is not None:
                _add(config, of_root)
        found |= of_root
    return found


def _files(root: Path) -> Iterable[Path]:
    return (path for path in root.glob("**/*.yaml") if not IGNORED.intersection(path.parts))


def _add(config: Mapping[str, Any], index: dict[str, TaskEntry]) -> None:
    kind = "group" if "group" in config and "class" not in config else "task"
    name, given = config.get(kind), config.get("tag")
    tags = given if isinstance(given, list) else [] if given is None else [given]
    if not isinstance(name, str) or name in index or not all(isinstance(tag, str) for tag in tags):
        return
    index[name] = TaskEntry("group" if kind == "group" else "task", config)
    for tag in tags if kind == "task" else ():
        of_tag = index.get(tag, TaskEntry("tag", {}))
        index[tag] = of_tag._replace(members=(*of_tag.members, name))


def _with_included(path: Path, merged: _Merged, depth: int = 0) -> dict[str, Any] | None:
    """A file with what it includes; None: it cannot be read, or includes itself."""
    try:
        path = path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # a link to itself, or no path
        return None
    if path not in merged:
        if depth > _MOST_ABOVE:
            raise Unusable(
                f"{path} is included by more than {_MOST_ABOVE} files, one by the other: the operator joins them"
            )
        merged[path] = None
        config = _read(path)
        merged[path] = config if config is None else _merge(config, path, merged, depth)
    return merged[path]


def _merge(config: dict[str, Any], path: Path, merged: _Merged, depth: int) -> dict[str, Any] | None:
    if "include" not in config:
        return config
    given = config["include"]
    found: dict[str, Any] = {}
    for name in given if isinstance(given, list) else [given]:
        one = _with_included(path.parent / str(name), merged, depth + 1)
        if one is None:
            return None
        found |= {key: value for key, value in one.items() if key != "task_list"}
    return found | {key: value for key, value in config.items() if key != "include"}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        # A pipe without a writer would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                return None
            stamp = state.st_size, state.st_mtime_ns, state.st_ino
            if (kept := _known.get(path)) is not None and kept[0] == stamp:
                return kept[1]
            content = file.read(LARGEST + 1)
    except OSError:
        return None
    config = _parsed(content, path) if len(content) <= LARGEST else None
    if len(_known) >= 4 * MOST_FILES:
        _known.clear()
    _known[path] = stamp, config
    return config


def _parsed(content: bytes, path: Path) -> dict[str, Any] | None:
    try:
        check_levels(content)
        loader = _TaskLoader(content)
        try:
            node = loader.get_single_node()
            if node is None or values_of(node, {}) > MOST_VALUES:
                return None
            config = loader.construct_document(node)
            if loader.twice and isinstance(config, dict):
                config[PROBLEM] = f"has {loader.twice} of {path}: leave one of them out"
        finally:
            loader.dispose()
    # The last ones are what the library yaml raises for a value that is not of its tag, as in `!!bool x`.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return config if isinstance(config, dict) else None
