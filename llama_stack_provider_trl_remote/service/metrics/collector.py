"""Metrics of jobs, nodes and devices, computed from the job store at each scrape.

Nothing is counted in memory, so no restart of the service lowers a counter. Label values are states, reasons and names
of a fixed list, of the nodes, and of the jobs that run: ended jobs have no series.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.jobs.decisions.cores import Held, slot_of
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.monitoring.totals import (
    ATTEMPTS,
    BOUNDS,
    CHECKPOINT,
    FINISHED,
    TOKENS,
    WAIT,
    WEBHOOKS,
    Labels,
    Running,
)
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.gpus import uuids_of

from ..cluster.membership import Cluster, NodeCondition
from .latencies import BOUNDS as LATENCIES
from .latencies import Latencies

PREFIX = "trl_"
"""Of the names of all metrics of our own."""
_JOB = "job_uuid"
"""Label that names a job. Not `job`: Prometheus gives that name to what it scrapes."""
_DEVICE = ("node", "device", "UUID")
"""Labels that name a device. `UUID` is spelled as the exporter of NVIDIA's DCGM does, so that series join."""
_SIZES: Sequence[tuple[str, str, str]] = (
    ("loss", "loss", "Training loss at the last metric point of a running job."),
    ("tokens_per_second", "tokens_per_second", "Tokens without padding per second of a running job, of all its ranks."),
    ("epoch", "epochs", "Epochs that a running job has done, as a fraction."),
)
"""Field of `ProgressValues`, name of its metric after `trl_job_`, description."""


