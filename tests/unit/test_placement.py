from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions import placement
from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued, demand
from llama_stack_provider_trl.jobs.decisions.placement import PATIENCE, Node, Placed, place, suitable
from llama_stack_provider_trl.jobs.decisions.waits import why_waits
from llama_stack_provider_trl.specs.job import ResourcesSpec
from tests.fakes import job_spec
from tests.unit.placed_nodes import FOUR, GIB, GPUS, HEAD, four_gpus, node, wants


def queue(*wanted: str) -> list[Queued]:
    """Jobs a, b, c ... in order of age."""
    return [Queued(chr(ord("a") + age), device, age) for age, device in enumerate(wanted)]


def choose(queued: Iterable[Queued], running: Iterable[str], devices: Sequence[str], now: float = 0.0) -> Placed:
    """`place` on the head's own machine alone."""
    return place(queued, [Node("", tuple(devices), head=True)], running, now)


def why_waiting(job: Queued, holders: dict[str, str], devices: Sequence[str]) -> str:
    return why_waits(job, holders, [Node("", tuple(devices), head=True)])


def test_jobs_that_leave_the_choice_to_us_spread_over_the_gpus() -> None:
    assert choose(queue("auto", "auto", "auto"), [], GPUS) == {"a": ("cuda:0",), "b": ("cuda:1",)}


def test_auto_never_slides_from_a_busy_gpu_to_the_cpu() -> None:
    assert choose(queue("auto"), ["cuda:0"], ("cuda:0", "cpu")) == {}


def test_cuda_without_a_number_is_any_gpu() -> None:
    assert choose(queue("cuda"), ["cuda:0"], GPUS) == {"a": ("cuda:1",)}


def test_a_job_that_waits_for_one_device_does_not_hold_up_another_device() -> None:
    assert choose(queue("cuda:0", "cuda:1"), ["cuda:0"], GPUS) == {"b": ("cuda:1",)}


@pytest.mark.parametrize("wanted", ["cuda:7", "mps", "cuda"])
def test_a_device_that_the_node_does_not_have_suits_no_job(wanted: str) -> None:
    assert suitable(wanted, ["cpu"]) == []
    assert choose(queue(wanted), [], ["cpu"]) == {}


def test_a_waiting_job_names_the_holder_of_its_device() -> None:
    (any_device,), (cpu,), (third_gpu,) = queue("auto"), queue("cpu"), queue("cuda:3")
    assert why_waiting(any_device, {"cpu": "job-7"}, ["cpu"]) == "waiting for cpu (held by job-7)"
    assert "does not have: it has cpu" in why_waiting(third_gpu, {}, ["cpu"])
    assert why_waiting(cpu, {}, ["cpu"]) == ""
    pair = Queued("a", "auto", 1, ranks=2)
    assert why_waiting(pair, {"cuda:1": "job-7"}, GPUS) == "waiting for 2 devices; held: cuda:1 (held by job-7)"
    assert why_waiting(pair, {}, GPUS) == "waiting for 2 devices; held: none, but older jobs come first"
    assert why_waiting(any_device, {"cpu": "job-7"}, ("cuda:0", "cpu")) == ""
    assert "this node has 2 that serve" in why_waiting(Queued("a", "auto", 1, ranks=3), {}, GPUS)
    closed = Node("", ("cpu",), head=True, why_closed="draining")
    assert why_waits(cpu, {"cpu": "job-7"}, [closed]) == "waiting for this node, which is draining"


def test_every_rank_gets_a_gpu_of_its_own_or_none_does() -> None:
    pair = Queued("pair", "auto", 1, ranks=2)
    assert choose([pair], [], GPUS) == {"pair": GPUS}
    assert choose([pair], ["cuda:0"], GPUS) == {}


def test_ranks_share_a_cpu() -> None:
    for device in ("cpu", "mps"):
        assert choose([Queued("pair", "auto", 1, ranks=2)], [], [device]) == {"pair": (device,)}


