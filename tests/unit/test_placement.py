from __future__ import annotations

import pytest

from llama_stack_provider_trl.jobs.placement import PATIENCE, Queued, choose, suitable, why_waiting

GPUS = ("cuda:0", "cuda:1")


def queue(*wanted: str) -> list[Queued]:
    """Jobs a, b, c ... in order of age."""
    return [Queued(chr(ord("a") + age), device, age) for age, device in enumerate(wanted)]


def test_the_oldest_job_gets_the_only_device() -> None:
    assert choose(reversed(queue("cpu", "cpu")), [], ["cpu"]) == {"a": ("cpu",)}


def test_a_device_that_is_taken_is_not_given_away() -> None:
    assert choose(queue("cpu"), ["cpu"], ["cpu"]) == {}


def test_jobs_that_leave_the_choice_to_us_spread_over_the_gpus() -> None:
    assert choose(queue("auto", "auto", "auto"), [], GPUS) == {"a": ("cuda:0",), "b": ("cuda:1",)}


def test_auto_never_slides_from_a_busy_gpu_to_the_cpu() -> None:
    assert choose(queue("auto"), ["cuda:0"], ("cuda:0", "cpu")) == {}


def test_cuda_without_a_number_is_any_gpu() -> None:
    assert choose(queue("cuda"), ["cuda:0"], GPUS) == {"a": ("cuda:1",)}


def test_a_job_that_waits_for_one_device_does_not_hold_up_another_device() -> None:
    assert choose(queue("cuda:0", "cuda:1"), ["cuda:0"], GPUS) == {"b": ("cuda:1",)}


def test_priority_comes_before_age() -> None:
    jobs = [Queued("old", "cpu", 1), Queued("urgent", "cpu", 2, priority=5)]
    assert choose(jobs, [], ["cpu"]) == {"urgent": ("cpu",)}


@pytest.mark.parametrize("wanted", ["cuda:7", "mps", "cuda"])
def test_a_device_that_the_node_does_not_have_suits_nobody(wanted: str) -> None:
    assert suitable(wanted, ["cpu"]) == []
    assert choose(queue(wanted), [], ["cpu"]) == {}


def test_a_waiting_job_is_told_who_holds_what_it_waits_for() -> None:
    (any_device,), (cpu,), (third_gpu,) = queue("auto"), queue("cpu"), queue("cuda:3")
    assert why_waiting(any_device, {"cpu": "job-7"}, ["cpu"]) == "waiting for device cpu (held by job job-7)"
    assert "does not have: it has cpu" in why_waiting(third_gpu, {}, ["cpu"])
    assert why_waiting(cpu, {}, ["cpu"]) == ""
    pair = Queued("a", "auto", 1, ranks=2)
    assert why_waiting(pair, {"cuda:1": "job-7"}, GPUS) == "waiting for 2 devices; held: cuda:1 (held by job job-7)"
    assert "this node has 2 that serve" in why_waiting(Queued("a", "auto", 1, ranks=3), {}, GPUS)


def test_every_rank_gets_a_gpu_of_its_own_or_none_does() -> None:
    pair = Queued("pair", "auto", 1, ranks=2)
    assert choose([pair], [], GPUS) == {"pair": GPUS}
    assert choose([pair], ["cuda:0"], GPUS) == {}


def test_ranks_share_a_cpu() -> None:
    assert choose([Queued("pair", "auto", 1, ranks=2)], [], ["cpu"]) == {"pair": ("cpu",)}


def test_small_jobs_go_first_while_a_large_one_waits_but_not_for_ever() -> None:
    jobs = [Queued("large", "auto", 1, ranks=2, scheduled_at=1000.0), Queued("small", "auto", 2, scheduled_at=1500.0)]
    assert choose(jobs, ["cuda:0"], GPUS, now=1000.0 + PATIENCE) == {"small": ("cuda:1",)}
    assert choose(jobs, ["cuda:0"], GPUS, now=1001.0 + PATIENCE) == {}
    assert choose(jobs, [], GPUS, now=1001.0 + PATIENCE) == {"large": GPUS}


def test_a_job_that_can_never_run_here_keeps_nothing_back() -> None:
    jobs = [Queued("too-large", "auto", 1, ranks=3), Queued("small", "auto", 2)]
    assert choose(jobs, [], GPUS, now=1e9) == {"small": ("cuda:0",)}
