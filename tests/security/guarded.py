"""A training service with a token for each role, two nodes, and something behind every route."""

from __future__ import annotations

import hashlib
import http.client
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.process import FileLock
from llama_stack_provider_trl_remote.nodes.identity import versions
from tests.contract.ended import add_ended_job
from tests.contract.openai_known import FILE, JOB, add_known
from tests.contract.payloads import QUESTIONS, promised, sft
from tests.contract.service import TrainingService, ndjson, running
from tests.contract.stack import SFT, Json, poll
from tests.tiny import REPOSITORY

TOKENS = {
    "admin": "token-of-the-admin",
    "submit": "token-of-a-client",
    "node": "token-to-join-with",
    "metrics": "token-to-scrape",
    "read": "token-of-a-reader",
}
ROWS_DIGEST = hashlib.sha256(ndjson(QUESTIONS)).hexdigest()
NODE, OTHER_NODE = "mine", "other"
KNOWN = {
    **{"job_uuid": "waiting", "dataset_id": "questions", "sha256": ROWS_DIGEST, "identifier": "final"},
    **{"path": "model.bin", "name": NODE, "task_id": "waiting-1", "file": "rank-0.log", "checkpoint": "final"},
    **{"token_id": "none", "id": "none", "action": "cordon", "reading": "none"},
    **{"model": "ft:ended", "file_id": FILE, "job_id": JOB, "upload_id": "upload_gone", "permission_id": "cp_gone"},
}
"""Path parameter -> a value that the service knows."""
USERS = frozenset({"submit", "admin"})
READERS = USERS | {"read"}
HIDDEN = {
    **dict.fromkeys([("GET", "/openapi.json"), ("GET", "/docs")], READERS),
    ("GET", "/metrics"): READERS | {"metrics"},
    **dict.fromkeys([("GET", "/login"), ("POST", "/login"), ("GET", "/static/{name}")], frozenset[str]()),
    **dict.fromkeys([("GET", "/"), ("GET", "/jobs/{job_uuid}"), ("POST", "/logout")], READERS),
    **dict.fromkeys(
        [("GET", f"/jobs/{{job_uuid}}/{name}") for name in ("logs", "samples", "trials", "checkpoints/{identifier}")],
        READERS,
    ),
    **dict.fromkeys([("POST", f"/jobs/{{job_uuid}}/{name}") for name in ("cancel", "pause", "resume")], USERS),
    **dict.fromkeys([("GET", f"/{name}") for name in ("data", "data/rows", "answers", "compare", "nodes")], READERS),
    **dict.fromkeys([("GET", "/new"), ("GET", "/data/tokens")], USERS),
    **dict.fromkeys([("POST", f"/data/{name}") for name in ("tokens", "delete", "upload")], USERS),
    **dict.fromkeys([("POST", "/new"), ("POST", "/new/check")], USERS),
    **dict.fromkeys([("GET", f"/playground{path}") for path in ("", "/prompt", "/votes")], USERS),
    **dict.fromkeys([("POST", f"/playground/{name}") for name in ("answers", "votes")], USERS),
    **dict.fromkeys([("POST", "/jobs/{job_uuid}/delete"), ("POST", "/nodes/{name}/{action}")], frozenset({"admin"})),
}
"""Routes that the document leaves out: pages and their forms. -> their roles"""
HTTP_METHODS = {"get", "put", "post", "delete", "head", "patch", "options", "trace"}
QUERIES = {
    "GET /post-training/job/status": "job_uuid=waiting",
    "GET /post-training/job/artifacts": "job_uuid=waiting",
    "GET /data/rows": "dataset=questions",
    "POST /nodes/{name}/tasks/{task_id}/events": "offset=0",
    "PUT /nodes/{name}/tasks/{task_id}/logs/{file}": "offset=0",
    "PUT /nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}/files/{path}": f"offset=0&sha256={'0' * 64}",
}
"""Call -> a good query of it."""
_ROUTE = re.compile(r"^`([A-Z]+) (/\S*)`$")
_PREFIX = re.compile(r"^/(v1alpha|v1beta|v1)(?=/)")
_DIRECTORIES = ("jobs", "datasets", "blobs", "checkpoints", "uploads")


