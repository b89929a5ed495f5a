"""Assigns devices of nodes to queued jobs. Pure functions, from a snapshot of queue and nodes to assignments."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ...specs.job import ResourcesSpec
from .cores import CPU, core_names, is_core
from .demands import Queued, demand


@dataclass(frozen=True)
class Node:
    """A machine as the placement sees it."""

    name: str
    devices: tuple[str, ...]
    """Devices, best first, such as ("cpu",) or ("cuda:0", "cuda:1")."""
    machine: str = ""
    """Identifier of the machine: nodes with the same one share its devices. Empty: no other node is on it."""
    head: bool = False
    """Whether it is the service's own machine, which is always the first of the nodes."""
    is_new: bool = False
    """Whether it has joined just now: others may follow it."""
    joins: bool = True
    """Whether it has an agent, and can be one of several nodes of a job."""
    why_closed: str = ""
    """The reason for taking no jobs at the moment, such as `silent since 12:00:03 UTC`; empty: it takes jobs."""
    draining: bool = False
    """Whether the jobs on it are to save and to resume on other nodes."""
    evicted: bool = False
    """Whether they do so since the node's owner uses it, and not by an order to drain it."""
    memory: Mapping[str, int] | None = None
    """Bytes per GPU, where known."""
    uuids: Mapping[str, str] | None = None
    """UUIDs of GPUs, where known; the service's own machine knows its own."""
    slices: frozenset[str] = frozenset()
    """Those of its devices that are MIG slices. NCCL does not connect them: each trains a job of one process."""
    cpus: int = 0
    """Cores. A CPU takes as many ranks of a job that may use other machines, and jobs may reserve some of them; 0:
    unknown, and it takes one rank."""
    memory_bytes: int = 0
    labels: Mapping[str, str] | None = None
    models: frozenset[str] = frozenset()
    refused: Mapping[str, str] | None = None
    """Job that it cannot start for a lasting reason -> the reason."""
    expected: Literal["", "requested", "granted"] = ""
    """What a pool has of a machine that has not joined yet; empty: it has joined."""

    def place(self, device: str) -> str:
        """The device in the form of an attempt's record."""
        return device if self.head else f"{self.name}/{device}"

    @property
    def where(self) -> str:
        """Key of a machine, the same for all nodes on it."""
        return self.machine or self.name


class Obtainable(NamedTuple):
    """Machines that a pool may give, beside those that have joined or are expected."""

    pool: str
    shape: Node
    """What each of them has."""
    nodes: int


class _Offer(NamedTuple):
    """Devices of a node for jobs of a kind, if all of them were free."""

    node: Node
    devices: Sequence[str]
    needed: int
    """Number of its devices that a job takes."""
    cores: bool = False
    """Whether these are cores of its CPU."""


Placed = dict[str, tuple[str, ...]]
_Kind = tuple[str, int, str, bool, frozenset[str]]
Offers = dict[_Kind, tuple[list[_Offer], int]]
"""Of each kind of demand: the devices that could serve it, and the number of machines that it needs to start."""
Slot = tuple[str, str]
"""A machine, and a device or core of it."""
PATIENCE = 600.0
"""Seconds for which younger jobs may take devices that an older one could use once there are enough of them."""
_KINDS = ("cuda", "mps", "cpu")
"""Kinds of devices, the best first."""
_GIB = 1 << 30


def refusing(nodes: Iterable[Node]) -> list[Node]:
    """The nodes that cannot start some jobs."""
    return [node for node in nodes if node.refused]


def wish_of(job: Queued, refuse: Iterable[Node]) -> _Kind:
    """All of a job that decides whether given devices are enough for it."""
    refused = frozenset(node.name for node in refuse if node.refused and job.job_uuid in node.refused)
    return job.device, job.ranks, job.demand, job.tried, refused


