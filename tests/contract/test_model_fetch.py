"""A node that lacks a job's model fetches it from the service: with a real service and real agents, which are killed in
the middle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.system.files import sha256_of
from tests import forked
from tests.contract.fake_agent import FakeAgent
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running
from tests.contract.stack import SFT, Json, poll
from tests.tiny import REPOSITORY, tiny_model
from tests.unit.snapshots import snapshot

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

MODEL = "org/tiny"
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj"],
    "apply_lora_to_mlp": False,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}


class Head(TrainingService):
    """Its machine has the model in its cache."""

    def spawn(self, port: int, data_dir: Path, log: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        return super().spawn(port, data_dir, log, *arguments, HF_HUB_CACHE=str(self.root / "hub"), **environ)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    files = {path.name: path.read_bytes() for path in tiny_model().iterdir()}
    snapshot(root, {**files, "README.md": b"not sent", "training_args.bin": b"not sent"}, model=MODEL)
    service = Head(root, api_token="operator", node_token="agents", warm_start=False)  # it trains nothing
    service.forks = True
    service.session.headers["Authorization"] = "Bearer operator"
    with running(service):
        service.register("questions", QUESTIONS)
        yield service


class Worker:
    """A real agent, on a machine of its own as far as models go."""

    def __init__(self, service: TrainingService, root: Path, name: str) -> None:
        self.service, self.root, self.name = service, root, name
        self.data_dir, self.log = root / "node", root / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, mib_per_second: float | None = None) -> None:
        program = [sys.executable, "-m", "tests.forked", str(REPOSITORY / "tests" / "contract" / "local_agent.py")]
        rate = [] if mib_per_second is None else [str(mib_per_second)]
        arguments = [self.name, self.service.url, str(self.data_dir), str(self.root / "empty"), *rate]
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRL_", "HF_"))},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRL_SERVICE_NODE_TOKEN": "agents",
            "TRL_LOCK_DIR": str(self.root / "locks"),
            **forked.environment(),
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*program, *arguments], stdout=log, stderr=log, cwd=REPOSITORY, env=variables, start_new_session=True
            )

    def kill(self) -> None:
        """As `kill -9`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def part(self) -> int:
        """Bytes of the weights that are here, whole or not."""
        for _ in range(3):  # a rename may hide them for a moment
            for path in (self.data_dir / "models").glob("*/model.safetensors*"):
                with suppress(FileNotFoundError):
                    return path.stat().st_size
        return 0

    def continues(self, size: int) -> None:
        """Wait until more than `size` bytes are here. Fails if there are fewer in between."""

        def grows() -> bool:
            found = self.part()
            assert found >= size, f"{size} bytes were here, and now {found}"
            return found > size

        poll(grows, "the rest is on its way", timeout=90, pause=0.01)

    def row(self) -> Json:
        return next((node for node in self.service.get("/nodes").json()["data"] if node["node"] == self.name), {})


