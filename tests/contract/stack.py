"""A real Llama Stack on a free port of this machine, and the calls that a user makes to it or to a training service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.system.files import tail
from llama_stack_provider_trl.system.process import RUN_DIR_MARK, TASK_MARK
from tests import forked, left_behind
from tests.ports import free_port
from tests.tiny import REPOSITORY

LLAMA = Path(sys.executable).with_name("llama")
SFT, DPO = "/post-training/supervised-fine-tune", "/post-training/preference-optimize"
ENDED = ("completed", "failed", "cancelled")

Json = dict[str, Any]


def poll[Value](probe: Callable[[], Value], what: str, timeout: float, pause: float = 0.1) -> Value:
    """The first true value that `probe` returns; an AssertionError naming `what` and the last value after `timeout`,
    but never within the first minute: the machine may have other work."""
    deadline = time.monotonic() + max(timeout, 60.0)
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {max(timeout, 60.0):.0f} s; last seen: {value!r}")
        time.sleep(pause)


class Server(ABC):
    """What Llama Stack and the training service have in common: one process on one data directory, which can be stopped
    or killed, and started again; and the calls that a user makes to it."""

    called: str
    root: Path
    data_dir: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def launch(self) -> None:
        """Start the server; `wait` finds out whether it is up."""

    @abstractmethod
    def wait_until_it_answers(self) -> None:
        """Until it can be called; an AssertionError where it ends instead."""

    @abstractmethod
    def get(self, path: str, *, prefix: str = "/v1", **params: Any) -> requests.Response: ...

    @abstractmethod
    def post(self, path: str, body: Any, *, prefix: str = "/v1", options: Any = None) -> requests.Response:
        """POST, with our own options where this server expects them."""

    @abstractmethod
    def log_tail(self) -> str: ...

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.launch()
        self.wait_until_it_answers()

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """SIGTERM; an AssertionError where it takes a SIGKILL, or where the server ended by itself."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            exit_code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            exit_code = self.process.wait()
        # uvicorn shuts down in order, then ends by the signal that it was sent.
        assert exit_code in (0, -signal.SIGTERM), f"{self.called} ended with {exit_code}\n{self.log_tail()}"

    def arm(self, point: str, action: str) -> None:
        """Have the product do something at one of its points, once (tests/README.md)."""
        self.faults.mkdir(exist_ok=True)
        for name in (f"{point}.taken", f"{point}.go"):
            (self.faults / name).unlink(missing_ok=True)
        (self.faults / point).write_text(action)

    def taken(self, point: str) -> bool:
        """Whether a process has come to an armed point."""
        return (self.faults / f"{point}.taken").exists()

    def wait_taken(self, point: str, timeout: float = 60) -> None:
        """Until a process has come to an armed point. Asks the server nothing."""
        poll(lambda: self.taken(point), f"a process reaches {point}", timeout, pause=0.02)

    def go(self, point: str) -> None:
        """Let continue who is held at a point."""
        (self.faults / f"{point}.go").touch()

    @property
    def faults(self) -> Path:
        return self.root / "faults"

    def submit(self, path: str, body: Json, *, options: Any = None, **more: Any) -> str:
        """POST a job that must be taken, its body with what is more; returns its job_uuid."""
        answer = self.post(path, {**body, **more}, options=options)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"job_uuid": body["job_uuid"]}
        return str(body["job_uuid"])

    def register(self, dataset_id: str, rows: list[Json], **more: Any) -> str:
        return self.register_source(dataset_id, {"type": "rows", "rows": rows}, **more)

    def register_source(self, dataset_id: str, source: Json, **more: Any) -> str:
        body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source, **more}
        answer = self.post("/datasets", body)
        assert answer.status_code == 200, answer.text
        return dataset_id

    def status(self, job_uuid: str) -> Json:
        answer = self.get("/post-training/job/status", job_uuid=job_uuid)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def cancel(self, job_uuid: str) -> requests.Response:
        return self.post("/post-training/job/cancel", {"job_uuid": job_uuid})

    def jobs(self) -> list[str]:
        """Names of all jobs: Llama Stack answers with one page, the service with several where there are many."""
        page = self.get("/post-training/jobs").json()
        names = [job["job_uuid"] for job in page["data"]]
        while (after := page.get("next")) is not None:
            page = self.get("/post-training/jobs", after=after).json()
            names += [job["job_uuid"] for job in page["data"]]
        return names

    def wait(self, job_uuid: str, expected: str, timeout: float = 90) -> Json:
        """The status of a job once it has ended; it must have ended as expected."""

        def ended() -> Json | None:
            status = self.status(job_uuid)
            return status if status["status"] in ENDED else None

        status = poll(ended, f"job {job_uuid} ends", timeout)
        assert status is not None
        assert status["status"] == expected, json.dumps(status["resources_allocated"], indent=1)
        return status

    def wait_for_checkpoint(self, job_uuid: str, timeout: float = 60) -> Json:
        """The status of a running job that has written its first checkpoint."""

        def probe() -> Json | None:
            status = self.status(job_uuid)
            assert status["status"] not in ENDED, json.dumps(status, indent=1)
            return status if status["checkpoints"] else None

        status = poll(probe, f"job {job_uuid} writes a checkpoint", timeout)
        assert status is not None
        return status

    def processes(self, job_uuid: str | None = None) -> list[psutil.Process]:
        """Live processes that work for jobs of this server (for one job), found by the marks in their environment."""
        home = self.data_dir.resolve() / "jobs" / (job_uuid or "")
        return [process for process in psutil.process_iter() if _works_under(process, home)]

    def end_jobs(self) -> list[str]:
        """End every job; returns what still runs some seconds later, after having killed it."""
        for job_uuid in self.jobs():
            if self.status(job_uuid)["status"] not in ENDED:
                self.cancel(job_uuid)
        try:
            poll(lambda: not self.processes(), "processes of ended jobs are gone", timeout=15)
        except AssertionError:
            return [_kill(process) for process in self.processes()]
        return []

    def kill_tasks(self) -> None:
        """End whatever trains on this data directory."""
        for process in self.processes():
            _kill(process)


