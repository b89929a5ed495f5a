"""Reads the task files of lm-evaluation-harness in the directories that the operator names, without the library.

The names are those that the library finds there: of two files of a directory with the same name the first counts, in
the order of their paths, and of two directories the last. No function that a file names is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ..specs.harness import TaskEntry, Unusable

MOST_FILES = 2000
_LARGEST = 1 << 20
"""Bytes of a file."""
_IGNORED = {"__pycache__", ".ipynb_checkpoints"}
type _Stamp = tuple[int, int, int]


class _TaskLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads a file of a task; a function is the text that names it."""


_TaskLoader.add_constructor("!function", lambda loader, node: str(loader.construct_scalar(node)))

_known: dict[Path, tuple[_Stamp, dict[str, Any] | None]] = {}
"""Files that were read, without those that they include; None: one that cannot be."""


def read_task_files(roots: Iterable[Path]) -> dict[str, TaskEntry]:
    """The tasks, groups and tags of some directories, by name. A file that the library cannot read is left out.

    Raises:
        Unusable: they have too many files.
    """
    found: dict[str, TaskEntry] = {}
    files = 0
    for root in roots:
        paths = sorted(islice(_files(root), MOST_FILES + 1 - files), key=Path.as_posix)
        files += len(paths)
        if files > MOST_FILES:
            hint = f"the configured harness_roots have more than {MOST_FILES} task files"
            raise Unusable(f"{hint}: the operator names directories of those that are used")
        of_root: dict[str, TaskEntry] = {}
        for path in paths:
            if (config := _with_included(path, frozenset())) is not None:
                _add(config, of_root)
        found |= of_root
    return found


def _files(root: Path) -> Iterable[Path]:
    return (path for path in root.glob("**/*.yaml") if not _IGNORED.intersection(path.parts))


def _add(config: Mapping[str, Any], index: dict[str, TaskEntry]) -> None:
    kind = "group" if "group" in config and "class" not in config else "task"
    name = config.get(kind)
    if not isinstance(name, str) or name in index:
        return
    index[name] = TaskEntry("group" if kind == "group" else "task", config)
    tags = config.get("tag") if kind == "task" else None
    for tag in [tags] if isinstance(tags, str) else tags or ():
        of_tag = index.get(tag, TaskEntry("tag", {}))
        index[tag] = of_tag._replace(members=(*of_tag.members, name))


def _with_included(path: Path, above: frozenset[Path]) -> dict[str, Any] | None:
    """A file with what it includes; None: it cannot be read, or includes itself."""
    path = path.expanduser().resolve()
    config = None if path in above else _read(path)
    if config is None or "include" not in config:
        return config
    given = config["include"]
    merged: dict[str, Any] = {}
    for name in given if isinstance(given, list) else [given]:
        one = _with_included(path.parent / str(name), above | {path})
        if one is None:
            return None
        merged |= {key: value for key, value in one.items() if key != "task_list"}
    return merged | {key: value for key, value in config.items() if key != "include"}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        state = path.stat()
        stamp = state.st_size, state.st_mtime_ns, state.st_ino
        if (kept := _known.get(path)) is not None and kept[0] == stamp:
            return kept[1]
        config = yaml.load(path.read_bytes(), _TaskLoader) if state.st_size <= _LARGEST else None
    except OSError:
        return None
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    if len(_known) >= 4 * MOST_FILES:
        _known.clear()
    _known[path] = stamp, config if isinstance(config, dict) else None
    return _known[path][1]