def test_small_jobs_go_first_while_a_large_one_waits_but_not_forever() -> None:
    jobs = [Queued("large", "auto", 1, ranks=2, scheduled_at=1000.0), Queued("small", "auto", 2, scheduled_at=1500.0)]
    assert choose(jobs, ["cuda:0"], GPUS, now=1000.0 + PATIENCE) == {"small": ("cuda:1",)}
    assert choose(jobs, ["cuda:0"], GPUS, now=1001.0 + PATIENCE) == {}
    assert choose(jobs, [], GPUS, now=1001.0 + PATIENCE) == {"large": GPUS}


def test_a_job_that_can_never_run_here_keeps_nothing_back() -> None:
    jobs = [Queued("too-large", "auto", 1, ranks=3), Queued("small", "auto", 2)]
    assert choose(jobs, [], GPUS, now=1e9) == {"small": ("cuda:0",)}


# Several nodes


def test_a_job_takes_the_service_s_own_machine_first_and_others_when_that_is_taken() -> None:
    nodes = [HEAD, node("b")]
    assert place([wants(1), wants(2), wants(3)], nodes, []) == {"job-1": ("cpu",), "job-2": ("b/cpu",)}


def test_a_job_that_requested_no_nodes_stays_at_home() -> None:
    assert place([Queued("a", "cpu", 1)], [HEAD, node("b")], ["cpu"]) == {}
    assert why_waits(Queued("a", "cpu", 1), {"cpu": "x"}, [HEAD, node("b")]) == "waiting for cpu (held by x)"


def test_all_nodes_of_a_job_or_none() -> None:
    nodes = [HEAD, node("b"), node("c")]
    pair = wants(nodes=2)
    assert place([pair], nodes, []) == {"job-1": ("cpu", "b/cpu")}
    assert place([pair], nodes, ["cpu"]) == {"job-1": ("b/cpu", "c/cpu")}
    assert place([pair], nodes, ["cpu", "b/cpu"]) == {}
    assert "held by x" in why_waits(pair, {"cpu": "x", "b/cpu": "x"}, nodes)
    assert why_waits(pair, {}, nodes) == "waiting for 2 nodes: older jobs come first"
    assert why_waits(wants(), {}, nodes) == ""  # it starts at the next poll
    assert why_waits(pair, {}, [HEAD]) == "waiting for 2 nodes: 1 of 1 can serve it"
    # A node that was removed with a job on it has no owner.
    assert place([pair], nodes, ["gone/cpu"]) == {"job-1": ("cpu", "b/cpu")}


def test_ranks_of_each_node_get_gpus_of_their_own() -> None:
    nodes = [node("head", *GPUS, head=True), node("b", *GPUS), node("c", "cuda:0")]
    pair = wants(nodes=2, per_node=2)
    assert place([pair], nodes, []) == {"job-1": ("cuda:0", "cuda:1", "b/cuda:0", "b/cuda:1")}
    assert place([pair], nodes, ["b/cuda:1"]) == {}
    assert "c has 1 of 2 devices" in why_waits(wants(nodes=3, per_node=2), {}, nodes)


