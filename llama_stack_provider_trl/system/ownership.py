"""Records which data directory owns a job's checkpoint directory.

Two data directories may use the same absolute `checkpoint_dir` and the same job_uuid. Without a record beside the
directory, each would move and delete the files of the other one's job.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from ..errors import InvalidRequest, JobConflict
from .data_dir import DataDir, read_own
from .files import atomic_write_json, read_regular

_SUFFIX = ".owner"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_READABLE = 0o644
"""Mode of a record: another user's service reads it."""


class Owner(NamedTuple):
    """The owner of a checkpoint directory, from the record `.<job_uuid>.owner` beside it."""

    identity: str
    data_dir: Path
    """Path of that data directory when it last launched the job."""
    job_uuid: str


class Ownership:
    """Guards the checkpoint directories of the jobs of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir.resolve()

    def check(self, checkpoint_dir: Path) -> None:
        """Refuse a checkpoint directory that conflicts with another data directory's job.

        Raises:
            JobConflict: another one owns it, or a directory above or below it; names both, and
                what to do.
            OSError: a record cannot be read.
        """
        self._refuse_our_own_files(checkpoint_dir)
        ours = _identity(self._data_dir)
        below = (path.with_name(path.name[1 : -len(_SUFFIX)]) for path in checkpoint_dir.rglob(f".*{_SUFFIX}"))
        for directory in (checkpoint_dir, *checkpoint_dir.parents[:-1], *below):
            owner = _read(directory)
            if owner is not None and not self._is_ours(owner, ours, directory):
                raise JobConflict(
                    f"checkpoint_dir {str(checkpoint_dir)!r}: {directory} is that of job {owner.job_uuid!r} of another "
                    f"data directory, {owner.data_dir}. Choose another checkpoint_dir or job_uuid; if that data "
                    f"directory is gone for good, remove {record(directory)} and submit the job again"
                )

    def check_unused(self, checkpoint_dir: Path) -> None:
        """Make sure that a new job may write into a checkpoint directory: as `check`, and what lies there is ours.

        Raises:
            JobConflict: as `check`; or it has content, and nothing shows that this data directory's job wrote it.
            OSError: it or a record cannot be read.
        """
        self.check(checkpoint_dir)
        if _has_content(checkpoint_dir) and not self.is_ours(checkpoint_dir):
            raise JobConflict(
                f"checkpoint_dir {str(checkpoint_dir)!r} has content, and was not written by a job of this data "
                f"directory, {self._data_dir} (there is no record {record(checkpoint_dir)}): choose another "
                "checkpoint_dir or job_uuid, or move it away"
            )

    def is_ours(self, checkpoint_dir: Path) -> bool:
        """Whether a job of this data directory wrote it, so that it may be moved and what is in it removed: it lies in
        `checkpoints` of the data directory, or has our record."""
        try:
            self.check(checkpoint_dir)
            owner = _read(checkpoint_dir)
        except JobConflict:
            return False
        return owner is not None or DataDir(self._data_dir).is_result(checkpoint_dir.resolve())

    def claim(self, checkpoint_dir: Path, job_uuid: str) -> None:
        """Record that the directory is ours, before a job writes into it. May be repeated. Raises JobConflict: as
        `check`; OSError: the record cannot be written."""
        self.check(checkpoint_dir)
        owner = Owner(_identity(self._data_dir, make=True), self._data_dir, job_uuid)
        checkpoint_dir.parent.mkdir(parents=True, exist_ok=True)
        if not _create(checkpoint_dir, owner):
            self.check(checkpoint_dir)  # another process was faster
            if _read(checkpoint_dir) != owner:  # ours, from before it was moved
                atomic_write_json(record(checkpoint_dir), _document(owner), mode=_READABLE)

    def release(self, checkpoint_dir: Path) -> None:
        """Remove the record of a job that is deleted. Another data directory's record stays."""
        owner = _read(checkpoint_dir)
        if owner is not None and self._is_ours(owner, _identity(self._data_dir), checkpoint_dir):
            record(checkpoint_dir).unlink(missing_ok=True)

    def _refuse_our_own_files(self, checkpoint_dir: Path) -> None:
        """Refuse to write, move or delete what is our own, whatever directory a job names. Raises JobConflict."""
        if not DataDir(self._data_dir).is_free(checkpoint_dir.resolve()):
            raise JobConflict(
                f"checkpoint_dir {str(checkpoint_dir)!r} is among the own files of the data directory, "
                f"{self._data_dir}: results lie below {DataDir(self._data_dir).checkpoints}; submit the job again"
            )

    def _is_ours(self, owner: Owner, ours: str, directory: Path) -> bool:
        # The file with the identity may be lost: what lies here, and names this place, is ours all the same. Behind a
        # link it may be that of another machine, whose data directory has the same path.
        lies_here = directory.resolve().is_relative_to(DataDir(self._data_dir).checkpoints)
        if owner.data_dir == self._data_dir and lies_here:
            return True
        if not ours or owner.identity != ours:
            return False
        if owner.data_dir == self._data_dir or _identity_elsewhere(owner.data_dir) != ours:
            return True  # it was moved here
        return owner.data_dir.samefile(self._data_dir)  # else one is a copy of the other


