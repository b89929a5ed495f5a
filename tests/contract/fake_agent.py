"""A worker node as a script: sends the service the reports that a test chooses, and runs nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import requests

from llama_stack_provider_trl.system.files import file_names, sha256_of
from llama_stack_provider_trl_remote.nodes.identity import versions
from tests.contract.service import TrainingService
from tests.contract.stack import Json, poll


class FakeAgent:
    """A node whose calls a test makes.

    Args:
        token: the join token. It is sent until a join has answered with a credential, which is sent from then on;
            None: every call is made by the operator.
    """

    def __init__(self, service: TrainingService, name: str = "worker", token: str | None = None, **report: Any) -> None:
        self.service = service
        self.name = name
        self.token = token
        self.credential: str | None = None
        self.boot_id = f"boot of {name}"
        self.seen = 0
        self.orders: list[Json] = []
        self.reports: dict[str, Json] = {}
        self.report: Json = {
            **{"name": name, "machine_id": f"machine of {name}", "boot_id": self.boot_id, "address": "127.0.0.1"},
            **{"cpus": 4, "memory_bytes": 8 << 30, "disk_free_bytes": 8 << 30, "devices": [{"name": "cpu"}]},
            **{"versions": versions()},
            **report,
        }
        self.boot_id = self.report["boot_id"]

    def join(self) -> requests.Response:
        answer = self.call("POST", "/nodes", json=self.report)
        if answer.ok:
            self.credential = answer.json().get("credential") or self.credential
        return answer

    def call(self, method: str, path: str, **request: Any) -> requests.Response:
        """One call as this agent, to any path."""
        headers = dict(request.pop("headers", {}))
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.credential or self.token}"
        return self.service.session.request(
            method, f"{self.service.url}/v1{path}", headers=headers, timeout=60, **request
        )

    def poll(self) -> requests.Response:
        own = {"boot_id": self.boot_id, "agent_id": self.report.get("agent_id", "")}
        body = {**own, "tasks": list(self.reports.values()), "seen": self.seen}
        answer = self.call("POST", f"/nodes/{self.name}/poll", json=body)
        if answer.ok:
            self.seen, self.orders = answer.json()["revision"], answer.json()["tasks"]
        return answer

    def wait_for(self, task_id: str, stage: str) -> Json:
        """Poll until a task is to be in this stage; returns its order."""
        found: list[Json] = []

        def matching() -> list[Json]:
            return [order for order in self.orders if (order["task_id"], order["stage"]) == (task_id, stage)]

        def ordered() -> bool:
            found[:] = matching()
            if not found:
                assert self.poll().ok
            found[:] = matching()
            return bool(found)

        poll(ordered, f"{self.name} is ordered to {stage} {task_id}", timeout=30, pause=0.01)
        return found[0]

    def report_task(self, task_id: str, stage: str, progress: str = "done", **more: Any) -> None:
        """Report a task, and poll."""
        self.reports[task_id] = {"task_id": task_id, "stage": stage, "progress": progress, **more}
        self.seen = 0  # answer at once
        assert self.poll().ok

    def run(self, task_id: str, port: int = 29500) -> Json:
        """Go through the stages until it runs; returns its order."""
        self.wait_for(task_id, "prepare")
        self.report_task(task_id, "prepare", port=port)
        order = self.wait_for(task_id, "run")
        self.report_task(task_id, "run", "working", observation=running())
        return order

    def forget(self, task_id: str) -> None:
        self.reports.pop(task_id, None)
        self.seen = 0
        assert self.poll().ok

    def send_events(self, task_id: str, offset: int, data: bytes) -> requests.Response:
        return self._send("POST", f"{task_id}/events", data, offset=offset)

    def send_log(self, task_id: str, file: str, offset: int, data: bytes) -> requests.Response:
        return self._send("PUT", f"{task_id}/logs/{file}", data, offset=offset)

    def send_answers(self, task_id: str, offset: int, data: bytes, file: str = "answers.jsonl") -> requests.Response:
        return self._send("PUT", f"{task_id}/answers/{file}", data, offset=offset)

    def begin_answers(self, task_id: str) -> requests.Response:
        return self.call("POST", f"/nodes/{self.name}/tasks/{task_id}/answers")

    def answers(self, task_id: str, file: str = "answers.jsonl", **headers: str) -> requests.Response:
        return self.call("GET", f"/nodes/{self.name}/tasks/{task_id}/answers/{file}", headers=headers)

    def ask(self, task_id: str, checkpoint: Path, kind: str = "step") -> requests.Response:
        files = [
            {"path": name, "size": (checkpoint / name).stat().st_size, "sha256": sha256_of(checkpoint / name)}
            for name in file_names(checkpoint)
        ]
        path = f"/nodes/{self.name}/tasks/{task_id}/checkpoints/{checkpoint.name}"
        return self.call("POST", path, json={"kind": kind, "files": files})

    def send_file(self, task_id: str, checkpoint: Path, name: str, offset: int = 0) -> requests.Response:
        data = (checkpoint / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        path = f"{task_id}/checkpoints/{checkpoint.name}/files/{name}"
        return self._send("PUT", path, data[offset:], sha256=digest, offset=offset)

    def ship(self, task_id: str, checkpoint: Path, kind: str = "step") -> Path:
        """A whole checkpoint; returns where it is on the service."""
        for name in self.ask(task_id, checkpoint, kind).json()["missing"]:
            answer = self.send_file(task_id, checkpoint, name)
            assert answer.ok, answer.text
        answer = self.ask(task_id, checkpoint, kind)
        assert answer.ok, answer.text
        assert answer.json()["missing"] == []
        return Path(answer.json()["path"])

    def _send(self, method: str, path: str, data: bytes, **params: Any) -> requests.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return self.call(method, f"/nodes/{self.name}/tasks/{path}", data=data, params=params, headers=headers)


def running() -> Json:
    return {"state": "running"}


def exited(exit_code: int | None = 0, **more: Any) -> Json:
    return {"state": "exited", "exit_code": exit_code, **more}
