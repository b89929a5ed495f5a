"""The models of a node: those in its own cache, and those that it has fetched from the service by digest.

A fetched model is `models/<digest>/` in the node's data directory. Until it is whole its files are in
`<digest>.tmp/`: a part as `<name>.part`, and a file under its own name once its sha256 was compared.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl.system.digests import KeptDigests
from llama_stack_provider_trl.system.files import (
    atomic_write_json,
    free_bytes,
    fsync_path,
    put_in_place,
    read_regular,
    resolve_under,
)
from llama_stack_provider_trl.system.hub_cache import CachedCommit, cached_models, hub_cache, is_offline
from llama_stack_provider_trl.system.model_directory import ModelDirectory, find_model

from ..wire import ModelFiles, TaskOrder
from .calls import NodeClient
from .localize import PathMap

log = logging.getLogger(__name__)
KEEP = 7 * 24 * 3600.0
"""Seconds for which a model is kept that no attempt has begun with."""
KEEP_PARTS = 24 * 3600.0
"""Seconds for which the parts of a model are kept that was never whole."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST = 200
"""Characters of a model's name in a report of the node."""


class ModelMissing(FileNotFoundError):
    """Raised when a job's model is not on this node and cannot be fetched. A retry here fails again."""


class Models:
    """The models of one node. One event loop uses it; methods that read many bytes are called in threads."""

    def __init__(
        self, data_dir: Path, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = NodeDir(data_dir).models
        self._environ, self._clock = environ, clock
        self._digests = KeptDigests(self._root / "digests.json")
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of the models that tasks need at the moment: two tasks fetch one once."""
        self._removing = threading.Lock()
        """Held from the check that no task uses a model until it is gone."""
        self.has_news = False
        """Whether `names` may have changed since the node was described last; its agent resets it."""

    def names(self) -> list[str]:
        """Names of the models that this node can train: of its cache, and fetched ones."""
        fetched = {name for record in self._records().values() for name in record if len(name) <= _LONGEST}
        return sorted({*cached_models(self._environ), *fetched})

    async def provide(
        self,
        order: TaskOrder,
        job: JobSpec,
        node: str,
        calls: NodeClient,
        note_detail: Callable[[str], None],
        used: Callable[[], Collection[str]] = tuple,
    ) -> dict[str, Path]:
        """Have every model of a task on this node. Returns name -> directory of those that are not read by their names.
        Raises ModelMissing; OSError: the disk has no room. Those of the calls.

        Args:
            used: digests and names of models that its tasks use (`models_used`), which are not removed for another one.
                Called in threads.
        """
        found: dict[str, Path] = {}
        listed = {model.model: model for model in order.models}
        for source in job.models:
            name, revision = source.model, source.revision
            files = listed.get(name)
            if files is None or not files.sha256:
                directory = await asyncio.to_thread(self._unlisted, name, revision, node, files)
            else:
                lock = self._fetching.setdefault(files.sha256, asyncio.Lock())
                async with lock:
                    directory = await self._listed(order, job, files, revision, node, calls, note_detail, used)
            if directory is not None and str(directory) != name:
                found[name] = directory
        return found

    async def _listed(
        self,
        order: TaskOrder,
        job: JobSpec,
        files: ModelFiles,
        revision: str | None,
        node: str,
        calls: NodeClient,
        note_detail: Callable[[str], None],
        used: Callable[[], Collection[str]],
    ) -> Path:
        note_detail(f"compares {files.model} with the service's files")
        if (here := await asyncio.to_thread(self._same, files, revision)) is None:
            here = self._root / files.sha256
            free = job.lifecycle.min_free_bytes
            await asyncio.to_thread(self._make_room, files, free, node, lambda: {*used(), files.sha256})
            await self._fetch(order.task_id, files, here, calls, note_detail)
        if here.parent == self._root:
            await asyncio.to_thread(self._record, files)
        return here

    async def _fetch(
        self,
        task_id: str,
        files: ModelFiles,
        target: Path,
        calls: NodeClient,
        note_detail: Callable[[str], None],
    ) -> None:
        """Download what is missing, file by file."""
        staging = target.with_name(f"{target.name}.tmp")
        total, before = sum(file.size for file in files.files), 0
        for number, file in enumerate(files.files, 1):
            place = resolve_under(staging, file.path, "model file")
            place.parent.mkdir(parents=True, exist_ok=True)

            def note(size: int, before: int = before, number: int = number, name: str = file.path) -> None:
                percent = 100 * (before + size) // max(total, 1)
                what = f"file {number} of {len(files.files)}: {name}"
                note_detail(f"fetches {files.model} from the service, {percent} % of {shown(total)}, {what}")

            note(0)
            if not (place.is_file() and place.stat().st_size == file.size):  # else it has been compared
                part = place.with_name(f"{place.name}.part")
                try:
                    await calls.model_file(task_id, files.sha256, part, file.model_dump(), note)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise OSError(
                        f"the disk of {self._root} is full: {file.path} of {files.model} is not whole"
                    ) from error
                await asyncio.to_thread(_into_place, part, place)
            before += file.size
        await asyncio.to_thread(put_in_place, staging, target)
        log.info("model %s: fetched from the service, %s in %s", files.model, shown(total), target)

    def _same(self, files: ModelFiles, revision: str | None) -> Path | None:
        """A directory of this node with exactly these files; None: there is none."""
        candidates = [ModelDirectory(self._root, files.sha256), find_model(self._environ, files.model, revision)]
        if files.commit and not Path(files.model).is_absolute():
            repository = hub_cache(self._environ) / f"models--{files.model.replace('/', '--')}"
            candidates.append(ModelDirectory.of(CachedCommit(repository, files.commit)))
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = next((one.path for one in candidates if one is not None and self._has(one, files)), None)
        with self._removing:  # the task that is to begin is among those that use it: what is here now stays
            return found if found is not None and found.is_dir() else None

    def _has(self, found: ModelDirectory, files: ModelFiles) -> bool:
        try:
            for file in files.files:
                with found.open(file.path) as opened:
                    if os.fstat(opened.fileno()).st_size != file.size:
                        return False
            for file in files.files:
                with found.open(file.path) as opened:
                    if self._digests.of(opened) != file.sha256:
                        return False
        except OSError:
            return False
        return True

    def _unlisted(self, name: str, revision: str | None, node: str, files: ModelFiles | None) -> Path | None:
        """The directory of a model that the service does not send; None: it is read by its name."""
        why_not = files.why_not if files and files.why_not else "the service does not send it"
        if Path(name).is_absolute():
            if Path(name).exists():
                return None
            raise ModelMissing(
                f"the model {name} is not on node {node}, and {why_not}: provide it under the same path (shared "
                "storage, or a copy)"
            )
        if files is None or find_model(self._environ, name, revision) is not None or not is_offline(self._environ):
            return None
        with self._removing:  # the name is among those that tasks use: what is here now stays
            for digest, names in self._records().items():
                if name in names and (self._root / digest).is_dir():
                    os.utime(self._root / f"{digest}.json")
                    return self._root / digest
        raise ModelMissing(
            f"node {node} does not have the model {name} in its cache, is offline (HF_HUB_OFFLINE), and {why_not}: "
            "download it on the service's machine or there (hf download)"
        )

    def _make_room(self, files: ModelFiles, must_stay: int, node: str, used: Callable[[], Collection[str]]) -> None:
        """Check that the missing files fit. Where they do not, models that no task uses are removed, the one first that
        was used least recently. Raises OSError."""
        staging = self._root / f"{files.sha256}.tmp"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed = sum(file.size for file in files.files)
        for file in files.files:
            with suppress(OSError):
                needed -= min(file.size, (staging / file.path).stat().st_size)
            with suppress(OSError):
                needed -= min(file.size, (staging / f"{file.path}.part").stat().st_size)
        for digest in self._least_recent():
            if free_bytes(self._root) >= needed + must_stay:
                break
            self._remove_unused(digest, used, "to make room for another one")
        if (free := free_bytes(self._root)) < needed + must_stay:
            stays = f" and {shown(must_stay)} must stay free" if must_stay else ""
            raise OSError(
                f"the model {files.model} takes {shown(needed)} more in {self._root} of node {node}, where "
                f"{shown(free)} are free{stays}: free some, or have the job on another node",
            )

    def _record(self, files: ModelFiles) -> None:
        """Note that a task begins with a fetched model, and under which name."""
        record = self._root / f"{files.sha256}.json"
        names = self._names_in(record)
        if files.model in names:
            os.utime(record)
        else:
            atomic_write_json(record, {"names": [*names, files.model]})
            self.has_news = True

    def clean(self, used: Callable[[], Collection[str]]) -> None:
        """Remove fetched models, and parts of some, that no task has needed for long."""
        now = self._clock()
        for digest in self._least_recent():
            if now - self._used_at(digest) > KEEP:
                self._remove_unused(digest, used, "which no attempt has used for long")
        for removed in self._root.glob("*.old"):  # by an agent that was killed meanwhile
            shutil.rmtree(removed, ignore_errors=True)
        for staging in self._root.glob("*.tmp"):
            with suppress(OSError):
                newest = max(path.stat().st_mtime for path in (staging, *staging.rglob("*")))
                if staging.stem not in used() and now - newest > KEEP_PARTS:
                    shutil.rmtree(staging, ignore_errors=True)

    def _remove_unused(self, digest: str, used: Callable[[], Collection[str]], why: str) -> None:
        """Remove a model, unless a task uses it by now."""
        with suppress(OSError):
            # Renamed first: what is half removed has no digest for its name.
            aside = self._root / f"{digest}.old"
            shutil.rmtree(aside, ignore_errors=True)
            with self._removing:
                names = self._records().get(digest, [])
                if not {digest, *names}.isdisjoint(used()):
                    return
                (self._root / digest).rename(aside)
                (self._root / f"{digest}.json").unlink(missing_ok=True)
            log.info("model %s (%s) is removed, %s", digest, ", ".join(names), why)
            shutil.rmtree(aside, ignore_errors=True)

    def _least_recent(self) -> list[str]:
        """Digests of the fetched models, the one first that was used least recently."""
        found = [path.name for path in self._root.glob("*") if _DIGEST.fullmatch(path.name)]
        return sorted(found, key=self._used_at)

    def _used_at(self, digest: str) -> float:
        for path in (self._root / f"{digest}.json", self._root / digest):
            with suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def _records(self) -> dict[str, list[str]]:
        """Digest -> names of the fetched models."""
        records = sorted(self._root.glob("*.json")) if self._root.is_dir() else []
        return {path.stem: self._names_in(path) for path in records if _DIGEST.fullmatch(path.stem)}

    def _names_in(self, record: Path) -> list[str]:
        try:
            return [str(name) for name in json.loads(read_regular(record))["names"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def models_used(paths: PathMap) -> set[str]:
    """Digests of the models of a task, and names of those that the service does not send, or has not listed yet."""
    order = paths.order
    digests = {model.model: model.sha256 for model in order.models if model.sha256}
    names = {source.model for source in (paths.attempt.job.models if order.spec else ())}
    return {*digests.values(), *(names - digests.keys())}


def shown(size: int) -> str:
    """A number of bytes, for a sentence."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.1f} MiB"


def _into_place(part: Path, place: Path) -> None:
    """Give a file that was compared its name."""
    fsync_path(part)
    os.replace(part, place)
