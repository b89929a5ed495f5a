"""The mounts that this process sees: on which file system a path lies, and what its name is there.

A bind mount shows a directory under a second path. Both have the same location. Where the kernel lists no mounts (not
Linux), a path is its own location.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_TABLE = "/proc/self/mountinfo"


class Mount(NamedTuple):
    """A line of mountinfo; see proc_pid_mountinfo(5)."""

    number: int
    parent: int
    """Number of the mount that it lies on; of none that is listed: it is the root."""
    device: str
    """`major:minor`; of btrfs another than that of `stat`, so that both are not compared."""
    root: Path
    """The directory of the file system that is shown."""
    point: Path
    """Where."""
    options: frozenset[str]
    """Of this mount alone: `ro` although the file system may be writable elsewhere."""


class Location(NamedTuple):
    """A file or directory, which need not exist, whatever path leads there."""

    device: str
    path: Path
    """From the root of its file system."""

    def is_within(self, other: Location) -> bool:
        return self.device == other.device and self.path.is_relative_to(other.path)


class MountTable:
    def __init__(self, mounts: list[Mount]) -> None:
        self.mounts = mounts
        numbers = {mount.number for mount in mounts}
        self._roots = [mount for mount in mounts if mount.parent not in numbers or mount.parent == mount.number]
        self._on: dict[int, list[Mount]] = {}
        for mount in mounts:
            if mount.parent != mount.number:
                self._on.setdefault(mount.parent, []).append(mount)

    @classmethod
    def read(cls) -> MountTable:
        try:
            with open(_TABLE, "rb") as file:
                return cls.parse(file.read())
        except OSError:
            return cls([])

    @classmethod
    def parse(cls, text: bytes) -> MountTable:
        return cls([_parsed(line) for line in text.split(b"\n") if line])

    def locate(self, path: Path) -> Location:
        """Where an absolute path leads that has no symbolic links."""
        mount = self._mount_of(path)
        return (
            Location("", path) if mount is None else Location(mount.device, mount.root / path.relative_to(mount.point))
        )

    def below(self, path: Path) -> list[Path]:
        """Mount points below a path, without those that another mount hides."""
        points = dict.fromkeys(mount.point for mount in self.mounts if path in mount.point.parents)
        return [point for point in points if (shown := self._mount_of(point)) is not None and shown.point == point]

    def _mount_of(self, path: Path) -> Mount | None:
        """The uppermost mount on a path. The kernel looks for the next mount at each component of a path, so the
        nearest to the root hides what else lies on the same mount further down."""
        mount, lying_there = None, self._roots
        while around := [found for found in lying_there if path.is_relative_to(found.point)]:
            mount = min(around, key=lambda found: len(found.point.parts))
            lying_there = self._on.get(mount.number, [])
        return mount


def _parsed(line: bytes) -> Mount:
    number, parent, device, root, point, options = line.split(b" ")[:6]
    flags = frozenset(options.decode().split(","))
    return Mount(int(number), int(parent), device.decode(), _unescaped(root), _unescaped(point), flags)


def _unescaped(path: bytes) -> Path:
    """Spaces, tabs, line feeds, backslashes and hashes are written as octal numbers."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), path)))