def test_a_cpu_takes_as_many_ranks_as_it_has_cores() -> None:
    two_cores = [node("head", head=True, cpus=2), node("b", cpus=2)]
    many = wants(nodes=2, per_node=64)
    assert place([many], two_cores, [], now=1e9) == {}
    there = "0 of 2 can serve it"
    reasons = "head has 2 CPU cores for 64 ranks, b has 2 CPU cores for 64 ranks"
    assert why_waits(many, {}, two_cores) == f"waiting for 2 nodes: {there}; {reasons}"
    assert place([wants(nodes=2, per_node=2)], two_cores, []) == {"job-1": ("cpu", "b/cpu")}
    assert place([wants(per_node=3)], two_cores, []) == {}
    large = [*two_cores, node("c", cpus=64)]
    assert place([wants(per_node=64)], large, []) == {"job-1": ("c/cpu",)}
    assert place([wants(per_node=65)], large, []) == {}
    # It waits on a service with one machine too, and does not wait for who holds the CPU.
    message = "waiting for a node: 0 of 1 can serve it; head has 2 CPU cores for 3 ranks"
    assert why_waits(wants(per_node=3), {"cpu": "x"}, two_cores[:1]) == message
    # Whose cores are not known takes one.
    assert place([wants(per_node=2)], [HEAD], []) == {}
    assert place([wants()], [HEAD], []) == {"job-1": ("cpu",)}
    # mps is one device as well. On GPUs the GPUs count.
    assert place([wants(per_node=3)], [node("head", "mps", head=True, cpus=2)], []) == {}
    assert place([wants(per_node=2)], [node("head", *GPUS, head=True, cpus=1)], []) == {"job-1": GPUS}


def test_two_agents_on_one_machine_are_one_machine() -> None:
    nodes = [HEAD, node("b", machine="m"), node("c", machine="n")]
    assert place([wants(nodes=2)], nodes, []) == {"job-1": ("cpu", "c/cpu")}
    assert "2 of the 3" not in why_waits(wants(nodes=2), {}, nodes)
    # Training on both could not help: it trains on the machines that there are, and waits for those.
    assert place([wants(nodes=3)], nodes, []) == {"job-1": ("cpu", "c/cpu")}
    assert place([wants(nodes=2)], nodes[:2], []) == {"job-1": ("cpu",)}
    assert place([wants(nodes=3)], nodes, ["c/cpu"]) == {}
    assert place([wants(nodes=3)], [*nodes[:2], node("c", machine="n", why_closed="silent")], []) == {}
    assert why_waits(wants(nodes=3), {"c/cpu": "other"}, nodes) == "waiting for 2 nodes; c/cpu (held by other)"
    assert place([wants(nodes=4)], nodes, []) == {}
    assert "waiting for 4 nodes: 2 of 3" in why_waits(wants(nodes=4), {}, nodes)
    last = wants(nodes=3, min_nodes=3, tried=True)
    assert place([last], nodes, []) == {"job-1": ("cpu", "c/cpu")}
    # Its GPUs may be others than the other agent's.
    one_machine = [node("head", "cuda:0", head=True), node("b", "cuda:0", machine="head")]
    assert place([wants(nodes=2)], one_machine, []) == {}
    assert why_waits(wants(nodes=2), {}, one_machine).endswith("2 nodes: 1 of 2 can serve it")
    # Nor is its CPU two CPUs.
    assert place([wants(1), wants(2), wants(3)], nodes, []) == {"job-1": ("cpu",), "job-2": ("c/cpu",)}
    assert place([wants(1, labels={})], nodes, ["b/cpu", "c/cpu"]) == {}


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ({"labels": {"zone": "x"}}, "b lacks the label zone=x"),
        ({"cpus": 64}, "b has 8 CPUs"),
        ({"memory_gb": 100}, "b has 16 GiB of memory"),
        ({"model": "org/other"}, "b has no org/other"),
        ({"device": "cuda"}, "b has no cuda"),
        ({"device": "mps"}, "b has no mps"),
    ],
)
def test_a_node_must_have_what_a_job_asks_for_and_the_job_names_what_it_lacks(
    requested: dict[str, Any], why: str
) -> None:
    rich = {"cpus": 8, "memory_bytes": 16 * GIB, "labels": {"zone": "b"}, "models": frozenset({"org/model"})}
    nodes = [HEAD, node("b", **rich)]
    assert place([wants(**requested)], nodes, []) == {}
    assert why in why_waits(wants(**requested), {}, nodes)
    fitting = {"labels": {"zone": "b"}, "cpus": 8, "memory_gb": 16, "model": "org/model"}
    assert place([wants(**fitting)], nodes, []) == {"job-1": ("b/cpu",)}


