"""Jobs that save for a critical one, and jobs whose only other machine is lost before they train."""

from __future__ import annotations

import pytest

from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, prepared, resources_of, submit, trains
from tests.required import IN_FULL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), IN_FULL]


def test_a_job_that_saves_for_a_critical_one_ends_as_if_nothing_had_happened(bed: Bed) -> None:
    prepared(bed, preempt=True)
    submit(bed, dpo("undisturbed", 12))
    assert bed.wait_for_end("undisturbed")["status"] == "completed"
    release = bed.hold("step-6")
    submit(bed, dpo("low", 12, priority="low"))
    bed.wait(lambda: trains(bed, "low", beyond=4), "the job trains", 240)
    submit(bed, dpo("normal", 4))
    submit(bed, dpo("critical", 4, priority="critical"))
    bed.wait(lambda: "held by low" in resources_of(bed, "critical")["detail"], "it waits for the job", 60)
    release()
    assert bed.wait_for_end("critical")["status"] == "completed"
    assert bed.wait_for_end("normal")["status"] == "completed"
    status = bed.wait_for_end("low")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert first["message"].endswith("the critical job critical gets its devices")
    assert (first["reason"], second["reason"], status["resources_allocated"]["retries_used"]) == (None, None, 0)
    ends = {name: bed.status(name)["completed_at"] for name in ("critical", "normal", "low")}
    assert sorted(ends, key=lambda name: str(ends[name])) == ["critical", "normal", "low"]
    assert bed.losses("low") == bed.losses("undisturbed")
    bed.nothing_is_left()


def test_a_job_that_does_not_train_yet_moves_to_the_service_s_machine_once_the_other_one_is_lost(bed: Bed) -> None:
    prepared(bed, "a")
    _, a = bed.machines
    release = bed.hold("step-2")
    submit(bed, dpo("first", 4))
    bed.wait(lambda: trains(bed, "first"), "the service's machine trains", 240)
    a.link(up=False)
    submit(bed, dpo("second", 4, resources={"nodes": 1}))
    bed.wait(lambda: resources_of(bed, "second")["device"] == "a/cpu", "it is on the node", 15)
    release()
    assert bed.wait_for_end("first")["status"] == "completed"
    status = bed.wait_for_end("second")
    assert (status["status"], status["resources_allocated"]["device"]) == ("completed", "cpu"), status
    first, _ = status["resources_allocated"]["attempts"]
    assert (first["reason"], "node a is silent since" in first["message"]) == ("node_lost", True)
    a.link(up=True)
    bed.wait_for_nodes("a")
    bed.nothing_is_left()
