"""The error tree. Each class refines a stdlib error, so a caller may catch either.

    TrlError
    |-- InvalidRequest (ValueError)        a field, a row or a value that cannot be honoured -> 400
    |   `-- InvalidRows (ValueError)       a dataset row that no recipe can read             -> 400
    |-- JobNotFound (LookupError)          no job has this job_uuid                           -> 404
    |-- JobConflict (RuntimeError)         the job_uuid is taken, or the state forbids it     -> 409
    |-- LimitReached (RuntimeError)        a limit is reached, for now                        -> 429
    |-- QuotaReached (RuntimeError)        a token has stored as many bytes as it may         -> 507
    |-- StoreError (RuntimeError)          the job database cannot be used                    -> 507 or 503
    |-- ServiceUnreachable (ConnectionError)  the training service does not answer            -> 502
    |-- ServiceRefusal (RuntimeError)      the training service answered with an error        -> its status, or 502
    |-- MethodUnavailable (ImportError)     a package's training method cannot be used here      -> never sent
    |-- MissingExtra (ImportError)         a library is needed that an extra installs         -> never sent
    `-- JobFailure (RuntimeError)          raised in a training process; becomes the job's failure reason

A message states what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

_AGAIN = "send it again"


class Shortage(NamedTuple):
    """Why storage, or something else of the system, cannot be used for now. Neither the request nor the job at hand is
    at fault."""

    status: int
    """Of the answer to a request that needs it."""
    what: str
    advice: str
    retry_after: int | None = None
    """Seconds after which the same request may succeed by itself; None: only when the advice was followed."""

    @property
    def headers(self) -> dict[str, str]:
        """Of an answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def described(self, error: object, again: str = _AGAIN) -> str:
        """The sentence of an answer.

        Args:
            again: what is repeated when the advice was followed.
        """
        return f"{self.what}: {str(error) or type(error).__name__}; {self.advice.replace(_AGAIN, again)}"


FULL = Shortage(507, "the disk is full", "free some space and send it again")
_READ_ONLY = Shortage(
    507, "the disk is read-only", "make it writable again (the kernel's log has the reason), then send it again"
)
_FAILING = Shortage(503, "the disk cannot be read or written", "check it (the kernel's log has the reason)", 30)
LOCKED = Shortage(503, "another process holds the lock of the database", "send it again in a few seconds", 5)
_REMOVED = Shortage(503, "rows were removed meanwhile", "send it again", 1)
_UNUSABLE = Shortage(
    503, "storage cannot be used", "`trl-remote doctor` on that machine, and the log, show what is wrong with it", 30
)
_NO_DESCRIPTORS = Shortage(
    503,
    "the process is out of file descriptors",
    "send it again in a few seconds, or raise the limit of open files (ulimit -n, LimitNOFILE of systemd) and restart "
    "the process",
    5,
)
_NO_MEMORY = Shortage(
    503,
    "memory is exhausted",
    "send it again in a few seconds, or end other programs on that machine, or give the process more memory",
    5,
)
_NO_THREADS = Shortage(
    503,
    "the process can start no more threads or processes",
    "send it again in a few seconds, or raise the limit of processes (ulimit -u, TasksMax of systemd) and restart the "
    "process",
    5,
)
_OF_SYSTEM = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EROFS: _READ_ONLY, errno.EIO: _FAILING}
_OF_NETWORK_DISK = frozenset({errno.ETIMEDOUT, errno.ECONNABORTED})
"""What a file system of another machine reports of itself, and a connection likewise."""
_EXHAUSTED = {
    errno.EMFILE: _NO_DESCRIPTORS,
    errno.ENFILE: _NO_DESCRIPTORS,
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: _NO_THREADS,
}
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_IOERR: _FAILING,
    sqlite3.SQLITE_CANTOPEN: _FAILING,
    sqlite3.SQLITE_BUSY: LOCKED,
    sqlite3.SQLITE_LOCKED: LOCKED,
    sqlite3.SQLITE_PROTOCOL: LOCKED,
}


