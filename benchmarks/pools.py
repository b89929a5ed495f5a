"""Pools, simulated: 500 nodes of two pools, 5,000 jobs, nodes lost at random, on a clock of its own.

    python -m benchmarks.pools

Jobs arrive faster than the nodes can serve them, then no more come. A pool takes minutes to give a node. At times a
node is lost with all that runs on it, and its allocation with it. Prints, as a table: how long a decision took, how
much of the time of the devices that pools had given was used while jobs waited, how long jobs waited by size, and how
many nodes were left at the end. Ends with 1 where a job was never run, less than 85 % was used, a decision over the
whole queue took longer than 500 ms of CPU time, or an allocation was left. Takes some minutes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace

from benchmarks.placement import Job, print_waits
from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
from llama_stack_provider_trl.jobs.decisions.placement import Node, place
from llama_stack_provider_trl.jobs.decisions.pools import Allocation, AllocationState, PoolState, decide, node_names
from llama_stack_provider_trl.specs.job import ResourcesSpec

JOBS, SEED, GPUS = 5000, 1, 8
LIMIT_MS, LEAST_USED = 500.0, 85.0
# nodes, GPUs per node, share of the jobs
SIZES = ((1, 1, 0.5), (1, 2, 0.15), (1, 4, 0.12), (1, 8, 0.12), (2, 8, 0.06), (4, 8, 0.03), (16, 8, 0.02))
MEAN_SECONDS, LONGEST = 1800.0, 4 * 3600.0
PASS = 15.0
"""Seconds between two passes."""
GRANT = (30.0, 240.0)
"""Seconds from asking to joined nodes."""
LOST_HOURS = 200.0
"""Mean hours until a node is lost."""
MOST_NODES = {"ray": 350, "slurm": 150}
HEAD = Node("head", ("cpu",), "head", head=True, cpus=8)


def shape(memory_gb: int) -> Node:
    devices = tuple(f"cuda:{gpu}" for gpu in range(GPUS))
    return Node("", devices, cpus=96, memory_bytes=512 << 30, memory=dict.fromkeys(devices, memory_gb << 30))


POOLS = (
    PoolState("ray", shape(80), MOST_NODES["ray"], idle_seconds=300),
    PoolState("slurm", shape(40), MOST_NODES["slurm"], idle_seconds=300),
)
SHAPES = {pool.name: pool.shape for pool in POOLS}


def jobs(rng: random.Random) -> list[Job]:
    """In the order in which they arrive."""
    demand = sum(nodes * gpus * share for nodes, gpus, share in SIZES) * MEAN_SECONDS
    between = demand / (sum(MOST_NODES.values()) * GPUS) * 0.8
    found, now = [], 0.0
    for age in range(JOBS):
        now += rng.expovariate(1 / between)
        (nodes, gpus, _), *_ = rng.choices(SIZES, [share for *_, share in SIZES])
        requested = ResourcesSpec(nodes=nodes, min_nodes=nodes, gpu_memory_gb=70 if rng.random() < 0.3 else None)
        text = Demand(resources=requested).text()
        priority = rng.choices((-1, 0, 1), (0.1, 0.8, 0.1))[0]
        queued = Queued(f"job-{age}", "cuda", age, priority, "", nodes * gpus, now, text)
        found.append(Job(queued, min(rng.expovariate(1 / MEAN_SECONDS), LONGEST), (nodes, gpus)))
    return found


class Simulation:
    """Jobs, pools and what they have given, at a time."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        self.coming = jobs(self.rng)[::-1]
        self.by_name = {job.queued.job_uuid: job for job in self.coming}
        self.waiting: dict[str, Queued] = {}
        self.running: dict[str, tuple[str, ...]] = {}
        self.ends: list[tuple[float, str, int]] = []
        self.tries: defaultdict[str, int] = defaultdict(int)
        self.allocations: dict[str, Allocation] = {}
        self.ready_at: dict[str, float] = {}
        self.lost_at: dict[str, float] = {}
        self.unused_since: dict[str, float] = {}
        self.waited: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.decisions: list[float] = []
        self.names = itertools.count()
        self.now = self.used = self.offered = 0.0
        self.most_nodes = self.lost = 0

    def nodes(self) -> list[Node]:
        granted = [one for one in self.allocations.values() if one.state is AllocationState.granted]
        return [
            HEAD,
            *(replace(SHAPES[one.pool], name=name, machine=name) for one in granted for name in node_names(one)),
        ]

    def step(self) -> None:
        """A pass of the supervisor, and what happened before it."""
        while self.coming and self.coming[-1].queued.scheduled_at <= self.now:
            job = self.coming.pop()
            self.waiting[job.queued.job_uuid] = job.queued
        while self.ends and self.ends[0][0] <= self.now:
            _, name, tried = heapq.heappop(self.ends)
            if self.tries[name] == tried:  # else its nodes were lost
                self.running.pop(name, None)
        self._lose()
        for name, one in self.allocations.items():
            if one.state is AllocationState.requested and self.ready_at[name] <= self.now:
                self.allocations[name] = one._replace(state=AllocationState.granted, granted_at=self.now)
                self.lost_at[name] = self.now + self.rng.expovariate(one.nodes / (LOST_HOURS * 3600))
        nodes = self.nodes()
        self._place(nodes)
        holders = self._holders()
        begin = time.thread_time()
        plan = decide(
            self.waiting.values(), nodes, holders, self.allocations.values(), POOLS, self.unused_since, self.now
        )
        self.decisions.append(time.thread_time() - begin)
        self.unused_since = plan.unused_since
        for name in plan.returns:
            assert not {place_.rpartition("/")[0] for place_ in holders} & set(node_names(self.allocations[name]))
            del self.allocations[name]
        for ask in plan.asks:
            name = f"{next(self.names):06d}"
            self.allocations[name] = Allocation(
                name, ask.pool, ask.nodes, AllocationState.requested, ask.job_uuid, self.now
            )
            self.ready_at[name] = self.now + self.rng.uniform(*GRANT)
        for pool, most in MOST_NODES.items():
            assert sum(one.nodes for one in self.allocations.values() if one.pool == pool) <= most
        self.most_nodes = max(self.most_nodes, len(nodes) - 1)
        if self.waiting:
            self.used += PASS * len(holders)
            self.offered += PASS * GPUS * (len(nodes) - 1)
        self.now += PASS

    def _holders(self) -> dict[str, str]:
        return {place_: name for name, places in self.running.items() for place_ in places}

    def _place(self, nodes: list[Node]) -> None:
        for name, places in place(self.waiting.values(), nodes, self._holders(), self.now).items():
            queued = self.waiting.pop(name)
            job = self.by_name[name]
            self.running[name] = places
            if not self.tries[name]:
                self.waited[job.size].append(self.now - queued.scheduled_at)
            self.tries[name] += 1
            heapq.heappush(self.ends, (self.now + job.seconds, name, self.tries[name]))

    def _lose(self) -> None:
        """Machines that are gone take their allocation with them, and its jobs wait again."""
        for gone in [name for name, at in self.lost_at.items() if at <= self.now]:
            del self.lost_at[gone]
            if (one := self.allocations.pop(gone, None)) is None:
                continue
            self.lost += 1
            names = set(node_names(one))
            for name, places in list(self.running.items()):
                if names & {place_.rpartition("/")[0] for place_ in places}:
                    del self.running[name]
                    self.tries[name] += 1
                    self.waiting[name] = self.by_name[name].queued._replace(tried=True)


def main() -> int:
    """Returns the exit status."""
    world = Simulation()
    while world.coming or world.waiting or world.running or world.allocations:
        if world.now > 7 * 24 * 3600:
            break
        world.step()
    used = 100 * world.used / world.offered
    print(f"{JOBS} jobs, up to {world.most_nodes} nodes x {GPUS} GPUs, {world.lost} allocations lost, ", end="")
    print(f"{world.now / 3600:.1f} h simulated, {len(world.decisions)} decisions")
    longest = 1e3 * max(world.decisions)
    print(f"a decision    median {1e3 * statistics.median(world.decisions):6.1f} ms   longest {longest:6.1f} ms")
    print(f"GPUs in use while jobs waited: {used:.1f} % of those that pools had given")
    print(f"never run: {len(world.waiting) + len(world.running)}; allocations left: {len(world.allocations)}")
    print_waits(world.waited)
    failed = world.waiting or world.running or world.allocations or used < LEAST_USED or longest > LIMIT_MS
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
