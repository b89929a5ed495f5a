"""Every path of a data directory: what lies where, and which part of it a request may name.

Results of jobs lie below `checkpoints`. Everything else is the provider's own, and no request reaches it, whatever its
name is.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import StoreError
from .files import is_regular, set_aside
from .mounts import Location, MountTable

log = logging.getLogger(__name__)

CHECKPOINTS, DATABASE = "checkpoints", "jobs.sqlite3"
_SMALL = 64 << 20
"""Bytes of a small file of our own; the largest, the digests of models, have 3 MiB."""
_ASIDE = re.compile(r".+\.stale-\d+")
_BEFORE_THE_DATABASE = ("llama-stack", "service.lock", "supervisor.lock")
"""What a data directory may hold before its first job database exists."""


def is_aside(name: str) -> bool:
    """Whether something of this name was set aside: no request gives such a name to what becomes a file."""
    return _ASIDE.fullmatch(name) is not None


class DataEntry(NamedTuple):
    name: re.Pattern[str]
    """Of what lies in `directory`."""
    kind: Literal["file", "directory"]
    directory: str = ""
    """Path in the data directory; empty: itself."""
    cannot_be_made_again: bool = False
    """A start is refused while a link in its place leads nowhere: its disk is not there."""


def _own(
    name: str, kind: Literal["file", "directory"], directory: str = "", *, cannot_be_made_again: bool = False
) -> DataEntry:
    return DataEntry(re.compile(name), kind, directory, cannot_be_made_again)


_LOGS = (
    _own(r"logs", "directory"),
    _own(r"(service|agent|agent-.+)\.log(\.\d)?", "file", "logs"),
)
OF_A_NODE = (
    *(_own(name, "directory") for name in ("jobs", "datasets", "tokens", "reference", "models")),
    *_LOGS,
    *(_own(re.escape(name), "file") for name in ("agent.lock", "agent-id", "credential.json")),
)
"""What lies in an agent's data directory; and `ssh`, which belongs to `nodes.pools.on_host`."""
OWN = (
    *(_own(name, "directory", cannot_be_made_again=True) for name in (CHECKPOINTS, "jobs", "datasets")),
    *(
        _own(name, "directory")
        for name in ("tokens", "reference", "preflights", "serving", "trackers", "uploads", "llama-stack", "node")
    ),
    *(_own(name, "directory") for name in ("model-manifests", "audit")),
    *_LOGS,
    _own(r"audit-.*\.jsonl", "file", "audit"),
    _own(r"[0-9a-f]{64}\.(jsonl|.+\.json)", "file", "datasets"),
    _own(r"registry", "directory", "datasets"),
    _own(r"[0-9a-f]{64}\.json", "file", "datasets/registry"),
    _own(r"([0-9a-f]{64}|digests)\.json", "file", "model-manifests"),
    _own(r"upload_[0-9a-f]{24}", "directory", "uploads"),
    _own(r"[A-Za-z0-9][A-Za-z0-9._-]*", "directory", "jobs"),
    _own(r"jobs\.sqlite3(-wal|-shm|-journal|\.upgrade)?", "file"),
    *(
        _own(re.escape(name), "file")
        for name in ("identity", "cancel-orders", "sessions.json", "exporter.log", "exporter.log.1")
    ),
    *(_own(re.escape(name), "file") for name in ("service.lock", "supervisor.lock", "exporter.lock")),
    *(one._replace(directory=f"node/{one.directory}".rstrip("/")) for one in OF_A_NODE),
)
"""What lies in the data directory of a service or of the inline provider."""


