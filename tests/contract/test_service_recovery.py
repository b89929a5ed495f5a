"""Jobs of two ranks on the service end alike, whichever process is killed, in whatever state, on a crowded machine."""

from __future__ import annotations

import json
import random
import socket
import threading
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
from llama_stack_provider_trl.specs.events import iter_events
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import tasks_below
from llama_stack_provider_trl_remote.service.datasets.blobs import READING
from tests.contract.crashing import (
    CONCLUDING,
    STARTING,
    Crashing,
    CrashingService,
    assert_as_undisturbed,
    cancel_and_kill,
    die_at,
    kill_while_held,
    pause_and_kill,
)
from tests.contract.payloads import promised
from tests.contract.service import TrainingService, ndjson, running
from tests.contract.stack import DPO, Json, poll

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


def master_port(directory: Path) -> int:
    """The port that an attempt's torchrun received."""
    arguments = json.loads(RunDir(directory).task.read_text())["argv"]
    (port,) = (int(part.removeprefix("--master-port=")) for part in arguments if part.startswith("--master-port="))
    return port
