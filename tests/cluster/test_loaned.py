"""A loaned node: jobs train there while its owner does not use it, on cores of their own, and are gone within 30 s once
the owner does."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.bed import Bed, Machine, command_of
from tests.cluster.jobs import dpo, has_saved, ready, resources_of, submit, trains
from tests.contract.stack import Json
from tests.required import IN_FULL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(540)]

OWNER = "nobody"
"""Whose processes count: others use the machine of the tests, too."""
WITHIN = 30.0
TERMS = ("--loaned", "--loaned-max-load", "0.1", "--loaned-idle-seconds", "4", "--loaned-user", OWNER)


@contextmanager
def owner_works() -> Iterator[float]:
    """A program of the owner uses a core. Yields when it began."""

    def as_owner() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        os.setuid(pwd.getpwnam(OWNER).pw_uid)

    loop = subprocess.Popen(["sh", "-c", "while :; do :; done"], preexec_fn=as_owner, cwd="/", stdin=subprocess.DEVNULL)
    try:
        yield time.monotonic()
    finally:
        loop.kill()
        loop.wait()


def nodes(bed: Bed) -> list[Json]:
    return list(bed.get("/nodes")["data"])


def state(bed: Bed, name: str) -> str:
    return next(str(node["state"]) for node in nodes(bed) if node["node"] == name)


def join(bed: Bed, machine: Machine) -> None:
    machine.join(bed.machines[0], "--label", "rack=7", *TERMS)


def waits(bed: Bed, job: str) -> None:
    deadline = time.monotonic() + 60
    while (seen := resources_of(bed, job))["state"] != "scheduled":
        left = f"{seen['state']} {seen['progress']} {seen['detail']}"
        assert time.monotonic() < deadline, f"{left}\n{bed.machines[1].log_tail()}"
        time.sleep(0.2)


def seconds_until(bed: Bed, what: Callable[[], object], text: str, begin: float) -> float:
    bed.wait(what, text, 60)
    return time.monotonic() - begin


@IN_FULL
def test_a_loaned_node_is_free_within_30_s_of_its_owners_return_and_takes_jobs_again(
    bed: Bed, record_property: Callable[[str, object], None]
) -> None:
    bed.machine("head").serve()
    worker = bed.machine("a")
    join(bed, worker)
    ready(bed, "a")
    first = state(bed, "a")
    assert first in ("loaned, and its owner's load is not known yet", "open"), first
    bed.wait(lambda: state(bed, "a") == "open", "the owner's load is known to be low", 60)
    job = submit(
        bed, dpo("job", 4000, resources={"labels": {"rack": "7"}, "reserve_cpus": 1}, save_steps=40, keep_last=2)
    )
    bed.wait(lambda: trains(bed, job), "it trains on the loaned node", 120)
    assert resources_of(bed, job)["device"] == "a/cpu:0"

    # Its agent is killed: the next one measures the load before jobs come, and the training continues meanwhile.
    worker.kill_agent()
    join(bed, worker)
    reached = resources_of(bed, job)["progress"]["step"]
    bed.wait(lambda: trains(bed, job, beyond=reached + 2), "it trains on", 60)
    bed.wait(lambda: state(bed, "a") == "open", "the load is known again", 60)

    # The owner is back: the job saves and ends.
    with owner_works() as begin:
        free = seconds_until(bed, lambda: not worker.trainings(), "nothing trains there", begin)
        assert free < WITHIN
        assert state(bed, "a") == "in use by its owner"
        waits(bed, job)
        bed.wait(lambda: "a is in use by its owner" in resources_of(bed, job)["detail"], "its status names why", 30)
        (node,) = (node for node in nodes(bed) if node["node"] == "a")
        assert (node["loaned"], node["jobs"]) == (True, {})
    saved = resources_of(bed, job)["progress"]["step"]
    assert has_saved(bed, job, saved), "it has saved where it ended"
    record_property("saved, free after seconds", round(free, 1))

    # The owner is gone: the node takes the job again, which continues where it ended.
    bed.wait(lambda: state(bed, "a") == "open", "the owner is gone", 60)
    bed.wait(lambda: trains(bed, job, attempt=2, beyond=saved + 45), "it trains there again", 120)

    # A training that cannot save is ended.
    ranks = [pid for pid in worker.trainings() if b"recipes.train" in command_of(pid)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    with owner_works() as begin:
        free = seconds_until(bed, lambda: not worker.trainings(), "nothing trains there", begin)
        assert free < WITHIN
        waits(bed, job)
    record_property("ended, free after seconds", round(free, 1))
    reached = resources_of(bed, job)["progress"]["step"]
    bed.wait(lambda: trains(bed, job, attempt=3, beyond=reached), "it trains there again", 120)
    assert resources_of(bed, job)["retries_used"] == 0
    steps = [point["step"] for point in bed.get(f"/post-training/jobs/{job}/metrics")["data"]]
    assert steps == list(range(1, len(steps) + 1))
    assert bed.post(f"/post-training/jobs/{job}/cancel", {}).ok
    bed.wait(lambda: not worker.trainings(), "it is over", 60)
