"""Machines of a Ray cluster, through its Jobs REST API. Nothing here imports ray.

An order is a Ray job, whose submission id has the id of the order: the same order is one job however often it is
requested. See `ray_bundles` for what it runs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from .base import AgentStart, Given, PoolOrder, Seen
from .ray_bundles import STARTED
from .ray_jobs import RayJobs

_MODULE = "llama_stack_provider_trl_remote.nodes.pools.ray_bundles"


class RayPool:
    """A Ray cluster.

    Args:
        python: an interpreter on its nodes that has ray and this package.
        bundle: resources of each machine, such as {"CPU": 8, "GPU": 8}.
    """

    def __init__(self, jobs: RayJobs, agent: AgentStart, python: str, bundle: Mapping[str, float]) -> None:
        self._jobs, self._agent, self._python, self._bundle = jobs, agent, python, bundle

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"trl-{request_id}"

    def request(self, order: PoolOrder) -> None:
        if self._jobs.get(order.handle) is not None:
            return
        agent = self._agent
        order_text = json.dumps(
            {
                "names": list(order.names),
                "bundle": dict(self._bundle),
                "service_url": agent.service_url,
                "token_file": agent.token_file,
                "data_dir": agent.data_dir,
                "labels": dict(agent.labels),
            }
        )
        entrypoint = f"{shlex.quote(self._python)} -m {_MODULE} {shlex.quote(order_text)}"
        self._jobs.submit(order.handle, entrypoint, {"request": order.request_id})

    def observe(self, order: PoolOrder) -> Seen:
        job = self._jobs.get(order.handle)
        if job is None:
            return Seen(Given.nothing)
        status = str(job.get("status"))
        if status == "PENDING":
            return Seen(Given.pending, f"Ray job {order.handle} is PENDING: {job.get('message') or 'it has not begun'}")
        if status == "RUNNING":
            lines = self._jobs.lines(order.handle)
            if STARTED in lines:
                return Seen(Given.all, f"Ray job {order.handle}")
            return Seen(Given.pending, lines[-1] if lines else f"Ray job {order.handle} starts")
        return Seen(Given.nothing, self._jobs.why_ended(order.handle, job))

    def release(self, order: PoolOrder) -> None:
        self._jobs.stop(order.handle)