class Guarded(TrainingService):
    """A service with tokens; its own session has the admin's."""

    def __init__(self, root: Path, **settings: Any) -> None:
        tokens = [{"token": TOKENS[role], "role": role} for role in TOKENS if role != "admin"]
        models = {"known": {"model": sft("known", "questions")["model"]}}
        settings = {"openai": {"models": models}, **settings}
        super().__init__(root, **{"api_token": TOKENS["admin"], "tokens": tokens, **settings})
        self.session.headers["Authorization"] = f"Bearer {TOKENS['admin']}"
        self.credentials: dict[str, str] = {}
        """Node -> the credential that its join was answered with."""

    def document(self) -> Json:
        return dict(self.get("/openapi.json", prefix="").json())

    def join(self, name: str) -> None:
        """Join a node that takes no jobs."""
        headers = {"Authorization": f"Bearer {TOKENS['node']}"}
        answer = self.session.post(f"{self.url}/v1/nodes", json=report(name), headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        self.credentials[name] = answer.json()["credential"]
        assert self.post(f"/nodes/{name}/cordon").status_code == 204
        # Used once: a service may slow down addresses that guess, but no token that it has accepted from there.
        own = {"Authorization": f"Bearer {self.credentials[name]}"}
        body = {"boot_id": f"boot of {name}", "tasks": [], "seen": -1}
        answer = self.session.post(f"{self.url}/v1/nodes/{name}/poll", json=body, headers=own, timeout=30)
        assert answer.status_code == 200, answer.text

    def contents(self) -> tuple[dict[str, list[tuple[Any, ...]]], list[tuple[str, int]]]:
        """Every row of the job store and every file with its size, without what the service writes at its own times:
        when nodes were seen, and the load of machines."""
        with closing(sqlite3.connect(f"file:{self.data_dir / DATABASE}?mode=ro", uri=True)) as database:
            named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'loads'")
            tables = [name for (name,) in named]
            rows = {}
            for table in tables:
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[1] != "seen_at"]
                rows[table] = sorted(database.execute(f"SELECT {', '.join(columns)} FROM {table}"), key=repr)
        files = [
            (str(path.relative_to(self.data_dir)), path.stat().st_size)
            for directory in _DIRECTORIES
            for path in sorted((self.data_dir / directory).rglob("*"))
            if path.is_file()
        ]
        return rows, files


def report(name: str) -> Json:
    """What a node joins with."""
    return {
        **{"name": name, "machine_id": f"machine of {name}", "boot_id": f"boot of {name}", "address": "127.0.0.1"},
        **{"cpus": 4, "memory_bytes": 8 << 30, "disk_free_bytes": 8 << 30, "devices": [{"name": "cpu"}]},
        "versions": versions(),
    }


@contextmanager
def guarded_service(root: Path, **settings: Any) -> Iterator[Guarded]:
    """A service with one ended job, one that waits, a dataset and two nodes. Nothing trains: its device is locked."""
    (root / "locks").mkdir()
    device = FileLock(root / "locks" / "cpu.lock")
    assert device.acquire("tests/security")
    add_ended_job(root / "data")
    try:
        with running(Guarded(root, **settings)) as service:
            fill(service)
            yield service
    finally:
        device.release()


def fill(service: Guarded) -> None:
    """Give the service a dataset, uploaded rows, a job that waits and two nodes."""
    questions = service.register("questions", QUESTIONS)
    assert service.put_blob(QUESTIONS)[0].ok
    service.submit(SFT, sft("waiting", questions))
    submits = {"Authorization": f"Bearer {TOKENS['submit']}"}
    add_known(service, submits)
    # The supervisor writes once, some time after the request, what the job waits for.
    poll(lambda: service.status("waiting")["resources_allocated"]["detail"], "the job waits for a device", timeout=20)
    for name in (NODE, OTHER_NODE):
        service.join(name)
    assert service.get("/nodes", headers=submits).status_code == 200  # used once, as the credentials are
    scrapes = {"Authorization": f"Bearer {TOKENS['metrics']}"}
    assert service.get("/metrics", prefix="", headers=scrapes).status_code == 200