def test_only_gpus_with_enough_memory_are_given() -> None:
    memory = {"cuda:0": 24 * GIB, "cuda:1": 40 * GIB}
    nodes = [HEAD, node("b", *GPUS, memory=memory)]
    assert place([wants(device="cuda", gpu_memory_gb=40)], nodes, []) == {"job-1": ("b/cuda:1",)}
    assert place([wants(device="cuda", gpu_memory_gb=40)], nodes, ["b/cuda:1"]) == {}
    one_held = {"b/cuda:0": "x", "b/cuda:1": "y"}
    message = why_waits(wants(device="cuda", gpu_memory_gb=40), one_held, nodes)
    assert message == "waiting for a node; b/cuda:1 (held by y)"
    assert place([wants(device="cpu", gpu_memory_gb=40)], nodes, ["b/cpu"]) == {"job-1": ("cpu",)}
    two = wants(device="cuda", gpu_memory_gb=40, per_node=2)
    assert "b has 1 GPUs with 40 GiB" in why_waits(two, {}, nodes)


def test_auto_means_what_the_service_s_own_machine_has_on_every_node() -> None:
    nodes = [node("head", *GPUS, head=True), node("b", "cpu")]
    assert place([wants()], nodes, GPUS) == {}
    assert place([wants(device="cpu")], nodes, GPUS) == {"job-1": ("b/cpu",)}
    there = "1 of 2 can serve it"
    assert why_waits(wants(nodes=2), {}, nodes) == f"waiting for 2 nodes: {there}; b has no cuda"


def test_auto_on_a_service_without_gpus_means_the_gpus_of_the_nodes() -> None:
    nodes = [HEAD, node("b", *GPUS)]
    assert place([wants(1), wants(2), wants(3)], nodes, []) == {"job-1": ("b/cuda:0",), "job-2": ("b/cuda:1",)}
    assert place([wants(device="cpu"), wants(2, home=True)], nodes, ["b/cuda:0"]) == {"job-1": ("cpu",)}
    assert place([Queued("a", "auto", 1)], nodes, []) == {"a": ("cpu",)}, "a job that stays at home"
    message = why_waits(wants(), {"b/cuda:0": "x", "b/cuda:1": "y"}, nodes)
    assert message == "waiting for a node; b/cuda:0 (held by x), b/cuda:1 (held by y)"
    silent = [HEAD, node("b", *GPUS, why_closed="silent since 12:00:00 UTC")]
    assert place([wants()], silent, []) == {}, "a job does not move to the CPU because its GPUs are silent for a moment"
    assert why_waits(wants(), {}, silent) == "waiting for a node; b is silent since 12:00:00 UTC"


def test_a_job_that_needs_gpu_memory_waits_for_such_a_gpu_and_does_not_move_to_a_cpu() -> None:
    nodes = [HEAD, node("b", *GPUS, memory=dict.fromkeys(GPUS, 24 * GIB))]
    assert place([wants(gpu_memory_gb=80)], nodes, []) == {}
    assert place([wants(gpu_memory_gb=24)], nodes, []) == {"job-1": ("b/cuda:0",)}


def test_all_nodes_of_a_job_on_auto_have_one_kind_of_device() -> None:
    mixed = [HEAD, node("b", *GPUS), node("c")]
    assert place([wants(nodes=2)], mixed, []) == {"job-1": ("cpu", "c/cpu")}, "one machine with GPUs is too few"
    assert place([wants(nodes=2)], [*mixed, node("d", "cuda:0")], []) == {"job-1": ("d/cuda:0", "b/cuda:0")}
    no_kind = why_waits(wants(nodes=2), {}, mixed[:2])
    assert no_kind == "waiting for 2 nodes: 1 of 2 can serve it; b has no cpu"


