"""Calls of an agent to the service: one method per route."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl.system.files import open_in

from ..client import SLOWEST_DISK, ServiceAnswer, ServiceClient, Timeouts, job_path
from ..pull import fetch
from ..wire import POLL_SECONDS, AnswersBegin, CheckpointAnswer, CheckpointReport, Joined, NodeReport, Orders, Poll

GONE = 410
_PIECE = 64 << 20
"""Bytes of one PUT of a checkpoint's file: the part that is repeated after a lost connection."""
_CHUNK = 1 << 18
_LISTING = 3600.0
"""Seconds that the service may take to list the files of a checkpoint: 110 GiB at SLOWEST_DISK."""
_OF_TOKEN = "TRL_SERVICE_NODE_TOKEN must be the same here as on the service's machine"
_TIMEOUTS = Timeouts(connect=3.0, read=30.0, total=60.0)


class Behind(ServiceRefusal):
    """Raised when the service's part of a file is not the expected one. `size`: the bytes that it has."""

    def __init__(self, url: str, detail: str, size: int) -> None:
        super().__init__(url, 409, detail)
        self.size = size


class Pace:
    """Limits the bytes per second over all uploads, or all downloads, of an agent.

    Args:
        rate: bytes per second; None: no limit.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = clock()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may be sent, or the next ones received."""
        if self._rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now) + size / self._rate
        if self._free_at > now:
            await self._sleep(self._free_at - now)


