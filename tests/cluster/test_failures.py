"""What goes wrong among several machines and is no machine's death: full disks, slow links, a service that is away.

They take minutes: `TRL_TESTS=full ./scripts/test.sh tests/cluster` runs them.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, machines_of, prepared, ready, resources_of, submit, trains
from tests.required import IN_FULL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), IN_FULL]

WORKERS = {"nodes": 2, "labels": {"rack": "7"}}


@pytest.mark.parametrize("how", ["link", "stopped"])
def test_a_service_that_is_away_for_a_minute_stops_no_training(bed: Bed, how: str) -> None:
    """Cut off from all its nodes, or standing still, for four times as long as a node may be silent."""
    prepared(bed, "a", "b")
    head = bed.machines[0]
    release = bed.hold("step-60")  # so that it does not end before the service is back
    submit(bed, dpo("pair", 80, resources=WORKERS, save_steps=20))
    first, second = machines_of(bed, bed.wait(lambda: trains(bed, "pair", beyond=2), "the job trains", 420))
    trainings = first.trainings() + second.trainings()
    away_until = time.monotonic() + 60
    if how == "link":
        head.link(up=False)
    else:
        head.signal_agent(signal.SIGSTOP)
    bed.wait(lambda: (bed.faults / "step-60.taken").exists(), "it trains on meanwhile", 240)
    time.sleep(max(0.0, away_until - time.monotonic()))
    assert set(first.trainings() + second.trainings()) == set(trainings)
    if how == "link":
        head.link(up=True)
    else:
        head.signal_agent(signal.SIGCONT)
    bed.wait_for_nodes("a", "b")
    release()
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert sorted(bed.losses("pair")) == list(range(1, 81))
    bed.nothing_is_left()


@pytest.mark.parametrize("whose", ["rank 0", "rank 1", "the service"])
def test_a_disk_that_is_full_for_a_while_is_named_and_costs_no_step(bed: Bed, whose: str) -> None:
    """Where a checkpoint is written, where a part of it is, or where it is uploaded to."""
    prepared(bed, "a", "b", disk_mb=64)
    release = bed.hold("step-12")
    submit(bed, dpo("pair", 32, resources=WORKERS, save_steps=5))
    first, second = machines_of(bed, bed.wait(lambda: trains(bed, "pair", beyond=10), "the job trains", 420))
    bed.wait(lambda: [one for one in bed.events("pair") if one["type"] == "checkpoint"], "it has a checkpoint", 60)
    machine = {"rank 0": first, "rank 1": second, "the service": bed.machines[0]}[whose]
    with machine.full_disk():
        release()
        if whose == "the service":
            bed.wait(lambda: "disk is full" in first.log.read_text(), "the node knows why it waits", 120)
        else:
            bed.wait(lambda: resources_of(bed, "pair")["attempts"][0]["reason"], "the attempt has ended", 120)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    attempts = status["resources_allocated"]["attempts"]
    if whose == "the service":
        assert [attempt["reason"] for attempt in attempts] == [None]
    else:
        assert attempts[0]["reason"] == "disk_full", attempts
        assert f"node {machine.name}" in attempts[0]["message"], attempts
        assert "disk is full" in attempts[0]["message"], attempts
        assert attempts[-1]["start_step"] >= 5
    assert sorted(bed.losses("pair")) == list(range(1, 33))
    bed.nothing_is_left()


def test_a_slow_node_is_waited_for(bed: Bed) -> None:
    """Its cable carries little and drops what is too much, and it is suspended for ten seconds, agent and ranks."""
    prepared(bed, "a", "b")
    slow = bed.machines[2]
    slow.limit(kbit_per_s=20_000)
    release = bed.hold("step-20")
    submit(bed, dpo("pair", 40, resources=WORKERS, save_steps=10))
    bed.wait(lambda: trains(bed, "pair", beyond=17), "the job trains", 420)
    slow.signal_all(signal.SIGSTOP)
    release()
    time.sleep(10)
    slow.signal_all(signal.SIGCONT)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert sorted(bed.losses("pair")) == list(range(1, 41))
    bed.nothing_is_left()


def test_a_service_with_tls_takes_part_itself(bed: Bed) -> None:
    """Its own agent trusts its certificate; a worker trusts what its system does."""
    head = bed.machine("head")
    certificate, settings = bed.certificate()
    head.serve(settings)
    url = f"https://{head.address}:8322"
    stranger = bed.machine("stranger")
    stranger.join(head, TRL_SERVICE_URL=url)
    bed.machine("a").join(head, TRL_SERVICE_URL=url, SSL_CERT_FILE=str(certificate))
    ready(bed, "head", "a")
    submit(bed, dpo("pair", 8, resources={"nodes": 2}))
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    assert status["resources_allocated"]["device"] == "cpu,a/cpu"
    assert sorted(bed.losses("pair")) == list(range(1, 9))
    assert "has a certificate that is not trusted here" in stranger.log.read_text()
    assert "stranger" not in [node["node"] for node in bed.get("/nodes")["data"]]
    bed.nothing_is_left()