def test_a_node_that_is_closed_gets_nothing() -> None:
    nodes = [HEAD, node("b", why_closed="silent since 12:00:00 UTC")]
    assert place([wants()], nodes, ["cpu"]) == {}
    assert "b is silent since 12:00:00 UTC" in why_waits(wants(), {"cpu": "x"}, nodes)
    pair, c = wants(nodes=2), node("c", labels={"zone": "b"})
    assert why_waits(pair, {}, nodes) == "waiting for 2 nodes; b is silent since 12:00:00 UTC"
    there = "2 of 3 can serve it"
    closed = "; b is silent since 12:00:00 UTC"
    three = wants(nodes=3, cpus=1)
    able = [node(one.name, cpus=1, head=one.head, why_closed=one.why_closed) for one in nodes]
    assert why_waits(three, {}, [*able, c]) == f"waiting for 3 nodes: {there}; c has 0 CPUs{closed}"
    # Whether it is open or not makes no difference to whom it could not serve.
    unfit = node("c", why_closed="draining")
    message = why_waits(
        wants(labels={"zone": "b"}), {}, [HEAD, node("b", labels={"zone": "b"}, why_closed="cordoned"), unfit]
    )
    assert message == "waiting for a node; b is cordoned"


def test_a_machine_without_an_agent_is_no_part_of_several() -> None:
    nodes = [node("head", head=True, joins=False), node("b")]
    assert place([wants(nodes=2)], nodes, []) == {}
    assert place([wants()], nodes, []) == {"job-1": ("cpu",)}


def test_the_smallest_hole_that_will_do_is_filled() -> None:
    nodes = [HEAD, node("b", *GPUS), node("c", *GPUS)]
    assert place([wants(device="cuda")], nodes, ["c/cuda:0"]) == {"job-1": ("c/cuda:1",)}
    nodes = four_gpus("head", "b")
    assert place([wants(device="cuda")], nodes, ["b/cuda:0"]) == {"job-1": ("cuda:0",)}


def test_of_nodes_that_would_do_those_with_the_model_come_first() -> None:
    def placed(*nodes: Node, running: tuple[str, ...] = (), **more: Any) -> tuple[str, ...]:
        return place([wants(prefers="org/model", **more)], nodes, running).get("job-1", ())

    head = node("head", "cpu", head=True)
    a, b = node("a", "cpu"), node("b", "cpu", models=frozenset({"org/model"}))
    assert placed(head, a, b) == ("b/cpu",)
    assert placed(head, a, b, nodes=2) == ("b/cpu", "cpu")
    unknown = node("head", "cpu", head=True, joins=False)
    assert placed(unknown, a, b) == ("cpu",)  # it may have it
    has_it = node("head", "cpu", head=True, models=frozenset({"org/model"}))
    assert placed(has_it, a, b) == ("cpu",)
    assert placed(head, a, b, failed_on="b/cpu") == ("cpu",)
    c = node("c", "cpu", models=frozenset({"/models/own"}))
    assert place([wants(prefers="/models/own")], [head, a, c], []) == {"job-1": ("cpu",)}  # a path of that machine


def test_a_job_takes_a_node_without_its_model_rather_than_wait() -> None:
    head = node("head", "cpu", head=True)
    a, b = node("a", "cpu"), node("b", "cpu", models=frozenset({"org/model"}))
    job, strict = wants(prefers="org/model"), wants(2, model="org/model")
    assert place([job], [head, a, b], ["b/cpu"]) == {"job-1": ("cpu",)}
    assert place([job], [head, a, replace(b, why_closed="cordoned")], []) == {"job-1": ("cpu",)}
    assert place([strict], [head, a, b], ["b/cpu"]) == {}
    # One that must have it does not lose its turn to one that only prefers it, nor the other way round.
    assert place([job, strict], [head, a, b], []) == {"job-1": ("b/cpu",)}
    assert place([job, strict], [head, a, b], [], now=PATIENCE + 1) == {"job-1": ("b/cpu",)}