def place(
    queued: Iterable[Queued],
    nodes: Sequence[Node],
    running: Iterable[str],
    now: float = 0.0,
    obtainable: Sequence[Obtainable] = (),
    *,
    planning: bool = False,
    known: Offers | None = None,
) -> Placed:
    """Give free devices to jobs, all that a job needs or none: on GPUs one per rank, while a CPU (or mps) is one device
    for as many ranks as the node has cores. Jobs that reserve cores share a CPU. MIG slices train jobs of one process
    only. A job over several nodes gets as many devices on each, and no two nodes on one machine; where the nodes are
    fewer machines than requested, it trains on these (`side_by_side`).

    Of the nodes that would do, those come last on which an attempt of the job could not be launched; else those come
    first that have its model, then the service's own, then the one with the fewest free devices: large holes stay
    whole. No job waits for a node that it prefers. A job that finds too few devices
    does not hold up a younger one at first. Once it has waited for `PATIENCE` seconds free devices are kept for it (of
    those that ask for the same, for one job at a time), on nodes that stay the same from pass to pass (`_kept`).

    So none starves: once a job has lost its patience and no other comes before it, it waits no longer than the jobs run
    that run at that moment, as long as the nodes that it needs stay open; one that has others before it, at most as
    much for each of these. Others are the older ones of its priority and all of a higher one. Its own grows while it
    waits (`Queued.claim`), so these end: after three hours at most no job that comes later is before it.

    Expected machines come last. A job that needs some waits for them; once they are granted, the devices that it gets
    beside them are kept for it. Returns job_uuid -> places, rank 0's node first, in the order in which the jobs should
    start.

    Args:
        nodes: the service's own machine first; expected ones of pools among them.
        running: places of the jobs that have some.
        now: seconds since the epoch.
        obtainable: what pools may give: jobs wait for it rather than take fewer machines, or a worse kind of device.
        planning: treat expected machines as if they had joined.
        known: what earlier calls with the same nodes, and what pools may give, have found; is added to.
    """
    giving = Giving(nodes, running, now, obtainable, planning=planning, known=known)
    found = {job.job_uuid: giving.give(job) for job in sorted(queued, key=lambda job: job.claim(now))}
    return {job_uuid: places for job_uuid, places in found.items() if places}


class Giving:
    """Free devices, which jobs get one after the other, in the order of their claims. The arguments are `place`'s."""

    def __init__(
        self,
        nodes: Sequence[Node],
        running: Iterable[str],
        now: float,
        obtainable: Sequence[Obtainable] = (),
        *,
        planning: bool = False,
        known: Offers | None = None,
    ) -> None:
        self._nodes, self._now, self._obtainable, self._planning = nodes, now, obtainable, planning
        self._known = {} if known is None else known
        self._refuse = refusing(nodes)
        self._unserved: set[_Kind] = set()
        self._served: set[_Kind] = set()
        self.free = Free(nodes, running)
        self.compared = 0
        """Nodes that were examined for jobs."""

    def give(self, job: Queued) -> tuple[str, ...]:
        """The places at which a job starts; none: it waits, and free devices may be kept for it."""
        kind = wish_of(job, self._refuse)
        patient = self._now - job.scheduled_at <= PATIENCE
        if kind in self._unserved and (patient or kind in self._served):
            return ()  # nothing has become free since a job with the same demand found too little
        offers, fewest = self._offers(job, kind)
        self.compared += len(offers)
        gang = _gang(job, offers, fewest, self.free)
        awaited = {node.expected for node, _ in gang if node.expected and not self._planning}
        if gang and "requested" not in awaited:
            self.free.take(gang)
            return () if awaited else _places(gang)
        self._unserved.add(kind)
        if not patient:
            self._served.add(kind)
            self.free.take(_kept(offers, fewest, self.free))
        return ()

    def found(self, job: Queued, free: Free, machines: Collection[str] | None = None) -> tuple[str, ...]:
        """The places at which a job could start if these devices were free; none are taken. No node is expected.

        Args:
            machines: on which it starts if anywhere; None: any.
        """
        offers, fewest = self._offers(job, wish_of(job, self._refuse))
        if machines is not None:
            offers = [offer for offer in offers if offer.node.where in machines]
        self.compared += len(offers)
        return _places(_gang(job, offers, fewest, free))

    def take(self, places: Iterable[str]) -> None:
        """A job gets these places."""
        self.free.take_slots(self.free.slots(places))

    def change(self, free: Free) -> None:
        """Go on with these free devices: some have been given up."""
        self.free = free
        self._unserved.clear()

    def _offers(self, job: Queued, kind: _Kind) -> tuple[list[_Offer], int]:
        if kind not in self._known:
            auto = auto_kind(job, self._nodes, self._obtainable)
            suited = [node for node in self._nodes if not unsuited(job, node, auto)]
            self._known[kind] = offers_of(job, suited, auto), fewest_machines(job, suited, auto, self._obtainable)
            self.compared += len(self._nodes)
        return self._known[kind]


def is_remote(places: Sequence[str]) -> bool:
    """Whether an attempt at these places uses another machine than the service's own."""
    return any("/" in place for place in places)


def nodes_of(places: Sequence[str]) -> int:
    """The number of nodes that these places are on."""
    return len({place.rpartition("/")[0] for place in places}) or 1