class TrlError(Exception):
    """Base of every error that this project raises on purpose.

    Every subclass survives pickling, with any arguments: ranks and worker processes exchange errors that way.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


class InvalidRequest(TrlError, ValueError):
    """Raised when a request cannot be honoured.

    Args:
        field: dotted path of the offending field, such as `training_config.data_config.packed`.
        value: what was found there.
        hint: the nearest supported value, as a full sentence.
    """

    def __init__(self, field: str, value: Any, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        missing = value is None and field.startswith("--")  # an option of a command line
        found = "is missing" if missing else f"={_shown(value)} is not supported"
        super().__init__(f"{_cut(field)}{' ' if missing else ''}{found}: {hint}")


class InvalidRows(InvalidRequest):
    """Raised when a dataset row cannot be read; names the row (counted from 0) and its columns."""

    def __init__(self, message: str, *, row: int | None = None) -> None:
        self.row = row
        text = message if row is None else f"row {row}: {message}"
        self.field, self.value, self.hint = "dataset", None, text
        Exception.__init__(self, text)


class JobNotFound(TrlError, LookupError):
    """Raised when no job has the given `job_uuid`."""

    def __init__(self, job_uuid: str) -> None:
        self.job_uuid = job_uuid
        super().__init__(f"job {job_uuid!r} not found: GET /v1/post-training/jobs lists the jobs of this provider")


class JobConflict(TrlError, RuntimeError):
    """Raised when a `job_uuid` is already taken by a different request, or a job's state forbids the call."""


class LimitReached(TrlError, RuntimeError):
    """Raised when a limit of the caller's token, or of the requests that are checked at once, is reached; the same
    request succeeds later."""

    status_code = 429
    """As `StoreError`'s."""

    def __init__(self, message: str, retry_after: int = 30) -> None:
        self.retry_after = retry_after
        """Seconds after which it may succeed."""
        super().__init__(message)


class NotServed(TrlError, RuntimeError):
    """Raised when a model cannot answer now: a training has the device, or other models do; the same request succeeds
    later."""

    def __init__(self, message: str, retry_after: int = 10) -> None:
        self.retry_after = retry_after
        """Seconds after which it may succeed."""
        super().__init__(message)


class QuotaReached(TrlError, RuntimeError):
    """Raised when a token has stored as much as it may; the same request succeeds when some of that is deleted."""

    status_code = 507


class StoreError(TrlError, RuntimeError):
    """Raised when the job database or a dataset cannot be opened or written; names the file and the reason."""

    @property
    def status_code(self) -> int:
        """Its own status: Llama Stack shows the text of an error that carries one, and "unexpected" for others."""
        return shortage_behind(self).status


class RowsRemoved(StoreError):
    """Raised when rows were removed while a job that needs them was stored; the same request succeeds."""


class DamagedRecord(StoreError):
    """Raised when the record of a job cannot be read; others can."""


class ServiceUnreachable(TrlError, ConnectionError):
    """Raised when the training service cannot be reached, stops answering, or is another program; names its URL.

    Llama Stack answers a ConnectionError with 502 and its text.
    """

    def __init__(self, url: str, found: str, advice: str = "") -> None:
        self.url = url
        todo = advice or "start it with ./scripts/run-remote-fsdp-server.sh, or correct its address (TRL_SERVICE_URL)"
        super().__init__(f"the training service at {url} {found}: {todo}")


class ServiceRefusal(TrlError, RuntimeError):
    """Raised when the training service answers with an error.

    Args:
        url: address of the service.
        status: HTTP status of its answer.
        detail: its sentence.
        of_token: advice about the token where that was refused.
    """

    THEIRS = frozenset({400, 404, 409})
    """The request itself is wrong: the service's sentence is complete."""
    PASSED_ON = frozenset({*THEIRS, 413, 429, 503, 507})
    """Statuses that Llama Stack passes on. Others, such as a wrong token, concern the adapter and not its client:
    502."""
    OF_TOKEN = "The token is TRL_SERVICE_TOKEN, in Llama Stack the `api_token` of remote::trl_remote"

    def __init__(self, url: str, status: int, detail: str, of_token: str = OF_TOKEN) -> None:
        self.url, self.status, self.detail = url, status, detail
        text = detail if status in self.THEIRS else f"the training service at {url} answered {status}: {detail}"
        if status in (401, 403) and of_token:
            text = f"{text.removesuffix('.')}. {of_token}"
        super().__init__(text)

    @property
    def status_code(self) -> int:
        """The status of Llama Stack's answer."""
        return self.status if self.status in self.PASSED_ON else 502


class MissingExtra(TrlError, ImportError):
    """Raised when a command needs a library that is not installed.

    Args:
        what: the command, or what it makes.
        library: what cannot be imported.
        extra: the extra of this distribution that installs it.
    """

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {library}, which is not installed: pip install 'llama_stack_provider_trl[{extra}]'"
        )