def test_a_job_that_was_running_may_continue_with_fewer_nodes() -> None:
    nodes = [HEAD, node("b")]
    assert place([wants(nodes=3, min_nodes=2)], nodes, []) == {}
    assert place([wants(nodes=3, min_nodes=2, tried=True)], nodes, []) == {"job-1": ("cpu", "b/cpu")}
    assert place([wants(nodes=3, min_nodes=2, tried=True)], nodes, ["cpu"]) == {}
    fewer = wants(2, nodes=3, min_nodes=2, tried=True)
    assert place([fewer], [*nodes, node("c"), node("d")], []) == {"job-2": ("cpu", "b/cpu", "c/cpu")}
    # What it may do without, another may not.
    assert place([wants(1, nodes=3, min_nodes=2), fewer], nodes, []) == {"job-2": ("cpu", "b/cpu")}


def test_a_job_that_finds_nothing_does_not_speak_for_one_that_asks_for_something_else() -> None:
    nodes = [HEAD, node("b", labels={"zone": "b"})]
    jobs = [wants(1, labels={"zone": "c"}), wants(2, labels={"zone": "b"})]
    assert place(jobs, nodes, []) == {"job-2": ("b/cpu",)}


def test_single_jobs_cannot_starve_one_over_several_nodes() -> None:
    nodes = [HEAD, node("b"), node("c")]
    jobs = [
        wants(1, device="cpu", nodes=2, scheduled_at=0.0),
        *(wants(age, device="cpu", scheduled_at=1e4) for age in (2, 3)),
    ]
    taken = ["b/cpu", "c/cpu"]
    assert place(jobs, nodes, taken, now=PATIENCE - 1) == {"job-2": ("cpu",)}
    assert place(jobs, nodes, taken, now=PATIENCE + 1) == {}
    assert place(jobs, [*nodes, node("d")], [*taken, "cpu"], now=PATIENCE + 1) == {}
    large = [*nodes, node("d", *GPUS, cpus=9)]
    assert place([*jobs, wants(4, device="cuda")], large, taken, now=PATIENCE + 1) == {"job-4": ("d/cuda:0",)}


def test_what_is_kept_stays_on_the_same_nodes_until_another_can_serve_the_job() -> None:
    nodes = four_gpus("head", "b", "c")
    large = wants(1, device="cuda", per_node=4)
    jobs = [large, *(wants(age, device="cuda", scheduled_at=1e4) for age in range(2, 6))]
    full = [node.place(device) for node in nodes for device in FOUR]
    # b has more free devices than the head, which is kept all the same, with none yet and with one.
    for head_has in ([], ["cuda:3"]):
        free = [*head_has, "b/cuda:0", "b/cuda:1", "b/cuda:2"]
        placed = place(jobs, nodes, set(full) - set(free), now=PATIENCE + 1)
        assert list(placed.values()) == [("b/cuda:0",), ("b/cuda:1",), ("b/cuda:2",)]
    assert place(jobs, nodes, FOUR, now=PATIENCE + 1)["job-1"] == tuple(f"b/{device}" for device in FOUR)
    # Of two nodes, one that can serve it already is kept before the first one.
    pair = wants(1, device="cuda", nodes=2, per_node=2)
    taken = {*full[:8], "c/cuda:0"} - {"cuda:1", "b/cuda:1"}
    assert place([pair, *jobs[1:]], nodes, taken, now=PATIENCE + 1) == {
        "job-2": ("b/cuda:1",),
        "job-3": ("c/cuda:3",),
    }


