"""The launcher of tasks on several machines: agents run there what `LocalLauncher` runs on this machine.

Orders and reports of nodes are rows of the job store, so nothing is lost with this process. `states` computes the state
of an attempt. This module reads the rows, and writes the consequences of a state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.placement import is_remote
from llama_stack_provider_trl.jobs.decisions.placement import place as placed
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.devices import CORE
from llama_stack_provider_trl.launch.torchrun import common_threads
from llama_stack_provider_trl.specs.events import Failed, Finished, Paused, iter_events
from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec
from llama_stack_provider_trl.system.files import RunDir, atomic_write

from ...nodes.localize import MARK
from ...wire import Peer, Stage, TaskOrder
from .membership import Cluster
from .models import ServedModels
from .node_answers import remove_results
from .presence import silent_since
from .reports import ReportedPart, combined, observation, progress_detail
from .states import (
    ABSENT,
    ATTEMPT_TRANSITIONS,
    CALL_DUE,
    ORDERED,
    AttemptEvent,
    AttemptState,
    Observed,
    PartState,
    attempt_state,
    is_left,
    observe,
)
from .uploads import UploadReceiver


class ClusterLauncher:
    """Launches tasks on all machines.

    A task whose devices all belong to this machine is `local`'s. Of any other task each node's agent has a part, and
    their reports become one observation.

    Args:
        models: lists the models that nodes may fetch; None: each node has its own.
        has_pools: whether machines can be requested for a job that waits.
    """

    def __init__(
        self,
        local: Launcher,
        store: Store,
        cluster: Cluster,
        uploads: UploadReceiver,
        ports: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
        models: ServedModels | None = None,
        has_pools: bool = False,
    ) -> None:
        self._local = local
        self._has_pools = has_pools
        self._models = models
        self._store = store
        self._cluster = cluster
        self._uploads = uploads
        self._ports = ports
        self._clock = clock
        self._exited: dict[str, dict[str, float]] = {}
        """Task -> node -> time at which its exit was first seen: the first exit is the cause of the others."""

    def start(self, task: TaskSpec) -> None:
        """See `Launcher.start`. Records an order for each node, which its agent fetches."""
        if not is_remote(task.devices):
            return self._local.start(task)
        spec = AttemptSpec.model_validate_json(RunDir(task.run_dir).spec.read_text())
        mark = spec.job.checkpoint_dir / MARK
        mark.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(mark, task.task_id.encode(), mode=0o644)  # a node may read it as another user
        remove_results(spec.job)
        self._order(task, spec, mark)

    def poll(self, task: TaskSpec) -> Observation:
        """See `Launcher.poll`. Moves an attempt to its next state, all nodes of it together."""
        if not is_remote(task.devices):
            return self._local.poll(task)
        parts = [ReportedPart(record) for record in self._store.tasks.of_attempt(task.task_id)]
        if not parts:
            return Observation(TaskState.unknown)
        if parts[0].order.awaits_models and parts[0].record.stage == Stage.prepare:
            self._order_models(parts)
        seen = self._part_states(task, parts)
        is_ending = parts[0].record.ending is not None
        state = AttemptState.ending if is_ending else attempt_state(Stage(parts[0].record.stage), seen)
        observed = observe(state, seen, any(part.node == self._cluster.head for part in parts))
        following = state if observed is None else ATTEMPT_TRANSITIONS[state][observed.event]
        if following is AttemptState.ended:
            return self._conclude(task, parts)
        if state is AttemptState.ending:
            left = ", ".join(part.node for part, one in zip(parts, seen, strict=True) if is_left(one))
            return Observation(TaskState.running, detail=f"it ends on {left}")
        if following is AttemptState.ending:
            assert observed is not None
            if observed.event is AttemptEvent.node_lost and self._may_train_on(parts):
                silent = silent_since(self._cluster.presence.silence(parts[0].node))
                waits = f"node {parts[0].node} is {silent} and may train on; no other node can take the job now"
                return Observation(TaskState.running, detail=f"left alone: {waits}")
            self._stop(task.task_id, self._ending(task, parts, observed))
            return self.poll(task)
        if following is not state:
            self._advance(parts, ORDERED[following])
        return self._in_progress(parts, seen)

    def pause(self, task: TaskSpec) -> None:
        if not is_remote(task.devices):
            return self._local.pause(task)
        running = [record for record in self._store.tasks.of_attempt(task.task_id) if record.stage == Stage.run]
        if running:
            self._store.tasks.advance(running, Stage.pause)

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        """See `Launcher.sweep`. On other machines the agents end tasks without an order."""
        return self._local.sweep(root, keep)

    def cancel(self, task: TaskSpec) -> None:
        if not is_remote(task.devices):
            return self._local.cancel(task)
        if not self._store.tasks.of_attempt(task.task_id):
            self._order(task, None)  # for the record: it is stopped before an agent can fetch it
        self._stop(task.task_id, Observation(TaskState.exited, detail="it was ordered to end"), cancelled=True)

    def _order(self, task: TaskSpec, spec: AttemptSpec | None, mark: Path | None = None) -> None:
        """Record an order for each node, unless there is one."""
        job_uuid, _, attempt = task.task_id.rpartition("-")
        models = self._models.of_job(spec.job) if self._models and spec else ()
        by_node: dict[str, list[str]] = {}
        for place in task.devices:
            by_node.setdefault(place.rpartition("/")[0] or self._cluster.head, []).append(place)
        threads = self._threads(by_node, task.ranks)
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
                threads=threads,
                devices=tuple(place.rpartition("/")[2] for place in places),
                spec={} if spec is None else spec.model_dump(mode="json"),
                ports=self._ports,
                time_limit=task.time_limit,
                hang_timeout=task.hang_timeout,
                shared_mark=str(mark or ""),
                awaits_models=models is None,
                models=models or (),
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

    def _threads(self, by_node: Mapping[str, Sequence[str]], ranks: int) -> int | None:
        """Threads of each rank, on all nodes of a task; None: it has one node, or a node's report cannot be read."""
        if len(by_node) == 1:
            return None
        found = []
        reserved = False
        for name, places in by_node.items():
            record = self._store.nodes.get(name)
            report = self._cluster.report(record) if record else None
            if report is None:
                return None
            cores = sum(place.rpartition("/")[2].startswith(CORE) for place in places)
            reserved = reserved or cores > 0
            found.append((cores or report.cpus, report.threads))
        return common_threads(found, ranks, reserved=reserved)

    def _order_models(self, parts: Sequence[ReportedPart]) -> None:
        """Add the files of the job's models to the orders, once these are listed: the same ones on every node."""
        models = self._models.of_job(_job_of(parts[0])) if self._models else ()
        if models is None:
            return
        listed = {"awaits_models": False, "models": models}
        orders = [part.order.model_copy(update=listed).model_dump_json() for part in parts]
        records = [replace(part.record, order=order) for part, order in zip(parts, orders, strict=True)]
        self._store.tasks.advance(records, Stage.prepare)

    def _stop(self, task_id: str, ending: Observation, cancelled: bool = False) -> None:
        self._store.tasks.stop(task_id, json.dumps(asdict(ending)), cancelled)

    def _part_states(self, task: TaskSpec, parts: Sequence[ReportedPart]) -> list[PartState]:
        now, presence = self._clock(), self._cluster.presence
        exited = self._exited.setdefault(task.task_id, {})
        found = []
        for part in parts:
            if part.has_exited:
                exited.setdefault(part.node, now)
            found.append(
                PartState(
                    part.record.node_rank,
                    node=presence.state(part.node),
                    silence=presence.silence(part.node),
                    gone=part.record.gone,
                    stage_done=part.is_done(Stage(parts[0].record.stage)),
                    stage_failed=part.has_failed,
                    exited_for=now - exited[part.node] if part.has_exited else None,
                    exited_well=part.observed.exit_code == 0,
                    uploaded=part.report is not None and part.report.shipped,
                )
            )
        return found

    def _may_train_on(self, parts: Sequence[ReportedPart]) -> bool:
        """Whether a training on one lost node is left alone: no other node would take it, and no pool can give one, so
        that a replacement gains nothing. Free devices that waiting jobs before it get are none for it. Ranks of several
        nodes cannot train without each other, and end themselves."""
        (first, *others) = parts
        if self._has_pools or others or first.record.stage != Stage.run or not _job_of(first).lifecycle.failover:
            return False
        queued = self._store.tasks.job_as_queued(first.record.job_uuid)
        waiting = [*self._store.queue(), queued]
        return queued.job_uuid not in placed(waiting, self._cluster.nodes(), self._store.holders(), time.time())

    def _ending(self, task: TaskSpec, parts: Sequence[ReportedPart], observed: Observed) -> Observation:
        """The ending of an attempt, from the observation that ends it."""
        if observed.part is None:  # completed or overdue
            return combined([part for part in parts if part.has_exited], self._exited[task.task_id])
        part = parts[observed.part]
        if observed.event is AttemptEvent.stage_failed:
            for other in parts:
                if other.has_failed and other.report is not None and other.report.lasting:
                    self._cluster.leave_out(other.node, task.task_id, other.record.job_uuid, other.error)
            return Observation(TaskState.exited, launch_error=f"node {part.node}: {part.error}")
        if observed.event is AttemptEvent.task_lost:
            if part.report is not None and part.report.stage is Stage.stop and part.report.error:
                return Observation(TaskState.exited, detail=f"node {part.node} has ended it: {part.report.error}")
            return Observation(
                TaskState.exited, detail=f"node {part.node} no longer has the task: it may have been restarted"
            )
        silent = silent_since(self._cluster.presence.silence(part.node))
        return Observation(TaskState.exited, detail=f"node {part.node} is {silent}")

    def _conclude(self, task: TaskSpec, parts: Sequence[ReportedPart]) -> Observation:
        """The recorded ending of an attempt of which no reachable node has anything left."""
        self._add_failed_event(task, parts)
        self._exited.pop(task.task_id, None)
        mark = parts[0].order.shared_mark
        if mark:
            Path(mark).unlink(missing_ok=True)  # fences off processes of it on an unreachable node
        assert parts[0].record.ending is not None
        return observation(json.loads(parts[0].record.ending))

    def _add_failed_event(self, task: TaskSpec, parts: Sequence[ReportedPart]) -> None:
        """Append the `failed` event of a rank on a node without rank 0, which has no event file here.

        Nothing is appended where rank 0 has reported the end itself."""
        failed = [event for part in parts if (event := part.failed_event) is not None]
        if failed and not _has_final_event(task.run_dir):
            self._uploads.append_event(RunDir(task.run_dir).events, failed[0])

    def _advance(self, parts: Sequence[ReportedPart], stage: Stage) -> None:
        """Order the next stage on all nodes; after the first stage, with the addresses of the others."""
        is_first = parts[0].record.stage == Stage.prepare
        records = self._introduced(parts) if is_first else [part.record for part in parts]
        self._store.tasks.advance(records, stage)

    def _in_progress(self, parts: Sequence[ReportedPart], seen: Sequence[PartState]) -> Observation:
        """The observation of an attempt that continues."""
        stage = Stage(parts[0].record.stage)
        states = {part.observed.state for part in parts}
        starts = stage in (Stage.prepare, Stage.probe)
        is_waiting = starts or TaskState.waiting in states or states == {TaskState.unknown}
        detail, alone = progress_detail(parts, stage), self._cluster.presence.seconds_alone()
        if starts and parts[0].order.awaits_models and self._models is not None:
            detail = f"{self._cluster.head}: {self._models.progress(_job_of(parts[0]))}"
        if alone > CALL_DUE and any(not one.gone and one.node in ABSENT for one in seen):
            detail = (
                f"left alone: all other machines are {silent_since(alone)}, possibly because of this machine's network"
            )
        return Observation(TaskState.waiting if is_waiting else TaskState.running, detail=detail)

    def _introduced(self, parts: Sequence[ReportedPart]) -> list[NodeTaskRecord]:
        """The parts with orders that name the other nodes."""
        peers = []
        for part in parts:
            assert part.report is not None
            assert part.report.port is not None
            record = self._store.nodes.get(part.node)
            report = self._cluster.report(record) if record else None
            peers.append(Peer(node=part.node, address=report.address if report else "", port=part.report.port))
        found = []
        for part in parts:
            others = tuple(peer for peer in peers if peer.node != part.node)
            order = part.order.model_copy(update={"master": peers[0], "peers": others})
            found.append(replace(part.record, order=order.model_dump_json()))
        return found


def _has_final_event(run_dir: Path) -> bool:
    return any(isinstance(event, Finished | Failed | Paused) for event in iter_events(RunDir(run_dir).events))


def _job_of(part: ReportedPart) -> JobSpec:
    return JobSpec.model_validate(part.order.spec["job"])
