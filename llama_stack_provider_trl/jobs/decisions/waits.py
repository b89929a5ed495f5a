"""The reasons for which jobs wait for devices, as their status reports them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .cores import CPU, Held, listed
from .demands import Queued, demand
from .placement import (
    Node,
    Obtainable,
    auto_kind,
    devices_needed,
    fewest_machines,
    kind_of,
    nodes_wanted,
    obtainable_for,
    offers_of,
    suitable,
    unsuited,
    unusable_slices,
    usable_devices,
)


def why_waits(
    job: Queued, holders: Mapping[str, str], nodes: Sequence[Node], obtainable: Sequence[Obtainable] = ()
) -> str:
    """The reason for which a job found no devices, for its status.

    Args:
        holders: place -> job_uuid of the job that has it.
    """
    if ((len(nodes) > 1 or obtainable) and not demand(job.demand).home) or nodes_wanted(job) > 1:
        return _why_waits_for_nodes(job, holders, nodes, obtainable)
    node = nodes[0]
    devices = node.devices
    fitting, needed, taken = usable_devices(job, node, None), devices_needed(job, devices), Held(holders)
    if node.why_closed:
        return f"waiting for this node, which is {node.why_closed}"
    if not suitable(job.device, devices):
        return f"waiting for device {job.device}, which this node does not have: it has {', '.join(devices)}"
    if len(fitting) < needed:
        if slices := unusable_slices(job, node, None):
            return f"waiting for {needed} whole GPUs; this node has {len(fitting)}, and {slices}"
        return f"waiting for {needed} devices; this node has {len(fitting)} that serve: {', '.join(fitting)}"
    if not demand(job.demand).home and unsuited(job, node, kind_of(devices[0])):
        return _why_waits_for_nodes(job, holders, nodes, obtainable)
    if wanted := demand(job.demand).resources.reserve_cpus:
        return f"waiting for cores: {taken.found(CPU, wanted, node.cpus)}"
    held = ", ".join(f"{device} (held by {listed(jobs)})" for device in fitting if (jobs := taken.of(device)))
    if needed > 1:
        return f"waiting for {needed} devices; held: {held or 'none, but older jobs come first'}"
    return f"waiting for {held}" if held else ""


def _why_waits_for_nodes(
    job: Queued, holders: Mapping[str, str], nodes: Sequence[Node], obtainable: Sequence[Obtainable]
) -> str:
    auto = auto_kind(job, nodes, obtainable)
    why_not = {node.name: unsuited(job, node, auto) for node in nodes}
    fitting = [node for node in nodes if not why_not[node.name]]
    count = fewest_machines(job, fitting, auto, obtainable)
    machines = {node.where for node in fitting}
    closed = [f"{node.name} is {node.why_closed}" for node in fitting if node.why_closed]
    others = [f"{name} {why}" for name, why in why_not.items() if why]
    taken, held = Held(holders), []
    for offer in offers_of(job, fitting, auto):
        if offer.cores:
            held.append(f"{offer.node.name}: {taken.found(offer.node.place(CPU), offer.needed, offer.node.cpus)}")
        else:
            places = map(offer.node.place, offer.devices)
            held += [f"{place} (held by {listed(jobs)})" for place in places if (jobs := taken.of(place))]
    what = f"{count} nodes" if count > 1 else "a node"
    if len(machines) < count:
        there = f"{len(machines)} of {len(nodes)} can serve it"
        if count <= len(fitting) and (joined := [node.name for node in fitting if node.is_new]):
            return f"waiting for {what}: {there} on machines of their own, and others may follow {joined[-1]}"
        return (
            f"waiting for {what}: {there}{_listed(others)}{_listed(closed)}{_for_pools(job, nodes, obtainable, auto)}"
        )
    if held or closed:
        # Jobs of one kind share a detail: the refusals of one job keep it apart from the others.
        refused = [f"{node.name} {why_not[node.name]}" for node in nodes if job.job_uuid in (node.refused or ())]
        return f"waiting for {what}{_listed(closed)}{_listed(held)}{_listed(refused)}"
    return f"waiting for {what}: older jobs come first" if count > 1 else ""


def _for_pools(job: Queued, nodes: Sequence[Node], obtainable: Iterable[Obtainable], auto: str) -> str:
    """The pools whose devices a job on `auto` waits for though its own machines have others; empty: none."""
    own = kind_of(nodes[0].devices[0])
    pools = [one.pool for one in obtainable_for(job, obtainable, auto)]
    if job.device != "auto" or auto == own or not pools:
        return ""
    return f"; device auto waits for pool {' or '.join(pools)}: send device {own} to train without it"


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return f"; {', '.join(items[:5])}{more}" if items else ""
