"""Files that survive a crash: content-addressed rows, atomic JSON, whole directories, confinement to a root, paths."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import InvalidRequest, is_exhausted
from .beneath import NotAFile, open_beneath
from .json_rows import encoded

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
"""File in a checkpoint with the size of each of its files, and the digests of a step checkpoint's. It is written last,
so that a directory with it was complete once."""
LATEST = "latest"
"""File in a job's checkpoint directory with the name of the step checkpoint that became visible last."""
_STEP = re.compile(r"checkpoint-\d+")
_STAGED = re.compile(r"\.saving|.+\.tmp|.+\.old")
_SMALL = 16 << 20
"""Bytes of a small file that a training may have written; the largest manifests have 1 MiB."""
_PIECE_BYTES = 1 << 16
Check = Callable[[Path], object]
Storing = Callable[[str], object]


class RunDir:
    """Every path of one attempt, as a function of its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spec = root / "spec.json"
        self.events = root / "events.jsonl"
        self.log = self.rank_log(0)
        self.launcher_log = root / "torchrun.log"
        """torchrun's log where several ranks train: the rank that ended first, and its exit."""
        self.launcher_dir = root / "torchrun"
        """torchrun's log directory, which is never read: without it torchrun creates one in /tmp and never removes
        it."""
        self.stacks = root / "stacks"
        """One file per rank, named by its pid: its Python stacks when the runner requests them."""
        self.control = root / "control.json"
        """The order for rank 0 after the current step; written by the launcher."""
        self.cancelled = root / "cancelled"
        """Marks the first cancel, by its modification time."""
        self.ballast = root / "ballast"
        """Deleted to make room for the final event of a training process on a full disk."""
        self.uploads = root / "uploads"
        """Number of checkpoints that wait for their upload; written by the agent of another machine."""
        self.task = root / "task.json"
        self.runner_lock = root / "runner.lock"
        self.runner_log = root / "runner.log"
        self.runner_status = root / "runner.json"

    def rank_log(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.log"


class Blob(NamedTuple):
    sha256: str
    path: Path
    num_rows: int
    num_bytes: int


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading whose name a training controls: no symbolic link is followed, no FIFO awaited. Raises
    FileNotFoundError: nothing has the name; NotAFile: it is a symbolic link, a directory, a FIFO, a device or a socket;
    OSError: it cannot be opened."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAFile(errno.EINVAL, "it is a symbolic link or a socket, not a file", str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise NotAFile(errno.EINVAL, "it is not a regular file", str(path))


def open_in(directory: Path, relative: str | Path) -> BufferedReader:
    """Open a regular file below a directory in which a training writes; no symbolic link leads out of it.

    Raises:
        NotAFile: it is something else.
        OSError: it cannot be opened. EXDEV or ELOOP: a symbolic link on the path leads out of `directory`.
    """
    return os.fdopen(open_beneath(directory, Path(relative)), "rb")


def read_regular(path: Path, limit: int = _SMALL) -> bytes:
    """The content of a small file, opened as by `open_regular`. Raises OSError: those of `open_regular`. EFBIG: it has
    more than `limit` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file itself, and not a symbolic link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def private_directory(directory: Path) -> None:
    """Create a directory that no other user can enter; an existing one of ours becomes private. Raises OSError: it
    cannot be created."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = stat.S_IMODE(directory.stat().st_mode)
    if not found & 0o077:
        return
    try:
        directory.chmod(found & ~0o077)
    except OSError as error:
        log.warning(
            "%s can be entered by other users (mode %04o), and that cannot be changed (%s): rows and logs in it are "
            "readable for them; have its owner run chmod 700",
            *(directory, found, error.strerror),
        )


def put_rows(
    directory: Path, rows: Iterable[dict[str, Any]], check: Check | None = None, storing: Storing = lambda digest: None
) -> Blob:
    """Store rows as `<directory>/<sha256>.jsonl`, one JSON object per line; the same rows are stored once.

    A column whose value is NaN is left out of its row: a data frame marks rows without such a column that way.

    Args:
        check, storing: as in `put_lines`.

    Raises:
        InvalidRows: a row is not an object, contains itself, or is nested too deeply; names the row, and nothing is
            stored. Values that JSON lacks are written as objects (`json_rows`).
        OSError: the directory cannot be written.
    """
    return put_lines(directory, _pieces(encoded(row, number) for number, row in enumerate(rows)), check, storing)


def put_lines(
    directory: Path, lines: Iterable[bytes], check: Check | None = None, storing: Storing = lambda digest: None
) -> Blob:
    """Store rows that are lines of JSON already, like `put_rows`. Raises OSError: the directory cannot be written.

    Args:
        lines: whole ones, or any pieces of them: a file that a node has sent may have a line without an end.
        check: is called with the file before it is stored, and raises if it is not to be.
        storing: is called with their digest before they are stored, or found stored.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=directory, prefix=".rows-")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb", buffering=1 << 20) as file:
            digest, num_rows = _write_lines(file, lines)
            num_bytes = file.tell()
            _flush(file)
        if check is not None:
            check(temporary)
        path = directory / f"{digest}.jsonl"
        storing(digest)
        if not touched(path):
            os.replace(temporary, path)
            fsync_path(directory)
        return Blob(digest, path, num_rows, num_bytes)
    finally:
        temporary.unlink(missing_ok=True)


def touched(rows: Path) -> bool:
    """Whether these rows are stored; they then count as used now, and are not removed for a while."""
    try:
        os.utime(rows)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EROFS:  # where nothing is removed either
            raise
        return rows.exists()
    return True


def atomic_write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    atomic_write(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n", mode)


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader, also after a power cut, finds the old one or the new one and never a part."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            _flush(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def fsync_tree(directory: Path) -> None:
    """Force every file and directory below (and including) `directory` to disk."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            fsync_path(Path(root, name))
        fsync_path(Path(root))


def write_manifest(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record the size of every file of a directory that is complete, in the directory.

    Args:
        digests: path in the directory -> sha256 of the file, where known; `damage` compares them.
    """
    sizes = {name: (directory / name).stat().st_size for name in file_names(directory)}
    manifest = {"files": sizes, **({"sha256": dict(sorted(digests.items()))} if digests else {})}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def is_whole(directory: Path) -> bool:
    """Whether every file that the directory's manifest names is there with its size. Reads no file but that."""
    return damage(directory, of=()) is None


def damage(directory: Path, of: Collection[str] | None = None) -> str | None:
    """The first fault of a directory that has a manifest, as a sentence; None: it has none. Raises OSError: this
    process has no descriptor or no memory left for the check.

    Args:
        of: read these files, and compare their digests; None: all. A manifest without digests is compared by
            its sizes.
    """
    try:
        manifest = json.loads(read_regular(directory / MANIFEST))
        for name, size in manifest["files"].items():
            with open_in(directory, name) as file:
                found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{name} has {found} bytes, its manifest lists {size}"
        for name, digest in manifest.get("sha256", {}).items():
            if (of is None or name in of) and sha256_in(directory, name) != digest:
                return f"{name} does not have the sha256 that its manifest lists"
    except OSError as error:
        if is_exhausted(error):
            raise  # the files may be whole, and a damaged checkpoint would be abandoned
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read: {error!r}"
    return None


def file_names(directory: Path) -> list[str]:
    """Paths in `directory` of all files in and below it, sorted: the same on every rank."""
    return sorted(str(path.relative_to(directory)) for path in _files(directory))


def sha256_of(path: Path) -> str:
    """sha256 of a file: 0.7 GB/s on one core of a server CPU, and Python's other threads continue meanwhile
    (hashlib)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_in(directory: Path, name: str) -> str:
    with open_in(directory, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def point_latest(directory: Path, name: str) -> None:
    """Make the file `latest` name a checkpoint of its directory. A reader finds the old name or the new one."""
    temporary = directory / f"{LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as file:  # follows no symbolic link
        file.write(name.encode() + b"\n")
        _flush(file)
    os.replace(temporary, directory / LATEST)
    fsync_path(directory)


def put_in_place(staging: Path, target: Path, check: Callable[[], None] = lambda: None) -> None:
    """Make a complete directory visible under its name, in one step; an existing one of the name is replaced. `check`
    is called when all files are on the disk, as late as possible; where it raises, nothing becomes visible."""
    fsync_tree(staging)
    check()
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(directory: Path, listed: Collection[str]) -> None:
    """Remove the rest of a killed process from a job's checkpoint directory: parts of checkpoints.

    A whole step checkpoint stays, also one that is not listed: the database may be an older one, restored from a
    backup. The job replaces it when it comes to that step again. A checkpoint that was set aside for a new one which
    never came gets its name back.

    Args:
        listed: names of the job's checkpoints; they stay.
    """
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        replaced = path.with_suffix("")
        if path.suffix == ".old" and not replaced.exists():
            path.rename(replaced)
        elif path.name == f"{LATEST}.tmp":
            path.unlink()
        elif path.is_symlink():
            if _STAGED.fullmatch(path.name):
                path.unlink()
        elif _STAGED.fullmatch(path.name) or (
            _STEP.fullmatch(path.name) and path.name not in listed and not is_whole(path)
        ):
            shutil.rmtree(path, ignore_errors=True)
    latest = directory / LATEST
    if os.path.lexists(latest) and _named_by(latest) not in listed:  # it became visible and was not announced
        steps = [name for name in listed if _STEP.fullmatch(name)]
        if steps:
            point_latest(directory, max(steps, key=lambda name: int(name.rpartition("-")[2])))
        else:
            latest.unlink()


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint. After a crash in between `remove_leftovers` removes the rest, whole or not."""
    aside = checkpoint.with_name(f"{checkpoint.name}.removed.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        checkpoint.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _named_by(latest: Path) -> str | None:
    try:
        return read_regular(latest).decode(errors="replace").strip()
    except NotAFile:
        return None


def free_bytes(path: Path) -> int:
    """Bytes that may still be written on the disk of `path`, which need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def disk_of(path: Path) -> int:
    """The file system of `path`, which need not exist, as `stat` names it."""
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def is_read_only(path: Path) -> bool:
    """Whether the disk of `path`, which need not exist, is mounted without the right to write."""
    while not path.exists():
        path = path.parent
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def can_write(directory: Path) -> bool:
    try:
        try_to_write(directory)
    except OSError:
        return False
    return True


def try_to_write(directory: Path) -> None:
    """Write a small file without a name to a directory, force it to disk, and drop it. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(4096))
        _flush(file)


def set_aside(path: Path) -> Path | None:
    """Rename what has this name, a link itself included, to `<name>.stale-<n>`; returns its new name, None: there is
    nothing."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.stale-{number}")):
        number += 1
    return path.rename(aside)


def resolve_under(root: Path, relative: str | Path, field: str = "path") -> Path:
    """The path `root / relative` without symlinks, which lies under `root`. Raises InvalidRequest: `relative` is
    absolute, has a `..`, or leads out of `root` through a symlink; names `field`."""
    text = str(relative)
    if "\0" in text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise InvalidRequest(field, text, "send a relative path without '..'.")
    resolved = (root / text).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise InvalidRequest(field, text, f"a symbolic link on it leads out of {root}: send a path that stays inside.")
    return resolved


def tail(path: Path, lines: int = 20, limit: int = 4096) -> str:
    """The last lines of a text file, at most `limit` bytes of them; empty where there is no such regular file."""
    try:
        with open_regular(path) as file:
            return tail_of(file, lines, limit)
    except (FileNotFoundError, NotAFile):
        return ""


def tail_of(file: BinaryIO, lines: int, limit: int) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
    text = file.read(limit).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:]).strip()


def _write_lines(file: BinaryIO, lines: Iterable[bytes]) -> tuple[str, int]:
    digest, count, last = hashlib.sha256(), 0, b"\n"
    for line in lines:
        digest.update(line)
        file.write(line)
        count += line.count(b"\n")
        last = line[-1:] or last
    return digest.hexdigest(), count + (last != b"\n")


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Many lines at once: a million small rows are stored in 2.2 s of CPU time where it took 2.9."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) > _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if is_regular(path))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
