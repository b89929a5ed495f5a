"""A hub on loopback, with which huggingface_hub's own client and `datasets` talk: repositories with branches, commits,
gates and tokens, and faults on request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

Files = Mapping[str, bytes]


def lines(*rows: Mapping[str, Any]) -> bytes:
    """Rows as the content of a .jsonl file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Repository:
    """A repository of one kind. Each push is a commit."""

    kind: str = "datasets"
    token: str | None = None
    """Whoever lacks it does not see the repository."""
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def push(self, files: Files, branch: str = "main") -> str:
        """Make a branch this content. Returns its commit."""
        parts = [f"{len(self.commits)}", *(f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in files.items())]
        commit = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def revision(self, path: str) -> str | None:
        """The branch or commit with which a path begins; None: there is none."""
        known = sorted({*self.branches, *self.commits}, key=len, reverse=True)
        return next((one for one in known if f"{path}/".startswith(f"{one}/")), None)


@dataclass
class Hub:
    """What a server has, and what it was asked."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    status: int = 0
    """Of all answers, in place of those of a hub; 0: none."""
    delay: float = 0.0
    """Seconds before each answer."""

    def add(self, name: str, files: Files, **more: Any) -> Repository:
        """A repository with one commit on its branch main."""
        self.repositories[name] = Repository(**more)
        self.repositories[name].push(files)
        return self.repositories[name]

    def sent(self) -> list[str]:
        """Names of the files whose content was sent."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET ") and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"{self.command} {path}")
        time.sleep(self.hub.delay)
        if self.hub.status:
            return self.answer(self.hub.status, b"<html>not a hub</html>", {"Content-Type": "text/html"})
        if path.startswith("/api/"):
            kind, _, rest = path.removeprefix("/api/").partition("/")
        else:
            kind, rest = (
                ("datasets", path.removeprefix("/datasets/")) if path.startswith("/datasets/") else ("models", path[1:])
            )
        name = "/".join(rest.split("/")[:2])
        repository = self.hub.repositories.get(name)
        if repository is None or repository.kind != kind or not self.may_read(repository):
            return self.refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        what, _, argument = rest.removeprefix(name).strip("/").partition("/")
        if path.startswith("/api/"):
            return self.api(name, repository, what, argument)
        if repository.gated:
            return self.refuse(403, "GatedRepo")
        return self.resolve(repository, argument)

    do_HEAD = do_GET

    def may_read(self, repository: Repository) -> bool:
        return repository.token is None or self.headers.get("Authorization") == f"Bearer {repository.token}"

    def api(self, name: str, repository: Repository, what: str, argument: str) -> None:
        revision = repository.revision(argument) if what in ("revision", "tree") else "main"
        if revision is None:
            return self.refuse(404, "RevisionNotFound")
        if repository.gated:
            return self.refuse(403, "GatedRepo")
        commit = repository.branches.get(revision, revision)
        files = repository.commits[commit]
        if what != "tree":
            return self.reply({"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})
        if below := argument.removeprefix(revision).strip("/"):
            files = {path: data for path, data in files.items() if path.startswith(f"{below}/")}
            if not files:
                return self.refuse(404, "EntryNotFound")
        oids = {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}
        return self.reply(
            [{"type": "file", "path": path, "size": len(data), "oid": oids[path]} for path, data in files.items()]
        )

    def resolve(self, repository: Repository, argument: str) -> None:
        revision = repository.revision(argument)
        if revision is None:
            return self.refuse(404, "RevisionNotFound")
        commit = repository.branches.get(revision, revision)
        data = repository.commits[commit].get(argument.removeprefix(f"{revision}/"))
        if data is None:
            return self.refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        return self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    def refuse(self, status: int, code: str, more: Mapping[str, str] | None = None) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(more or {})})

    def reply(self, body: Any) -> None:
        self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve() -> Iterator[Hub]:
    """An empty hub, until the end of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
