"""Datasets in the job database: whose stored rows count for which token, and the names that jobs are to make.

A job keeps such a name from the transaction that stores it until it has ended, so that no second job, and no client,
takes it meanwhile: the job would fail after all its answers were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ...errors import InvalidRequest, RowsRemoved
from ...specs.job import JobSpec
from ...system.files import touched
from .database import Database, Execute

IsRegistered = Callable[[str], bool]
"""Whether a registered dataset has the rows of a digest. It is called in a transaction, and waits for no lock."""


class RowOwners:
    """The owners of stored rows in a job database. Every method may raise StoreError.

    Rows of one digest are stored once. They count for each owner, and once for one that has several datasets of them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, sha256: str, owner: str, num_bytes: int, dataset_id: str = "") -> None:
        """Record rows that a token has uploaded, or registered as a dataset.

        Args:
            dataset_id: empty: no dataset has them yet.
        """
        row = {"sha256": sha256, "owner": owner, "bytes": num_bytes, "dataset_id": dataset_id}
        with self._database.transaction() as execute:
            if dataset_id and execute("select_registered_rows", row).fetchone() is None:
                execute("delete_unregistered_rows", row)
                execute("insert_stored_rows", row)
            elif not dataset_id and not execute("select_rows_of_owner", row).fetchone():
                execute("insert_stored_rows", row)

    def used(self, owner: str) -> int:
        """Bytes of the rows that a token has stored."""
        return sum(row["bytes"] for row in self._database.select("select_stored_bytes", {"owner": owner}))

    def owns(self, sha256: str, owner: str) -> bool:
        """Whether rows count for a token already."""
        return bool(self._database.select("select_rows_of_owner", {"sha256": sha256, "owner": owner}))

    def are_counted(self, sha256: str) -> bool:
        """Whether rows count for any token."""
        return bool(self._database.select("select_owner_of_rows", {"sha256": sha256}))

    def registered(self) -> set[tuple[str, str]]:
        """Digest of the rows and name of each dataset whose rows count."""
        return {(row["sha256"], row["dataset_id"]) for row in self._database.select("select_rows_of_datasets", {})}

    def of_dataset(self, dataset_id: str) -> list[str]:
        """Digests of the rows of a dataset."""
        rows = self._database.select("select_rows_of_dataset", {"dataset_id": dataset_id})
        return [row["sha256"] for row in rows]

    def count_for(self, owner: str, sha256: str, num_bytes: int) -> None:
        """Record rows that a job of a token has made of others, unless they count for a token already."""
        with self._database.transaction() as execute:
            count_rows(execute, owner, {sha256: num_bytes})

    def release(self, dataset_id: str, path: Path, is_registered: IsRegistered) -> bool:
        """Forget a dataset, and remove its rows unless something else has them. Rows of jobs stay, and count until they
        are removed with these. Returns whether they were removed.

        Args:
            is_registered: whether another dataset has rows of a digest.
        """
        row = {"sha256": path.stem, "dataset_id": dataset_id}
        with self._database.transaction() as execute:
            found = execute("select_registered_rows", row).fetchone()
            if found is None:
                return False
            execute("delete_registered_rows", row)
            if _remove_unused(execute, path, is_registered):
                return True
            if execute("select_rows_mentioned", row).fetchone() is not None:
                kept = {"owner": found["owner"], "bytes": found["bytes"], "dataset_id": ""}
                execute("insert_stored_rows", {**row, **kept})
            return False

    def discard(self, path: Path, is_registered: IsRegistered) -> None:
        """Remove rows that were stored and then refused, unless something else has them."""
        with self._database.transaction() as execute:
            _remove_unused(execute, path, is_registered)

    def forget(self, digests: Iterable[str]) -> None:
        """Forget rows that were removed."""
        with self._database.transaction() as execute:
            for sha256 in digests:
                execute("forget_stored_rows", {"sha256": sha256})


def count_rows(execute: Execute, owner: str, sizes: Mapping[str, int]) -> None:
    """Record rows that jobs of a token have, in the transaction that stores these jobs. Those that count for any token
    count already."""
    for sha256, num_bytes in sizes.items():
        row = {"sha256": sha256, "owner": owner, "bytes": num_bytes, "dataset_id": ""}
        if execute("select_owner_of_rows", row).fetchone() is None:
            execute("insert_stored_rows", row)


def _remove_unused(execute: Execute, path: Path, is_registered: IsRegistered) -> bool:
    """Remove rows that no job, no dataset and no token has. Called in a transaction: a job that is being submitted
    either mentions them by now, or finds them gone."""
    row = {"sha256": path.stem}
    # The table lacks datasets that were registered when it could not be written.
    if is_registered(path.stem) or any(
        execute(name, row).fetchone() for name in ("select_rows_mentioned", "select_owner_of_rows")
    ):
        return False
    path.unlink(missing_ok=True)
    return True


FIELD = "output.dataset_id"


def refuse_promised_name(execute: Execute, spec: JobSpec) -> None:
    """Refuse a job that is to make a dataset which another one is to make, in the transaction that stores the job.
    Raises InvalidRequest: names the other job."""
    dataset_id = spec.does.made_dataset
    if dataset_id is not None and (maker := _maker(execute, dataset_id, spec.job_uuid)) is not None:
        hint = f"job {maker!r} is to make a dataset of this name: choose another one"
        raise InvalidRequest(FIELD, dataset_id, hint)


@contextmanager
def no_new_maker(database: Database, dataset_id: str) -> Iterator[str | None]:
    """Yields the job that is to make a dataset of this name, if there is one. No job is stored in the block, a write
    transaction, which must be quick. May raise StoreError."""
    with database.transaction() as execute:
        yield _maker(execute, dataset_id)


def _maker(execute: Execute, dataset_id: str, other_than: str = "") -> str | None:
    row = execute("select_maker", {"dataset_id": dataset_id, "other_than": other_than}).fetchone()
    return None if row is None else str(row["job_uuid"])


class NeedsFiles(Protocol):
    """A job that is about to be stored."""

    @property
    def spec(self) -> JobSpec: ...

    @property
    def needed(self) -> Iterable[Path]: ...


def use_rows(jobs: Iterable[NeedsFiles]) -> None:
    """Mark what jobs need as used: the last step of storing them, since the rows of a refused request are discarded.
    Raises RowsRemoved: some of it is gone."""
    for job in jobs:
        for path in job.needed:
            if not touched(path):
                raise RowsRemoved(f"{path} was removed while job {job.spec.job_uuid!r} was stored")
