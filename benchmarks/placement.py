"""Placement, simulated: 50 nodes, 2,000 jobs of many kinds that arrive and end, on a clock of its own.

    python -m benchmarks.placement

Prints, as a table: how long a decision took (one pass over the whole queue), how long jobs waited by size, whether any
starved, and how much of the GPUs' time was used while there was more to do than they could. Then large jobs compete
with small ones that never end coming (`crowded`; `shared` for cores of CPUs). Ends with 1 where a decision, or all the
reasons for which jobs wait, took longer than 50 ms of CPU time, a job was never placed, or a large one waited longer
than the bound that `place` states. Takes about a minute.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
from llama_stack_provider_trl.jobs.decisions.placement import PATIENCE, Node, place
from llama_stack_provider_trl.jobs.decisions.waits import why_waits
from llama_stack_provider_trl.specs.job import ResourcesSpec

NODES, GPUS, JOBS = 50, 8, 2000
LIMIT_MS = 50.0
SEED = 1
# nodes, GPUs per node, share of the jobs: most are small, and the few large ones are those that could starve.
SIZES = ((1, 1, 0.55), (1, 2, 0.15), (1, 4, 0.12), (1, 8, 0.08), (2, 8, 0.06), (4, 8, 0.03), (8, 8, 0.01))
MEAN_SECONDS = 1800.0
POLL_INTERVAL = 60.0
"""Seconds between two passes; the supervisor's interval is shorter and finds the same kinds of jobs."""
LONGEST = 3600.0
"""Seconds that a job runs at most where small ones never end coming."""
BURST = 1000
"""Jobs that are there at the beginning; the others arrive one by one, a little faster than they can be served."""


class Job(NamedTuple):
    queued: Queued
    seconds: float
    size: tuple[int, int]


def machines() -> list[Node]:
    """Three quarters with large GPUs; two zones."""
    found = []
    for number in range(NODES):
        memory = (80 if number % 4 else 24) << 30
        devices = tuple(f"cuda:{gpu}" for gpu in range(GPUS))
        found.append(
            Node(
                f"node-{number}",
                devices,
                f"machine-{number}",
                head=number == 0,
                memory=dict.fromkeys(devices, memory),
                cpus=96,
                memory_bytes=512 << 30,
                labels={"zone": "ab"[number % 2]},
            )
        )
    return found


def jobs(rng: random.Random) -> list[Job]:
    """In the order in which they arrive."""
    demand = sum(nodes * gpus * share for nodes, gpus, share in SIZES) * MEAN_SECONDS
    between = demand / (NODES * GPUS) * 0.95
    found, now = [], 0.0
    for age in range(JOBS):
        now += rng.expovariate(1 / between) if age >= BURST else 0.0
        (nodes, gpus, _), *_ = rng.choices(SIZES, [share for *_, share in SIZES])
        requested = ResourcesSpec(
            nodes=nodes,
            min_nodes=nodes,
            gpu_memory_gb=40 if rng.random() < 0.3 else None,
            labels={"zone": rng.choice("ab")} if rng.random() < 0.2 else {},
        )
        text = Demand(resources=requested).text()
        priority = rng.choices((-1, 0, 1), (0.1, 0.8, 0.1))[0]
        queued = Queued(f"job-{age}", "cuda", age, priority, "", nodes * gpus, now, text)
        found.append(Job(queued, rng.expovariate(1 / MEAN_SECONDS), (nodes, gpus)))
    return found


