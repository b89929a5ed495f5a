"""A server of Weights & Biases, as far as `wandb sync` calls one: accounts, runs, and lines of their history by number.

It stands in for a server that cannot be had here. What it knows of the protocol is what wandb sends.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
HISTORY = "wandb-history.jsonl"


class WandbServer:
    """Keeps what it receives over restarts; at one port, which nothing else listens on."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.history: dict[str, dict[int, Json]] = {}
        """entity/project/run -> number of a line -> the line."""
        self.complete: set[str] = set()
        self.streams = 0
        self.answers_to_lose = 0
        self.streams_to_refuse = 0
        self.unauthorized = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (_Handler,), {"owner": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def values(self, run: str) -> dict[tuple[str, int], list[float]]:
        """Name of a metric and step -> every value that the run has for it."""
        found: dict[tuple[str, int], list[float]] = {}
        for line in self.history[run].values():
            for name, value in line.items():
                if "/" in name:
                    found.setdefault((name, line["_step"]), []).append(value)
        return found

    def stream(self, run: str, body: Json) -> None:
        self.streams += 1
        chunk = body.get("files", {}).get(HISTORY, {"offset": 0, "content": []})
        lines = self.history.setdefault(run, {})
        lines |= {chunk["offset"] + number: json.loads(line) for number, line in enumerate(chunk["content"])}
        if body.get("complete"):
            self.complete.add(run)

    def query(self, query: str, variables: Json) -> Json:
        if "UpsertBucket" in query:
            project = {
                "id": "1",
                "name": variables["project"],
                "entity": {"id": "1", "name": variables["entity"] or "me"},
            }
            bucket = {"id": "1", "name": variables["name"], "displayName": variables["displayName"], "config": "{}"}
            more = {"description": "", "sweepName": None, "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": {**bucket, **more}, "inserted": True}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}}


class _Handler(BaseHTTPRequestHandler):
    owner: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._read()
        given = self.headers.get("Authorization", "")
        if (
            given != "Basic " + base64.b64encode(f"api:{self.owner.api_key}".encode()).decode()
            and "/otel/" not in self.path
        ):
            self.owner.unauthorized += 1
            return self._answer({"errors": [{"message": "permission denied"}]}, 401)
        if self.path == "/graphql":
            request = json.loads(body)
            return self._answer({"data": self.owner.query(request["query"], request.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            if self.owner.streams_to_refuse:
                self.owner.streams_to_refuse -= 1
                return self._answer({}, 403)
            self.owner.stream(self.path.removeprefix("/files/").removesuffix("/file_stream"), json.loads(body))
            if self.owner.answers_to_lose:
                self.owner.answers_to_lose -= 1
                self.close_connection = True
                return None
        return self._answer({})

    def do_PUT(self) -> None:
        self._read()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, body: Json, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
