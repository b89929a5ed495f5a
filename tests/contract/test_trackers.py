"""Trackers get every point of the store once: trainings, services and exporters are killed with SIGKILL meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.trackers import PACKAGES
from llama_stack_provider_trl.system.data_dir import DATABASE, DataDir
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, refusal, running
from tests.contract.stack import SFT, Json, LlamaStack, poll, serving
from tests.contract.wandb_server import WandbServer
from tests.required import FULL, IN_FULL, lacking

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]

SECRET = "secret-of-a-tracker-5f1d"
WANDB_KEY = "5f1d" * 10
"""As long as wandb requires."""
MLFLOW = os.environ.get("TRL_MLFLOW", "")
"""The program of mlflow's whole package, in an environment of its own."""
STEPS = 16
OF_EACH = 3 if FULL else 1
"""Kills of a training and of the service, with which its exporter ends; of the exporter there is one at an instant of
each tracker that is installed, with TRL_TESTS=full three and one at any time."""
Values = dict[tuple[str, int], list[float]]
"""Name of a metric and step -> every value that a tracker has for it."""


def installed(tracker: str) -> bool:
    return all(find_spec(module) is not None for module in PACKAGES[tracker])


class TrackedService(TrainingService):
    """A service whose exporter is known, and whose environment has credentials of trackers."""

    def launch(self) -> None:
        secrets = {"WANDB_API_KEY": WANDB_KEY, "MLFLOW_TRACKING_PASSWORD": SECRET}
        self.process = self.spawn(self.port, self.data_dir, self.log, **secrets)

    def exporter(self) -> psutil.Process | None:
        """The process that holds the exporter's lock."""
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            found = re.search(r"pid (\d+)", DataDir(self.data_dir).exporter_lock.read_text())
            process = psutil.Process(int(found[1])) if found else None
            if process is not None and process.cmdline()[-1:] == ["llama_stack_provider_trl.export"]:
                return process
        return None

    def trackers(self, job_uuid: str) -> Json:
        found: Json = self.status(job_uuid)["resources_allocated"]["trackers"]
        return found

    def is_up_to_date(self, job_uuid: str) -> bool:
        shown = self.trackers(job_uuid)
        return all(shown[tracker]["state"] == "up_to_date" for tracker in shown if tracker != "wandb")

    def wait_exported(self, job_uuid: str, *trackers: str) -> None:
        """All trackers have all points of a job that has ended, and its end."""
        with_store(
            self,
            lambda store: poll(
                lambda: all(one.finished for one in store.exports.of_job(job_uuid) if one.tracker in trackers),
                f"{job_uuid} is exported: {[(e.tracker, e.error) for e in store.exports.of_job(job_uuid)]}",
                timeout=180,
            ),
        )


def with_store[Result](service: TrainingService, use: Callable[[Store], Result]) -> Result:
    store = Store(service.data_dir / DATABASE)
    try:
        return use(store)
    finally:
        store.close()


def body(job_uuid: str, trackers: Json, steps: int = STEPS) -> Json:
    request = sft(job_uuid, "rows")
    request["training_config"]["n_epochs"] = 1
    request["training_config"]["data_config"] |= {"batch_size": 1, "validation_dataset_id": "held-out"}
    request["training_config"]["max_steps_per_epoch"] = steps
    return {**request, "logger_config": trackers}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackedService]:
    trackers: Json = {tracker: {} for tracker in INSTALLED}
    with tracked(tmp_path_factory.mktemp("service"), trackers) as service:
        yield service


@pytest.fixture
def other(tmp_path: Path) -> Iterator[TrackedService]:
    """A service whose trackers have their files beside its data directory, MLflow's in a directory that is missing."""
    root = tmp_path / "other"
    root.mkdir()
    later = {"uri": f"sqlite:///{root / 'later' / 'mlflow.sqlite3'}"}
    with tracked(root, {"tensorboard": {"directory": str(root / "boards")}, "mlflow": later}) as service:
        yield service