def test_one_job_of_a_kind_at_a_time_has_devices_kept() -> None:
    nodes = four_gpus("head", "b", "c")
    larges = [wants(age, device="cuda", per_node=4) for age in (1, 2)]
    others = [wants(age, device="cuda", scheduled_at=1e4) for age in (3, 4, 5)]
    taken = ["cuda:0", "cuda:1", "cuda:2", *(f"{name}/{device}" for name in "bc" for device in FOUR[1:])]
    assert place([*larges, *others], nodes, taken, now=PATIENCE + 1) == {"job-3": ("b/cuda:0",), "job-4": ("c/cuda:0",)}
    # Nor does a second pair where the first one has a node that could serve it, and the head.
    pairs = [wants(age, device="cuda", nodes=2, per_node=4) for age in (1, 2)]
    free = {"b/cuda:0", *(f"c/{device}" for device in FOUR)}
    taken_now = {node.place(device) for node in nodes for device in FOUR} - free
    assert place([*pairs, *others], nodes, taken_now, now=PATIENCE + 1) == {"job-3": ("b/cuda:0",)}
    # An urgent one with patience does not stand in for an older one without.
    urgent = wants(9, device="cuda", per_node=4, priority=1, scheduled_at=1e4)
    assert "cuda:3" not in str(place([urgent, *larges, *others], nodes, taken, now=PATIENCE + 1))
    # Nor does what is kept for a job serve a younger one of another kind.
    smaller = wants(6, device="cuda", per_node=3)
    assert place([larges[0], smaller], nodes, ["cuda:0", *taken[3:]], now=PATIENCE + 1) == {}


def test_what_is_kept_is_on_as_many_machines_as_are_needed() -> None:
    """Two agents on one are one."""
    nodes = [node("head", *GPUS, head=True, machine="m"), node("b", *GPUS, machine="m"), node("c", *GPUS)]
    pair = wants(1, device="cuda", nodes=2, per_node=2)
    assert place([pair, wants(2, device="cuda")], nodes, ["cuda:0", "c/cuda:0"], now=PATIENCE + 1) == {}


def test_a_job_that_may_continue_with_fewer_nodes_has_as_many_kept() -> None:
    nodes = [HEAD, node("b"), node("c", why_closed="silent since 12:00:00 UTC")]
    tried = wants(1, nodes=3, min_nodes=2, tried=True)
    jobs = [tried, wants(2, scheduled_at=1e4)]
    assert place(jobs, nodes, ["b/cpu"], now=PATIENCE - 1) == {"job-2": ("cpu",)}
    assert place(jobs, nodes, ["b/cpu"], now=PATIENCE + 1) == {}
    assert place(jobs, nodes, [], now=PATIENCE + 1) == {"job-1": ("cpu", "b/cpu")}
    held = {"b/cpu": "x"}
    because = "c is silent since 12:00:00 UTC; b/cpu (held by x)"
    assert why_waits(tried, held, nodes) == f"waiting for 2 nodes; {because}"
    assert why_waits(tried._replace(tried=False), held, nodes) == f"waiting for 3 nodes; {because}"


@pytest.mark.parametrize("size", [(1, 4), (2, 3), (4, 4)])
def test_a_job_starts_once_all_have_ended_that_ran_when_it_lost_its_patience(size: tuple[int, int]) -> None:
    """Of what runs one ends at each poll, in the order that is worst for it, and young jobs want every free device."""
    count, per_node = size
    nodes = four_gpus("head", *"bcdef")
    large = wants(1, device="cuda", nodes=count, per_node=per_node)
    young = [wants(age, device="cuda", scheduled_at=1e4) for age in range(2, 40)]
    before = {node.place(device) for node in nodes for device in FOUR}
    since: list[str] = []
    chosen = place([large, *young], nodes, before, now=PATIENCE + 1)
    while "job-1" not in chosen:
        assert before, "nothing runs any more that ran at the beginning"
        since += [places[0] for places in chosen.values()]
        # The last ones of the nodes that hold it up most; of the young ones that run, one as well.
        by_node = sorted(before, key=lambda place_: (len([one for one in before if one[:2] == place_[:2]]), place_))
        before.remove(by_node[-1])
        if since:
            since.pop(0)
        chosen = place([large, *young], nodes, [*before, *since], now=PATIENCE + 1)
    assert len(chosen["job-1"]) == count * per_node


