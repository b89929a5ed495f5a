"""Jobs of two ranks on the service end alike, whichever process is killed, in whatever state, on a crowded machine."""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import requests

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.launch.ports import PORTS
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.launch.torchrun import LOOPBACK
from llama_stack_provider_trl.specs.events import Started, iter_events
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir, is_whole
from llama_stack_provider_trl.system.process import ProcessId, tasks_below
from llama_stack_provider_trl_remote.service.datasets.blobs import READING
from tests.census import assert_clean, census
from tests.contract.crashing import (
    CONCLUDING,
    PASSES,
    STARTING,
    Crashing,
    CrashingService,
    CrashingStack,
    assert_as_undisturbed,
    cancel_and_kill,
    crashing_stack,
    die_at,
    kill_while_held,
    pause_and_kill,
)
from tests.contract.payloads import promised
from tests.contract.service import JOBS, TrainingService, ndjson, running, running_service
from tests.contract.stack import DPO, Json, poll
from tests.required import IN_FULL

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]

PAIRS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": "I would rather not say."}
    for n in range(24)
]
STEPS = CrashingService.steps
"""Three epochs of 24 rows, of which 2 ranks take 4 each at once. Checkpoints come at the end of an epoch: 3 and 6."""
SECONDS = CrashingService.patience
LAST, FIRST_KILL, SECOND_KILL = f"step-{STEPS}", "step-4", "step-7"


class Two(NamedTuple):
    """Two jobs of the promised payload, posted at the same moment."""

    first: str
    """The one that was trained first."""
    second: str
    waiting: Json
    """The status of the second when the first was at its last step."""
    tasks: list[Path]
    """Run directories of all processes at that moment."""
    listening: list[int]
    """Ports of the range that had a listener then."""


@pytest.fixture(scope="module")
def ports() -> range:
    """A range of ports that are free, for a service."""
    return free_range()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, ports: range) -> Iterator[CrashingService]:
    torchrun = {"nproc_per_node": 2, "master_port": ports.start}
    service = CrashingService(tmp_path_factory.mktemp("service"), torch_run_config=torchrun)
    with closing(service.store), running(service):
        service.arm(LAST, "hold")
        register(service.url)
        yield service


@pytest.fixture(scope="module")
def two(service: CrashingService, ports: range) -> Two:
    post_at_once(service.url, [promised(name, "pairs") for name in ("one", "other")])
    service.wait_taken(LAST, timeout=SECONDS)
    states = {job: service.state(job) for job in ("one", "other")}
    assert sorted(states.values()) == ["in_progress", "scheduled"]
    first, second = sorted(states, key=lambda job: states[job])
    tasks = sorted(tasks_below(service.data_dir.resolve() / "jobs"))
    listening = [port for port in ports if listens(port)]
    return Two(first, second, service.status(second), tasks, listening)


@pytest.fixture(scope="module")
def undisturbed(service: CrashingService, two: Two) -> Json:
    """The first job, ended. The second one is going to be held twice."""
    service.arm(FIRST_KILL, "hold")  # the first one is past these steps
    service.arm(SECOND_KILL, "hold")
    service.go(LAST)
    return service.wait(two.first, "completed")


@pytest.fixture
def idle(service: CrashingService) -> CrashingService:
    """The service without a job, whatever the test before has left there."""
    service.disarm()
    return service


def test_of_two_jobs_posted_at_once_the_second_waits_and_names_the_first(
    service: TrainingService, two: Two, ports: range
) -> None:
    home = service.data_dir.resolve() / "jobs"
    assert two.waiting["status"] == "scheduled"
    assert two.waiting["resources_allocated"]["detail"] == f"waiting for cpu (held by {two.first})"
    assert two.tasks == [home / two.first / "attempts" / "1"]
    assert two.listening == [ports.start]


