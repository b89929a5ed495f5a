"""Checks that a YAML file can be read by any program without harm: it ends, is small, and its aliases do not grow
without end. Reads YAML in which no mapping has a key twice."""

from __future__ import annotations

import stat
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from .files import open_regular
from .texts import DuplicateKey, first_duplicate

LARGEST = 1 << 20
"""Bytes of a file."""
MOST_VALUES = 1 << 19
"""Values of a file, where each alias counts as all that it stands for."""
_MOST_LEVELS = 100
"""Of a file: the parser in C ends the process at some ten thousand, and takes seconds before."""


def repeated_key(node: yaml.MappingNode) -> str | None:
    """A key that a mapping has twice; None: it has none."""
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    return first_duplicate(keys)


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: PyYAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if (twice := repeated_key(node)) is not None:
            raise DuplicateKey(twice, f"in the mapping of line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_files(paths: Iterable[Path]) -> None:
    """Return if all files, and those that they name as `include`, can be read without harm. Those that do not exist,
    may not be read or are no YAML, directories, and links to themselves are left to whatever reads them: it fails.
    Raises ValueError: names the file, and what it would do."""
    waiting, checked = list(paths), set[Path]()
    while waiting:
        path = waiting.pop()
        try:
            path = path.expanduser().resolve()
            if path in checked:
                continue
            checked.add(path)
            with open_regular(path) as file:
                content = file.read(LARGEST + 1)
        except (OSError, RuntimeError, ValueError) as error:
            if _is_waited_for(path):
                raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
            continue
        try:
            waiting += [path.parent / name for name in _included(content)]
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def _is_waited_for(path: Path) -> bool:
    """Whether a program that opens and reads what is no file may never end: a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except (OSError, RuntimeError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _included(content: bytes) -> list[str]:
    """What a file includes. Raises ValueError: it is too large, or its aliases are."""
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    try:
        check_levels(content)
        node = yaml.compose(content, Loader=_LOADER)
        if node is None:
            return []
        if values_of(node, {}) > MOST_VALUES:
            raise ValueError(f"it stands for more than {MOST_VALUES} values")
    except yaml.YAMLError:
        return []
    parts = node.value if isinstance(node, yaml.MappingNode) else []
    given = [value for key, value in parts if key.value == "include"]
    listed = [one for value in given for one in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
    return [one.value for one in listed if isinstance(one, yaml.ScalarNode)]


def check_levels(content: bytes) -> None:
    """Return if a text has few levels. Raises ValueError; yaml.YAMLError: it is no YAML."""
    levels = 0
    for event in yaml.parse(content, Loader=_LOADER):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if levels > _MOST_LEVELS:
            raise ValueError(f"it has more than {_MOST_LEVELS} levels")


def values_of(node: yaml.Node, counted: dict[int, int]) -> int:
    """How many values a node stands for. Raises ValueError: it contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if (known := counted.get(id(node))) is not None:
        if not known:
            raise ValueError("it contains itself")
        return known
    counted[id(node)] = 0
    parts = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in node.value for one in pair]
    counted[id(node)] = 1 + sum(values_of(one, counted) for one in parts)
    return counted[id(node)]
