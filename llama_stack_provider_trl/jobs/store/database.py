"""The sqlite file of a data directory: connections, transactions, creation and upgrade of its tables.

Several processes may have the file open. The statements are in `queries.sql`, the tables in `schema.sql`. The records
that the tables hold have classes of their own: `store.Store`, `nodes.Nodes`, `node_tasks.NodeTasks`, `tokens.Tokens`.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import LOCKED, InvalidRequest, StoreError, shortage_of
from ...system.data_dir import DataDir
from ...system.files import is_read_only, private_directory
from ...system.process import FileLock

SCHEMA_VERSION = 1
_BUSY_SECONDS = 5.0
"""Seconds that a writer waits for another. Transactions take about a millisecond."""
_LOCKED_SECONDS, _BRIEF_MS = 1.0, 100
"""Seconds after a wait without effect in which writers wait only these milliseconds: else a lock that another process
keeps would hold a thread of the service for each of them, and reads would wait behind those."""
_CACHE_KIB = 512
"""Of each connection, in place of SQLite's 2,000: one that has read the points of a long job would keep them, and the
kernel has the same pages."""
_CREATED = re.compile(r"^CREATE (?:UNIQUE )?(?:TABLE|INDEX|TRIGGER|VIEW) IF NOT EXISTS (\w+)", re.MULTILINE)
"""Names that the schema gives."""
_DROPPED = re.compile(r"^DROP TABLE IF EXISTS (\w+)", re.MULTILINE)
"""Tables of other builds of the same version, which the schema removes."""
_inherited: list[sqlite3.Connection] = []
"""Connections of the process that this one is a fork of. They stay open until it ends."""
log = logging.getLogger(__name__)

Execute = Callable[[str, Mapping[str, Any]], sqlite3.Cursor]
"""Runs a named statement of `queries.sql`."""


class _ThreadConnection:
    """A connection that is closed when its thread ends and drops this object.

    A `sqlite3.Connection` is part of a reference cycle, by its statement cache. It would stay open until the garbage
    collector finds it, and Python 3.13 warns of that.

    A fork of the process drops the objects of all threads but its own, before it runs anything else, and keeps their
    connections open: to close one waits for a mutex of SQLite that the thread may have held (41 of 100 forks beside a
    thread that writes), and would undo its transaction in the index of the write-ahead log, which both processes share.
    https://www.sqlite.org/howtocorrupt.html (2.6).
    """

    def __init__(self, connection: sqlite3.Connection, is_read_only: bool = False) -> None:
        self.connection = connection
        self.is_read_only = is_read_only
        """It was opened while nothing could be written to the disk, and never writes."""
        self.users = 0
        """Statements and transactions of its thread that have not ended."""
        self.is_closed = False
        """No statement begins on it any more."""
        self._process = os.getpid()

    def close(self) -> None:
        """Close it, or leave that to the end of its last use: sqlite3 takes the statements of a connection that it
        closes from under a thread that runs one, and the process ends with SIGSEGV."""
        self.is_closed = True  # before `users` is read: the thread counts itself before it reads this
        if not self.users:
            self.connection.close()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self.connection.close()
        else:
            _inherited.append(self.connection)


class Database:
    """Connections to `path`, one per thread. Safe to share between threads.

    Every method may raise StoreError: the file cannot be opened, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked_until = 0.0
        self._turn, self._process = threading.Lock(), os.getpid()
        """Of the thread that writes. SQLite's own wait is not fair: of 100 threads some waited 5 s, and failed."""
        self._local = threading.local()
        self._connections: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections of all threads, those that are in use when their statement or transaction has ended. A
        later call opens a new one."""
        for held in list(self._connections):
            held.close()
        self._local = threading.local()

    def select(self, name: str, values: Mapping[str, Any]) -> Sequence[sqlite3.Row]:
        """Rows of a named statement of `queries.sql`."""
        with self._store_errors(), self._used() as connection:
            return connection.execute(_queries()[name], values).fetchall()

    def scan(self, name: str, values: Mapping[str, Any]) -> Iterator[sqlite3.Row]:
        """As `select`, one row after the other: of many rows only one is in memory."""
        with self._store_errors(), self._used() as connection:
            yield from connection.execute(_queries()[name], values)

    @contextmanager
    def transaction(self) -> Iterator[Execute]:
        """One write transaction; yields a function that runs a named statement."""
        with self._store_errors(), self._used() as connection, self._taken_turn():
            self._begin(connection)
            try:
                yield lambda name, values: connection.execute(_queries()[name], values)
                connection.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled it back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads of this thread in the block see the same state of the database. Writers do not wait for it. Inside
        another snapshot it is that one's state."""
        with self._store_errors(), self._used() as connection:
            if connection.in_transaction:
                yield
                return
            connection.execute("BEGIN")
            try:
                yield
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def _taken_turn(self) -> Iterator[None]:
        """No other thread of this process writes meanwhile. Raises OperationalError as SQLite does."""
        if self._process != os.getpid():  # a fork: the thread that had the lock is not in it
            self._turn, self._process = threading.Lock(), os.getpid()
        turn, is_brief = self._turn, time.monotonic() < self._locked_until
        if not turn.acquire(timeout=_BRIEF_MS / 1000 if is_brief else _BUSY_SECONDS):
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        try:
            yield
        finally:
            turn.release()

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Begin a write transaction, when other writers have ended theirs."""
        brief = time.monotonic() < self._locked_until
        if brief:
            connection.execute(f"PRAGMA busy_timeout = {_BRIEF_MS}")
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if shortage_of(error) is LOCKED:
                self._locked_until = time.monotonic() + _LOCKED_SECONDS
            raise
        finally:
            if brief:
                connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise StoreError in place of an error that the file causes."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise  # wrong values or a wrong statement: a bug, and no fault of the file
        except (sqlite3.Error, OSError) as error:
            if shortage_of(error) not in (None, LOCKED):
                self._local.stale = True  # the file may lie on another mount of its disk by the next call
            raise StoreError(f"job database {self.path}: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        """The connection of this thread."""
        return self._own().connection

    @contextmanager
    def _used(self) -> Iterator[sqlite3.Connection]:
        """The connection of this thread, which no other one closes in the block."""
        own = self._own()
        own.users += 1
        while own.is_closed and own.users == 1:  # closed since it was looked up
            own.users = 0
            own = self._own()
            own.users += 1
        try:
            yield own.connection
        finally:
            own.users -= 1
            if own.is_closed and not own.users:
                own.connection.close()

    def _own(self) -> _ThreadConnection:
        own: _ThreadConnection | None = getattr(self._local, "own", None)
        if own is None or own.is_closed or (self._is_stale(own) and not own.connection.in_transaction):
            own = self._local.own = self._connect()
            self._local.stale = False
            self._connections.add(own)
        return own

    def _is_stale(self, own: _ThreadConnection) -> bool:
        is_writable_by_now = own.is_read_only and not is_read_only(self.path)
        return is_writable_by_now or getattr(self._local, "stale", False)

    def _connect(self) -> _ThreadConnection:
        cannot_write = is_read_only(self.path)
        connection = sqlite3.connect(
            self.path,
            timeout=_BUSY_SECONDS,
            isolation_level=None,  # `transaction` and `snapshot` begin and end them
            check_same_thread=False,  # so that close() can close those of other threads
        )
        connection.row_factory = sqlite3.Row
        try:
            # A confirmed job must survive a power failure: in WAL mode, NORMAL does not wait for the disk.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        except sqlite3.Error:
            connection.close()
            raise
        return _ThreadConnection(connection, cannot_write)

    def _create(self) -> None:
        """Create the tables, or upgrade those of an older release. What the schema has and the file lacks is made, too,
        and what it removes is removed: another build of the same version may have differed there."""
        with self._store_errors():
            private_data_dir(self.path.parent)
            if not self.path.exists():  # sqlite would make it 0644
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = self._connection()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"job database {self.path} has schema version {version}, this program knows {SCHEMA_VERSION}:"
                    " another build wrote it, most likely a newer one: use that one, or another data directory"
                )
            if version < SCHEMA_VERSION or (_is_of_another_build(connection) and not is_read_only(self.path)):
                _use_wal(connection)
                with _lock(self.path):
                    (version,) = connection.execute("PRAGMA user_version").fetchone()
                    upgrades = range(version, SCHEMA_VERSION) if version else ()
                    try:
                        connection.executescript(
                            _in_one_transaction([*(f"upgrade-{old}.sql" for old in upgrades), "schema.sql"])
                        )
                    finally:
                        connection.rollback()  # has no effect after a commit


def require_database(data_dir: Path) -> Path:
    """The database of a data directory, of a release that this one reads. Raises InvalidRequest: the directory has
    none; StoreError: it cannot be read, or is of an earlier release: opening it would upgrade it under the processes
    that use it."""
    database = DataDir(data_dir).database
    if not database.is_file():
        hint = f"it has no {database.name}: name the data directory of a service, or that of the inline provider."
        raise InvalidRequest("--data-dir", str(data_dir), hint)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database.resolve()))}?mode=ro", uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"job database {database}: {error}") from error
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"job database {database} has schema version {version}, this program reads {SCHEMA_VERSION}: an earlier "
            "release wrote it; the next start of its service or Llama Stack on this release upgrades it"
        )
    return database


def private_data_dir(data_dir: Path) -> None:
    """Create a data directory that no other user can enter. One that held other files before keeps its mode, and only
    the directories of the provider in it become private. What has the name of a file of ours and is none is set aside.
    Raises OSError: it cannot be created; StoreError: see `DataDir.prepare`."""
    DataDir(data_dir).prepare()
    if not data_dir.exists() or DataDir(data_dir).holds_only_ours:
        return private_directory(data_dir)
    if data_dir.stat().st_mode & 0o077:
        log.warning(
            "%s holds other files and keeps its mode: only the provider's own files in it become private", data_dir
        )
        for directory in DataDir(data_dir).private:
            private_directory(directory)


@contextmanager
def _lock(database: Path) -> Iterator[None]:
    """Prevents two processes from upgrading a database at the same time."""
    lock = FileLock(database.with_name(f"{database.name}.upgrade"))
    deadline = time.monotonic() + _BUSY_SECONDS
    while not lock.acquire(f"pid {os.getpid()}") and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode, in which readers and the writer do not wait for each other. The switch ignores the busy
    timeout."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _is_of_another_build(connection: sqlite3.Connection) -> bool:
    """Whether a database lacks a table, an index, a trigger or a view of the schema, or has a table that the schema
    removes: a tenth of the time of an open, and no lock, for which it would wait."""
    found, schema = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}, _sql("schema.sql")
    return not (found.issuperset(_CREATED.findall(schema)) and found.isdisjoint(_DROPPED.findall(schema)))


@cache
def _queries() -> dict[str, str]:
    """Name -> statement, from `queries.sql`."""
    parts = _sql("queries.sql").split("-- name: ")[1:]
    return {name.strip(): text for name, _, text in (part.partition("\n") for part in parts)}


def _in_one_transaction(names: Iterable[str]) -> str:
    """Scripts as one transaction, so that a process that is killed in between leaves the database unchanged."""
    scripts = "".join(_sql(name) for name in names)
    return f"BEGIN IMMEDIATE;\n{scripts.replace('BEGIN IMMEDIATE;', '').replace('COMMIT;', '')}\nCOMMIT;\n"


def _sql(name: str) -> str:
    return resources.files(__package__).joinpath("sql", name).read_text()
