"""Nodes and demands for the tests of placement."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.specs.job import ResourcesSpec

GPUS = ("cuda:0", "cuda:1")


GIB = 1 << 30


def node(name: str, *devices: str, **changes: Any) -> Node:
    return Node(name, devices or ("cpu",), **changes)


HEAD = node("head", head=True, machine="m")


FOUR = tuple(f"cuda:{number}" for number in range(4))


def four_gpus(*names: str) -> list[Node]:
    return [node(name, *FOUR, head=name == "head") for name in names]


def wants(age: int = 1, *, device: str = "auto", nodes: int = 1, per_node: int = 1, **more: Any) -> Queued:
    fields = {name: more.pop(name) for name in ("model", "prefers", "home") if name in more}
    queued = {name: more.pop(name) for name in Queued._fields if name in more}
    resources = ResourcesSpec(nodes=nodes, min_nodes=more.pop("min_nodes", nodes), **more)
    text = Demand(resources=resources, **fields).text()
    return Queued(f"job-{age}", device, age, ranks=nodes * per_node, demand=text, **queued)