def test_the_promised_payload_trains_on_two_ranks_and_its_record_reports_how_it_was_sharded(undisturbed: Json) -> None:
    from transformers import AutoModelForCausalLM

    steps = [Path(checkpoint["path"]).name for checkpoint in undisturbed["checkpoints"]]
    assert steps == ["checkpoint-3", "checkpoint-6", "final"]
    effective = undisturbed["resources_allocated"]["effective_config"]
    trained = AutoModelForCausalLM.from_pretrained(undisturbed["checkpoints"][-1]["path"])
    parameters = dict(trained.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    found = effective["recipe"]["effective"]
    sharding = found["sharding"]
    assert sharding.pop("local_elements") == total / 2, "each rank holds half of it"
    assert sharding.pop("units") > 2, "the two blocks are gathered one after the other"
    assert sharding.pop("reference")["placements"] == {"Shard(0)": len(parameters)}
    assert sharding == {
        "strategy": "FULL_SHARD",
        "ranks": 2,
        "sharded_parameters": len(parameters),
        "placements": {"Shard(0)": len(parameters)},
        "total_elements": total,
    }
    assert found["global_batch_size"] == 8
    base = AutoModelForCausalLM.from_pretrained(effective["model"]).state_dict()
    assert not [name for name, weight in trained.state_dict().items() if weight.equal(base[name])], "left untrained"


@IN_FULL  # CI: ranks, torchrun and runner in tests/process/test_torchrun.py, the service in the next test
def test_a_job_ends_as_if_left_alone_although_the_service_a_rank_and_torchrun_are_killed(
    service: CrashingService, two: Two, undisturbed: Json
) -> None:
    job = two.second
    service.wait_taken(FIRST_KILL, timeout=SECONDS)
    wait_written(service, "the checkpoint of step 3")
    before = census(service.data_dir)
    assert len(before.running) >= 4, "the runner, torchrun, two ranks"
    service.kill()
    assert census(service.data_dir) == before
    service.restart()
    assert census(service.data_dir) == before, "who begins to supervise must leave what is at work alone"
    assert service.recorded(job) is JobState.in_progress

    process.send_signal(rank_1(run_dir(service, job)), signal.SIGKILL)
    service.wait_taken(SECOND_KILL, timeout=SECONDS)
    wait_written(service, "the checkpoint of step 6")
    service.kill()
    torchrun = runner_status(run_dir(service, job)).trainer
    assert torchrun is not None
    process.send_signal(torchrun, signal.SIGKILL)
    poll(lambda: not census(service.data_dir), "every process is gone although there is no service", timeout=10)
    assert service.recorded(job) is JobState.in_progress
    service.restart()
    assert service.reach(job, JobState.completed, JobState.failed).state is JobState.completed

    attempts = service.store.attempts(job)
    assert_clean(service.data_dir)
    status = service.wait(job, "completed")
    assert [attempt.start_step for attempt in attempts] == [0, 3, 6]
    assert "rank 1 was killed by SIGKILL" in attempts[0].message
    assert "the training process was killed by SIGKILL" in attempts[1].message
    assert status["resources_allocated"]["retries_used"] == 2
    assert service.outcome(job) == service.outcome(two.first)
    assert [step for _, step, _ in service.outcome(job).losses] == list(range(1, STEPS + 1))
    assert [Path(checkpoint["path"]).name for checkpoint in status["checkpoints"]] == [
        *("checkpoint-3", "checkpoint-6", "final")
    ]
    assert all(is_whole(Path(checkpoint["path"])) for checkpoint in status["checkpoints"])
    assert Path(status["checkpoints"][-1]["path"]).parent != Path(undisturbed["checkpoints"][-1]["path"]).parent


def test_a_job_ends_as_if_left_alone_although_the_service_is_killed_in_every_state_of_it(
    idle: CrashingService, two: Two, undisturbed: Json
) -> None:
    service = idle
    expected = service.outcome(two.first)
    service.kill()
    with service.unsupervised():
        service.start()
        job = service.train("killed-often")
        service.kill()
    assert service.recorded(job) is JobState.scheduled

    for point in STARTING:
        service.arm(point, "kill")
    for point in service.held:
        service.arm(point, "hold")
    service.launch()
    die_at(service, job, STARTING)
    for point in service.held:
        kill_while_held(service, point)
        if point == service.between:
            paused_at = pause_and_kill(service, job)
            # Of the job that has the device now, the service is killed while it is cancelled.
            service.arm(service.second_save, "hold")
            cancel_and_kill(service, service.train("cancelled"))
            assert service.recorded(job) is JobState.paused
            for act in CONCLUDING:
                service.arm(act, "kill")
            service.store.request_resume(job)
        else:
            service.go(point)
    die_at(service, job, CONCLUDING)
    service.wait_until_it_answers()
    assert_as_undisturbed(service, job, expected, paused_at)


@IN_FULL  # CI: tests/unit/test_supervisor.py; a port that is taken in tests/process/test_torchrun.py
def test_a_job_waits_while_every_port_is_taken_and_trains_once_one_is_free(idle: CrashingService, ports: range) -> None:
    service = idle
    reported_text = (
        f"every port from {ports.start} to {ports.stop - 1} is in use; set master_port to the first of 100 free ones"
    )
    spare = ports[57]
    with all_taken(ports) as listeners:
        impatient = service.submit(DPO, one_epoch("impatient"), provider_options={"retries": 0})
        failed = service.wait(impatient, "failed")
        patient = service.submit(DPO, one_epoch("patient"))
        waiting = poll(lambda: tried_again(service, patient), "the first attempt has ended", timeout=20)
        listeners[spare].close()
        service.wait(patient, "completed", timeout=SECONDS)
    error = failed["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    assert reported_text in error["message"]
    assert waiting is not None
    assert waiting["status"] == "scheduled"
    resources = waiting["resources_allocated"]
    assert resources["detail"].startswith("attempt 1 ended (launch_failed); the next one starts in 10 s: ")
    assert reported_text in resources["detail"]
    assert "the ports from master_port on" in error["message"]
    assert reported_text in resources["attempts"][0]["message"]
    assert master_port(service.data_dir / "jobs" / patient / "attempts" / "2") == spare
    assert_clean(service.data_dir)


@IN_FULL  # CI: two servers of Llama Stack with the same locks in test_http_recovery.py
def test_an_inline_provider_and_the_service_never_train_on_one_device_together(
    idle: CrashingService, tmp_path: Path
) -> None:
    service = idle
    (tmp_path / "locks").symlink_to(service.root / "locks")  # TRL_LOCK_DIR of both
    with crashing_stack(tmp_path) as stack:
        service.arm("step-1", "hold")
        first = service.submit(DPO, one_epoch("service-first"))
        stack.start()  # while the first job imports torch
        register(stack.url)
        service.wait_taken("step-1", timeout=SECONDS)
        stack.arm("step-1", "hold")
        second = stack.submit(DPO, one_epoch("inline-second"))
        reported = wait_for_holder(stack, second, f"task {first}-1 ")
        assert str(service.data_dir.resolve()) in reported
        assert only_its_runner_lives(stack, second)
        service.go("step-1")
        stack.wait_taken("step-1")

        third = service.submit(DPO, one_epoch("service-third"), provider_options={"nproc_per_node": 1})
        reported = wait_for_holder(service, third, f"task {second}-1 ")
        assert str(stack.data_dir.resolve()) in reported
        assert only_its_runner_lives(service, third)
        stack.go("step-1")
        jobs = [(service, first), (stack, second), (service, third)]
        for server, job_uuid in jobs:
            server.wait(job_uuid, "completed")
        times = [moment for server, job_uuid in jobs for moment in trained(server, job_uuid)]
        assert times == sorted(times), "one began before the other had ended"
        assert_clean(stack.data_dir)
    assert_clean(service.data_dir)


def trained(server: Crashing, job_uuid: str) -> tuple[float, float]:
    """When a job's only training began and ended, by its own events: a server records either a little later."""
    _, (file,) = server.store.event_files(job_uuid)
    events = list(iter_events(RunDir(file.run_dir).events))
    return events[0].time, events[-1].time


def test_a_killed_service_leaves_no_reader_of_a_dataset_behind(idle: CrashingService) -> None:
    service = idle
    (service.files / "pairs.jsonl").write_bytes(ndjson(PAIRS) * 10_000)
    source = {"type": "uri", "uri": str(service.files / "pairs.jsonl")}
    assert service.post("/datasets", {"dataset_id": "file", "source": source}).ok
    with ThreadPoolExecutor(1) as threads:
        requested = threads.submit(service.post, DPO, promised("never-queued", "file"))
        half_read = ".incoming-*/.rows-*"
        poll(lambda: [*(service.data_dir / "datasets").glob(half_read)], "it is read", timeout=20, pause=0.005)
        children = psutil.Process(service.pid).children()
        (reader,) = (child for child in children if READING in child.cmdline())
        reader.suspend()  # or it would end by itself
        service.kill()
        assert isinstance(requested.exception(20), requests.ConnectionError)
    gone, left = psutil.wait_procs([reader], timeout=10)
    for survivor in left:
        survivor.kill()
    assert gone
    service.start()
    assert not [*(service.data_dir / "datasets").glob(".incoming-*")]
    assert service.get("/post-training/job/status", job_uuid="never-queued").status_code == 404


@IN_FULL  # CI: devices in tests/unit/test_placement.py, ports in test_launch.py
def test_jobs_that_train_side_by_side_share_no_device_no_port_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four GPUs that need not exist: what would train there is a shell that sleeps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    ports = free_range()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec "{sys.executable}" "$@"\nsleep 600\n')
    python.chmod(0o755)
    torchrun = {"nproc_per_node": 2, "master_port": ports.start}
    (tmp_path / "service").mkdir()
    settings = {"device": "cuda", "train_python": str(python), "torch_run_config": torchrun}
    with running_service(tmp_path / "service", **settings) as service:
        register(service.url)
        post_at_once(service.url, [promised(f"job-{number}", "pairs") for number in range(3)])
        shells = poll(lambda: launched(service, 2), "two jobs are started", timeout=20)
        devices = [shell.environ()["CUDA_VISIBLE_DEVICES"] for shell in shells]
        assert sorted(devices) == ["0,1", "2,3"]
        started = [Path(shell.environ()["TRL_RUN_DIR"]) for shell in shells]
        assert sorted(map(master_port, started)) == [ports[0], ports[1]]
        specs = [json.loads(RunDir(run_dir).spec.read_text())["job"] for run_dir in started]
        assert len({spec["checkpoint_dir"] for spec in specs} | set(map(str, started))) == 4

        (waiting,) = {f"job-{number}" for number in range(3)} - {spec["job_uuid"] for spec in specs}
        held = service.get("/nodes").json()["data"][0]["jobs"]
        assert Counter(held.values()) == Counter({spec["job_uuid"]: 2 for spec in specs})
        shown = ", ".join(f"{device} (held by {held[device]})" for device in sorted(held))
        expected = f"waiting for 2 devices; held: {shown}"
        # The first of the two may have been placed a poll of the supervisor earlier.
        poll(lambda: service.status(waiting)["resources_allocated"]["detail"] == expected, expected, timeout=20)
        # Their ports have no listener yet: a service that was killed must know them all the same.
        service.kill()
        service.start()
        (second,) = (
            spec["job_uuid"] for spec, home in zip(specs, started, strict=True) if master_port(home) == ports[1]
        )
        assert service.post(f"{JOBS}/{second}/cancel").status_code == 200
        service.wait(second, "cancelled")
        task = RunDir(service.data_dir / "jobs" / waiting / "attempts" / "1").task
        poll(task.exists, "the third job is started", timeout=20)
        assert master_port(task.parent) == ports[1]
        for job in {waiting, *held.values()} - {second}:
            assert service.post(f"{JOBS}/{job}/cancel").status_code == 200
            service.wait(job, "cancelled")
        assert_clean(service.data_dir)


def one_epoch(job_uuid: str) -> Json:
    body = promised(job_uuid, "pairs")
    body["training_config"]["n_epochs"] = 1
    return body


def register(url: str) -> None:
    """The promised dataset, sent as users send it."""
    source = {"type": "rows", "rows": PAIRS}
    body = {"dataset_id": "pairs", "purpose": "post-training/messages", "dataset_type": "preference", "source": source}
    answer = requests.post(f"{url}/v1/datasets", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def post_at_once(url: str, bodies: list[Json]) -> None:
    """Each body by a thread of its own, all at the same moment, with nothing but `requests`."""
    ready = threading.Barrier(len(bodies))

    def post(body: Json) -> requests.Response:
        ready.wait()
        return requests.post(f"{url}/v1{DPO}", json=body, timeout=30)

    with ThreadPoolExecutor(len(bodies)) as threads:
        for body, answer in zip(bodies, threads.map(post, bodies), strict=True):
            assert (answer.status_code, answer.json()) == (200, {"job_uuid": body["job_uuid"]})


def run_dir(service: CrashingService, job: str) -> RunDir:
    found = service.store.get(job).run_dir
    assert found is not None
    return RunDir(found)


def runner_status(paths: RunDir) -> RunnerStatus:
    status = RunnerStatus.read(paths.runner_status)
    assert status is not None
    return status


def rank_1(paths: RunDir) -> ProcessId:
    """The rank without a `started` event."""
    started = next(iter_events(paths.events))
    assert isinstance(started, Started)
    (pid,) = {int(path.name) for path in paths.stacks.iterdir()} - {started.pid}
    # Both are numbers of the namespace that the ranks are in.
    (found,) = [
        one for one in process.marked({process.RUN_DIR_MARK: str(paths.root)}) if process.innermost_pid(one.pid) == pid
    ]
    return found


def free_range() -> range:
    """As many ports as a service takes, all free, below those that the kernel gives to connections."""
    for first in random.sample(range(12_000, 32_000, PORTS), 100):
        ports = range(first, first + PORTS)
        try:
            with all_taken(ports):
                return ports
        except OSError:
            continue
    raise AssertionError("there is no free range of ports")


@contextmanager
def all_taken(ports: range) -> Iterator[dict[int, socket.socket]]:
    """Each of these ports has a listener."""
    with ExitStack() as stack:
        yield {port: stack.enter_context(socket.create_server((LOOPBACK, port))) for port in ports}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def wait_written(service: CrashingService, what: str) -> None:
    """A checkpoint is written while training continues; until then its directory is staged."""
    poll(lambda: not census(service.data_dir).staged, f"{what} is written", timeout=SECONDS)


def master_port(directory: Path) -> int:
    """The port that an attempt's torchrun received."""
    arguments = json.loads(RunDir(directory).task.read_text())["argv"]
    (port,) = (int(part.removeprefix("--master-port=")) for part in arguments if part.startswith("--master-port="))
    return port


def tried_again(service: TrainingService, job: str) -> Json | None:
    """The status of a job that waits for its second attempt."""
    status = service.status(job)
    return status if status["resources_allocated"]["retries_used"] else None


def wait_for_holder(server: TrainingService | CrashingStack, job: str, holder: str) -> str:
    """What a job's status reports once it waits for a device that another process holds."""

    def probe() -> str:
        status = server.status(job)
        detail = str(status["resources_allocated"]["detail"])
        return detail if status["status"] == "scheduled" and "device cpu, held by" in detail else ""

    detail = poll(probe, f"job {job} waits", timeout=20)
    assert detail.startswith(f"waiting for device cpu, held by {holder}"), detail
    return detail


def only_its_runner_lives(server: TrainingService | CrashingStack, job: str) -> bool:
    """Whether no process of a job trains, for as long as a supervisor needs for some passes."""
    time.sleep(PASSES)
    tasks = tasks_below(server.data_dir.resolve() / "jobs" / job)
    return [[one.pid for one in processes] for processes in tasks.values()] == [
        [status.runner.pid]
        for directory in tasks
        if (status := runner_status(RunDir(directory))).runner is not None and status.trainer is None
    ]


def launched(service: TrainingService, number: int) -> list[psutil.Process]:
    """What was started in place of torchrun, once there are so many."""
    statuses = map(RunnerStatus.read, service.data_dir.glob("jobs/*/attempts/*/runner.json"))
    started = [status.trainer for status in statuses if status is not None and status.trainer is not None]
    return [psutil.Process(one.pid) for one in started] if len(started) == number else []
