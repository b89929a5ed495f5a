"""Several machines: which are there, and the launcher that has agents on them do what `LocalLauncher` does on this one.

What a node is to do and what it said are rows of the job store, so that nothing is lost with this process; only since
when a node is silent is kept in memory, and counts from the start of the service at the earliest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llama_stack_provider_trl.jobs.placement import Node, is_remote
from llama_stack_provider_trl.jobs.records import NodeRecord, NodeTaskRecord
from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.specs.events import Failed, Finished, Paused, Reason, iter_events
from llama_stack_provider_trl.specs.job import AttemptSpec
from llama_stack_provider_trl.system.files import RunDir, atomic_write

from ...nodes.localize import MARK
from ...wire import LEASE, POLL_SECONDS, SILENCE, NodeReport, Peer, Progress, Stage, TaskOrder, TaskReport
from .uploads import Shipping

log = logging.getLogger(__name__)
GRACE_FAILED = 10.0
"""Seconds that the other nodes of an attempt get to end, and to say why, once one has failed."""
GRACE_DONE = 60.0
"""The same once one has ended well."""
_OBSERVATION = TypeAdapter(Observation)
_TEXTS = ("detail", "launch_error", "stacks")
_LONGEST = 65_536
"""Characters of a text that a node reports."""
_DUE = 2 * POLL_SECONDS
"""Seconds in which every node that lives calls once."""
_GAP = 5.0
"""Seconds without a look after which this process was stopped itself, and no node is to blame for what it missed."""


class Presence:
    """When each node was last heard of. Safe to share between threads.

    Args:
        own: name of this machine: its agent is heard whatever the network does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, own: str = "") -> None:
        self._clock, self._own = clock, own
        self._heard: dict[str, float] = {}
        self._floor = self._looked = self._others = self._again = clock()

    def heard(self, node: str) -> None:
        self._heard[node] = now = self._clock()
        if node != self._own:
            if now - self._others > _DUE:
                self._again = now
            self._others = now

    def silence(self, node: str) -> float:
        """Seconds since a node was heard of, or since we began to listen."""
        now = self._clock()
        if now - self._looked > _GAP:
            self._floor = now
        self._looked = now
        return now - max(self._heard.get(node, self._floor), self._floor)

    def is_lost(self, node: str) -> bool:
        return self.silence(node) > SILENCE

    def is_to_blame(self, node: str) -> bool:
        """Whether a lost node is silent on its own: another one has been heard of since it had to call. With all of
        them silent, and until each had time to call again, it may be this machine that was cut off."""
        return self._others - max(self._heard.get(node, 0.0), self._floor, self._again) > _DUE

    def seconds_alone(self) -> float:
        """Seconds since any other machine was heard of."""
        return self._clock() - self._others

    def was_heard(self, node: str) -> bool:
        """Since the start of this process."""
        return node in self._heard

    def forget(self, node: str) -> None:
        self._heard.pop(node, None)


class Cluster:
    """The machines that jobs may run on: this one, and those that have joined.

    Args:
        head: name of this machine; its agent joins under it too.
        machine_id: of this machine.
        cpus: of this machine, as far as its agent has not reported any.
    """

    def __init__(
        self, store: Store, presence: Presence, head: str, machine_id: str, devices: Sequence[str], cpus: int
    ) -> None:
        self._store = store
        self.presence = presence
        self.head = head
        self._unreadable: set[str] = set()
        self._head = Node(head, tuple(devices), machine_id, head=True, joins=False, cpus=cpus)

    def nodes(self) -> list[Node]:
        """This machine first."""
        head, others = self._head, []
        for record in self._store.nodes.all():
            report = self._report(record)
            if report is None:
                continue
            if record.name == self.head:
                why = "" if record.mode == "open" else record.mode
                joins = self.presence.was_heard(record.name) and not self.presence.is_lost(record.name)
                head = replace(
                    _node(record, report, why),
                    devices=self._head.devices,
                    machine=self._head.machine,
                    head=True,
                    joins=joins,
                )
            else:
                others.append(_node(record, report, self.why_closed(record)))
        return [head, *others]

    def _report(self, record: NodeRecord) -> NodeReport | None:
        """What a node has last reported. None: another release stored it and this one cannot read it; the node gets no
        jobs until its agent has joined again, and the other nodes do."""
        try:
            return NodeReport.model_validate_json(record.report)
        except ValueError as error:
            if record.name not in self._unreadable:
                log.error("node %s is left out until its agent joins again: its report: %s", record.name, error)
            self._unreadable.add(record.name)
            return None

    def why_closed(self, record: NodeRecord) -> str:
        """Why a node takes no jobs; empty: it does."""
        if self.presence.is_lost(record.name):
            return silent_since(self.presence.silence(record.name))
        if not self.presence.was_heard(record.name):
            return "not heard of since the service was started"
        return "" if record.mode == "open" else record.mode