def test_a_job_that_no_set_of_nodes_can_serve_keeps_nothing_back() -> None:
    nodes = [HEAD, node("b")]
    assert place([wants(1, nodes=3), wants(2)], nodes, [], now=1e9) == {"job-2": ("cpu",)}


def test_what_a_job_asks_for_survives_the_queue() -> None:
    spec = job_spec(resources=ResourcesSpec(nodes=2, min_nodes=1, labels={"a": "b"}, model_present=True), ranks=2)
    assert demand(Demand.of(spec).text()) == Demand(resources=spec.resources, model=spec.source.model)
    assert (Demand.of(job_spec()).text(), demand("")) == ("", Demand(home=True))
    plain = job_spec(resources=ResourcesSpec())
    assert Demand.of(plain) == Demand(prefers=plain.source.model)


def test_of_jobs_that_ask_for_the_same_only_the_first_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    polled: list[str] = []
    monkeypatch.setattr(placement, "_gang", lambda job, *_: polled.append(job.job_uuid) or [])
    place([wants(age) for age in range(1000)], [HEAD], ["cpu"])
    assert polled == ["job-0"]


def test_of_many_that_hold_what_a_job_waits_for_a_few_are_named() -> None:
    nodes = [HEAD, *(node(name) for name in "bcdefg")]
    held = {one.place("cpu"): "x" for one in nodes}
    named = ", ".join(f"{place_} (held by x)" for place_ in list(held)[:5])
    assert why_waits(wants(), held, nodes[:5]) == f"waiting for a node; {named}"
    assert why_waits(wants(), held, nodes) == f"waiting for a node; {named} and 2 more"


MIXED = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def mixed(name: str = "w", head: bool = False, **more: Any) -> Node:
    """A machine with two whole GPUs, and two MIG slices between them."""
    return Node(name, MIXED, head=head, slices=frozenset({"cuda:1", "cuda:2"}), **more)


def test_ranks_of_one_job_share_whole_gpus_and_never_mig_slices() -> None:
    pair = Queued("a", "auto", 1, ranks=2)
    assert place([pair], [mixed("", head=True)], []) == {"a": ("cuda:0", "cuda:3")}
    assert place([pair], [mixed("", head=True)], ["cuda:3"]) == {}


def test_each_mig_slice_trains_a_job_of_one_process() -> None:
    chosen = place(queue("auto", "auto", "auto", "auto"), [mixed("", head=True)], [])
    assert sorted(device for places in chosen.values() for device in places) == list(MIXED)


def test_machines_with_slices_only_are_no_nodes_of_a_job_over_several() -> None:
    resources = ResourcesSpec(nodes=2, min_nodes=2)
    job = Queued("a", "cuda", 1, ranks=2, demand=Demand(resources=resources).model_dump_json())
    head = Node("head", ("cpu",), head=True)
    sliced = [Node(name, ("cuda:0",), slices=frozenset({"cuda:0"})) for name in ("x", "y")]
    assert place([job], [head, *sliced], []) == {}
    assert "x has 0 of 1 whole GPUs, and 1 MIG slice, where a job has one process" in why_waits(
        job, {}, [head, *sliced]
    )
    assert place([job], [head, mixed("x"), mixed("y")], []) == {"a": ("x/cuda:0", "y/cuda:0")}


def test_a_job_that_waits_for_whole_gpus_is_not_promised_slices() -> None:
    head = mixed("", head=True)
    triple = Queued("a", "auto", 1, ranks=3)
    assert why_waits(triple, {}, [head]) == (
        "waiting for 3 whole GPUs; this node has 2, and 2 MIG slices, where a job has one process"
    )
    held = why_waits(Queued("a", "auto", 1, ranks=2), {"cuda:1": "x", "cuda:3": "y"}, [head])
    assert held == "waiting for 2 devices; held: cuda:3 (held by y)"