def crowded(rng: random.Random, nodes: Sequence[Node]) -> list[tuple[str, float, float]]:
    """Large jobs, each of a kind of its own, wait for nodes that are full of small ones, while younger small ones want
    every device that becomes free. Small ones run for up to `LONGEST`, half of them for all of it.

    Returns:
        Job, seconds that it waited, and its bound: its own period and those of the jobs before it.
    """
    closed = [replace(node, why_closed="silent") if number == NODES - 1 else node for number, node in enumerate(nodes)]
    requested = {
        "8 x 8": (ResourcesSpec(nodes=8, min_nodes=8), False),
        "4 x 8 in a zone": (ResourcesSpec(nodes=4, min_nodes=4, labels={"zone": "b"}), False),
        "all nodes x 8, one node gone, fewer will do": (ResourcesSpec(nodes=NODES, min_nodes=NODES - 1), True),
        "1 x 8": (ResourcesSpec(), False),
    }
    large = [
        Queued(f"large-{age}", "cuda", age, ranks=resources.nodes * GPUS, tried=tried, demand=text)
        for age, (resources, tried) in enumerate(requested.values())
        for text in [Demand(resources=resources).text()]
    ]
    small = (Queued(f"small-{age}", "cuda", age, demand=Demand().text()) for age in itertools.count(len(large)))
    running: dict[str, tuple[str, float]] = {}
    placed: dict[str, float] = {}
    now, limit = 0.0, PATIENCE + (len(large) + 1) * LONGEST
    for node in closed[:-1]:
        running |= {node.place(device): (next(small).job_uuid, rng.uniform(0, LONGEST)) for device in node.devices}
    while len(placed) < len(large) and now < limit:
        running = {place_: one for place_, one in running.items() if one[1] > now}
        free = sum(node.place(device) not in running for node in closed[:-1] for device in node.devices)
        waiting = [job for job in large if job.job_uuid not in placed]
        waiting += [job._replace(scheduled_at=now) for job in itertools.islice(small, free)]
        for name, places in place(waiting, closed, running, now).items():
            if name.startswith("large"):
                placed[name] = now
            seconds = rng.choice((LONGEST, rng.uniform(0, LONGEST)))
            running |= dict.fromkeys(places, (name, now + seconds))
        now += POLL_INTERVAL
    return [
        (what, placed.get(job.job_uuid, math.inf), PATIENCE + turn * (LONGEST + POLL_INTERVAL) + POLL_INTERVAL)
        for turn, (what, job) in enumerate(zip(requested, large, strict=True), 1)
    ]


CORES = 96
"""Cores of each machine whose CPU jobs share."""


def shared(rng: random.Random) -> tuple[list[tuple[str, float, float]], list[float]]:
    """Jobs that need a whole CPU, or nearly, among small ones with reserved cores that never end coming.

    Returns:
        For each such job, what it is, how long it waited and how long it may; and the seconds of each decision.
    """
    nodes = [
        Node(f"cpu-{number}", ("cpu",), f"machine-{number}", head=number == 0, cpus=CORES) for number in range(NODES)
    ]
    large = {"a whole CPU": None, f"{CORES} of {CORES} cores": CORES, "64 cores": 64}
    waiting = {what: _with_cores(what, cores, age) for age, (what, cores) in enumerate(large.items())}
    running: dict[str, tuple[str, ...]] = {}
    ends: list[tuple[float, str]] = []
    placed: dict[str, float] = {}
    decisions: list[float] = []
    now, age, limit = 0.0, len(large), PATIENCE + (len(large) + 1) * LONGEST
    # All machines are full of small jobs when the large ones come.
    for node in nodes:
        for core in range(CORES):
            name = f"first {node.name} {core}"
            running[name] = (node.place(f"cpu:{core}"),)
            heapq.heappush(ends, (rng.uniform(0, LONGEST), name))
    while len(placed) < len(large) and now < limit:
        while ends and ends[0][0] <= now:
            del running[heapq.heappop(ends)[1]]
        while len(waiting) < JOBS:
            waiting[f"small-{age}"] = _with_cores(f"small-{age}", rng.choice((1, 1, 2, 4, 8)), age)
            age += 1
        taken = {place_: name for name, places in running.items() for place_ in places}
        begin = time.thread_time()
        chosen = place(waiting.values(), nodes, taken, now)
        decisions.append(time.thread_time() - begin)
        for name, places in chosen.items():
            assert taken.keys().isdisjoint(places)
            taken |= dict.fromkeys(places, name)
            running[name] = places
            del waiting[name]
            heapq.heappush(ends, (now + rng.uniform(60, LONGEST), name))
            if name in large:
                placed[name] = now
        now += POLL_INTERVAL
    bounds = {what: PATIENCE + number * LONGEST for number, what in enumerate(large, 1)}
    return [(what, placed.get(what, math.inf), bounds[what]) for what in large], decisions


