"""Which running jobs are paused for a critical one, and that no waiting job starves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.demands import AGING, Queued
from llama_stack_provider_trl.jobs.decisions.placement import Node, Placed, place
from llama_stack_provider_trl.jobs.decisions.preemption import LEAST_RUN, Preemptible, Preemption, preempt
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.specs.events import Finished, Paused, Prepared, Started
from tests.fakes import FakeClock, FakeLauncher, job_spec
from tests.unit.placed_nodes import FOUR, GIB, HEAD, four_gpus, node, wants

NOTHING = Preemption()
CORES = Node("head", ("cpu",), head=True, cpus=4)


def running(name: str, *places: str, priority: int = 0, **more: Any) -> Preemptible:
    return Preemptible(name, priority, places, **{"attempt": 1, "launched_at": 0.0, **more})


def chosen(
    job: Queued | list[Queued], jobs: list[Preemptible], nodes: list[Node] | None = None, now: float = 100.0
) -> Preemption:
    holders = {place_: one.job_uuid for one in jobs for place_ in one.places}
    queued = job if isinstance(job, list) else [job]
    return preempt(queued, jobs, nodes or [HEAD], holders, now)._replace(compared=0)


def critical(age: int = 9, **more: Any) -> Queued:
    return wants(age, priority=2, **{"device": "cuda", **more})


def test_a_critical_job_gets_the_devices_of_a_lower_one() -> None:
    job = critical(device="cpu")
    assert chosen(job, [running("low", "cpu")]) == Preemption({"low": "job-9"}, {"cpu": "job-9"})
    assert chosen(Queued("home", "auto", 9, priority=2), [running("low", "cpu")]).victims == {"low": "home"}


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_no_other_job_pauses_one(priority: int) -> None:
    job = critical(device="cpu")._replace(priority=priority)
    for now in (100.0, 100 * AGING):
        assert chosen(job, [running("low", "cpu", priority=-1)], now=now) == NOTHING


@pytest.mark.parametrize(
    ("job", "jobs"),
    [
        (critical(device="cpu"), [running("other", "cpu", priority=2)]),
        (critical(device="cuda"), [running("low", "cpu")]),
        (critical(device="cpu", nodes=2), [running("low", "cpu")]),
        (critical(device="cpu", labels={"zone": "x"}), [running("low", "cpu")]),
        (critical(device="cpu"), []),
        (critical(device="cpu"), [running("low", "cpu", attempt=2)]),
    ],
)
def test_no_job_is_paused_without_effect_and_none_that_is_critical(job: Queued, jobs: list[Preemptible]) -> None:
    assert chosen(job, jobs) == NOTHING


@pytest.mark.parametrize(
    ("job", "victims"),
    [
        (critical(), ["low-2"]),
        (critical(per_node=2), ["low-1", "low-2"]),
        (critical(per_node=4), ["high", "low-1", "low-2", "normal"]),
        (critical(nodes=2, per_node=1), ["gang", "low-2"]),
    ],
)
def test_those_of_the_lowest_priority_and_of_these_the_last_are_paused_and_no_more_than_needed(
    job: Queued, victims: list[str]
) -> None:
    jobs = [
        running("low-1", "cuda:0", priority=-1, launched_at=10.0),
        running("low-2", "cuda:1", priority=-1, launched_at=20.0),
        running("normal", "cuda:2"),
        running("high", "cuda:3", priority=1),
        running("gang", *(f"b/{device}" for device in FOUR), priority=1),
    ]
    found = chosen(job, jobs, four_gpus("head", "b"))
    assert sorted(found.victims) == victims
    assert len(found.reserved) == job.ranks


def test_jobs_that_end_in_any_case_come_first_and_the_choice_stays() -> None:
    jobs = [running("a", "cuda:0", priority=-1), running("b", "cuda:1", is_ending=True)]
    nodes = [node("head", "cuda:0", "cuda:1", head=True)]
    assert chosen(critical(), jobs, nodes).reserved == {"cuda:1": "job-9"}
    cancelled = running("c", "cuda:0", priority=2, is_ending=True)
    assert chosen(critical(), [cancelled], [node("head", "cuda:0", head=True)]) == Preemption({}, {"cuda:0": "job-9"})


def test_each_critical_job_gets_devices_of_its_own() -> None:
    nodes = [node("head", *FOUR, head=True)]
    jobs = [running(name, device, priority=-1) for name, device in zip("abc", FOUR, strict=False)]
    found = chosen([critical(age) for age in (5, 6, 7)], jobs, nodes)
    # One takes the free GPU; two jobs are paused for the others.
    assert (len(found.victims), sorted(found.victims.values())) == (2, ["job-6", "job-7"])
    assert "cuda:3" not in found.reserved


@pytest.mark.parametrize(
    ("wanted", "victims"),
    [({"reserve_cpus": 1}, ["b"]), ({"reserve_cpus": 3}, ["a", "b"]), ({}, ["a", "b"])],
)
def test_cores_are_given_up_like_devices(wanted: dict[str, Any], victims: list[str]) -> None:
    jobs = [running("a", "cpu:0", "cpu:1"), running("b", "cpu:2", "cpu:3", launched_at=5.0)]
    assert sorted(chosen(critical(device="cpu", **wanted), jobs, [CORES]).victims) == victims


def test_the_job_of_another_agent_on_the_same_machine_is_paused() -> None:
    nodes = [node("head", head=True, machine="m", labels={"zone": "a"}), node("b", machine="m")]
    assert chosen(critical(device="cpu", labels={"zone": "a"}), [running("low", "b/cpu")], nodes).victims == {
        "low": "job-9"
    }


def test_a_job_that_was_paused_advances_before_it_is_paused_again() -> None:
    job, again = critical(device="cpu"), running("low", "cpu", attempt=2, launched_at=1000.0)
    assert chosen(job, [again], now=999.0 + LEAST_RUN) == NOTHING
    assert chosen(job, [again], now=1000.0 + LEAST_RUN).victims == {"low": "job-9"}


# Aging


def placed_at(now: float, *jobs: Queued) -> Placed:
    return place(jobs, [HEAD], [], now)


@pytest.mark.parametrize(("priority", "hours"), [(-1, 3), (0, 2), (1, 1)])
def test_a_job_that_waits_is_passed_by_later_ones_of_a_higher_priority_for_a_few_hours_only(
    priority: int, hours: int
) -> None:
    waits = wants(1, device="cpu", priority=priority, scheduled_at=0.0)

    def next_job(now: float) -> list[str]:
        new = wants(2, device="cpu", priority=2, scheduled_at=now)
        return list(placed_at(now, new, waits))

    assert next_job(hours * AGING - 1) == ["job-2"]
    assert next_job(hours * AGING) == ["job-1"]


def test_waiting_raises_a_priority_by_one_each_hour_and_never_above_critical() -> None:
    low = wants(5, priority=-1, scheduled_at=1000.0)
    grown = [low.claim(1000.0 + hours * AGING)[0] for hours in (-1, 0, 0.9, 1, 2, 3, 100)]
    assert grown == [1, 1, 1, 0, -1, -2, -2]
    assert wants(5, priority=7, scheduled_at=0.0).claim(1e9) == (-7, 5)


# The supervisor


class Service:
    """A supervisor whose passes are made by hand, on a machine with two GPUs."""

    def __init__(self, root: Path, clock: FakeClock, store: Store) -> None:
        self.root, self.clock, self.store, self.launcher = root, clock, store, FakeLauncher()
        self.start()

    def start(self, preempts: bool = True) -> None:
        devices = ["cuda:0", "cuda:1"]
        self.supervisor = Supervisor(
            self.store, self.launcher, devices, self.root, ports=PortRange(), preempts=preempts
        )

    def add(self, name: str, priority: int = 0, ranks: int = 1, device: str = "cuda") -> None:
        spec = job_spec(
            name, priority=priority, ranks=ranks, device=device, checkpoint_dir=self.root / "checkpoints" / "out" / name
        )
        self.store.add_job(spec, "digest")
        self.supervisor.tick()

    def run(self, name: str, attempt: int = 1) -> None:
        started = Started(pid=1, device="cuda:0", versions={})
        prepared = Prepared(total_steps=9, num_rows=8, trainable_parameters=1, total_parameters=1)
        self.launcher.emit(f"{name}-{attempt}", started, prepared)
        self.supervisor.tick()

    def save(self, name: str, attempt: int = 1) -> None:
        self.launcher.emit(f"{name}-{attempt}", Paused(step=3))
        self.launcher.exit(f"{name}-{attempt}", 0)
        self.supervisor.tick()

    def end(self, name: str, attempt: int = 1) -> None:
        self.launcher.emit(f"{name}-{attempt}", Finished(step=9))
        self.launcher.exit(f"{name}-{attempt}", 0)
        self.supervisor.tick()

    def devices(self, *names: str) -> list[str]:
        holders = self.store.holders()
        return [",".join(sorted(place_ for place_, holder in holders.items() if holder == name)) for name in names]

    def pauses(self, name: str) -> int:
        return self.launcher.tasks[f"{name}-1"].pauses


@pytest.fixture
def service(tmp_path: Path, clock: FakeClock, store: Store) -> Service:
    return Service(tmp_path, clock, store)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lower_job_saves_and_resumes_by_itself_once_the_critical_one_has_ended(
    service: Service, restarts: bool
) -> None:
    for name in ("low", "normal"):
        service.add(name, priority=-1 if name == "low" else 0)
        service.run(name)
    service.add("critical", priority=2)
    service.supervisor.tick()
    assert (service.pauses("low") > 0, service.pauses("normal")) == (True, 0)
    if restarts:
        service.start()
        service.supervisor.tick()
    service.save("low")
    assert service.devices("low", "normal", "critical") == ["", "cuda:1", "cuda:0"]
    assert service.store.get("low").state is JobState.scheduled
    (attempt,) = service.store.attempts("low")
    assert attempt.message == "saved at step 3: the critical job critical gets its devices"
    assert service.store.get("low").retries_used == 0
    service.run("critical")
    service.end("critical")
    assert service.devices("low", "normal") == ["cuda:0", "cuda:1"]
    assert service.store.get("low").attempt == 2


def test_what_one_job_has_given_up_is_kept_until_the_last_one_has_saved(service: Service) -> None:
    for name in ("a", "b"):
        service.add(name)
        service.run(name)
    service.add("young", priority=1)
    service.add("pinned", device="cuda:0")
    service.add("critical", priority=2, ranks=2)
    service.supervisor.tick()
    assert (service.pauses("a") > 0, service.pauses("b") > 0) == (True, True)
    service.save("a")
    service.supervisor.tick()
    assert service.devices("a", "b", "young", "critical") == ["", "cuda:1", "", ""]
    assert service.store.get("young").detail == "waiting for cuda:1 (held by b)"
    kept = "waiting: the free devices are kept for jobs that come first"
    assert service.store.get("pinned").detail == kept
    service.save("b")
    assert service.devices("a", "b", "young", "critical") == ["", "", "", "cuda:0,cuda:1"]


def test_without_the_setting_a_critical_job_waits_for_the_next_free_device(service: Service) -> None:
    service.start(preempts=False)
    for name in ("a", "b"):
        service.add(name)
        service.run(name)
    service.add("critical", priority=2)
    service.supervisor.tick()
    assert (service.pauses("a"), service.pauses("b")) == (0, 0)
    assert service.store.get("critical").detail.startswith("waiting for cuda:0 (held by a)")


def test_a_job_that_has_not_begun_to_train_is_paused_once_it_has(service: Service) -> None:
    service.add("a")
    service.add("b")
    service.run("a")
    service.add("critical", priority=2, ranks=2)
    service.supervisor.tick()
    assert (service.pauses("a") > 0, service.pauses("b")) == (True, 0)
    service.run("b")
    assert service.pauses("b") > 0


def test_a_critical_job_that_is_cancelled_has_no_further_job_paused(service: Service) -> None:
    service.add("a")
    service.add("b")
    service.run("a")
    service.add("critical", priority=2, ranks=2)
    service.store.request_cancel("critical")
    service.supervisor.tick()
    service.run("b")
    service.supervisor.tick()
    assert service.pauses("b") == 0


def test_the_time_for_which_a_job_was_paused_by_its_user_is_no_wait(service: Service) -> None:
    service.store.add_job(job_spec("a", priority=-1), "digest")
    service.store.request_pause("a")
    service.clock.advance(100 * AGING)
    service.store.request_resume("a")
    (job,) = service.store.queue()
    assert job.claim(service.clock.now) == (1, job.age)


def test_the_lists_of_jobs_have_the_order_of_the_placement(service: Service) -> None:
    for name, priority in (("low", -1), ("normal", 0), ("high", 1)):
        service.store.add_job(job_spec(name, priority=priority), "digest")
        service.clock.advance(1.5 * AGING)
    service.store.add_job(job_spec("critical", priority=2), "digest")
    queued = sorted(service.store.queue(), key=lambda job: job.claim(service.clock.now))
    names = [job.job_uuid for job in queued]
    assert names == ["low", "normal", "high", "critical"]
    assert [job.job_uuid for job in service.store.queue_page()[0]] == names
    assert [one.job.job_uuid for one in service.store.ahead.waiting(9)] == names
    assert [one.job.job_uuid for one in service.store.ahead.waiting(2)] == names[:2]


def test_critical_jobs_that_demand_the_same_are_compared_once() -> None:
    """200 of them, which no machine serves, took 2.5 s of each page of the queue."""
    jobs = [running(f"low-{number}", f"cuda:{number}") for number in range(4)]
    holders = {place_: one.job_uuid for one in jobs for place_ in one.places}
    waiting = [critical(age=age, per_node=8) for age in range(200)]
    assert preempt(waiting, jobs, four_gpus("head"), holders, 100.0).compared <= 2
    one = critical(age=300)
    assert [*chosen([*waiting, one], jobs, four_gpus("head")).victims.values()] == ["job-300"]


def test_jobs_of_one_machine_are_looked_for_on_that_machine_alone() -> None:
    """They were looked for on all: 7,032 nodes were examined for these 40 critical jobs."""
    names = [f"node-{number}" for number in range(20)]
    nodes = [node("head", head=True), *(node(name, *FOUR, memory_bytes=8 * GIB) for name in names[1:])]
    jobs = [running(f"{name}-{device}", f"{name}/{device}") for name in names[1:] for device in FOUR]
    holders = {place_: one.job_uuid for one in jobs for place_ in one.places}
    waiting = [critical(age=age, per_node=4, memory_gb=1 + age / 100) for age in range(40)]
    found = preempt(waiting, jobs, nodes, holders, 100.0)
    assert len(found.victims) == len(jobs)
    assert found.compared < 5000


# Jobs with an earlier claim


def grown(age: int = 1, **more: Any) -> Queued:
    """A job that comes before later critical ones, by waiting."""
    return wants(age, **{"device": "cuda", "priority": 0, "scheduled_at": 0.0, **more})


GROWN = 3 * AGING
PAIR = [node("head", "cuda:0", "cuda:1", head=True)]


def test_a_critical_job_has_another_save_rather_than_wait_for_a_device_that_is_kept_for_an_earlier_claim() -> None:
    new, low = critical(scheduled_at=GROWN - 5), running("low", "cuda:1", launched_at=GROWN - 10)
    assert chosen([grown(per_node=2), new], [low], PAIR, GROWN) == Preemption({"low": "job-9"}, {"cuda:1": "job-9"})
    # Without an earlier claim it takes the free device.
    assert chosen([grown(per_node=2, scheduled_at=GROWN - 1000), new], [low], PAIR, GROWN) == NOTHING
    # An earlier critical one, for which nothing that helps can be paused, has free devices kept for it too.
    earlier = critical(1, per_node=3, scheduled_at=0.0)
    jobs = [running("low", "cuda:1"), running("other", "cuda:2", priority=2)]
    three = [node("head", "cuda:0", "cuda:1", "cuda:2", head=True)]
    assert chosen([earlier, new], jobs, three, GROWN).reserved == {"cuda:1": "job-9"}


def test_a_critical_job_does_not_wait_for_a_device_that_is_kept_beside_an_expected_machine() -> None:
    nodes, new = [*PAIR], critical(scheduled_at=GROWN - 5)
    spread = grown(nodes=2, per_node=1)
    low = running("low", "cuda:1", launched_at=GROWN - 10)
    coming = [node("b", "cuda:0", expected="granted")]
    found = preempt([spread, new], [low], nodes, {"cuda:1": "low"}, GROWN, expected=coming)
    assert found.victims == {"low": "job-9"}


def test_what_was_given_up_for_a_critical_job_is_not_for_one_with_an_earlier_claim() -> None:
    jobs, promised = [grown(per_node=2), critical(scheduled_at=GROWN - 5)], {"cuda:1": "job-9"}

    def after(holders: dict[str, str], promised: dict[str, str]) -> Preemption:
        return preempt(jobs, [], PAIR, holders, GROWN, promised=promised)._replace(compared=0)

    assert after({}, promised) == Preemption({}, promised, {"job-9": ("cuda:1",)})
    # The node has not reported yet that the processes have ended.
    assert after({"cuda:1": "low"}, promised) == Preemption({}, promised)
    assert after({}, {}) == NOTHING
    assert after({}, {"cuda:1": "job-77"}) == NOTHING


def test_a_critical_job_gets_what_another_saved_for_it_and_an_older_job_all_of_the_machine_after_it(
    service: Service,
) -> None:
    service.add("low")
    service.run("low")
    service.clock.now = time.time() - GROWN
    service.add("older", ranks=2)
    service.clock.now = time.time()
    service.add("critical", priority=2)
    service.supervisor.tick()
    assert service.pauses("low") > 0
    service.save("low")
    assert service.devices("low", "older", "critical") == ["", "", "cuda:0"]
    service.run("critical")
    service.end("critical")
    assert service.devices("low", "older") == ["", "cuda:0,cuda:1"]