def kind_of(place: str) -> str:
    """The kind of device at a place: cpu, cuda or mps."""
    return _kind(place.rpartition("/")[2])


def devices_needed(job: Queued, devices: Sequence[str]) -> int:
    """The number of a node's devices that the job takes."""
    return _needed(job, suitable(job.device, devices))


def suitable(wanted: str, devices: Sequence[str]) -> list[str]:
    """The node's devices that serve a request, best first.

    `auto` means the kind of the node's first device: a job never falls back from a busy GPU to the CPU. `cuda` means
    any of the node's cuda devices.
    """
    return list(_suitable(wanted, tuple(devices), None))


def places_for(job: Queued, nodes: Sequence[Node], obtainable: Sequence[Obtainable] = ()) -> list[str]:
    """The places that could serve a job if they were free, on the nodes that take jobs."""
    auto = auto_kind(job, nodes, obtainable)
    offers = offers_of(job, [node for node in nodes if not unsuited(job, node, auto)], auto)
    return [offer.node.place(device) for offer in offers for device in offer.devices]


def side_by_side(job: Queued, suited: Sequence[Node], auto: str, more: int = 0) -> int:
    """The number of requested nodes that a job can use. It is lower where several agents share a machine and the job
    trains on CPUs (or mps): a second process on the same machine only slows the first one down. While nodes join the
    job waits for as many machines as it requests: it does not depend on which of them is first.

    Args:
        suited: the nodes that could serve it, closed ones included, since a job waits for those.
        more: machines that pools may give for it.
    """
    wanted = nodes_wanted(job)
    usable = len({node.where for node in suited}) + more
    if not usable < wanted <= len(suited) + more or any(node.is_new for node in suited):
        return wanted
    kinds = {_kind(_suitable(job.device, node.devices, auto)[0]) for node in suited}
    return wanted if "cuda" in kinds else usable


def unsuited(job: Queued, node: Node, auto: str) -> str:
    """The reason for which a node can never serve a job; empty: it can."""
    requested, resources = demand(job.demand), demand(job.demand).resources
    if node.refused and (why := node.refused.get(job.job_uuid)):
        return f"cannot start it until its agent joins again: {why}"
    if requested.home and not node.head:
        return "the job runs on the service's machine only"
    if resources.nodes > 1 and not node.joins:
        return "has no agent"
    if not _suitable(job.device, node.devices, auto):
        return f"has no {auto if job.device == 'auto' else job.device}"
    if (resources.reserve_cpus or 0) > node.cpus:
        return f"has {node.cpus} of {resources.reserve_cpus} cores to reserve"
    fitting = usable_devices(job, node, auto)
    needed = _needed(job, fitting)
    if (slices := unusable_slices(job, node, auto)) and len(fitting) < needed:
        return f"has {len(fitting)} of {job.ranks // nodes_wanted(job)} whole GPUs, and {slices}"
    if resources.gpu_memory_gb and _kind(fitting[0]) == "cuda":
        fitting = _large(node, fitting, resources.gpu_memory_gb)
        if len(fitting) < needed:
            return f"has {len(fitting)} GPUs with {resources.gpu_memory_gb:g} GiB"
    if len(fitting) < needed:
        return f"has {len(fitting)} of {needed} devices"
    ranks = job.ranks // nodes_wanted(job)
    # The service checks its own machine's cores when it accepts a job that stays there. Its configuration may allow
    # more ranks than these.
    if not requested.home and _kind(fitting[0]) != "cuda" and ranks > max(node.cpus, 1):
        return f"has {node.cpus} CPU cores for {ranks} ranks"
    if resources.cpus and node.cpus < resources.cpus:
        return f"has {node.cpus} CPUs"
    if resources.memory_gb and node.memory_bytes < resources.memory_gb * _GIB:
        return f"has {node.memory_bytes / _GIB:.0f} GiB of memory"
    if resources.memory_gb and resources.reserve_cpus and (why := _exceeds_share(node, resources)):
        return why
    for name, value in resources.labels.items():
        if (node.labels or {}).get(name) != value:
            return f"lacks the label {name}={value}"
    if requested.model is not None and requested.model not in node.models:
        return f"has no {requested.model}"
    return ""


def _exceeds_share(node: Node, resources: ResourcesSpec) -> str:
    """The reason for which a job may not reserve so much memory; empty: it may. With each core goes its share of the
    memory, so that jobs that fit one by one fit together."""
    share = node.memory_bytes / max(node.cpus, 1)
    wanted = (resources.memory_gb or 0) * _GIB
    if wanted <= share * (resources.reserve_cpus or 0):
        return ""
    return (
        f"has {share / _GIB:.1f} GiB of memory for each of its cores: {resources.memory_gb:g} GiB go with "
        f"{math.ceil(wanted / share)} reserved cores"
    )


