"""The files of models that nodes fetch from this machine: listed with their digests, and opened by these.

A list is computed once in a thread, recorded in the order of every node, and kept under its own digest. A file is sent
only while it has the sha256 that its list names.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.model_files import NotSent, files_digest, sent_files
from llama_stack_provider_trl.system.data_dir import read_own
from llama_stack_provider_trl.system.digests import KeptDigests
from llama_stack_provider_trl.system.files import atomic_write_json, private_directory
from llama_stack_provider_trl.system.model_directory import ModelDirectory, find_model

from ...wire import ModelFile, ModelFiles
from ..http.errors import Conflict, NotFound
from ..views.checkpoints import Opener

log = logging.getLogger(__name__)
_MOST_LISTS = 200
"""Lists that are kept, the newest ones; each has some KiB."""
_TAKEN_WITHIN = 60.0
"""Seconds after which a list is outdated that no attempt has taken: its job was cancelled meanwhile."""


class _Wanted(NamedTuple):
    """A model that a job names."""

    model: str
    revision: str | None
    has_code: bool


class ServedModels:
    """Lists and opens the files of models. Safe to share between threads.

    Args:
        listed: called when a list is complete.
    """

    def __init__(
        self,
        directory: Path,
        listed: Callable[[], None] = lambda: None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._listed, self._environ, self._clock = directory, listed, environ, clock
        # One: a model is read as fast as its disk can, and other calls need the CPU meanwhile.
        self._lister = ThreadPoolExecutor(1, "trl-models")
        self.threads = ThreadPoolExecutor(4, "trl-model-files")
        """For `open`, which reads a file that was touched since it was listed."""
        self._digests = KeptDigests(directory / "digests.json")
        self._lock = threading.Lock()
        self._listing: dict[_Wanted, Future[ModelFiles]] = {}
        self._listed_at: dict[_Wanted, float] = {}
        self._read: dict[_Wanted, tuple[int, int]] = {}
        """Model that is being listed -> bytes that were read, of so many."""
        self._roots: dict[str, ModelDirectory] = {}

    def of_job(self, job: JobSpec) -> tuple[ModelFiles, ...] | None:
        """The files of the models of a job; None: they are still being listed."""
        listings = [self._listing_of(wanted) for wanted in _wanted(job)]
        if not all(listing.done() for listing in listings):
            return None
        with self._lock:
            for wanted in _wanted(job):  # the next attempt finds out whether the files have changed
                self._listing.pop(wanted, None)
        try:
            return tuple(listing.result() for listing in listings)
        except CancelledError:  # this process stops
            return None

    def _listing_of(self, wanted: _Wanted) -> Future[ModelFiles]:
        """The list of a model, begun at the first call; one that no job has taken for a while is begun again."""
        with self._lock:
            listing = self._listing.get(wanted)
            if listing is None or (listing.done() and self._clock() - self._listed_at[wanted] > _TAKEN_WITHIN):
                listing = self._listing[wanted] = self._lister.submit(self._list, wanted)
                listing.add_done_callback(lambda _: self._listed())
            return listing

    def progress(self, job: JobSpec) -> str:
        """What is done for `of_job` at the moment, for the job's status."""
        for wanted in _wanted(job):
            if counted := self._read.get(wanted):
                read, size = counted
                return f"computes the digests of {wanted.model} ({100 * read // max(size, 1)} % of {_gib(size)})"
        return f"computes the digests of {job.source.model}"

    def open(self, sha256: str, name: str, expected: str) -> tuple[Opener, int]:
        """A function that opens a file of a listed model, and its size. Raises NotFound: the list, or the file, is not
        here any more; Conflict: the file has changed since it was listed.

        Args:
            sha256: of the list.
            expected: sha256 of the file.
        """
        found = self._root_of(sha256)
        if found is None:
            raise NotFound(f"there is no model {sha256} here: start the job again")
        opener = partial(found.open, name)
        try:
            with opener() as file:
                actual, size = self._digests.of(file), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise NotFound(
                f"{name} of the model in {found.path} cannot be read on the service's machine: {error.strerror}"
            ) from error
        if actual != expected:
            raise Conflict(
                f"{name} of the model in {found.path} has changed on the service's machine since the attempt began: "
                "its next attempt trains on the new file"
            )
        return opener, size

    def close(self) -> None:
        """Stop the threads; what is being listed is listed again by the next process."""
        self._digests.close()
        for threads in (self._lister, self.threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _list(self, wanted: _Wanted) -> ModelFiles:
        try:
            return self._with_digests(wanted)
        except NotSent as reason:
            return ModelFiles(model=wanted.model, why_not=f"the service does not send it: {reason}")
        except OSError as error:
            name = f"{Path(str(error.filename)).name}: " if error.filename else ""
            return ModelFiles(
                model=wanted.model, why_not=f"the service cannot read it: {name}{error.strerror or error}"
            )
        finally:
            self._read.pop(wanted, None)
            self._listed_at[wanted] = self._clock()

    def _with_digests(self, wanted: _Wanted) -> ModelFiles:
        found = find_model(self._environ, wanted.model, wanted.revision)
        if found is None:
            where = "it is not a directory there" if wanted.model.startswith("/") else "its machine's cache lacks it"
            raise NotSent(where)
        names = sent_files(found, has_code=wanted.has_code)
        sizes = {}
        for name in names:
            with found.open(name) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
        total, read = sum(sizes.values()), 0

        def note(size: int) -> None:
            nonlocal read
            read += size
            self._read[wanted] = read, total

        private_directory(self._directory)
        files = []
        for name in names:
            with found.open(name) as file:
                files.append(ModelFile(path=name, size=sizes[name], sha256=self._digests.of(file, note)))
        digest = files_digest((file.path, file.size, file.sha256) for file in files)
        self._keep(digest, found)
        log.info("model %s: %d files, %s, listed as %s", wanted.model, len(files), _gib(total), digest)
        return ModelFiles(model=wanted.model, sha256=digest, commit=found.commit, files=tuple(files))

    def _keep(self, digest: str, found: ModelDirectory) -> None:
        """Remember where the files of a list are."""
        record = {"root": str(found.root), "inside": found.inside, "commit": found.commit}
        atomic_write_json(self._directory / f"{digest}.json", record)
        with self._lock:
            self._roots[digest] = found
        kept = sorted(self._lists(), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST_LISTS]:
            path.unlink(missing_ok=True)

    def _lists(self) -> list[Path]:
        return [path for path in self._directory.glob("*.json") if len(path.stem) == 64]

    def _root_of(self, digest: str) -> ModelDirectory | None:
        with self._lock:
            known = self._roots.get(digest)
        if known is None:
            try:
                known = read_own(self._directory / f"{digest}.json", _parsed)
            except OSError:
                known = None
            if known is None:
                return None
            with self._lock:
                self._roots[digest] = known
        return known


def _parsed(data: bytes) -> ModelDirectory:
    record = json.loads(data)
    return ModelDirectory(Path(record["root"]), str(record["inside"]), str(record["commit"]))


def _wanted(job: JobSpec) -> Sequence[_Wanted]:
    found = [_Wanted(source.model, source.revision, source.trust_remote_code) for source in job.models]
    return list(dict.fromkeys(found))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.1f} MiB"