def record(checkpoint_dir: Path) -> Path:
    return checkpoint_dir.with_name(f".{checkpoint_dir.name}{_SUFFIX}")


def _has_content(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


def _document(owner: Owner) -> dict[str, str]:
    return {"identity": owner.identity, "data_dir": str(owner.data_dir), "job_uuid": owner.job_uuid}


def _read(checkpoint_dir: Path) -> Owner | None:
    path = record(checkpoint_dir)
    try:
        found = json.loads(path.read_text())
        return Owner(found["identity"], Path(found["data_dir"]), found["job_uuid"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Some data directory owns it. Without an identity it cannot be this one.
        return Owner("", Path(f"(unknown, the record {path} is damaged: {error})"), checkpoint_dir.name)


def _create(checkpoint_dir: Path, owner: Owner) -> bool:
    """Write a record atomically; False: there is one."""
    path = record(checkpoint_dir)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}-")
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, _READABLE)
            json.dump(_document(owner), file, indent=1)
            file.flush()
            os.fsync(fd)
        _link(Path(name), path)
    except FileExistsError:
        return False
    finally:
        os.unlink(name)
    return True


def _link(source: Path, path: Path) -> None:
    """Give a file a second name. Raises FileExistsError."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        with open(path, "x") as file:  # a file system without hard links: not atomic, but never over another
            file.write(source.read_text())


def _identity(data_dir: Path, make: bool = False) -> str:
    """Names a data directory; "" where it has no name yet.

    Args:
        make: create one. Only the supervising process does so, which is one at a time.
    """
    path = DataDir(data_dir).identity
    found = read_own(path, _parsed_identity)
    if found is not None or not make:
        return found or ""
    name = uuid4().hex
    data_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, name)
    return name


def _identity_elsewhere(data_dir: Path) -> str:
    """Names a directory that a record calls a data directory; "" where it is none any more."""
    try:
        return _parsed_identity(read_regular(DataDir(data_dir).identity))
    except (OSError, ValueError):
        return ""


def _parsed_identity(data: bytes) -> str:
    name = data.decode().strip(' "\n')
    if not _IDENTITY.fullmatch(name):
        raise ValueError("expected 32 hexadecimal digits")
    return name


def refuse_foreign(data_dir: Path, checkpoint_dir: Path) -> None:
    """Return if a new job may use a checkpoint directory. Raises JobConflict, InvalidRequest."""
    try:
        Ownership(data_dir).check_unused(checkpoint_dir)
    except OSError as error:
        hint = f"it cannot be read: {error}"
        raise InvalidRequest("checkpoint_dir", str(checkpoint_dir.parent), hint) from error