def usable_devices(job: Queued, node: Node, auto: str | None) -> Sequence[str]:
    """The node's devices that serve a job, best first: of several ranks, no MIG slice."""
    fitting = _suitable(job.device, node.devices, auto)
    return [device for device in fitting if device not in node.slices] if node.slices and job.ranks > 1 else fitting


def unusable_slices(job: Queued, node: Node, auto: str | None) -> str:
    """The MIG slices that a job of several ranks cannot use, for its status; empty: none."""
    count = len(_suitable(job.device, node.devices, auto)) - len(usable_devices(job, node, auto))
    return f"{count} MIG slice{'s' if count > 1 else ''}, where a job has one process" if count else ""


@lru_cache(1000)  # the same few arguments at every pass
def _suitable(wanted: str, devices: tuple[str, ...], auto: str | None) -> tuple[str, ...]:
    kind = auto or _kind(devices[0]) if wanted == "auto" else wanted
    return tuple(device for device in devices if device == kind or _kind(device) == kind)


class Free:
    """The devices, and cores, that are free, by machine: all nodes on one share them."""

    def __init__(self, nodes: Sequence[Node], running: Iterable[str]) -> None:
        self._by_name = {node.name: node for node in nodes}
        self._head = nodes[0]
        self._taken: dict[str, frozenset[str]] = {}
        """Machine -> what jobs have of it."""
        self.take_slots(self.slots(running))

    def slots(self, places: Iterable[str]) -> set[Slot]:
        """What these places are, of the nodes that there are."""
        found = set()
        for place_ in places:
            name, slash, device = place_.rpartition("/")
            node = self._by_name.get(name) if slash else self._head
            if node is not None:
                found.add((node.where, device))
        return found

    def of(self, offer: _Offer) -> Sequence[str]:
        """Those of the offered devices that are free."""
        taken = self._taken.get(offer.node.where)
        if not taken:
            return offer.devices
        if offer.cores and CPU in taken:
            return ()
        free = [device for device in offer.devices if device not in taken]
        # A job with the whole CPU needs every core.
        return [device for device in free if device != CPU] if CPU in free and any(map(is_core, taken)) else free

    def take(self, gang: Iterable[tuple[Node, Sequence[str]]]) -> None:
        for node, devices in gang:
            self._taken[node.where] = self._taken.get(node.where, frozenset()).union(devices)

    def take_slots(self, slots: Iterable[Slot]) -> None:
        self._change(slots, frozenset.union)

    def are_free(self, slots: Iterable[Slot]) -> bool:
        """Whether no job has any of these, or a part of one."""
        for where, device in slots:
            taken = self._taken.get(where, frozenset())
            others = taken if device == CPU else {CPU} & taken if is_core(device) else ()
            if device in taken or any(one == CPU or is_core(one) for one in others):
                return False
        return True

    def without(self, slots: Iterable[Slot]) -> Free:
        """A copy in which these have been given up."""
        copy = object.__new__(Free)
        copy._by_name, copy._head, copy._taken = self._by_name, self._head, {**self._taken}
        copy._change(slots, frozenset.difference)
        return copy

    def _change(self, slots: Iterable[Slot], change: Callable[[frozenset[str], set[str]], frozenset[str]]) -> None:
        found: dict[str, set[str]] = {}
        for where, device in slots:
            found.setdefault(where, set()).add(device)
        for where, devices in found.items():
            self._taken[where] = change(self._taken.get(where, frozenset()), devices)


def offers_of(job: Queued, suited: Sequence[Node], auto: str) -> list[_Offer]:
    """Free devices of the open nodes."""
    resources = demand(job.demand).resources
    memory, cores = resources.gpu_memory_gb, resources.reserve_cpus
    offers = []
    for node in suited:
        if node.why_closed:
            continue
        if cores:
            offers.append(_Offer(node, core_names(node.cpus), cores, cores=True))
        else:
            fitting = usable_devices(job, node, auto)
            if memory and _kind(fitting[0]) == "cuda":
                fitting = _large(node, fitting, memory)
            offers.append(_Offer(node, fitting, _needed(job, fitting)))
    return offers


def obtainable_for(job: Queued, obtainable: Iterable[Obtainable], auto: str) -> list[Obtainable]:
    """What pools may give for a job."""
    return [one for one in obtainable if one.nodes and not unsuited(job, one.shape, auto)]