class NodeClient(ServiceClient):
    """Client of the service for one node.

    Args:
        token: sent until `authenticate` is called.
        downloads: limits downloads; None: nothing does.
    """

    most_answer = 16 << 20

    def __init__(
        self,
        url: str,
        token: str | None,
        name: str,
        pace: Pace,
        tls: ssl.SSLContext | None = None,
        downloads: Pace | None = None,
    ) -> None:
        super().__init__(url, token, _TIMEOUTS, tls=tls)
        self.name, self._pace, self._downloads = name, pace, downloads
        self._join_token = token

    def authenticate(self, credential: str | None) -> None:
        """Use this credential from now on; None: the token with which a node joins."""
        token = credential or self._join_token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def join(self, report: NodeReport) -> Joined:
        """Join. Raises ServiceRefusal (409: the name is taken, or versions differ) and ServiceUnreachable."""
        return Joined.model_validate(await self._json("POST", "/v1/nodes", report.model_dump(mode="json")))

    async def poll(self, poll: Poll, kept: Collection[str] = ()) -> Orders:
        """The orders of this node; waits for new ones, up to POLL_SECONDS.

        Args:
            kept: jobs of which files and no task are here, at most MOST_KEPT.
        """
        # A little more than POLL_SECONDS: after a cut connection, an early timeout allows an early next poll.
        limit = POLL_SECONDS + 2.0
        body = poll.model_dump(mode="json")
        query = "&".join(f"kept={quote(job_uuid, safe='')}" for job_uuid in kept)
        answer = await self._json("POST", f"{self._home}/poll{'?' * bool(query)}{query}", body, limit)
        return Orders.model_validate(answer)

    async def append_events(self, task_id: str, offset: int, lines: bytes) -> int:
        """Append events. Returns the bytes of events that the service has now; at another offset nothing was
        appended."""
        return await self._append("POST", f"{self._task(task_id)}/events", offset, lines)

    async def put_log(self, task_id: str, file: str, offset: int, data: bytes) -> int:
        """Append a part of a log, like `append_events`."""
        return await self._append("PUT", f"{self._task(task_id)}/logs/{quote(file)}", offset, data)

    async def put_answers(self, task_id: str, file: str, offset: int, data: bytes) -> int:
        """Append a part of a file of answers, like `append_events`."""
        await self._pace.take(len(data))
        return await self._append("PUT", f"{self._task(task_id)}/answers/{quote(file)}", offset, data)

    async def answers(self, task_id: str, file: str, path: Path) -> None:
        """Download the file of answers with which a task begins."""
        root = f"{self._task(task_id)}/answers"
        # The service reads the file first.
        answer = await self._call("POST", root, repeat=True, json={}, read=_LISTING, total=0)
        begin = AnswersBegin.model_validate(self._json_of(answer))
        await fetch(self, f"{root}/{quote(file)}", path, {"path": file, **begin.model_dump()})

    async def offer(self, task_id: str, checkpoint: str, report: CheckpointReport) -> CheckpointAnswer:
        """Announce a checkpoint. Returns the files that the service lacks."""
        # The service compares digests and forces files to disk before it answers.
        size = sum(file.size for file in report.files)
        limit = 60.0 + size / SLOWEST_DISK
        path = f"{self._task(task_id)}/checkpoints/{quote(checkpoint)}"
        return CheckpointAnswer.model_validate(await self._json("POST", path, report.model_dump(mode="json"), limit))

    async def upload(self, task_id: str, checkpoint: str, name: str, sha256: str, file: Path) -> None:
        """Send the rest of a checkpoint's file, until the service has the whole file. Raises Behind: the service has
        more bytes than the file, or refuses a part that begins at the offset it gave."""
        path = f"{self._task(task_id)}/checkpoints/{quote(checkpoint)}/files/{quote(name)}"
        # Opened below the checkpoint, since its training may create symbolic links there.
        parts = len(Path(name).parts)
        relative = Path(name) if file.parts[-parts:] == Path(name).parts else Path(file.name)
        root = file.parents[len(relative.parts) - 1]
        with open_in(root, relative) as source:
            size = os.fstat(source.fileno()).st_size
        have, whole = 0, False
        while not whole:
            # A service that has all bytes gets none: it ended, or its answer was lost, before the file was complete.
            step = min(_PIECE, size - have)
            hashed = size if have + step == size else 0
            try:
                # 0 is no limit: the time for a part depends on `pace` and the network, and `read` detects a dead
                # connection.
                answer = await self._call(
                    "PUT",
                    path,
                    params={"sha256": sha256, "offset": str(have)},
                    data=self._bytes(root, relative, have, step),
                    headers={"Content-Type": "application/octet-stream"},
                    total=0,
                    # The service forces the part to its disk, and reads all of a complete file, before it answers.
                    read=60.0 + (step + hashed) / SLOWEST_DISK,
                )
                have = int(answer.offset or 0)
                whole = have >= size
            except Behind as behind:
                if behind.size > size or behind.size == have:
                    raise
                have = behind.size

    async def rows(self, sha256: str, path: Path) -> None:
        """Download a dataset by its digest; a complete file is left unchanged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.fetching")
        await fetch(self, f"/v1/blobs/{sha256}", partial, {"path": path.name, "size": None, "sha256": sha256})
        partial.rename(path)

    async def checkpoint_files(self, job_uuid: str, checkpoint: str) -> list[dict[str, Any]]:
        """Path, size and sha256 of every file of a checkpoint that the service lists."""
        # The service may read all of the checkpoint first, for its digests.
        answer = await self._call("GET", _checkpoint(job_uuid, checkpoint), repeat=True, read=_LISTING, total=0)
        files: list[dict[str, Any]] = self._json_of(answer)["files"]
        return files

    async def checkpoint_file(self, job_uuid: str, checkpoint: str, path: Path, file: dict[str, Any]) -> None:
        """Download the missing part of one file of a checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        await fetch(self, f"{_checkpoint(job_uuid, checkpoint)}/files/{quote(file['path'])}", path, file)

    async def model_file(
        self, task_id: str, model: str, path: Path, file: dict[str, Any], note: Callable[[int], None]
    ) -> None:
        """Download the missing part of one file of a model, and compare its digest.

        Args:
            model: its digest.
            note: receives the number of bytes that are here, after each part.
        """
        await fetch(self, f"{self._task(task_id)}/models/{model}/files/{quote(file['path'])}", path, file, note)

    @asynccontextmanager
    async def download(
        self, path: str, start: int = 0, etag: str = ""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes], str]]:
        """See `ServiceClient.download`; as slow as `downloads` has it."""
        async with super().download(path, start, etag) as (begin, chunks, found):
            yield begin, self._slowed(chunks), found

    async def listed_checkpoints(self, job_uuid: str) -> set[str]:
        """Names of the directories of all checkpoints that a job has."""
        answer = await self.get(job_path(job_uuid, "/checkpoints"))
        return {Path(checkpoint["path"]).name for checkpoint in answer["data"]}

    @property
    def _home(self) -> str:
        return f"/v1/nodes/{quote(self.name)}"

    def _task(self, task_id: str) -> str:
        return f"{self._home}/tasks/{quote(task_id)}"

    async def _json(self, method: str, path: str, body: Any, limit: float | None = None) -> Any:
        return self._json_of(await self._call(method, path, json=body, read=limit, total=limit))

    async def _append(self, method: str, path: str, offset: int, data: bytes) -> int:
        try:
            answer = await self._call(
                method,
                path,
                params={"offset": str(offset)},
                data=data,
                headers={"Content-Type": "application/octet-stream"},
            )
        except Behind as behind:
            return behind.size
        return int(answer.offset or 0)

    async def _bytes(self, root: Path, relative: Path, start: int, size: int) -> AsyncIterator[bytes]:
        with open_in(root, relative) as source:
            source.seek(start)
            while size:
                chunk = await asyncio.to_thread(source.read, min(_CHUNK, size))
                if not chunk:
                    return
                await self._pace.take(len(chunk))
                size -= len(chunk)
                yield chunk

    async def _slowed(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            if self._downloads is not None:
                await self._downloads.take(len(chunk))
            yield chunk

    def _refusal(self, path: str, answer: ServiceAnswer) -> Exception:
        error = super()._refusal(path, answer)
        if not isinstance(error, ServiceRefusal):
            return error
        if error.status == 409 and (answer.offset or "").isdigit():
            return Behind(self.url, error.detail, int(answer.offset or 0))
        # A 403 may concern the address of the call: no other token helps then.
        about_token = error.status == 401 or "token" in error.detail
        return ServiceRefusal(self.url, error.status, error.detail, _OF_TOKEN if about_token else "")


def is_gone(error: BaseException) -> bool:
    """Whether the service answers that a task is no longer this node's."""
    return isinstance(error, ServiceRefusal) and error.status == GONE


def _checkpoint(job_uuid: str, checkpoint: str) -> str:
    return job_path(job_uuid, f"/checkpoints/{quote(checkpoint, safe='')}")