def _with_cores(name: str, cores: int | None, age: int) -> Queued:
    return Queued(name, "cpu", age, demand=Demand(resources=ResourcesSpec(reserve_cpus=cores)).text())


def print_waits(waited: Mapping[tuple[int, int], Sequence[float]]) -> None:
    """How long jobs of each size waited."""
    print("nodes x GPUs   jobs   waited: median   longest (s)")
    for (count, gpus), seconds in sorted(waited.items()):
        print(f"{count:5} x {gpus:<4} {len(seconds):8} {statistics.median(seconds):15.0f} {max(seconds):12.0f}")


def main() -> int:
    """Returns the exit status."""
    rng = random.Random(SEED)
    nodes, coming = machines(), jobs(rng)[::-1]
    by_name = {job.queued.job_uuid: job for job in coming}
    waiting: dict[str, Queued] = {}
    running: dict[str, tuple[str, ...]] = {}
    ends: list[tuple[float, str]] = []
    decisions: list[float] = []
    reasons: list[float] = []
    waited: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    now = used = offered = 0.0
    while coming or waiting or ends:
        while coming and coming[-1].queued.scheduled_at <= now:
            job = coming.pop()
            waiting[job.queued.job_uuid] = job.queued
        while ends and ends[0][0] <= now:
            del running[heapq.heappop(ends)[1]]
        taken = {place_: name for name, places in running.items() for place_ in places}
        begin = time.thread_time()
        chosen = place(waiting.values(), nodes, taken, now)
        decisions.append(time.thread_time() - begin)
        for name, places in chosen.items():
            job = by_name[name]
            assert len(places) == job.queued.ranks
            assert taken.keys().isdisjoint(places)
            running[name] = places
            taken |= dict.fromkeys(places, name)
            waited[job.size].append(now - waiting.pop(name).scheduled_at)
            heapq.heappush(ends, (now + job.seconds, name))
        kinds = {(job.device, job.ranks, job.demand): job for job in waiting.values()}
        if len(decisions) % 20 == 1:
            begin = time.thread_time()
            for kind in kinds.values():
                why_waits(kind, taken, nodes)
            reasons.append(time.thread_time() - begin)
        following = [coming[-1].queued.scheduled_at] if coming else []
        following += [ends[0][0]] if ends else []
        if not following:
            break
        passed = max(min(following) - now, POLL_INTERVAL)
        if len(waiting) > 20:
            used, offered = used + passed * len(taken), offered + passed * NODES * GPUS
        now += passed
    print(f"{NODES} nodes x {GPUS} GPUs, {JOBS} jobs, {len(decisions)} decisions, {now / 3600:.1f} h simulated")
    print(f"a decision    median {1e3 * statistics.median(decisions):6.2f} ms   longest {1e3 * max(decisions):6.2f} ms")
    print(f"its reasons   median {1e3 * statistics.median(reasons):6.2f} ms   longest {1e3 * max(reasons):6.2f} ms")
    print(f"GPUs in use while more than 20 jobs waited: {100 * used / offered:.1f} %")
    print(f"never placed: {len(waiting)}; patience {PATIENCE:.0f} s")
    print_waits(waited)
    print(f"among small jobs of up to {LONGEST:.0f} s that never end coming   waited   may wait (s)")
    late, large = False, crowded(rng, nodes)
    found, of_cores = shared(rng)
    for what, took, bound in (*large, *found):
        late |= took > bound
        print(f"{what:50} {took:15.0f} {bound:14.0f}{'   TOO LONG' if took > bound else ''}")
    print(
        f"{NODES} CPUs x {CORES} cores, {JOBS} jobs that reserve some: a decision "
        f"median {1e3 * statistics.median(of_cores):.2f} ms   longest {1e3 * max(of_cores):.2f} ms"
    )
    return int(bool(waiting) or late or 1e3 * max(*decisions, *reasons, *of_cores) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
