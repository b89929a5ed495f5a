"""A real training service on a free port of this machine, and the calls that a user makes to it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.system.files import tail
from tests import forked, left_behind
from tests.contract.stack import Json, Server, poll

JOBS = "/post-training/jobs"


class TrainingService(Server):
    """On the CPU, with one rank per job where the settings do not set it more."""

    called = "the service"
    python = sys.executable
    module = "llama_stack_provider_trl_remote.service"
    """What Python runs. A fork runs this one only."""
    forks = True
    """Whether its warm processes are forked from one that all servers of this test process share (tests/forked.py)."""
    is_forked = True
    """Whether it is forked itself, where its warm processes are."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.data_dir = root / "data"
        self.files = root / "files"
        self.log = root / "service.log"
        self.config = root / "run_fsdp.yaml"
        self.files.mkdir()
        self.session = requests.Session()
        self.port = 0
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        """Write the run file; what the service reads at its next start."""
        block = {"device": "cpu", "dataset_roots": [str(self.files)], "torch_run_config": {"nproc_per_node": 1}}
        # One of its own for a test that sets it. Nothing imports torch where trainings are played.
        self.forks = type(self).forks and not settings.keys() & {"warm_start", "train_python"}
        block |= {"warm_start": self.forks}
        provider = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": {**block, **settings}}
        self.config.write_text(yaml.safe_dump({"providers": {"post_training": [provider]}}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """On the port that it had before, if it had one."""
        self.process = self.spawn(self.port, self.data_dir, self.log)

    def wait_until_it_answers(self) -> None:
        poll(self._announced, "the service prints its address", timeout=20, pause=0.05)
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
            faults.VARIABLE: str(self.faults),
            **(forked.environment() if self.forks else {}),
            **environ,
        }
        main = [*(["-m", "tests.forked"] if self.forks else ["-m"]), self.module]
        command = [self.python, *main, *arguments]
        left_behind.watch(self.root)
        with open(log, "wb") as output:
            if self.forks and self.is_forked:
                return forked.start_server(forked.SERVICE, command, output, self.root, variables)
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=variables,
                start_new_session=True,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def get(self, path: str, *, prefix: str = "/v1", headers: Json | None = None, **params: Any) -> requests.Response:
        return self.session.get(self.url + prefix + path, params=params, headers=headers, timeout=30)

    def post(
        self, path: str, body: Any = None, *, prefix: str = "/v1", options: Any = None, **more: Any
    ) -> requests.Response:
        """POST, with `options` as the field `provider_options` of the body."""
        body = body if options is None else {**body, "provider_options": options}
        return self.session.post(self.url + prefix + path, json=body, timeout=60, **more)

    def delete(self, path: str, *, prefix: str = "/v1", **params: Any) -> requests.Response:
        return self.session.delete(self.url + prefix + path, params=params, timeout=30)

    def put_blob(self, rows: list[Json] | bytes, sha256: str | None = None) -> tuple[requests.Response, str]:
        """Upload rows; returns the answer and their true digest."""
        data = rows if isinstance(rows, bytes) else ndjson(rows)
        digest = hashlib.sha256(data).hexdigest()
        answer = self.session.put(f"{self.url}/v1/blobs/{sha256 or digest}", data=data, timeout=60)
        return answer, digest

    def status(self, job_uuid: str) -> Json:
        """With the effective configuration, as Llama Stack has it."""
        answer = self.get("/post-training/job/status", job_uuid=job_uuid, config="true")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def state(self, job_uuid: str) -> str:
        return str(self.status(job_uuid)["resources_allocated"]["state"])

    def wait_state(self, job_uuid: str, *states: str, timeout: float = 60) -> Json:
        poll(lambda: self.state(job_uuid) in states, f"job {job_uuid} is {' or '.join(states)}", timeout)
        return self.status(job_uuid)

    def read_bytes(self) -> int:
        """What the process has read so far from files and sockets."""
        return int(psutil.Process(self.pid).io_counters().read_chars)

    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / (1 << 20)

    def log_tail(self) -> str:
        return tail(self.log, 60, 1 << 16)

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


def running_service(root: Path, **settings: Any) -> AbstractContextManager[TrainingService]:
    """A service for a test module; fails it if the service does not end properly."""
    return running(TrainingService(root, **settings))


@contextmanager
def running[Service: TrainingService](service: Service) -> Iterator[Service]:
    """As `running_service`, for one that is not started yet."""
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
            service.kill_tasks()


def ndjson(rows: list[Json]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refusal(answer: requests.Response, status_code: int = 400) -> str:
    """The sentence of an answer that must be a refusal."""
    assert answer.status_code == status_code, (answer.status_code, answer.text)
    detail = answer.json()["detail"]
    assert isinstance(detail, str)
    return detail
