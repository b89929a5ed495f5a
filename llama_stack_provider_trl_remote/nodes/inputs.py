"""Fetches the input files of a task from the service: rows, and the checkpoints or answers to continue from."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from llama_stack_provider_trl.specs.checkpoint_files import check_names
from llama_stack_provider_trl.system.files import damage, put_in_place, resolve_under, sha256_in, sha256_of, touched

from ..wire import GIVEN
from .calls import NodeClient
from .localize import PathMap

log = logging.getLogger(__name__)
_fetching: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
"""Tasks of several jobs that need the same rows fetch them once: both would write to the same file."""


class Inputs:
    """The input files of one task on this node. `note_detail` is called with the current download."""

    def __init__(self, paths: PathMap, calls: NodeClient, note_detail: Callable[[str], None]) -> None:
        self._paths, self._calls, self._note_detail = paths, calls, note_detail

    async def fetch_rows(self) -> None:
        """Fetch each dataset that is missing here or has another digest."""
        for rows in self._paths.datasets():
            target = self._paths.rows(rows.sha256)
            async with _fetching.setdefault(target, asyncio.Lock()):
                if not touched(target) or await asyncio.to_thread(sha256_of, target) != rows.sha256:
                    self._note_detail(f"fetches {rows.num_rows} rows")
                    await self._calls.rows(rows.sha256, target)

    async def fetch_checkpoints(self) -> list[str]:
        """Fetch the checkpoint to resume from: the first one that is whole.

        All nodes get the same bytes and choose the same one. Returns the service's paths of those that are here: one,
        or none."""
        for path in self._paths.resumed_from():
            target = self._paths.here(path)
            if not (self._paths.shared and target == Path(path)):
                await self._pull(Path(path), target)
            if (wrong := await asyncio.to_thread(damage, target)) is None:
                return [path]
            log.warning("task %s: %s is damaged: %s", self._paths.order.task_id, path, wrong)
        return []

    async def fetch_answers(self) -> None:
        """Replace the answers that an earlier attempt has left here by those that the service has: others may have
        followed elsewhere, and what was not uploaded is answered again."""
        for name in self._paths.answer_files[:1]:
            self._note_detail("fetches the answers that there are")
            # In the attempt's own directory: an earlier training may have left symbolic links in the job's.
            staged = self._paths.run_dir / f"{name}.fetched"
            await self._calls.answers(self._paths.order.task_id, name, staged)
            os.replace(staged, self._paths.checkpoint_dir / name)

    async def _pull(self, path: Path, target: Path) -> None:
        """Copy a checkpoint of the service to this node. Raises InvalidRequest: it holds more than data."""
        job_uuid = self._paths.order.job_uuid
        # The other job and its checkpoint may be deleted by now: the service has a copy for this job.
        identifier = path.name if path.is_relative_to(self._paths.theirs) else GIVEN
        files = await self._calls.checkpoint_files(job_uuid, identifier)
        code = self._paths.attempt.job.source.trust_remote_code
        check_names([file["path"] for file in files], "checkpoint file", code=code)
        if await asyncio.to_thread(_is_the_same, target, files):
            return
        staging = target.with_name(f"{target.name}.tmp")
        if staging.is_symlink():  # left by the job's earlier training: files would be written to its target
            staging.unlink()
        for number, file in enumerate(files, 1):
            size = f"{file['size'] / (1 << 20):.1f} MiB"
            self._note_detail(f"fetches {path.name}, file {number} of {len(files)}: {file['path']}, {size}")
            place = resolve_under(staging, file["path"], "checkpoint file")
            await self._calls.checkpoint_file(job_uuid, identifier, place, file)
        await asyncio.to_thread(put_in_place, staging, target)


def _is_the_same(target: Path, files: list[dict[str, Any]]) -> bool:
    """Whether a checkpoint is here with exactly these bytes."""
    try:
        return bool(files) and all(
            (target / file["path"]).stat().st_size == file["size"] and sha256_in(target, file["path"]) == file["sha256"]
            for file in files
        )
    except OSError:
        return False
