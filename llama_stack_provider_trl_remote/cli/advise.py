"""`nodes advise`: whether training on several nodes would help, before a second machine is set up."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import struct
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.parallel import Exchange, advise
from llama_stack_provider_trl.system.hub_cache import find_snapshot

from ..plots.points import PlotPoint, fetch_points
from .terminal import emit

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import ShardingStrategy

    from ..client import ServiceClient

_MOST_HEADER = 100 << 20
"""Bytes of the header of a safetensors file, as the library itself limits it."""


@dataclass(frozen=True)
class _Rules:
    """What the exchange of a step follows from. The names are those of the options, the values their defaults."""

    nodes: int = 2
    sharding: ShardingStrategy = "FULL_SHARD"
    accumulation: int = 1
    gradient_sync: str = "step"
    ranks_per_node: int = 1
    reference: bool = False
    averaging_interval: int = 1
    gpus: bool = False
    fp32: bool = True
    machines: int | None = None
    trainable: int | None = None
    """None: all parameters."""

    def exchange(self, total: int) -> Exchange:
        return Exchange(
            nodes=self.nodes,
            trainable=total if self.trainable is None else self.trainable,
            total=total,
            reference=total if self.reference else 0,
            ranks_per_node=self.ranks_per_node,
            strategy=self.sharding,
            micro_steps=self.accumulation,
            keeps_whole_gradients=self.gradient_sync == "step",
            interval=self.averaging_interval,
            on_cpu=not self.gpus,
            weight_bytes=4 if self.fp32 else 2,
            machines=self.machines,
        )


class _Measured(NamedTuple):
    """What a job that has trained has of the advice."""

    rules: _Rules = _Rules()
    total: int | None = None
    """Parameters of its model."""
    step_seconds: float | None = None
    """Of a step on one node."""
    mbit_per_s: float | None = None
    cluster: _Cluster | None = None


class _Cluster(NamedTuple):
    """What the placement counts the machines of a job by."""

    rows: Sequence[dict[str, Any]]
    """Of `GET /v1/nodes`."""
    resources: dict[str, Any]
    """What the job requires of each node."""
    model: str
    kind: str
    """Of its devices."""

    def machines(self, nodes: int, ranks_per_node: int) -> int:
        """The number of these nodes that it can use."""
        from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
        from llama_stack_provider_trl.jobs.decisions.placement import Node, side_by_side, unsuited
        from llama_stack_provider_trl.specs.job import ResourcesSpec

        resources = ResourcesSpec.model_validate({**self.resources, "nodes": nodes, "min_nodes": nodes})
        demand = Demand(resources=resources, model=self.model if resources.model_present else None)
        job = Queued("", self.kind, 0, ranks=nodes * ranks_per_node, demand=demand.text())
        known = [
            Node(
                row["node"],
                tuple(row["devices"]),
                row["machine"] or "",
                head=row["head"],
                joins=row["agent"],
                memory=row["memory_of_devices"],
                cpus=row["cpus"],
                memory_bytes=row["memory_bytes"],
                labels=row["labels"],
                models=frozenset(row["models"]),
            )
            for row in self.rows
        ]
        return side_by_side(job, [node for node in known if not unsuited(job, node, self.kind)], self.kind)


async def print_advice(client: ServiceClient, options: Namespace) -> int:
    """Print the verdict with its reason. Exit status 0: it would help, 1: it would not."""
    of_job = _Measured() if options.job is None else await _measured(client, options.job)
    given = {name: getattr(options, name, None) for name in _Rules.__dataclass_fields__}
    if options.gpus is not None and options.job is None:
        given["fp32"] = not options.gpus
    rules = replace(of_job.rules, **{name: value for name, value in given.items() if value is not None})
    if of_job.cluster is not None and rules.machines is None and not rules.gpus:
        usable = of_job.cluster.machines(rules.nodes, rules.ranks_per_node)
        rules = replace(rules, machines=usable if usable < rules.nodes else None)
    mbit_per_s = options.mbit_per_s or of_job.mbit_per_s
    step_seconds = options.step_seconds or of_job.step_seconds
    total = of_job.total if options.model is None else parameters_of(options.model)
    if total is None:
        raise InvalidRequest("--model", None, "name it, or with --job a job that has trained.")
    if step_seconds is None:
        raise InvalidRequest("--step-seconds", None, "name it, as measured on one node, or with --job a job that has.")
    if mbit_per_s is None and rules.machines != 1:
        raise InvalidRequest("--mbit-per-s", None, "name it, or with --job a job that trained over these nodes.")
    if rules.machines is not None and rules.machines > rules.nodes:
        raise InvalidRequest("--machines", rules.machines, f"expected at most --nodes, {rules.nodes}.")
    if rules.trainable is not None and rules.trainable > total:
        raise InvalidRequest("--trainable", rules.trainable, f"the model has {total} parameters.")
    if rules.sharding == "HYBRID_SHARD" and rules.ranks_per_node == 1:
        raise InvalidRequest("--sharding", rules.sharding, "it shards within a node: name --ranks-per-node.")
    exchange = rules.exchange(total)
    # Without a link between machines its speed decides nothing: 10 Gbit/s is less than memory has.
    found = advise(exchange, step_seconds, mbit_per_s or 10_000.0)
    answer: dict[str, Any] = {
        "helps": found.helps,
        "speedup": round(found.speedup, 3),
        "step_seconds": round(found.step_seconds, 3),
        "bytes_per_node": round(exchange.bytes_per_node),
        "mbit_per_s": mbit_per_s,
        "reason": found.reason,
    }
    emit(options, answer, found.reason)
    return 0 if found.helps else 1


async def _measured(client: ServiceClient, job_uuid: str) -> _Measured:
    """The rules of a job, its steps as they are on one node, and its link. Raises InvalidRequest: it has not
    trained."""
    found = (await client.status(job_uuid)).get("resources_allocated") or {}
    config, progress = found.get("effective_config") or {}, found.get("progress") or {}
    recipe = config.get("recipe") or {}
    total, trainable = recipe.get("total_parameters"), recipe.get("trainable_parameters")
    if not total or not trainable:
        raise InvalidRequest("--job", job_uuid, "it has not trained: expected a job that has done steps.")
    devices = (found.get("device") or "").split(",")
    nodes = len({place.rpartition("/")[0] for place in devices})
    kind = devices[0].rpartition("/")[2].partition(":")[0]
    effective = recipe.get("effective") or {}
    own = _Rules(
        nodes=nodes,
        sharding=(config.get("sharding") or {}).get("strategy", _Rules.sharding),
        accumulation=config["gradient_accumulation_steps"],
        gradient_sync=effective.get("gradient_sync") or "step",
        ranks_per_node=max(1, config["ranks"] // ((config.get("resources") or {}).get("nodes") or 1)),
        reference=bool((effective.get("sharding") or {}).get("reference")),
        averaging_interval=(config.get("averaging") or {}).get("interval", 1),
        gpus=kind == "cuda",
        fp32=config.get("dtype") == "fp32",
        trainable=None if trainable == total else trainable,
    )
    rows = (await client.get_all("/v1/nodes"))["data"]
    cluster = _Cluster(rows, config.get("resources") or {}, config.get("model") or "", kind)
    link = progress.get("link_mbit_per_s")
    step_seconds = _median_step([point for point in await fetch_points(client, job_uuid) if point.kind == "train"])
    if nodes > 1 and step_seconds is not None:
        exchange = own.exchange(total)
        alone = step_seconds if exchange.interval > 1 else exchange.alone(step_seconds, link) if link else None
        return _Measured(own, total, alone, link, cluster)
    return _Measured(replace(own, nodes=_Rules.nodes), total, step_seconds, link, cluster)


def _median_step(points: Sequence[PlotPoint]) -> float | None:
    """Seconds of a step, from the times of metric points; None: they are too few."""
    found = [
        (after.time - before.time) / (after.step - before.step)
        for before, after in pairwise(points)
        if after.step > before.step and after.time > before.time
    ]
    return statistics.median(found) if found else None


def parameters_of(model: str) -> int:
    """Parameters of a model: a number such as 100M, a directory, or an id in this machine's cache. Raises
    InvalidRequest: there is no such model here, or it is not in safetensors."""
    number = parameter_count(model)
    if number is not None:
        return number
    directory = Path(model).expanduser()
    if not directory.is_dir():
        cached = find_snapshot(os.environ, model, None)
        if cached is None:
            hint = "expected a directory, an id in this machine's cache, or a number of parameters such as 100M."
            raise InvalidRequest("--model", model, hint)
        directory = cached.directory
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidRequest("--model", model, f"{directory} has no .safetensors file: name its parameters, as 100M.")
    return sum(map(_elements, files))


def parameter_count(text: str) -> int | None:
    """A number of parameters with a unit, such as 20M or 1.5B; None: the text is something else."""
    number = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([KMBT])", text)
    return round(float(number[1]) * 10 ** {"K": 3, "M": 6, "B": 9, "T": 12}[number[2]]) if number else None


def _elements(file: Path) -> int:
    try:
        with open(file, "rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            if size > _MOST_HEADER:
                raise ValueError(size)
            header = json.loads(source.read(size))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (struct.error, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest("--model", str(file), "it is no safetensors file: download it again.") from error