@pytest.fixture
def worker(service: TrainingService, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(service, tmp_path, "w")
    yield worker
    worker.kill()
    print(worker.log.read_text() if worker.log.exists() else "")


def submit(service: TrainingService, job_uuid: str, kind: str, **more: Any) -> str:
    options = {"resources": {"labels": {"kind": kind}}, "retries": 0, "preflight": "off"}
    body = sft(job_uuid, "questions", model=MODEL, algorithm_config=LORA)
    body["training_config"] |= {"max_steps_per_epoch": 2, "dtype": "fp32"}
    return service.submit(SFT, body, provider_options=options, **more)


def resources(service: TrainingService, job: str) -> Json:
    return dict(service.status(job)["resources_allocated"])


def test_a_node_without_the_model_fetches_it_also_after_both_sides_were_killed(
    service: TrainingService, worker: Worker
) -> None:
    worker.start(mib_per_second=0.2)
    submit(service, "fetched", "w")
    poll(lambda: worker.part() > 0, "the weights are on their way", timeout=90, pause=0.02)
    poll(lambda: "w: fetches org/tiny from the service" in resources(service, "fetched")["detail"], "shown", timeout=30)
    worker.kill()
    (staging,) = (worker.data_dir / "models").glob("*.tmp")
    config = (staging / "config.json").stat().st_mtime_ns
    worker.start(mib_per_second=0.2)
    worker.continues(worker.part())
    service.kill()
    assert not list((worker.data_dir / "models").glob("?" * 64))
    size = worker.part()
    assert 0 < size < (tiny_model() / "model.safetensors").stat().st_size
    service.start()
    worker.continues(size)
    status = service.wait_state("fetched", "completed", "failed", timeout=150)
    assert status["status"] == "completed", (status, worker.log.read_text())
    assert resources(service, "fetched")["attempt"] == 1

    (fetched,) = (worker.data_dir / "models").glob("?" * 64)
    assert {path.name: sha256_of(path) for path in fetched.iterdir()} == {
        path.name: sha256_of(path) for path in tiny_model().iterdir()
    }
    assert (fetched / "config.json").stat().st_mtime_ns == config

    final = Path(status["checkpoints"][-1]["path"])
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL
    job = json.loads((final / "training_job.json").read_text())
    assert (job["source"]["model"], job["source"]["path"]) == (MODEL, None)
    holding = [path.name for path in final.iterdir() if fetched.name.encode() in path.read_bytes()]
    assert holding == []

    assert worker.row()["models"] == [MODEL]


def test_a_job_is_cancelled_while_its_model_is_fetched(service: TrainingService, tmp_path: Path) -> None:
    worker = Worker(service, tmp_path, "slow")
    worker.start(mib_per_second=0.05)
    try:
        submit(service, "stopped", "slow")
        poll(lambda: worker.part() > 0, "the weights are on their way", timeout=90, pause=0.02)
        assert service.post(f"{JOBS}/stopped/cancel").ok
        service.wait_state("stopped", "cancelled", timeout=60)
        size = worker.part()
        time.sleep(0.3)
        assert worker.part() == size > 0  # nothing more comes, and the part is kept for another job
    finally:
        worker.kill()


def test_a_node_reads_the_models_of_its_own_current_tasks_only(service: TrainingService) -> None:
    mine, other = (FakeAgent(service, name, "agents", labels={"kind": name}) for name in ("mine", "other"))
    mine.report["ollama_models"] = ["llama3.2:1b"]
    for one in (mine, other):
        assert one.join().ok
    row = service.get("/nodes/mine").json()
    assert (row["ollama_models"], row["models"]) == (["llama3.2:1b"], [])
    submit(service, "read", "mine")
    order = mine.wait_for("read-1", "prepare")
    while order.get("awaits_models"):
        assert mine.poll().ok
        order = mine.wait_for("read-1", "prepare")
    (model,) = order["models"]
    assert (model["model"], model["why_not"]) == (MODEL, "")
    assert {file["path"] for file in model["files"]} == {path.name for path in tiny_model().iterdir()}
    path = f"tasks/read-1/models/{model['sha256']}/files"
    whole = (tiny_model() / "config.json").read_bytes()
    assert mine.call("GET", f"/nodes/mine/{path}/config.json").content == whole
    rest = mine.call("GET", f"/nodes/mine/{path}/config.json", headers={"Range": "bytes=10-"})
    assert (rest.status_code, rest.content) == (206, whole[10:])
    for name in ("README.md", "training_args.bin", "..%2F..%2Frefs%2Fmain", "%2Fetc%2Fpasswd"):
        assert "names no file" in refusal(mine.call("GET", f"/nodes/mine/{path}/{name}"), 404)
    refusal(mine.call("GET", f"/nodes/mine/tasks/read-1/models/{'0' * 64}/files/config.json"), 404)
    refusal(other.call("GET", f"/nodes/mine/{path}/config.json"), 403)
    refusal(other.call("GET", f"/nodes/other/{path}/config.json"), 410)
    assert service.post(f"{JOBS}/read/cancel").ok
    mine.reports.clear()
    mine.seen = 0
    poll(lambda: mine.poll().ok and service.state("read") == "cancelled", "nothing of it is left", timeout=30)
    refusal(mine.call("GET", f"/nodes/mine/{path}/config.json"), 410)


def test_a_model_that_is_nowhere_is_named_with_the_node(service: TrainingService, tmp_path: Path) -> None:
    worker = Worker(service, tmp_path, "lacking")
    worker.start()
    try:
        submit(service, "nowhere", "lacking", model="org/nowhere")
        (attempt,) = poll(
            lambda: [one for one in resources(service, "nowhere")["attempts"] if one["reason"]],
            "it was tried",
            timeout=60,
        )
        poll(lambda: service.state("nowhere") == "scheduled", "it waits for another node", timeout=30)
        assert attempt["reason"] == "launch_failed"
        assert attempt["message"].startswith("node lacking: node lacking does not have the model org/nowhere in its")
        assert "its machine's cache lacks it" in attempt["message"]
        assert service.post(f"{JOBS}/nowhere/cancel").ok
    finally:
        worker.kill()
        shutil.rmtree(worker.data_dir, ignore_errors=True)
