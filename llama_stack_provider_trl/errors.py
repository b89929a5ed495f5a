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
import sqlite3
from typing import Any, NamedTuple

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class Shortage(NamedTuple):
    """Why storage cannot be used for now. Neither the request nor the job at hand is at fault."""

    status: int
    """Of the answer to a request that needs it."""
    what: str
    advice: str
    retry_after: int | None = None
    """Seconds after which the same request may succeed by itself; None: only when the advice was followed."""

    def described(self, error: object) -> str:
        """The sentence of an answer."""
        return f"{self.what}: {error}; {self.advice}"


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
_OF_SYSTEM = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EROFS: _READ_ONLY, errno.EIO: _FAILING}
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
    """Whether an error, or one that caused it, is a lack of file descriptors, memory or processes.

    Such an error concerns this process at this moment, and never the file or the job at hand.
    """
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def shortage_of(error: BaseException | None) -> Shortage | None:
    """The shortage of storage that an error is, or that caused it: a full, read-only or failing disk, a locked
    database; None: it is something else."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
            return _OF_SYSTEM[error.errno]
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", None)  # sqlite3 raises some itself, without a code
            if code is not None and code & 0xFF in _OF_SQLITE:
                return _OF_SQLITE[code & 0xFF]
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def shortage_behind(error: BaseException) -> Shortage:
    """How an error of storage is answered, a StoreError or OSError, whatever is behind it: the request is not at fault,
    and the service has no bug."""
    return _REMOVED if isinstance(error, RowsRemoved) else shortage_of(error) or _UNUSABLE


def _shown(value: Any, limit: int = 250) -> str:  # a path of usual length stays whole
    text = repr(value[: 2 * limit] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut(text: str, limit: int = 250) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