def fewest_machines(job: Queued, suited: Sequence[Node], auto: str, obtainable: Iterable[Obtainable]) -> int:
    """Number of machines that it needs to start."""
    useful = side_by_side(job, suited, auto, sum(one.nodes for one in obtainable_for(job, obtainable, auto)))
    return min(useful, demand(job.demand).resources.min_nodes) if job.tried else useful


def _places(gang: Iterable[tuple[Node, Sequence[str]]]) -> tuple[str, ...]:
    return tuple(node.place(device) for node, devices in gang for device in devices)


def _gang(job: Queued, offers: Iterable[_Offer], fewest: int, free: Free) -> list[tuple[Node, Sequence[str]]]:
    """Nodes and devices for the job; empty: too few are free."""
    found = [(offer, free.of(offer)) for offer in offers]
    enough = [(offer, devices) for offer, devices in found if len(devices) >= offer.needed]
    fitting: dict[str, tuple[Node, Sequence[str]]] = {}
    failed = {place.rpartition("/")[0] for place in job.failed_on.split(",")} if job.failed_on else set()

    preferred = demand(job.demand).prefers

    def rank(one: tuple[_Offer, Sequence[str]]) -> tuple[bool, bool, bool, bool, int]:
        node = one[0].node
        has_failed = ("" if node.head else node.name) in failed
        return bool(node.expected), has_failed, _must_fetch(preferred, node), not node.head, len(one[1])

    for offer, devices in sorted(enough, key=rank):
        # The first node of a machine counts: two agents on it are one machine.
        fitting.setdefault(offer.node.where, (offer.node, devices[: offer.needed]))
    return list(fitting.values())[: nodes_wanted(job)] if len(fitting) >= fewest else []


def _must_fetch(model: str | None, node: Node) -> bool:
    """Whether a node is known to lack a model. The service's machine has its own directories, and what else it has is
    known once its agent has reported."""
    if model is None or model in node.models:
        return False
    return not node.head or (node.joins and not model.startswith("/"))


def _kept(offers: Iterable[_Offer], fewest: int, free: Free) -> list[tuple[Node, Sequence[str]]]:
    """Free devices that are kept for a job which has waited too long, if it can ever be placed.

    Devices are kept on nodes where the job could start, then on the first others: the same ones at every pass, until
    one more node can serve it. Devices that become free there stay free until the running jobs have ended. A choice by
    the most free devices would change at every pass and idle more: 87 % of the GPUs in use instead of 92 %.
    """
    found = [(offer, free.of(offer)) for offer in offers]
    kept: dict[str, tuple[Node, Sequence[str]]] = {}
    for offer, devices in sorted(found, key=lambda one: len(one[1]) < one[0].needed):
        # For a job with the whole CPU every core is kept, also those that become free later.
        whole = not offer.cores and CPU in offer.devices
        kept.setdefault(offer.node.where, (offer.node, [CPU] if whole else devices[: offer.needed]))
    return list(kept.values())[:fewest] if len(kept) >= fewest else []


def _large(node: Node, devices: Sequence[str], gib: float) -> list[str]:
    return [device for device in devices if (node.memory or {}).get(device, 0) >= gib * _GIB]


def _needed(job: Queued, fitting: Sequence[str]) -> int:
    """The number of devices that a job takes on one node, of those that would serve it."""
    return job.ranks // nodes_wanted(job) if fitting and _kind(fitting[0]) == "cuda" else 1


def nodes_wanted(job: Queued) -> int:
    return demand(job.demand).resources.nodes


def _kind(device: str) -> str:
    return device.partition(":")[0]


def auto_kind(job: Queued, nodes: Sequence[Node], obtainable: Iterable[Obtainable] = ()) -> str:
    """The kind of device that `auto` means for a job: that of the service's own machine if this has GPUs, or if the job
    stays there. Otherwise the best kind that enough machines have, or pools may give.

    Closed machines count, and pools that give none at the moment: a job does not move to a CPU because its GPUs are
    busy, silent or not granted yet.
    """
    own = _kind(nodes[0].devices[0])
    if own == "cuda" or job.device != "auto" or demand(job.demand).home:
        return own
    if demand(job.demand).resources.gpu_memory_gb:
        return "cuda"
    for kind in _KINDS:
        suited = [node for node in nodes if not unsuited(job, node, kind)]
        more = sum(one.nodes for one in obtainable_for(job, obtainable, kind))
        machines = len({node.where for node in suited}) + more
        if machines and machines >= fewest_machines(job, suited, kind, obtainable):
            return kind
    return own