@contextmanager
def tracked(root: Path, trackers: Json) -> Iterator[TrackedService]:
    with running(TrackedService(root, trackers=trackers, retry_backoff=0.05)) as service:
        service.register("rows", [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(2) for row in QUESTIONS])
        service.register("held-out", QUESTIONS[:2])
        yield service


def stored(service: TrainingService | LlamaStack, job_uuid: str) -> dict[tuple[str, int], float]:
    """What the database itself has, under the names of trackers."""
    with closing(sqlite3.connect(service.data_dir / DATABASE)) as database:
        query = "SELECT kind, step, epoch, metrics FROM points WHERE job_uuid = ?"
        rows = database.execute(query, [job_uuid]).fetchall()
    found = {}
    for kind, step, epoch, metrics in rows:
        group = {"train": "train", "validation": "eval"}[kind]
        for name, value in {"epoch": epoch, **json.loads(metrics)}.items():
            found[f"{group}/{name.removeprefix('eval_') if group == 'eval' else name}", step] = float(value)
    return found


def tensorboard_values(directory: Path) -> Values:
    """Of the records themselves: TensorBoard would hide what a later file supersedes."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: Values = {}
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load() if path.stat().st_size else ():
            for value in event.summary.value:
                found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found


def single(value: float) -> float:
    """As a 32-bit float, which is what TensorBoard keeps."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def assert_tensorboard(service: TrainingService | LlamaStack, job_uuid: str, run: str | None = None) -> None:
    found = tensorboard_values(service.data_dir / "trackers" / "tensorboard" / "llama-stack-trl" / (run or job_uuid))
    assert found == {key: [single(value)] for key, value in stored(service, job_uuid).items()}


def assert_mlflow(service: TrainingService, job_uuid: str, store: Path | None = None) -> None:
    """Of the run that is not deleted: all that a search finds."""
    with closing(sqlite3.connect(store or service.data_dir / "trackers" / "mlflow.sqlite3")) as database:
        rows = database.execute(
            "SELECT key, step, value, runs.status FROM metrics JOIN runs USING (run_uuid)"
            " WHERE lifecycle_stage = 'active' AND runs.name = ?",
            [job_uuid],
        ).fetchall()
    found: Values = {}
    for name, step, value, _ in rows:
        found.setdefault((name, step), []).append(value)
    assert found == {key: [value] for key, value in stored(service, job_uuid).items()}
    assert {status for *_, status in rows} == {"FINISHED"}


