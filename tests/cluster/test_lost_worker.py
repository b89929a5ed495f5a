"""Periodic averaging over machines: one that dies costs an interval, and the others continue without it."""

from __future__ import annotations

import pytest

from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, has_saved, machines_of, ready, submit, trains
from tests.contract.stack import Json
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), IN_FULL]


def test_two_workers_continue_where_three_last_met(bed: Bed) -> None:
    head = bed.machine("head")
    tiny_model()
    head.serve({"fsdp_config": {"sharding_strategy": "NO_SHARD"}})
    for name in ("a", "b", "c"):
        bed.machine(name).join(head, "--label", "rack=7")
    ready(bed, "a", "b", "c")
    bed.hold("step-14")  # until a machine dies there
    three = {"nodes": 3, "min_nodes": 2, "labels": {"rack": "7"}}
    submit(bed, dpo("apart", 28, resources=three, averaging={"interval": 4}, save_steps=4, logging_steps=1))
    resources = bed.wait(lambda: has_saved(bed, "apart", 12), "the job has a checkpoint", 420)
    assert workers_of(resources) == 3
    victim = machines_of(bed, resources)[2]
    victim.turn_off()
    bed.wait(lambda: trains(bed, "apart", attempt=2), "it trains again", 420)
    status = bed.wait_for_end("apart")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert (first["reason"], second["start_step"]) == ("node_lost", 12)
    assert len(status["resources_allocated"]["device"].split(",")) == 2
    assert workers_of(status["resources_allocated"]) == 2
    assert sorted(bed.losses("apart")) == list(range(1, 22))  # three steps of three pairs in each of seven epochs
    bed.nothing_is_left()


def workers_of(resources: Json) -> int:
    return int(resources["effective_config"]["recipe"]["effective"]["averaging"]["workers"])
