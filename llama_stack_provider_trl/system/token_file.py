"""Reads a token from a file that only its owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .texts import decoded

_LONGEST = 4096
"""Bytes of a token file."""
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Reading by the group is allowed: that is how Kubernetes mounts a Secret for a user other than root."""


def read_token(file: str) -> str:
    """The token in `file`, without white space around it. Raises ValueError: it is missing, no regular file, empty or
    too long, holds several lines, or other users can read or change it."""
    path = Path(file).expanduser()
    try:
        # Without O_NONBLOCK, a named pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"the token file {path} is not a regular file: name a file that holds the token alone")
            if found.st_mode & _OPEN_TO_OTHERS:
                raise ValueError(
                    f"the token file {path} has mode {stat.S_IMODE(found.st_mode):04o}, with which other users can "
                    f"read or change it: chmod 600 {path}"
                )
            content = opened.read(_LONGEST + 1)
    except OSError as error:
        raise ValueError(
            f"the token file {path} cannot be read ({error.strerror}): write the token there, with mode 600"
        ) from error
    try:
        token = checked_token(decoded(content)) if len(content) <= _LONGEST else None
    except ValueError as error:  # neither the content nor a part of it is repeated
        raise ValueError(
            f"the token file {path} does not hold one line of text: write the token alone there"
        ) from error
    if token is None:
        what = f"more than {_LONGEST} bytes" if content.strip() else "no token"
        raise ValueError(f"the token file {path} has {what}: write the token alone there")
    return token


def checked_token(token: str | None) -> str | None:
    """A token without surrounding white space (a file's last line ends with a newline); None: there is none. Raises
    ValueError: no HTTP header can carry it."""
    found = (token or "").strip()
    if not found.isprintable():
        raise ValueError("the token has a character that cannot be printed, such as a newline: set it as one line")
    return found or None