def assert_trackio(service: TrainingService, job_uuid: str) -> None:
    """Of every row of the database, under any run."""
    with closing(sqlite3.connect(service.data_dir / "trackers" / "trackio" / "llama-stack-trl.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", [job_uuid]).fetchall()
    found: Values = {}
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault((name, step), []).append(value)
    assert found == {key: [value] for key, value in stored(service, job_uuid).items()}


def assert_wandb(service: TrainingService, job_uuid: str) -> None:
    (path,) = (service.data_dir / "trackers" / "wandb" / "llama-stack-trl").rglob("*.wandb")
    found: Values = {}
    for step, row in wandb_history(path):
        for name, value in row.items():
            if "/" in name:
                found.setdefault((name, step), []).append(value)
    assert found == {key: [value] for key, value in stored(service, job_uuid).items()}
    assert not list((service.data_dir / "trackers" / "wandb" / "llama-stack-trl").glob(".*"))


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Steps and rows of a file of W&B: records of LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            record = Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                yield record.history.step.num, items


CHECKS: dict[str, Callable[[TrainingService, str], None]] = {
    **{"tensorboard": assert_tensorboard, "mlflow": assert_mlflow, "wandb": assert_wandb, "trackio": assert_trackio},
}
INSTALLED = [tracker for tracker in CHECKS if installed(tracker)]
BY_COMMAND = ("wandb", "trackio")
"""Trackers that prepare-env.sh does not install: docs/reference/test-runs.md has the last result with them."""


@pytest.fixture(scope="module")
def killed(service: TrackedService) -> str:
    """A job with kills of its training, of the service and of the exporter: at random steps the training is held,
    and one of them is killed, before the trackers have caught up or after."""
    chosen = random.Random(19)
    live = [tracker for tracker in INSTALLED if tracker != "wandb"]  # which is written when the job has ended
    instants = [f"export-{tracker}-{instant}" for tracker in live for instant in ("intended", "accepted")]
    instants = chosen.sample(instants, len(instants))
    if not FULL:  # one of each tracker
        instants = [next(one for one in instants if f"-{tracker}-" in one) for tracker in live]
    victims = [*["exporter at an instant"] * min(3, len(instants)), *["trainer", "service"] * OF_EACH]
    victims += ["exporter"] * FULL
    steps = sorted(chosen.sample(range(2, STEPS), len(victims)))
    chosen.shuffle(victims)
    for step in steps:
        service.arm(f"step-{step}", "hold")
    options = {"save_steps": 3, "retries": 20, "eval_steps": 2}
    service.submit(SFT, body("killed", dict.fromkeys(INSTALLED, True)), options=options)
    armed = []
    for step, victim in zip(steps, victims, strict=True):
        service.wait_taken(f"step-{step}", 60)
        if chosen.random() < 0.7:
            poll(lambda: service.is_up_to_date("killed"), "trackers catch up", timeout=60)
        else:
            time.sleep(chosen.random() / 5)
        if victim == "trainer":
            kill_training(service, "killed")
        elif victim == "service":
            service.kill()
            service.start()
        elif victim == "exporter":
            poll(service.exporter, "an exporter runs", timeout=30).send_signal(signal.SIGKILL)
        else:
            armed.append(instants.pop())
            service.arm(armed[-1], "kill")
        if step != steps[-1]:
            service.go(f"step-{step}")
    if "wandb" in INSTALLED:
        armed += [f"export-wandb-{instant}" for instant in ("intended", "accepted", "ended")]
        for point in armed[-3:]:
            service.arm(point, "kill")
    service.go(f"step-{steps[-1]}")
    service.wait("killed", "completed", 180)
    service.wait_exported("killed", *INSTALLED)
    assert [point for point in armed if not service.taken(point)] == []
    attempts = service.status("killed")["resources_allocated"]["attempts"]
    assert len(attempts) == 1 + victims.count("trainer")
    return "killed"


@pytest.mark.parametrize("tracker", CHECKS)
def test_after_kills_a_tracker_has_every_point_once(
    service: TrackedService, tracker: str, request: pytest.FixtureRequest
) -> None:
    if tracker not in INSTALLED:
        reason = f"the extra {tracker} is not installed"
        if tracker not in BY_COMMAND:
            lacking(f"{reason}: scripts/prepare-env.sh installs it")
        pytest.skip(f"{reason}; docs/reference/test-runs.md has the last result with it")
    job = request.getfixturevalue("killed")
    assert len([key for key in stored(service, job) if key[0] == "train/loss"]) == STEPS
    CHECKS[tracker](service, job)
    expected = {"state": "up_to_date", "behind": 0, "step": STEPS, "error": None}
    assert service.trackers(job)[tracker] == {**expected, "project": "llama-stack-trl", "run": job}


def kill_training(service: TrackedService, job_uuid: str) -> None:
    for process in service.processes(job_uuid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="the extra mlflow is not installed")
def test_a_tracker_that_fails_delays_nothing_and_catches_up(
    service: TrackedService, other: TrackedService, tmp_path: Path
) -> None:
    """The directory of its database is missing; and TensorBoard's has a run of another job under the same name."""
    taken = other.root / "boards" / "llama-stack-trl" / "late"
    taken.mkdir(parents=True)
    other.submit(SFT, body("late", {"tensorboard": True, "mlflow": True}, steps=4))
    other.wait("late", "completed")
    other.wait_exported("late", "tensorboard")
    poll(lambda: other.trackers("late")["mlflow"]["error"], "the error is shown", timeout=30)
    shown = other.trackers("late")["mlflow"]
    assert (shown["state"], shown["step"], shown["behind"]) == ("behind", None, 5)
    assert "does not exist: create it" in shown["error"]
    assert other.trackers("late")["tensorboard"]["state"] == "up_to_date"
    assert list(taken.iterdir()) == []
    found = tensorboard_values(taken.with_name("late-2"))
    assert found == {key: [single(value)] for key, value in stored(other, "late").items()}
    (other.root / "later").mkdir()
    other.wait_exported("late", "mlflow")
    assert other.trackers("late")["mlflow"]["state"] == "up_to_date"


@IN_FULL  # CI: the exporter is killed while it writes, above
@pytest.mark.skipif("mlflow" not in INSTALLED, reason="the extra mlflow is not installed")
def test_a_database_of_mlflow_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    program = f"""
from llama_stack_provider_trl.export.mlflow import Mlflow
print(Mlflow("sqlite:///{tmp_path}/runs.sqlite3")._experiment("p"))
"""
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    first = subprocess.Popen([sys.executable, "-c", program], env=environ)
    unfinished = tmp_path / ".runs.sqlite3.unfinished"
    # Of 950 kB, after which the tables of the first release are there and those of later ones are added.
    poll(lambda: unfinished.exists() and unfinished.stat().st_size > 200_000, "tables", timeout=60, pause=0.001)
    first.kill()
    first.wait(10)
    assert (tmp_path / "runs.sqlite3").exists() is False
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs.sqlite3"]


@pytest.mark.skipif(not MLFLOW, reason="TRL_MLFLOW names no mlflow of the whole package: a server is started with it")
def test_a_server_of_mlflow_that_is_away_and_killed_has_every_point_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = tmp_path / "server.sqlite3"

    @contextmanager
    def server() -> Iterator[None]:
        words = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination", str(tmp_path / "artifacts")]
        with (tmp_path / "server.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                one.kill()
            process.wait(60)

    root = tmp_path / "service"
    root.mkdir()
    with tracked(root, {"mlflow": {"uri": f"http://127.0.0.1:{port}"}}) as service:
        service.arm("step-4", "hold")
        service.arm("export-mlflow-accepted", "kill")
        service.submit(SFT, body("served", {"mlflow": True}, steps=8), options={"eval_steps": 2})
        poll(lambda: service.trackers("served")["mlflow"]["error"], "the error is shown", timeout=60)
        assert f"API request to http://127.0.0.1:{port}" in service.trackers("served")["mlflow"]["error"]
        with server():
            service.wait_taken("step-4", 60)
            poll(lambda: service.trackers("served")["mlflow"]["step"], "some points are there", timeout=180)
        service.go("step-4")
        service.wait("served", "completed", 60)  # the server is away
        with server():
            service.wait_exported("served", "mlflow")
        assert service.taken("export-mlflow-accepted")
        assert_mlflow(service, "served", store)


@pytest.mark.skipif("wandb" not in INSTALLED, reason="the extra wandb is not installed: docs/reference/test-runs.md")
def test_a_server_of_wandb_that_is_away_and_loses_answers_has_every_point_once(tmp_path: Path) -> None:
    server = WandbServer(WANDB_KEY)
    with tracked(tmp_path, {"wandb": {"mode": "online", "uri": server.url, "entity": "team"}}) as service:
        service.arm("export-wandb-accepted", "kill")
        service.submit(SFT, body("online", {"wandb": {"project": "p", "run": "r"}}, steps=8), options={"eval_steps": 2})
        service.wait("online", "completed")
        poll(lambda: service.trackers("online")["wandb"]["error"], "the error is shown", timeout=60)
        shown = service.trackers("online")["wandb"]
        assert (shown["state"], shown["step"]) == ("behind", None)
        assert "connection refused" in shown["error"]
        server.streams_to_refuse = 1  # behind which wandb ends with 0, and marks the run as uploaded
        with server.serving():
            poll(lambda: not server.streams_to_refuse, "an upload is refused", timeout=60)
            refused = "Fatal error while uploading data"
            poll(lambda: refused in (service.trackers("online")["wandb"]["error"] or ""), "it is shown", timeout=60)
        assert server.streams == 0
        server.answers_to_lose = 2
        with server.serving():
            poll(lambda: server.streams, "an upload has begun", timeout=60)
            poll(service.exporter, "an exporter runs", timeout=30).send_signal(signal.SIGKILL)
            service.wait_exported("online", "wandb")
        assert service.taken("export-wandb-accepted")
        (run,) = server.history
        assert run.startswith("team/p/")
        assert server.complete == {run}
        assert server.values(run) == {key: [value] for key, value in stored(service, "online").items()}
        assert server.unauthorized == 0
        assert service.trackers("online")["wandb"]["state"] == "up_to_date"
        files = [path for path in service.data_dir.rglob("*") if path.is_file()]
        assert [path for path in files if WANDB_KEY.encode() in path.read_bytes()] == []


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="the extra tensorboard is not installed")
def test_credentials_of_trackers_reach_the_exporter_only(service: TrackedService) -> None:
    service.arm("step-2", "hold")
    service.submit(SFT, body("secret", {"tensorboard": True}, steps=2))
    service.wait_taken("step-2")
    tasks = service.processes("secret")
    assert tasks
    secrets = (SECRET, WANDB_KEY)
    assert not [task for task in tasks if any(secret in "".join(task.environ().values()) for secret in secrets)]
    exporter = poll(service.exporter, "an exporter runs", timeout=30)
    assert "torch" not in "".join(region.path for region in exporter.memory_maps())
    assert ("MLFLOW_TRACKING_PASSWORD" in exporter.environ()) == ("mlflow" in INSTALLED)
    assert not [name for name in exporter.environ() if name.startswith("TRL_SERVICE")]
    service.go("step-2")
    service.wait("secret", "completed")
    service.wait_exported("secret", "tensorboard")
    texts = [service.log, *(path for path in service.data_dir.rglob("*") if path.is_file())]
    assert [path for path in texts if any(secret.encode() in path.read_bytes() for secret in secrets)] == []
    assert SECRET not in json.dumps(service.status("secret"))


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="the extra tensorboard is not installed")
def test_the_exporter_ends_with_its_service_and_when_nothing_is_left(service: TrackedService) -> None:
    service.arm("step-2", "hold")
    service.submit(SFT, body("ending", {"tensorboard": True}, steps=2))
    service.wait_taken("step-2")
    exporter = poll(service.exporter, "an exporter runs", timeout=30)
    service.kill()
    poll(lambda: not exporter.is_running(), "it ends with the service", timeout=10)
    service.start()
    another = poll(service.exporter, "another one continues", timeout=30)
    service.go("step-2")
    service.wait("ending", "completed")
    poll(lambda: not another.is_running(), "it ends by itself", timeout=30)
    assert_tensorboard(service, "ending")


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="the extra tensorboard is not installed")
def test_a_choice_that_a_client_does_not_have_is_a_400(service: TrackedService) -> None:
    for trackers, message in (
        ({"comet": True}, "'comet' is no tracker of this provider"),
        ({"tensorboard": {"directory": "/etc"}}, "logger_config.tensorboard.directory='/etc'"),
        ({"tensorboard": {"run": "../x"}}, "logger_config.tensorboard.run='../x'"),
    ):
        assert message in refusal(service.post(SFT, body("refused", trackers)))


@IN_FULL  # CI: the same exporter beside the service
@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="the extra tensorboard is not installed")
def test_the_inline_provider_exports_to_its_default_trackers(tmp_path: Path) -> None:
    stack = LlamaStack(tmp_path)
    stack.configure(trackers={"default": ["tensorboard"], "tensorboard": {}})
    with serving(stack):
        stack.register("rows", QUESTIONS)
        request = sft("inline", "rows")
        stack.submit(SFT, request)
        refused = refusal(stack.post(SFT, {**request, "job_uuid": "other", "logger_config": {"wandb": True}}))
        assert "configured here are: tensorboard" in refused
        stack.wait("inline", "completed")
        poll(lambda: tracked_step(stack), "the points are exported", timeout=60)
        assert_tensorboard(stack, "inline")


def tracked_step(stack: LlamaStack) -> int | None:
    shown = stack.status("inline")["resources_allocated"]["trackers"]["tensorboard"]
    return shown["step"] if shown["state"] == "up_to_date" else None
