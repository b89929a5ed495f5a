"""Directories in which no other user of the machine can put, replace or swap anything.

Every component of the path is opened beneath the one before it, without following a link, and its owner and mode are
checked. What passes cannot be changed by another user afterwards, so later calls may use the path.

Standard library only: `nodes.pools.ssh` sends this to machines without the project.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_OPEN = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""O_PATH: a directory such as /home may be entered, and not listed."""
_MOST_LINKS = 40
"""As the kernel follows at most."""
_ADVICE = "choose a directory below your home directory, or below one that only you and root can write"


class UnsafePath(OSError):
    """Raised when another user could put something into a directory, or another one in its place."""


def own_directory(path: Path, *, create: bool = True) -> None:
    """Check that a directory is this user's alone to change, and create what is missing of its path (mode 0700). Raises
    UnsafePath: another user could change it, or something else has its name; FileNotFoundError: it is missing, and
    `create` is false; OSError: it cannot be created."""
    left = list(reversed(path.absolute().parts[1:]))
    opened, links = [_root()], 0
    names: list[str] = []
    try:
        while left:
            name = left.pop()
            if name == "..":
                if names:
                    names.pop()
                    os.close(opened.pop())
                continue
            shown = "/" + "/".join([*names, name])
            target = _link(opened[-1], name, shown)
            if target is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise UnsafePath(f"{shown} is one of more than {_MOST_LINKS} symbolic links")
                if target.startswith("/"):
                    while names:
                        names.pop()
                        os.close(opened.pop())
                left += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                continue
            opened.append(_open(opened[-1], name, shown, create))
            names.append(name)
            _check(os.fstat(opened[-1]), shown, is_last=not left)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _root() -> int:
    root = os.open("/", _OPEN)
    try:
        _check(os.fstat(root), "/", is_last=False)
    except BaseException:
        os.close(root)
        raise
    return root


def _link(parent: int, name: str, shown: str) -> str | None:
    """The target of a symbolic link; None: it is none. Raises UnsafePath: another user has created it."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(found.st_mode):
        return None
    if not _is_trusted(found.st_uid):
        raise UnsafePath(f"{shown} is a symbolic link of {_user(found.st_uid)}, who may lead it anywhere: {_ADVICE}")
    return os.readlink(name, dir_fd=parent)


def _open(parent: int, name: str, shown: str, create: bool) -> int:
    if create:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        return os.open(name, _OPEN, dir_fd=parent)
    except NotADirectoryError:
        raise UnsafePath(f"{shown} is no directory: {_ADVICE}") from None
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file or directory", shown) from None


def _check(found: os.stat_result, shown: str, is_last: bool) -> None:
    """Check one component. Raises UnsafePath."""
    if is_last and found.st_uid != os.geteuid():
        raise UnsafePath(
            f"{shown} belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}, whose programs would use it: "
            f"{_ADVICE}"
        )
    if not _is_trusted(found.st_uid):
        raise UnsafePath(f"{shown} belongs to {_user(found.st_uid)}, who can replace all that is in it: {_ADVICE}")
    by_others = found.st_mode & stat.S_IWOTH
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    # In a directory such as /tmp only its own owner can replace an entry, and every entry on the path is checked.
    is_sticky = bool(found.st_mode & stat.S_ISVTX) and not is_last
    if (by_others or by_group) and not is_sticky:
        who = "every user" if by_others else f"members of group {found.st_gid}"
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafePath(f"{shown} can be written by {who} (mode {mode:04o}): {_ADVICE}, or `chmod go-w {shown}`")


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid()) or (uid == _unmapped() and _has_unmapped_users())


def _is_own_group(gid: int) -> bool:
    """Whether a group is root's, or has this user as its only member, as most distributions create one per user."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}


def _unmapped() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/fs/overflowuid").read_text())
    return 65534


def _has_unmapped_users() -> bool:
    """Whether this process is in a user namespace, where the machine's root has no number."""
    with suppress(OSError):
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return False


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
