"""A hub on loopback, with which huggingface_hub's own client and `datasets` talk: repositories with branches, commits,
gates and tokens, faults on request, and the uploads of an account."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote

Files = Mapping[str, bytes]
LARGE = 1 << 10
"""Bytes beyond which a file is uploaded by LFS."""


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
    writer: str | None = None
    """The token that makes repositories and commits; None: no token does."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded by sha256, of files of more than `LARGE` bytes."""
    private: dict[str, bool] = field(default_factory=dict)
    """Whether a repository that was made here is private, by its name."""
    damages: str | None = None
    """The file whose last byte a commit changes."""
    loses: str | None = None
    """The file that a commit lacks."""
    damaged_branch: str | None = None
    """The branch whose commits are damaged, or lack a file; None: those of all."""

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
        if not repository.commits:
            return self.reply({"id": name, "siblings": []})
        if revision is None:
            return self.refuse(404, "RevisionNotFound")
        if repository.gated:
            return self.refuse(403, "GatedRepo")
        commit = repository.branches.get(revision, revision)
        files = repository.commits[commit]
        if what != "tree":
            blobs = [self.described(path, data) for path, data in files.items()]
            return self.reply({"id": name, "sha": commit, "siblings": blobs})
        if below := argument.removeprefix(revision).strip("/"):
            files = {path: data for path, data in files.items() if path.startswith(f"{below}/")}
            if not files:
                return self.refuse(404, "EntryNotFound")
        oids = {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}
        return self.reply(
            [{"type": "file", "path": path, "size": len(data), "oid": oids[path]} for path, data in files.items()]
        )

    def described(self, path: str, data: bytes) -> dict[str, Any]:
        """A file as a hub lists it with its metadata."""
        found = {
            "rfilename": path,
            "size": len(data),
            "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        }
        sha256 = hashlib.sha256(data).hexdigest()
        if len(data) > LARGE:
            found["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 127}
        return found

    def as_path(self, path: str, data: bytes) -> dict[str, Any]:
        """A file as a hub describes a path."""
        described = self.described(path, data)
        found = {"type": "file", "path": path, "size": len(data), "oid": described["blobId"]}
        lfs = described.get("lfs")
        return found if lfs is None else {**found, "lfs": {"oid": lfs["sha256"], "size": len(data), "pointerSize": 127}}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if not self.is_chunked() else self.chunks()
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"POST {path}")
        if self.hub.status:
            return self.answer(self.hub.status, b"<html>not a hub</html>", {"Content-Type": "text/html"})
        if self.hub.writer is None or self.headers.get("Authorization") != f"Bearer {self.hub.writer}":
            return self.refuse(401, "")
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            status = 409 if name in self.hub.repositories else 200
            if status == 200:
                self.hub.repositories[name] = Repository("models", self.hub.writer)
                self.hub.repositories[name].push({".gitattributes": b""})
                self.hub.private[name] = given.get("visibility") == "private" or bool(given.get("private"))
            return self.reply({"url": f"{self.hub.url}/{name}"}, status)
        if path == "/api/validate-yaml":
            return self.reply({"warnings": [], "errors": []})
        name = "/".join(
            path.removeprefix("/api/models/").strip("/").removesuffix(".git/info/lfs/objects/batch").split("/")[:2]
        )
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return self.reply({"transfer": "basic", "objects": [self.lfs_action(one) for one in objects]})
        if f"{name}/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [("lfs" if one["size"] > LARGE else "regular", one["path"]) for one in files]
            return self.reply(
                {"files": [{"path": at, "uploadMode": mode, "shouldIgnore": False} for mode, at in modes]}
            )
        repository = self.hub.repositories[name]
        what, _, branch = path.removeprefix(f"/api/models/{name}/").partition("/")
        if what == "branch":
            commit = json.loads(body)["startingPoint"]
            repository.branches[branch] = repository.branches.get(commit, commit)
            return self.reply({})
        if what == "paths-info":
            files = repository.commits[repository.branches.get(branch, branch)]
            wanted = parse_qs(body.decode())["paths"]
            return self.reply([self.as_path(one, files[one]) for one in wanted if one in files])
        return self.commit(name, repository, branch, [json.loads(line) for line in body.splitlines()])

    def do_DELETE(self) -> None:
        path = unquote(self.path)
        self.hub.asked.append(f"DELETE {path}")
        name, _, branch = path.removeprefix("/api/models/").partition("/branch/")
        if self.hub.repositories[name].branches.pop(branch, None) is None:
            return self.refuse(404, "RevisionNotFound")
        return self.reply({})

    def lfs_action(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.objects:
            return dict(wanted)
        return {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/objects/{wanted['oid']}"}}}

    def do_PUT(self) -> None:
        self.hub.asked.append(f"PUT {self.path}")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.hub.objects[self.path.rpartition("/")[2]] = data
        self.answer(200, b"", {})

    def commit(self, name: str, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(repository.commits[repository.branches[branch]]) if repository.branches else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                if value["path"] not in files:
                    return self.refuse(400, "")
                del files[value["path"]]
        if self.hub.damaged_branch in (None, branch):
            if self.hub.damages in files:
                files[self.hub.damages] = files[self.hub.damages][:-1] + b"!"
            files = {path: data for path, data in files.items() if path != self.hub.loses}
        commit = repository.push(files, branch)
        self.reply({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def is_chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding") == "chunked"

    def chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

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

    def reply(self, body: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
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