def registry_of(store: Store, cluster: Cluster, latencies: Latencies) -> CollectorRegistry:
    """Everything that a scrape of a service reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(store, cluster))
    ProcessCollector(registry=registry)
    registry.register(_LatencyCollector(latencies))
    return registry


class _LatencyCollector(Collector):
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        histogram = HistogramMetricFamily(
            f"{PREFIX}http_request_duration_seconds",
            "Time until the answer to a call begins; polls of agents wait for their orders.",
            labels=["route", "method", "status"],
        )
        names = [str(bound) if bound < float("inf") else "+Inf" for bound in LATENCIES]
        for found in self._latencies.read():
            histogram.add_metric(found.labels, list(zip(names, found.counts, strict=True)), found.seconds)
        yield histogram


class StoreCollector(Collector):
    """Collects from the store and the cluster of a service.

    `collect` may raise StoreError.
    """

    def __init__(self, store: Store, cluster: Cluster) -> None:
        self._store = store
        self._cluster = cluster
        self._uuids: Mapping[str, str] | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry would else collect once when this is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._store.snapshot():
            states, totals = self._store.count(), self._store.totals.all()
            running, holders = self._store.totals.running(), self._store.holders()
            conditions = self._cluster.conditions()
            nodes = self._cluster.nodes()
            waiting = self._store.webhooks.waiting()
        yield _gauge("build_info", "The version of the service.", ["version"], {(__version__,): 1})
        yield _gauge("jobs", "Jobs by state.", ["state"], {(state,): states.get(state, 0) for state in JobState})
        yield from _totals(totals)
        yield _gauge("webhooks_waiting", "Webhooks that have not been delivered.", [], {(): waiting})
        yield from _of_running(running)
        found = Counter(conditions.values())
        yield _gauge(
            "nodes",
            "Machines by what they can do: `open` takes jobs.",
            ["state"],
            {(state,): found[state] for state in get_args(NodeCondition)},
        )
        yield from self._devices(nodes, holders, running)

    def _devices(
        self, nodes: Sequence[Node], holders: Mapping[str, str], running: Sequence[Running]
    ) -> Iterator[Metric]:
        """How many devices are free, and what each is."""
        counts = dict.fromkeys(("free", "used", "closed"), 0)
        names: dict[str, Labels] = {}
        taken = Held(holders)
        for node in nodes:
            for device in node.devices:
                place = node.place(device)
                counts["used" if taken.of(place) else "closed" if node.why_closed else "free"] += 1
                names[place] = (node.name, device, self._uuid(node, device))
        yield _gauge(
            "devices",
            "Devices by state. closed: without a job, on a machine that takes none.",
            ["state"],
            {(state,): count for state, count in counts.items()},
        )
        yield _gauge("device_info", "The devices of all machines.", [*_DEVICE], dict.fromkeys(names.values(), 1))
        slots = {job.job_uuid: {slot_of(place) for place in job.places} for job in running}
        of_jobs = {(job_uuid, *names[slot]): 1 for job_uuid, found in slots.items() for slot in found if slot in names}
        yield _gauge("job_device_info", "The devices of running jobs.", [_JOB, *_DEVICE], of_jobs)

    def _uuid(self, node: Node, device: str) -> str:
        """Of a GPU; empty: of another device, or not known."""
        if not node.head:
            return (node.uuids or {}).get(device, "")
        if self._uuids is None:
            self._uuids = uuids_of(node.devices, os.environ)
        return self._uuids.get(device, "")


def _totals(totals: Mapping[str, Mapping[Labels, float]]) -> Iterator[Metric]:
    for name, total, text, labels in (
        ("jobs_finished", FINISHED, "Jobs that have ended.", ["algorithm", "outcome", "reason"]),
        ("attempts", ATTEMPTS, "Attempts at jobs that have ended, by why.", ["reason"]),
        ("tokens", TOKENS, "Tokens trained on; a repeated step counts once.", ["algorithm"]),
        ("webhooks", WEBHOOKS, "Webhooks that were delivered, and those that were given up.", ["outcome"]),
    ):
        counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
        for values, value in sorted(totals.get(total, {}).items()):
            counter.add_metric(values, value)
        yield counter
    for name, total, text, labels in (
        ("job_queue_wait_seconds", WAIT, "Time until the first attempt, without the wait for other jobs.", []),
        (
            "checkpoint_write_seconds",
            CHECKPOINT,
            "Time to write a checkpoint, beside training; of exports with their comparison.",
            ["kind"],
        ),
    ):
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
        found = totals.get(total, {})
        for values in sorted({key[:-1] for key in found} or ({()} if not labels else set())):
            buckets, seconds = _buckets(total, {key[-1]: value for key, value in found.items() if key[:-1] == values})
            histogram.add_metric(values, buckets, seconds)
        yield histogram


def _buckets(total: str, found: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Bounds with the number of observations up to each, and the sum of the observations."""
    counts = {float(bound): count for bound, count in found.items() if bound != "sum"}
    bounds = [*map(float, BOUNDS[total]), float("inf")]
    return [
        ("+Inf" if bound == float("inf") else str(bound), sum(count for one, count in counts.items() if one <= bound))
        for bound in bounds
    ], found.get("sum", 0.0)


def _of_running(running: Sequence[Running]) -> Iterator[Metric]:
    """Series that vanish when their job ends."""
    yield _gauge(
        "job_info", "The running jobs.", [_JOB, "algorithm"], {(job.job_uuid, job.algorithm): 1 for job in running}
    )
    yield _gauge("job_step", "Optimizer steps done.", [_JOB], {(job.job_uuid,): job.step for job in running})
    yield _gauge(
        "job_planned_steps",
        "Optimizer steps of a running job as a whole.",
        [_JOB],
        {(job.job_uuid,): job.total_steps for job in running if job.total_steps is not None},
    )
    for field, name, text in _SIZES:
        values = {(job.job_uuid,): getattr(job.values, field) for job in running}
        yield _gauge(f"job_{name}", text, [_JOB], {key: value for key, value in values.items() if value is not None})
    for field, name, text in (
        ("rank_memory_bytes", "memory_bytes", "Memory of a rank: on GPUs allocated there, else its resident set."),
        ("rank_peak_memory_bytes", "peak_memory_bytes", "Peak memory of a rank."),
    ):
        ranks = {
            (job.job_uuid, rank): value
            for job in running
            for rank, value in enumerate(getattr(job.values, field) or ())
        }
        yield _gauge(f"job_{name}", text, [_JOB, "rank"], ranks)


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[tuple[Any, ...], float | None]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        if value is not None:
            gauge.add_metric([str(part) for part in key], value)
    return gauge
