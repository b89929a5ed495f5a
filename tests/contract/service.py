"""A real training service on a free port of this machine, and the calls that a user makes to it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from llama_stack_provider_trl.files import tail
from llama_stack_provider_trl.process import tasks_below
from tests.contract.stack import ENDED, Json, poll

JOBS = "/post-training/jobs"


class TrainingService:
    """One service on one data directory, on the CPU. It can be stopped or killed, and started again."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.data_dir = root / "data"
        self.files = root / "files"
        self.log = root / "service.log"
        self.config = root / "run_fsdp.yaml"
        self.files.mkdir()
        self.session = requests.Session()
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        """Write the run file; what the service reads at its next start."""
        block = {"device": "cpu", "dataset_roots": [str(self.files)], "torch_run_config": {"nproc_per_node": 1}}
        provider = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": {**block, **settings}}
        self.config.write_text(yaml.safe_dump({"providers": {"post_training": [provider]}}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the service, on the port that it had before if it had one, and wait until it answers."""
        self.process = self.spawn(self.port, self.data_dir, self.log)
        poll(self._announced, "the service says its address", timeout=20, pause=0.05)
        poll(self._healthy, "the service answers /v1/health", timeout=20, pause=0.05)

    def spawn(self, port: int, data_dir: Path, log: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        """A service process that is not waited for."""
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TRL_SERVICE_")},
            "TRL_SERVICE_CONFIG": str(self.config),
            "TRL_SERVICE_DATA_DIR": str(data_dir),
            "TRL_SERVICE_PORT": str(port),
            "TRL_LOCK_DIR": str(self.root / "locks"),  # not behind whatever else trains on this machine
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRL_FAULTS": str(self.root / "faults"),
            **environ,
        }
        with open(log, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "llama_stack_provider_trl_remote.service", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=variables,
                start_new_session=True,
            )

    def stop(self) -> None:
        """SIGTERM; an AssertionError where it takes a SIGKILL, or where the service ended by itself."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            exit_code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
            exit_code = -signal.SIGKILL
        assert exit_code in (0, -signal.SIGTERM), f"the service ended with {exit_code}\n{self.log_tail()}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def get(self, path: str, *, prefix: str = "/v1", headers: Json | None = None, **params: Any) -> requests.Response:
        return self.session.get(self.url + prefix + path, params=params, headers=headers, timeout=30)

    def post(self, path: str, body: Any = None, *, prefix: str = "/v1", **more: Any) -> requests.Response:
        return self.session.post(self.url + prefix + path, json=body, timeout=60, **more)

    def delete(self, path: str, *, prefix: str = "/v1", **params: Any) -> requests.Response:
        return self.session.delete(self.url + prefix + path, params=params, timeout=30)

    def put_blob(self, rows: list[Json] | bytes, sha256: str | None = None) -> tuple[requests.Response, str]:
        """Upload rows; returns the answer and their true digest."""
        data = rows if isinstance(rows, bytes) else ndjson(rows)
        digest = hashlib.sha256(data).hexdigest()
        answer = self.session.put(f"{self.url}/v1/blobs/{sha256 or digest}", data=data, timeout=60)
        return answer, digest

    def register(self, dataset_id: str, rows: list[Json], **more: Any) -> str:
        source = {"type": "rows", "rows": rows}
        body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source, **more}
        answer = self.post("/datasets", body)
        assert answer.status_code == 200, answer.text
        return dataset_id

    def submit(self, path: str, body: Json, **more: Any) -> str:
        """POST a job that must be taken; returns its job_uuid."""
        answer = self.post(path, {**body, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"job_uuid": body["job_uuid"]}
        return str(body["job_uuid"])

    def status(self, job_uuid: str) -> Json:
        answer = self.get("/post-training/job/status", job_uuid=job_uuid)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def state(self, job_uuid: str) -> str:
        return str(self.status(job_uuid)["resources_allocated"]["state"])

    def wait_state(self, job_uuid: str, *states: str, timeout: float = 60) -> Json:
        poll(lambda: self.state(job_uuid) in states, f"job {job_uuid} is {' or '.join(states)}", timeout)
        return self.status(job_uuid)

    def wait(self, job_uuid: str, expected: str, timeout: float = 90) -> Json:
        """The status of a job once it has ended; it must have ended as expected."""
        status = self.wait_state(job_uuid, *ENDED, timeout=timeout)
        assert status["status"] == expected, json.dumps(status["resources_allocated"], indent=1)
        return status

    def arm(self, point: str, action: str) -> None:
        """Have the product do something at one of its points, once (tests/README.md)."""
        (self.root / "faults").mkdir(exist_ok=True)
        (self.root / "faults" / point).write_text(action)

    def wait_taken(self, point: str, timeout: float = 60) -> None:
        """Until a process has come to an armed point. Asks the service nothing."""
        taken = self.root / "faults" / f"{point}.taken"
        poll(taken.exists, f"a process reaches {point}", timeout, pause=0.02)

    def go(self, point: str) -> None:
        """Let go on who is held at a point."""
        (self.root / "faults" / f"{point}.go").touch()

    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / (1 << 20)

    def log_tail(self) -> str:
        return tail(self.log, 60, 1 << 16)

    def end_jobs(self) -> None:
        """End whatever trains on this data directory."""
        for processes in tasks_below(self.data_dir.resolve() / "jobs").values():
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)

    def _announced(self) -> bool:
        assert self.runs(), f"the service ended by itself\n{self.log_tail()}"
        for line in self.log.read_text().splitlines():
            if line.strip().startswith("address "):
                self.port = int(line.split()[1].rpartition(":")[2])
                return True
        return False

    def _healthy(self) -> bool:
        assert self.runs(), f"the service ended by itself\n{self.log_tail()}"
        try:
            return requests.get(f"{self.url}/v1/health", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False


@contextmanager
def running_service(root: Path, **settings: Any) -> Iterator[TrainingService]:
    """A service for a test module; fails it if the service does not end properly."""
    service = TrainingService(root, **settings)
    service.start()
    try:
        yield service
        assert service.runs(), f"the service ended by itself\n{service.log_tail()}"
        assert "Traceback" not in service.log.read_text(), service.log_tail()
    finally:
        try:
            if service.runs():
                service.stop()
        finally:
            service.session.close()
            service.end_jobs()


def ndjson(rows: list[Json]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refusal(answer: requests.Response, status_code: int = 400) -> str:
    """The sentence of an answer that must be a refusal."""
    assert answer.status_code == status_code, (answer.status_code, answer.text)
    detail = answer.json()["detail"]
    assert isinstance(detail, str)
    return detail