class MethodUnavailable(TrlError, ImportError):
    """Raised when a training method of a package is not installed, or cannot be used, in the process at hand; its text
    becomes a refusal of the request, or the failure of the job."""


class JobFailure(TrlError, RuntimeError):
    """Raised inside a training process when the job cannot continue.

    Args:
        reason: a value of `specs.events.Reason`.
        message: what was found, what was expected, what to do next.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message
        super().__init__(message)


def _unpickled(kind: type[TrlError], args: tuple[Any, ...], state: dict[str, Any]) -> TrlError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def is_exhausted(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is a lack of file descriptors, memory, threads or processes.

    Such an error concerns this process at this moment, and never the file or the job at hand.
    """
    return _exhausted(error) is not None


def shortage_of(error: BaseException | None) -> Shortage | None:
    """The shortage of storage that an error is, or that caused it: a full, read-only or failing disk, a locked
    database; None: it is something else."""
    raised: BaseException | None = None
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _OF_SYSTEM:
            return _OF_SYSTEM[each.errno]
        is_of_file = isinstance(raised, StoreError) or (isinstance(each, OSError) and each.filename is not None)
        if is_of_file and isinstance(each, OSError) and each.errno in _OF_NETWORK_DISK:
            return _FAILING
        if isinstance(each, sqlite3.Error):
            code = getattr(each, "sqlite_errorcode", None)  # sqlite3 raises some itself, without a code
            if code is not None and code & 0xFF in _OF_SQLITE:
                return _OF_SQLITE[code & 0xFF]
        raised = each
    return None


def shortage_behind(error: BaseException) -> Shortage:
    """How an error of storage is answered, a StoreError or OSError, whatever is behind it: the request is not at fault,
    and the service has no bug."""
    return _REMOVED if isinstance(error, RowsRemoved) else shortage_of(error) or _exhausted(error) or _UNUSABLE


def trouble_of(error: BaseException, *, has_connections: bool = False) -> Shortage | None:
    """How an error that is none of ours is answered where storage or the system causes it, here and in Llama Stack;
    None: something else does.

    Args:
        has_connections: it may be the error of a connection to another program: one that both may report counts with
            the name of a file only.
    """
    if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
        return None  # a wrong value or statement
    if isinstance(error, TimeoutError | ConnectionError) and error.filename is None:
        return _FAILING if error.errno in _OF_NETWORK_DISK and not has_connections else None
    # Of another error nothing behind it counts: that may be a failure of something else, which was dealt with.
    return shortage_behind(error) if isinstance(error, OSError | sqlite3.Error) else _exhaustion(error)


def sentence_of(error: Exception, again: str) -> str:
    """The text of an error that ends a program, with what to do where storage or the system causes it.

    Args:
        again: what is repeated then.
    """
    is_either = isinstance(error, OSError | StoreError)
    shortage = (shortage_of(error) or _exhausted(error)) if is_either else None
    return _of_path(error) or str(error) if shortage is None else shortage.described(error, again)


_CORRECT = "correct the path"
_ALLOW = "change its permissions, or name another path"
_OF_PATH = {
    errno.ENOENT: _CORRECT,
    errno.ENOTDIR: _CORRECT,
    errno.EISDIR: _CORRECT,
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
}
"""What to do about a path that the system refuses."""


def _of_path(error: Exception) -> str:
    """The sentence of an error about one path; empty: it is another error."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str) or error.filename2 is not None:
        return ""
    if error.errno is None or (remedy := _OF_PATH.get(error.errno)) is None:
        return ""
    problem = os.strerror(error.errno).lower()
    within = "" if os.path.isabs(error.filename) else f" in {os.getcwd()}"
    return f"{error.filename!r} cannot be used: {problem}{within}: {remedy}"


def _exhausted(error: BaseException | None) -> Shortage | None:
    return next((found for each in _chain(error) if (found := _exhaustion(each)) is not None), None)


def _exhaustion(error: BaseException) -> Shortage | None:
    """What an error itself is a lack of; None: it is something else."""
    if isinstance(error, MemoryError):
        return _NO_MEMORY
    if type(error) is RuntimeError and str(error).startswith("can't start new thread"):
        return _NO_THREADS
    return _EXHAUSTED.get(error.errno or 0) if isinstance(error, OSError) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    seen = 0
    while error is not None and seen < 20:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def _shown(value: Any, limit: int = 250) -> str:  # a path of usual length stays whole
    text = repr(value[: 2 * limit] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut(text: str, limit: int = 250) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