class LlamaStack(Server):
    """With the shipped run.yaml, on the CPU."""

    called = "Llama Stack"
    warm_start = True
    """With processes that are forked from one that all servers of this test process share."""
    imports: Sequence[str] = forked.LLAMA_STACK
    """What the server is forked with (tests/forked.py). Empty: it is started as users start it."""
    programs: Sequence[Path] = (Path(__file__).with_name("plain_log.py"),)
    """What runs it then, each the next one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data_dir = root / "data"
        self.log = root / "server.log"
        self.port = free_port()
        shipped = (REPOSITORY / "run.yaml").read_text()
        # Everything else is the shipped file; a GPU beside other people's jobs is no place for tests of an API.
        assert shipped.count("device: auto\n") == 1
        self._config = root / "run.yaml"
        on_cpu = f"device: cpu\n      warm_start: {str(self.warm_start).lower()}\n"
        self._config.write_text(shipped.replace("device: auto\n", on_cpu))

    def configure(self, **settings: Any) -> None:
        """Change settings of our provider; what Llama Stack reads at its next start."""
        config = yaml.safe_load(self._config.read_text())
        (provider,) = config["providers"]["post_training"]
        provider["config"] |= settings
        self._config.write_text(yaml.safe_dump(config))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [str(LLAMA), "stack", "run", str(self._config)]

    def launch(self) -> None:
        self.data_dir.mkdir(exist_ok=True)
        environ = {
            **os.environ,
            "TRL_OUTPUT_DIR": str(self.data_dir),
            "TRL_LOCK_DIR": str(self.root / "locks"),  # not behind whatever else trains on this machine
            "LLAMA_STACK_PORT": str(self.port),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            faults.VARIABLE: str(self.faults),
            "LLAMA_STACK_LOG_WIDTH": "1000",  # one line of the log per message
        }
        left_behind.watch(self.root)
        command = self.command()
        if self.imports:
            python = Path(command[0]).with_name("python")
            command = [str(python), "-m", "tests.forked", *map(str, self.programs), *command]
            environ |= forked.environment() if self.warm_start else {}
        with open(self.log, "ab") as output:
            if self.imports:
                self.process = forked.start_server(self.imports, command, output, self.root, environ)
                return
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=environ,
                start_new_session=True,
            )

    def wait_until_it_answers(self) -> None:
        assert self.process is not None
        try:
            poll(self._healthy, "Llama Stack answers /v1/health", timeout=120)
        except AssertionError as error:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{error}\n{self.log_tail()}") from None

    def get(self, path: str, *, prefix: str = "/v1", **params: Any) -> requests.Response:
        return requests.get(self.url + prefix + path, params=params, timeout=30)

    def post(self, path: str, body: Any, *, prefix: str = "/v1", options: Any = None) -> requests.Response:
        """POST, with `options` under the key `trl` of the provider-data header."""
        headers = {"X-LlamaStack-Provider-Data": json.dumps({"trl": options})} if options is not None else {}
        return requests.post(self.url + prefix + path, json=body, headers=headers, timeout=30)

    def log_tail(self) -> str:
        """The end of the server's log, without the requests that went well."""
        lines = (line.rstrip() for line in tail(self.log, 2000, 1 << 20).splitlines())
        return "\n".join([line for line in lines if not (line.endswith(" 200") and "uvicorn.access" in line)][-60:])

    def _healthy(self) -> bool:
        assert self.runs(), "Llama Stack ended by itself"
        try:
            return requests.get(f"{self.url}/v1/health", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False


@contextmanager
def serving[Stack: LlamaStack](stack: Stack) -> Iterator[Stack]:
    """Run a server for a block; fails the test if a training process outlives its job or the server does not end
    properly."""
    stack.start()
    try:
        yield stack
        assert stack.runs(), f"{stack.called} ended by itself\n{stack.log_tail()}"
        survivors = stack.end_jobs()
        assert not survivors, f"processes outlived their jobs: {survivors}"
    finally:
        try:
            if stack.runs():
                stack.stop()
        finally:
            stack.kill_tasks()


def _works_under(process: psutil.Process, home: Path) -> bool:
    try:
        environ = process.environ()
    except psutil.Error:
        return False
    return TASK_MARK in environ and Path(environ.get(RUN_DIR_MARK, "/")).is_relative_to(home)


def _kill(process: psutil.Process) -> str:
    try:
        seen = f"{process.pid} {' '.join(process.cmdline())}"
        process.kill()
    except psutil.Error:
        return f"{process.pid} (gone meanwhile)"
    return seen
