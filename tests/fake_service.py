"""The training service as its clients see it, played in this process: a test chooses its jobs."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl_remote import client
from llama_stack_provider_trl_remote.cli import main as cli

Json = dict[str, Any]


class FakeService:
    """Serves on a free loopback port in a thread of its own, until `stop`."""

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        self.token = token
        self.health: Any = {"status": "OK", "version": __version__}
        self.jobs: dict[str, list[Json]] = {}
        """Statuses of a job: each GET takes one, and the last one stays."""
        self.posted: list[tuple[str, Json]] = []
        """Path and body of every POST that was answered."""
        self.blobs: dict[str, int] = {}
        """Digest -> size of what was uploaded."""
        self.files: dict[str, bytes] = {}
        """Files of the one checkpoint, `NAME-final`, that every job has."""
        self.announced: dict[str, str] = {}
        """Digests that the checkpoint's list of files gives instead of the true ones."""
        self.logs: list[str] = []
        """What the log is: each GET takes one, and the last one stays."""
        self.events: list[tuple[str, Json]] = []
        """Id and event of each event of every job."""
        self.breaks: list[int] = []
        """After how many events the next streams break off; a stream beyond them is whole."""
        self.points: list[Json] = []
        """Metric points of every job."""
        self.samples: list[Json] = []
        """Sets of answers of every job."""
        self.nodes: list[dict[str, Any]] = [{"node": "head", "devices": ["cpu"], "jobs": {"cpu": "job-1"}}]
        self.datasets: list[Json] = []
        self.pools: list[Json] = []
        self.placed: list[Json] = []
        """The jobs of every pipeline."""
        self.queue: list[Json] = []
        """Rows of the queue, two to a page, in whatever order is requested."""
        self.sorts: list[str] = []
        """What pages of the queue were to be sorted by."""
        self.seen: Counter[str] = Counter()
        """`METHOD path` of every request that arrived."""
        self.users: list[str] = []
        """X-TRL-User of every request that was for a job or a dataset."""
        self.refused_unsent = 0
        """Bodies that were refused (413) before they were sent."""
        self.trouble: list[str | int] = []
        """What happens to the next requests (not to /v1/health): `drop` the connection, `hang`, a status, `half` of the
        body and then a dropped connection, `move` to another address."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.port = asyncio.run_coroutine_threadsafe(self._start(port), self._loop).result(10)
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._end(self._runner), self._loop).result(10)
            self._runner = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self, runner: web.AppRunner) -> None:
        # A connection that is accepted in the same turn of the loop as its listener is closed stays open
        # (asyncio: its transport fails before it is known), and its socket fails whichever test runs when it is
        # collected. So nothing is accepted any more, and what was accepted becomes the runner's, before `cleanup`.
        for address in runner.sites:
            for listener in address._server.sockets:  # type: ignore[attr-defined]
                asyncio.get_running_loop().remove_reader(listener)
        for _ in range(5):
            await asyncio.sleep(0)
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # of connections that have not ended in time
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _start(self, port: int) -> int:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{path:.*}", self._answer, expect_handler=self._expect)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return int(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """A body that is refused is never requested."""
        if self.trouble[:1] == [413]:
            self.refused_unsent += 1
            return self._error(int(self.trouble.pop(0)))
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/health":
            return web.json_response(self.health)
        self.seen[f"{request.method} {request.path}"] += 1
        self.users.append(request.headers.get("X-TRL-User", ""))
        trouble = self.trouble.pop(0) if self.trouble else None
        if isinstance(trouble, int):
            return self._error(trouble)
        if trouble == "drop":
            assert request.transport is not None
            request.transport.close()
        if trouble == "hang":
            await asyncio.sleep(30)
        if trouble == "move":
            raise web.HTTPTemporaryRedirect(f"http://localhost:{self.port}{request.path}")
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._error(401)
        return await self._dispatch(request, half=trouble == "half")

    def _error(self, status: int) -> web.Response:
        return web.json_response({"detail": f"the sentence of a {status}"}, status=status)

    async def _dispatch(self, request: web.Request, half: bool) -> web.StreamResponse:
        path = request.path.removeprefix("/v1/")
        parts = path.split("/")
        if parts[0] == "blobs":
            return await self._blob(request, parts[1])
        if path == "nodes":
            return web.json_response({"data": self.nodes})
        if parts[0] == "nodes" and request.method == "GET":
            return web.json_response({"node": parts[1], "devices": ["cuda:0"], "jobs": {}})
        if parts[0] == "nodes":  # cordon, uncordon, drain, remove
            return web.Response(status=204)
        if request.method == "DELETE":
            return web.Response(status=204)
        if request.method == "POST":
            if request.content_type != "application/json":
                return self._error(400)
            return self._post(path, await request.json())
        if path in ("datasets", "pools"):
            return web.json_response({"data": self.datasets if path == "datasets" else self.pools})
        if path == "post-training/queue":
            self.sorts.append(request.query["sort"])
            first = int(request.query["offset"])
            page = self.queue[first : first + min(2, int(request.query["limit"]))]
            return web.json_response({"data": page, "matching": len(self.queue), "counts": {}})
        if path == "post-training/jobs":
            return self._list(request)
        if parts[:2] == ["post-training", "job"]:
            return self._job(request.query["job_uuid"], parts[2])
        if parts[3:] == ["logs"]:
            return web.Response(text=self.logs.pop(0) if len(self.logs) > 1 else self.logs[0])
        if parts[3:] == ["events"]:
            return await self._events(request)
        if parts[3:] == ["metrics"]:
            return web.json_response({"data": self.points})
        if parts[3:] == ["samples"]:
            limit, offset = (int(request.query[name]) for name in ("limit", "offset"))
            page = self.samples[offset : offset + limit]
            return web.json_response({"prompts": [[]], "data": page, "total": len(self.samples)})
        if parts[3:] == ["checkpoints"]:
            kinds = ["checkpoint-2"] if parts[2] == "young" else ["checkpoint-2", "final"]
            found = [{"identifier": f"{parts[2]}-{kind}"} for kind in kinds]
            return web.json_response({"data": found})
        if parts[3:4] == ["checkpoints"] and len(parts) == 5:
            files = [
                {"path": name, "size": len(content), "sha256": self.announced.get(name) or _sha256(content)}
                for name, content in self.files.items()
            ]
            return web.json_response({"identifier": parts[4], "path": "/there", "files": files})
        if parts[3:4] == ["checkpoints"]:
            return await self._file(request, "/".join(parts[6:]), half)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _blob(self, request: web.Request, digest: str) -> web.Response:
        if request.method == "HEAD":
            return web.Response(status=200 if digest in self.blobs else 404)
        hashed, size = hashlib.sha256(), 0
        async for chunk in request.content.iter_chunked(1 << 16):
            hashed.update(chunk)
            size += len(chunk)
        if hashed.hexdigest() != digest:
            return web.json_response({"detail": "digest mismatch"}, status=400)
        self.blobs[digest] = size
        return web.json_response({}, status=201)

    def _post(self, path: str, body: Json) -> web.Response:
        self.posted.append((path, body))
        if path in ("post-training/supervised-fine-tune", "post-training/preference-optimize", "post-training/export"):
            self.jobs.setdefault(body["job_uuid"], [status(body["job_uuid"])])
            return web.json_response({"job_uuid": body["job_uuid"]})
        if path == "post-training/pipelines":
            return web.json_response({"data": self.placed})
        if path.endswith(("/pause", "/resume")):
            return web.json_response(status(path.split("/")[2], "scheduled", state=path.split("/")[3]))
        return web.json_response(None)

    def _list(self, request: web.Request) -> web.Response:
        wanted = request.query.get("status")
        rows = [s[0] for s in self.jobs.values() if wanted in (None, s[0]["status"])]
        names = [row["job_uuid"] for row in rows]
        start = names.index(request.query["after"]) + 1 if "after" in request.query else 0
        limit = int(request.query.get("limit", len(rows) or 1))
        page = rows[start : start + limit]
        after = page[-1]["job_uuid"] if start + limit < len(rows) else None
        keys = ("job_uuid", "status", "scheduled_at") if request.query.get("full") == "true" else ("job_uuid",)
        return web.json_response({"data": [{key: row[key] for key in keys} for row in page], "next": after})

    def _job(self, job_uuid: str, what: str) -> web.Response:
        if job_uuid not in self.jobs:
            return web.json_response({"detail": f"job {job_uuid!r} not found"}, status=404)
        statuses = self.jobs[job_uuid]
        shown = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return web.json_response(shown if what == "status" else {k: shown[k] for k in ("job_uuid", "checkpoints")})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        after = request.headers.get("Last-Event-ID") or request.query.get("after")
        start = [name for name, _ in self.events].index(after) + 1 if after else 0
        rest = self.events[start:]
        if request.headers.get("Accept") != "text/event-stream":
            page = rest[: int(request.query["limit"])]
            data = [{"id": name, "event": event} for name, event in page]
            return web.json_response({"data": data, "next": page[-1][0] if page else after or "0-0"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": the job is in_progress\n\n")
        count = self.breaks.pop(0) if self.breaks else None
        for name, event in rest[:count]:
            await response.write(f"id: {name}\ndata: {json.dumps(event)}\n\n".encode())
        if count is None:
            await response.write(b'event: end\ndata: {"state": "completed"}\n\n')
        else:
            assert request.transport is not None
            request.transport.close()
        return response

    async def _file(self, request: web.Request, name: str, half: bool) -> web.StreamResponse:
        content = self.files[name]
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(content) - start
        await response.prepare(request)
        rest = content[start:]
        await response.write(rest[: len(rest) // 2] if half else rest)
        if half:
            assert request.transport is not None
            request.transport.close()
        return response


@contextmanager
def fake_service(port: int = 0, token: str | None = None) -> Iterator[FakeService]:
    service = FakeService(port, token)
    try:
        yield service
    finally:
        service.stop()


def status(job_uuid: str, word: str = "scheduled", **resources: Any) -> Json:
    """A job's status as the service gives it."""
    return {
        "job_uuid": job_uuid,
        "status": word,
        "scheduled_at": "2026-11-21T10:00:00Z",
        "started_at": None,
        "completed_at": None,
        "resources_allocated": {"state": word, **resources},
        "checkpoints": [],
    }


def progress(step: int, total: int = 10, **more: Any) -> Json:
    return {"step": step, "total_steps": total, "percent": 100.0 * step / total, **more}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def ndjson(rows: list[Json]) -> bytes:
    """Rows as they are uploaded."""
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()


Run = Callable[..., tuple[int, str, str]]
"""Runs `trl-remote` with these words: exit status, output, errors."""


def command_line(service: FakeService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`trl-remote` in this process, for a service; what fails is repeated without a pause."""
    monkeypatch.setenv("TRL_SERVICE_URL", service.url)
    monkeypatch.delenv("TRL_SERVICE_TOKEN", raising=False)
    monkeypatch.setattr(client, "ServiceClient", functools.partial(client.ServiceClient, pauses=()))

    def run(*words: object) -> tuple[int, str, str]:
        exit_status = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return exit_status, captured.out, captured.err

    return run