GRADER = {"type": "string_check", "name": "same", "operation": "eq", "input": "a", "reference": "a"}
BODIES: dict[str, Json] = {
    "POST /post-training/supervised-fine-tune": sft("new", "questions"),
    "POST /post-training/preference-optimize": promised("new", "questions"),
    "POST /post-training/generate": {
        "job_uuid": "generated",
        "model": sft("generated", "questions")["model"],
        "dataset_id": "questions",
        "output": {"dataset_id": "answers"},
    },
    "POST /post-training/evaluate": {
        "job_uuid": "evaluated",
        "model": sft("evaluated", "questions")["model"],
        "dataset_id": "questions",
    },
    "POST /post-training/merge": {"job_uuid": "merged", "models": [{"model": sft("merged", "questions")["model"]}]},
    "POST /post-training/export": {
        "job_uuid": "exported",
        "model": sft("exported", "questions")["model"],
        "to": "gguf",
    },
    "POST /post-training/pipelines": {
        "jobs": {"merged": {"kind": "merge", "models": [{"model": sft("merged", "questions")["model"]}]}}
    },
    "POST /post-training/preflight": sft("new", "no-such-dataset"),
    "POST /post-training/preview": sft("new", "no-such-dataset"),
    "POST /post-training/job/cancel": {"job_uuid": "waiting"},
    # Of a job that is not here: no model may answer while the device is locked.
    "POST /openai/v1/chat/completions": {"model": "ft:gone", "messages": [{"role": "user", "content": "a"}]},
    "POST /openai/v1/completions": {"model": "ft:gone", "prompt": "a"},
    "POST /openai/v1/fine_tuning/jobs": {"model": "known", "training_file": FILE},
    "POST /openai/v1/uploads": {
        "bytes": 3,
        "filename": "a.jsonl",
        "mime_type": "text/jsonl",
        "purpose": "fine-tune",
    },
    "POST /openai/v1/uploads/{upload_id}/complete": {"part_ids": ["part_gone"]},
    "POST /openai/v1/fine_tuning/checkpoints/{model}/permissions": {"project_ids": ["proj_a"]},
    "POST /openai/v1/fine_tuning/alpha/graders/run": {"grader": GRADER, "model_sample": "a"},
    "POST /openai/v1/fine_tuning/alpha/graders/validate": {"grader": GRADER},
    "POST /datasets": {
        "dataset_id": "new",
        "purpose": "post-training/messages",
        "source": {"type": "rows", "rows": QUESTIONS},
    },
    "POST /nodes": report("new"),
    "POST /tokens": {"name": "new"},
    "POST /nodes/{name}/poll": {"boot_id": f"boot of {NODE}", "tasks": [], "seen": -1},
    "POST /nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}": {"kind": "final", "files": []},
}
"""Bodies that are good: who gets past the check of roles changes something, or is answered with 2xx."""
MULTIPART = {
    "POST /openai/v1/files": (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--b--\r\n',
        "multipart/form-data; boundary=b",
    ),
    "POST /openai/v1/uploads/{upload_id}/parts": (
        b'--b\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n{}\n\r\n--b--\r\n',
        "multipart/form-data; boundary=b",
    ),
}
"""The same for routes that take a form: body and Content-Type."""


# --- The documented table of roles ------------------------------------------------------------------------------------


ROLES_PAGE = REPOSITORY / "docs" / "reference" / "service.md"


@cache
def documented_roles(page: Path = ROLES_PAGE) -> dict[tuple[str, str], dict[str, str]]:
    """(method, path without its version) -> caller -> its mark, from the table between the marks `roles`."""
    table = page.read_text().split("<!-- roles -->")[1].split("<!-- /roles -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {}
    for cells in rows[1:]:
        calls, marks = cells[0], dict(zip(header[1:], cells[1:], strict=True))
        for call in calls.split(", "):
            match = _ROUTE.match(call)
            assert match, f"docs/reference/service.md: {call!r} is not `METHOD /path`"
            found[match[1], match[2]] = marks
    return found


def sentence_of(body: Json) -> str:
    """The sentence of an error, in the form of the API or in OpenAI's."""
    return str(body["error"]["message"] if "error" in body else body["detail"])


def without_version(path: str) -> str:
    return _PREFIX.sub("", path)


# --- HTTP as it is written, sent by a client that changes nothing -----------------------------------------------------


@dataclass
class Answer:
    status: int
    """0: the connection was closed without one."""
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Raw:
    """One connection that sends methods and targets as they are."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def send(self, method: str, target: str, token: str | None, body: bytes | None, **headers: str) -> Answer:
        given = {} if token is None else {"Authorization": f"Bearer {token}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        for attempt in (1, 2):  # an idle connection may be closed by the service, with nothing answered
            try:
                self._connection.request(method, target, body, given)
                with self._connection.getresponse() as answer:
                    return Answer(answer.status, answer.read(), answer.headers)
            except (http.client.RemoteDisconnected, ConnectionError):
                self.close()
                if attempt == 2:
                    raise
        raise AssertionError("not reached")

    def close(self) -> None:
        self._connection.close()
