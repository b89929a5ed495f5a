"""Where a model's files are on this machine: a directory, or a snapshot in the hub's cache whose files are links."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from .files import open_in
from .hub_cache import CachedCommit, find_snapshot, repository_of

_SUBDIRECTORY = "additional_chat_templates"


class ModelDirectory(NamedTuple):
    """A model's directory. No symbolic link leads out of `root` when one of its files is opened."""

    root: Path
    inside: str = ""
    """Path of the model in `root`."""
    commit: str = ""
    """Of a snapshot in the hub's cache."""

    @classmethod
    def of(cls, snapshot: CachedCommit) -> ModelDirectory:
        return cls(snapshot.repository, snapshot.inside, snapshot.commit)

    @classmethod
    def at(cls, path: Path) -> ModelDirectory:
        """A model in a directory whose path has no symbolic links; the files of a snapshot are links to its repository
        in the cache."""
        repository = repository_of(path)
        return cls(path) if repository is None else cls(repository, str(path.relative_to(repository)))

    @property
    def path(self) -> Path:
        return self.root / self.inside

    def names(self) -> list[str]:
        """Paths, in the directory, of its files and of its chat templates. Raises OSError."""
        found = [path.name for path in self.path.iterdir() if path.is_file()]
        templates = self.path / _SUBDIRECTORY
        if templates.is_dir():
            found += [f"{_SUBDIRECTORY}/{path.name}" for path in templates.iterdir() if path.is_file()]
        return sorted(found)

    def open(self, name: str) -> BufferedReader:
        """Open one of its files. Raises OSError, also where a symbolic link leads out of `root`."""
        return open_in(self.root, Path(self.inside, name))

    def read(self, name: str, most: int = 1 << 20) -> bytes:
        """The content of one of its files. Raises OSError, also where it has more than `most` bytes."""
        with self.open(name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(f"it is larger than {most >> 20} MiB")
        return content


def find_model(environ: Mapping[str, str], model: str, revision: str | None = None) -> ModelDirectory | None:
    """The directory of a model on this machine: an absolute path's own, or an id's in the hub's cache; None: it is not
    here, or the path has become a symbolic link since it was resolved."""
    path = Path(model)
    if path.is_absolute():
        try:
            return ModelDirectory.at(path) if path.is_dir() and path.resolve() == path else None
        except (OSError, RuntimeError):
            return None
    snapshot = find_snapshot(environ, model, revision)
    return None if snapshot is None else ModelDirectory.of(snapshot)
