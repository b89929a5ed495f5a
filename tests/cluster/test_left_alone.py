"""A training on a node that is silent: left alone for as long as no other node would take it."""

from __future__ import annotations

import pytest

from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, ready, resources_of, submit, trains
from tests.required import IN_FULL
from tests.tiny import tiny_model

# CI: the decision in tests/unit/test_cluster.py; a service that is away in test_machines.py.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), IN_FULL]


def test_a_node_that_is_cut_off_trains_on_and_delivers_everything_when_it_is_back(bed: Bed) -> None:
    head = bed.machine("head")
    tiny_model()
    head.serve()
    a, b = bed.machine("a"), bed.machine("b")
    a.join(head, "--label", "rack=7")
    b.join(head)  # its calls show that the service can be reached
    ready(bed, "a", "b")
    release = bed.hold("step-14")  # so that it does not end before the node is back
    submit(bed, dpo("alone", 20, resources={"nodes": 1, "labels": {"rack": "7"}}, save_steps=4))
    bed.wait(lambda: trains(bed, "alone", beyond=2), "the job trains", 420)
    trainings = a.trainings()
    a.link(up=False)
    bed.wait(
        lambda: "left alone: node a is silent since" in resources_of(bed, "alone")["detail"], "it is left alone", 90
    )
    bed.wait(lambda: (bed.faults / "step-14.taken").exists(), "it trains on meanwhile", 240)
    assert set(a.trainings()) == set(trainings)
    a.link(up=True)
    bed.wait_for_nodes("a", "b")
    release()
    status = bed.wait_for_end("alone")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert sorted(bed.losses("alone")) == list(range(1, 21))
    bed.nothing_is_left()