class NodeDir:
    """Every path of an agent's data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = root / "jobs"
        self.datasets = root / "datasets"
        self.tokens = root / "tokens"
        self.reference = root / "reference"
        self.models = root / "models"
        self.log = root / "logs" / "agent.log"
        self.lock = root / "agent.lock"
        self.agent_id = root / "agent-id"
        self.credential = root / "credential.json"

    def prepare(self) -> None:
        """Set aside what is no file or directory as it should be. Raises OSError."""
        _set_aside_odd(self.root, OF_A_NODE)


class DataDir:
    """Every path of the data directory of a service or of the inline provider."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / CHECKPOINTS
        """Results of jobs: the only part that requests name, and jobs choose names in."""
        self.database = root / DATABASE
        self.jobs = root / "jobs"
        self.datasets = root / "datasets"
        self.registry = root / "datasets" / "registry"
        self.uploads = root / "uploads"
        """Uploads in parts, until these are rows of a dataset."""
        self.tokens = root / "tokens"
        self.reference = root / "reference"
        self.preflights = root / "preflights"
        self.serving = root / "serving"
        """Run directories of the processes that answer chats."""
        self.trackers = root / "trackers"
        self.node = root / "node"
        """Data directory of the agent in the service's own process."""
        self.model_lists = root / "model-manifests"
        self.audit = root / "audit"
        self.logs = root / "logs"
        self.service_log = root / "logs" / "service.log"
        self.identity = root / "identity"
        """Names the data directory: it is still the same one under another path."""
        self.cancel_orders = root / "cancel-orders"
        self.sessions = root / "sessions.json"
        self.service_lock = root / "service.lock"
        self.supervisor_lock = root / "supervisor.lock"
        self.exporter_lock = root / "exporter.lock"
        self.exporter_log = root / "exporter.log"

    @property
    def private(self) -> tuple[Path, ...]:
        """Directories that no other user may enter, where the data directory itself is shared."""
        return (
            *(self.jobs, self.datasets, self.uploads, self.tokens),
            *(self.reference, self.preflights, self.serving, self.trackers),
        )

    @property
    def holds_only_ours(self) -> bool:
        """Whether it holds nothing but what the provider put there."""
        names = {path.name for path in self.root.iterdir() if not is_aside(path.name)}
        return self.database.exists() or names <= {*_BEFORE_THE_DATABASE}

    def is_ours(self, path: Path) -> bool:
        """Whether this path, which has no symbolic links, is out of reach of requests: it lies in the data directory,
        and is neither `checkpoints` nor anything below it.

        A directory of ours that an operator has moved to another disk, behind a symbolic link directly in the data
        directory (`prepare` refuses deeper ones) or by a mount, is ours there too. So is what a bind mount shows
        elsewhere, at whatever depth.
        """
        table = MountTable.read()
        return _is_ours(table.locate(path), *self._locations(table))

    def is_free(self, path: Path) -> bool:
        """Whether this path, which has no symbolic links, is not ours and contains nothing of ours, in a mount below it
        either: a job may have it."""
        table = MountTable.read()
        places, checkpoints = self._locations(table)
        shown = [table.locate(name) for name in (path, *table.below(path))]
        contains = any(place.is_within(name) for place in (*places, checkpoints) for name in shown)
        return not contains and not any(_is_ours(name, places, checkpoints) for name in shown)

    def _locations(self, table: MountTable) -> tuple[list[Location], Location]:
        """Those of the directory, of its parts on other disks, and of `checkpoints`."""
        places, checkpoints = self.places(), self.checkpoints.resolve()
        mounted = [point for place in places for point in table.below(place) if not point.is_relative_to(checkpoints)]
        return [table.locate(place) for place in (*places, *mounted)], table.locate(checkpoints)

    def job_names(self) -> list[str]:
        found = (path for path in _listed(self.jobs) if not is_aside(path.name))
        return [path.name for path in found if (path / "attempts").is_dir()]

    def is_result(self, path: Path) -> bool:
        """Whether this path, which has no symbolic links, lies below `checkpoints`."""
        checkpoints = self.checkpoints.resolve()
        return path != checkpoints and path.is_relative_to(checkpoints) and not self.is_ours(path)

    def places(self) -> list[Path]:
        """Where the directory and its parts are, without symbolic links."""
        real = self.root.resolve()
        try:
            links = [path for path in real.iterdir() if path.is_symlink() and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            links = []
        return [real, *(path.resolve() for path in links if path.name != CHECKPOINTS)]

    def prepare(self) -> list[Path]:
        """Set aside what is no file or directory as it should be, so that it stops no start; returns the new names.
        Raises StoreError: a link to something that cannot be made again leads nowhere, or one leads out of reach of
        `is_ours`; OSError: it cannot be renamed."""
        if (why := self.why_not()) is not None:
            raise StoreError(why)
        return _set_aside_odd(self.root, OWN)

    def why_not(self) -> str | None:
        """Why no start can help itself, as a sentence; None: it can."""
        for entry in OWN:
            path = self.root / entry.name.pattern
            if entry.cannot_be_made_again and path.is_symlink() and not path.exists():
                return (
                    f"{path} is a link to {os.readlink(path)}, which is not there: mount its disk, or remove the link "
                    "to begin with an empty directory"
                )
        for path in self._leading_out():
            return (
                f"{path} is a link to {os.readlink(path)}, where requests could name what is the provider's own: move "
                "that back to this place, or mount its disk here; only directories directly in "
                f"{self.root} may be links"
            )
        return None

    def _leading_out(self) -> Iterator[Path]:
        """Links below the first level, and the database, that lead where requests may reach: `places` has no links of
        that depth, since a search of them all would be a part of every request."""
        odd = set(self.odd())
        if self.database.is_symlink():
            yield self.database
        own = {Path(one.directory, one.name.pattern) for one in OWN if one.kind == "directory"}
        for directory in sorted(own - {Path(CHECKPOINTS)}):
            try:
                with os.scandir(self.root / directory) as entries:
                    links = sorted(Path(entry.path) for entry in entries if entry.is_symlink())
            except (FileNotFoundError, NotADirectoryError):
                continue
            yield from (
                path
                for path in links
                if path not in odd and not is_aside(path.name) and not self.is_ours(path.resolve())
            )

    def odd(self) -> list[Path]:
        """What the next start sets aside."""
        return [path for path, _ in _odd(self.root, OWN)]

    def damaged(self) -> list[Path]:
        """Small files of JSON that cannot be parsed: they are set aside when they are read."""
        small = [self.sessions, *_listed(self.registry), *_listed(self.model_lists)]
        return [path for path in small if path.suffix == ".json" and _is(path, "file") and not _is_json(path)]

    def aside(self) -> list[Path]:
        """What was set aside, and is still there."""
        places = {self.root / entry.directory for entry in OWN}
        return sorted(path for place in places for path in _listed(place) if is_aside(path.name))


def _is_ours(name: Location, places: list[Location], checkpoints: Location) -> bool:
    around = [place for place in (*places, checkpoints) if name.is_within(place)]
    return bool(around) and max(around, key=lambda place: len(place.path.parts)) != checkpoints


def settle(path: Path, kind: Literal["file", "directory"]) -> Path | None:
    """Set aside what has the name of one of our own files or directories and is none; returns its new name."""
    if not os.path.lexists(path) or _is(path, kind):
        return None
    aside = set_aside(path)
    log.warning("%s is no %s: it was set aside as %s", path, kind, aside)
    return aside


def expect_directory(directory: Path) -> None:
    """Check that a directory of ours is there: what is not found in one that is away for a moment, is not gone. Raises
    StoreError: it is not."""
    if not directory.is_dir():
        raise StoreError(f"{directory} is not there, and what it holds is not known: mount its disk, or put it back")


def read_own[Value](path: Path, parse: Callable[[bytes], Value]) -> Value | None:
    """What `parse` makes of a small file of our own; None: there is none, or it was damaged and is set aside now.
    Raises OSError: it cannot be read at the moment.

    Args:
        parse: raises ValueError, KeyError, TypeError or AttributeError where the content is no such file's.
    """
    if settle(path, "file") is not None:
        return None
    try:
        with open(path, "rb") as file:
            data = file.read(_SMALL)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Without the text of the error, which may quote a secret.
        log.warning("%s is damaged (%s): it was set aside as %s", path, type(error).__name__, set_aside(path))
        return None


def _set_aside_odd(root: Path, entries: tuple[DataEntry, ...]) -> list[Path]:
    found = [(path, settle(path, entry.kind)) for path, entry in _odd(root, entries)]
    return [aside for _, aside in found if aside is not None]


def _odd(root: Path, entries: tuple[DataEntry, ...]) -> Iterator[tuple[Path, DataEntry]]:
    """What has a name of ours, and is of another kind; the database stays, whatever it is."""
    for directory in dict.fromkeys(entry.directory for entry in entries):
        here = [entry for entry in entries if entry.directory == directory]
        for path in _listed(root / directory):
            entry = next((one for one in here if one.name.fullmatch(path.name)), None)
            if entry is None or is_aside(path.name) or path.name == DATABASE:
                continue
            if not _is(path, entry.kind):
                yield path, entry


def _is(path: Path, kind: Literal["file", "directory"]) -> bool:
    """A directory may be a symbolic link to one: an operator has moved it to another disk. A file may not."""
    return path.is_dir() if kind == "directory" else is_regular(path)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