class ClusterLauncher:
    """A Launcher over all machines. A task whose devices are all this machine's is `local`'s; of any other, each node's
    agent has a part, and what they say is put together into one observation."""

    def __init__(
        self,
        local: Launcher,
        store: Store,
        cluster: Cluster,
        shipping: Shipping,
        ports: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._store = store
        self._cluster = cluster
        self._shipping = shipping
        self._ports = ports
        self._clock = clock
        self._exited: dict[str, dict[str, float]] = {}
        """Task -> node -> when its end was first seen: who ends first knows why."""

    def start(self, task: TaskSpec) -> None:
        """See `Launcher.start`: what is asked of each node is recorded; they come for it."""
        if not is_remote(task.devices):
            return self._local.start(task)
        spec = AttemptSpec.model_validate_json(RunDir(task.run_dir).spec.read_text())
        mark = spec.job.checkpoint_dir / MARK
        mark.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(mark, task.task_id.encode(), mode=0o644)  # a node may read it as another user
        self._order(task, spec.model_dump(mode="json"), mark)

    def poll(self, task: TaskSpec) -> Observation:
        """See `Launcher.poll`. Moves the nodes of an attempt on to the next stage, all of them together."""
        if not is_remote(task.devices):
            return self._local.poll(task)
        parts = [_Part(record) for record in self._store.tasks.of_attempt(task.task_id)]
        if not parts:
            return Observation(TaskState.unknown)
        if parts[0].record.ending is not None:
            return self._ending(task, parts)
        ending = self._ended(task, parts)
        if ending is not None:
            self._stop(task.task_id, ending)
            return self.poll(task)
        seen = self._advance(parts)
        presence = self._cluster.presence
        if presence.seconds_alone() > _DUE and any(self._is_lost(part) for part in parts):
            silent = silent_since(presence.seconds_alone())
            detail = f"left to itself: all other machines are {silent}, which may be this one's network"
            seen = replace(seen, detail=detail)
        return seen

    def pause(self, task: TaskSpec) -> None:
        """See `Launcher.pause`."""
        if not is_remote(task.devices):
            return self._local.pause(task)
        running = [record for record in self._store.tasks.of_attempt(task.task_id) if record.stage == Stage.run]
        if running:
            self._store.tasks.advance(running, Stage.pause)

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        """See `Launcher.sweep`; of other machines the agents look after themselves, by what they are ordered."""
        return self._local.sweep(root, keep)

    def cancel(self, task: TaskSpec) -> None:
        """See `Launcher.cancel`."""
        if not is_remote(task.devices):
            return self._local.cancel(task)
        if not self._store.tasks.of_attempt(task.task_id):
            self._order(task, {})  # for the record: it is told to stop before anybody can have heard of it
        self._stop(task.task_id, Observation(TaskState.exited, detail="it was told to end"))

    def _order(self, task: TaskSpec, spec: dict[str, Any], mark: Path | None = None) -> None:
        """Record what each node is asked to do, unless that was done before."""
        job_uuid, _, attempt = task.task_id.rpartition("-")
        by_node: dict[str, list[str]] = {}
        for place in task.devices:
            by_node.setdefault(place.rpartition("/")[0] or self._cluster.head, []).append(place)
        records = []
        for rank, (node, places) in enumerate(by_node.items()):
            order = TaskOrder(
                task_id=task.task_id,
                job_uuid=job_uuid,
                attempt=int(attempt),
                stage=Stage.prepare,
                node_rank=rank,
                nodes=len(by_node),
                ranks=task.ranks,
                devices=tuple(place.rpartition("/")[2] for place in places),
                spec=spec,
                ports=self._ports,
                time_limit=task.time_limit,
                hang_timeout=task.hang_timeout,
                shared_mark=str(mark or ""),
            )
            records.append(
                NodeTaskRecord(
                    task_id=task.task_id,
                    node=node,
                    job_uuid=job_uuid,
                    attempt=order.attempt,
                    node_rank=rank,
                    places=tuple(places),
                    stage=order.stage,
                    order=order.model_dump_json(),
                    report=None,
                    ending=None,
                    gone=False,
                )
            )
        self._store.tasks.add(records)

    def _stop(self, task_id: str, ending: Observation) -> None:
        self._store.tasks.stop(task_id, json.dumps(asdict(ending)))

    def _ending(self, task: TaskSpec, parts: Sequence[_Part]) -> Observation:
        """How an attempt ends that was told to, once nothing of it is left on the nodes that can be asked."""
        left = [part.node for part in parts if not (part.record.gone or part.has_exited or self._is_lost(part))]
        if left:
            return Observation(TaskState.running, detail=f"it ends on {', '.join(left)}")
        self._take_last_words(task, parts)
        self._exited.pop(task.task_id, None)
        mark = parts[0].order.shared_mark
        if mark:
            Path(mark).unlink(missing_ok=True)  # what a node still runs of it that was cut off writes no more
        assert parts[0].record.ending is not None
        return observation(json.loads(parts[0].record.ending))

    def _ended(self, task: TaskSpec, parts: Sequence[_Part]) -> Observation | None:
        """How an attempt is to end; None: it goes on."""
        exited = self._exited.setdefault(task.task_id, {})
        for part in parts:
            if part.has_exited:
                exited.setdefault(part.node, self._clock())
        shipped = parts[0].report is not None and parts[0].report.shipped
        if len(exited) == len(parts) and shipped:
            return _combined(parts, exited)
        for part in parts:
            if self._is_given_up(part, parts) and not (part.has_exited and part.record.node_rank):
                silent = silent_since(self._cluster.presence.silence(part.node))
                return Observation(TaskState.exited, detail=f"node {part.node} is {silent}")
            if part.record.gone:
                return Observation(TaskState.exited, detail=f"node {part.node} has lost it: was it restarted?")
        for part in parts:
            if part.report is not None and part.report.progress is Progress.failed:
                said = part.report.error or f"{part.report.stage} failed and it did not say why"
                return Observation(TaskState.exited, launch_error=f"node {part.node}: {said}")
        if exited and len(exited) < len(parts):
            failed = any(part.has_exited and part.observed.exit_code != 0 for part in parts)
            since = self._clock() - min(exited.values())
            # A node that went down took the ranks of the others with it, and is told from a slow one by its silence.
            silence = max(self._cluster.presence.silence(part.node) for part in parts if not part.has_exited)
            if since > (GRACE_FAILED if failed else GRACE_DONE) and silence < since:
                return _combined([part for part in parts if part.has_exited], exited)
        return None

    def _advance(self, parts: Sequence[_Part]) -> Observation:
        """Move on to the next stage, if all nodes are through with this one."""
        stage = Stage(parts[0].record.stage)
        if stage in (Stage.prepare, Stage.probe):
            if all(part.is_done(stage) for part in parts):
                following = Stage.probe if stage is Stage.prepare and len(parts) > 1 else Stage.run
                known = [part.record for part in parts]
                self._store.tasks.advance(self._introduced(parts) if stage is Stage.prepare else known, following)
            return Observation(TaskState.waiting, detail=_detail(parts, stage))
        observed = [part.observed for part in parts]
        if any(one.state is TaskState.waiting for one in observed):
            return Observation(TaskState.waiting, detail=_detail(parts, stage))
        if all(one.state is TaskState.unknown for one in observed):
            return Observation(TaskState.waiting, detail=_detail(parts, stage))
        return Observation(TaskState.running, detail=_detail(parts, stage))

    def _introduced(self, parts: Sequence[_Part]) -> list[NodeTaskRecord]:
        """The parts with orders that say who the others are."""
        peers = []
        for part in parts:
            assert part.report is not None
            assert part.report.port is not None
            record = self._store.nodes.get(part.node)
            address = NodeReport.model_validate_json(record.report).address if record else ""
            peers.append(Peer(node=part.node, address=address, port=part.report.port))
        found = []
        for part in parts:
            others = tuple(peer for peer in peers if peer.node != part.node)
            order = part.order.model_copy(update={"master": peers[0], "peers": others})
            found.append(replace(part.record, order=order.model_dump_json()))
        return found

    def _take_last_words(self, task: TaskSpec, parts: Sequence[_Part]) -> None:
        """A rank that failed on a node without rank 0 has nowhere to say it. Where rank 0 did not say how it all ended,
        that counts."""
        failed = [part.report.failed for part in parts if part.report is not None and part.report.failed is not None]
        if failed and not _has_final_word(task.run_dir):
            event = _failed(failed[0])
            self._shipping.append_event(RunDir(task.run_dir).events, event)

    def _is_given_up(self, part: _Part, parts: Sequence[_Part]) -> bool:
        """Whether to go on without a silent node. Where it may be we who are cut off, and the attempt needs us not, it
        trains on: then not before the agents have ended it themselves."""
        if not self._is_lost(part):
            return False
        presence, head = self._cluster.presence, self._cluster.head
        takes_part = any(other.node == head for other in parts)
        return takes_part or presence.is_to_blame(part.node) or presence.silence(part.node) > LEASE

    def _is_lost(self, part: _Part) -> bool:
        return not part.record.gone and self._cluster.presence.is_lost(part.node)


class _Part:
    """One node's part of an attempt, read."""

    def __init__(self, record: NodeTaskRecord) -> None:
        self.record = record
        self.node = record.node
        self.order = TaskOrder.model_validate_json(record.order)
        self.report, self.observed = _reported(record)
        self.has_exited = self.observed.state is TaskState.exited

    def is_done(self, stage: Stage) -> bool:
        report = self.report
        if report is None or report.stage is not stage or report.progress is not Progress.done:
            return False
        return report.port is not None or stage is not Stage.prepare


def observation(values: Mapping[str, Any]) -> Observation:
    """Of `dataclasses.asdict`. Long texts are cut.

    Raises:
        ValueError: a value is missing, has a wrong type, or is no exit code or rank that there can be.
    """
    if unknown := set(values) - set(Observation.__dataclass_fields__):
        raise ValueError(f"an observation has no {', '.join(sorted(unknown))[:100]}")
    found = _OBSERVATION.validate_python(dict(values))
    if abs(found.exit_code or 0) > 2**31 or not 0 <= (found.rank or 0) < 2**20:
        raise ValueError("the exit code or the rank is beyond what there can be")
    cut = {name: text[:_LONGEST] for name in _TEXTS if len(text := getattr(found, name)) > _LONGEST}
    return replace(found, **cut)


def _reported(record: NodeTaskRecord) -> tuple[TaskReport | None, Observation]:
    """What a node has reported of its part. A report that another release stored and this one cannot read counts as
    none: a node that lives sends a new one within seconds."""
    unknown = Observation(TaskState.unknown)
    if record.report is None:
        return None, unknown
    try:
        report = TaskReport.model_validate_json(record.report)
        return report, unknown if report.observation is None else observation(report.observation)
    except ValueError as error:
        log.warning("task %s: the report of node %s cannot be read: %s", record.task_id, record.node, error)
        return None, unknown


def _failed(said: Mapping[str, Any]) -> Failed:
    """A `failed` event of a report; one that was stored before events had bounds may be unreadable."""
    try:
        return Failed.model_validate(said)
    except ValueError as error:
        return Failed(reason=Reason.internal, message=f"its `failed` event cannot be read: {error}")


def silent_since(seconds: float) -> str:
    return f"silent since {datetime.fromtimestamp(time.time() - seconds, UTC):%H:%M:%S} UTC"


def _combined(parts: Sequence[_Part], exited: Mapping[str, float]) -> Observation:
    """What ended first with an error says why; where none did, rank 0's node."""
    in_order = sorted(parts, key=lambda part: (exited[part.node], part.record.node_rank))
    by_runner = [part for part in in_order if part.observed.ended is not None or part.observed.launch_error]
    failed = [part for part in in_order if part.observed.exit_code != 0]
    first = (by_runner or failed or list(parts))[0]
    error = first.observed.launch_error
    return replace(first.observed, launch_error=f"node {first.node}: {error}" if error else "")


def _detail(parts: Sequence[_Part], stage: Stage) -> str:
    """What the nodes are about, for the job's status."""
    said = []
    for part in parts:
        report = part.report
        if report is None or report.stage is not stage:
            if stage in (Stage.prepare, Stage.probe):
                said.append(f"{part.node}: told to {stage}")
        elif detail := report.detail or part.observed.detail:
            said.append(f"{part.node}: {detail}")
    return "; ".join(said)


def _has_final_word(run_dir: Path) -> bool:
    return any(isinstance(event, Finished | Failed | Paused) for event in iter_events(RunDir(run_dir).events))


def _node(record: NodeRecord, report: NodeReport, why_closed: str) -> Node:
    return Node(
        name=record.name,
        devices=tuple(device.name for device in report.devices),
        machine=record.machine_id,
        why_closed=why_closed,
        draining=record.mode == "draining",
        memory={device.name: device.memory_bytes for device in report.devices if device.memory_bytes},
        cpus=report.cpus,
        memory_bytes=report.memory_bytes,
        labels=report.labels,
        models=frozenset(report.models),
    )
