"""The nodes that have joined, as operators and other parts of the service change them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llama_stack_provider_trl.jobs.store.records import NodeMode, NodeRecord
from llama_stack_provider_trl.jobs.store.store import Store

from ..http.errors import Conflict, NotFound
from ..views.service_logs import ServiceLogs
from .loads import Loads
from .membership import Cluster, incarnation
from .poll_order import PollOrder
from .presence import Presence

log = logging.getLogger(__name__)


class JoinedNodes:
    """Finds nodes, sets which jobs they get, and removes them with what their calls have left.

    Args:
        head: name of the service's own machine.
        wake: has the supervisor check the jobs now.
    """

    def __init__(
        self,
        store: Store,
        head: str,
        presence: Presence,
        loads: Loads,
        polls: PollOrder,
        cluster: Cluster,
        logs: ServiceLogs,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._head, self._presence, self._wake = store, head, presence, wake
        self._left = (presence, loads, polls, cluster, logs)
        self._removed: dict[str, str] = {}
        """Nodes that were removed, with the run of their agent: these agents are to end."""

    def get(self, name: str) -> NodeRecord:
        """The record of a node. Raises NotFound."""
        record = self._store.nodes.get(name)
        if record is None:
            raise NotFound(f"there is no node {name!r} here: join first (POST /v1/nodes)")
        return record

    def set_mode(self, name: str, mode: NodeMode) -> None:
        """Change which jobs a node gets. Raises NotFound, Conflict."""
        if not self._store.nodes.set_mode(name, mode):
            if name == self._head:
                raise Conflict(
                    f"node {name!r} is the service's own machine and has no agent (the service listens on loopback): "
                    "jobs of other nodes do not come here; pause or cancel its own (trl-remote jobs)"
                )
            raise NotFound(f"there is no node {name!r} here: GET /v1/nodes lists them")
        log.info("node %s is %s", name, mode)
        self._wake()

    def remove(self, name: str) -> None:
        """Remove a node. Raises NotFound; Conflict: it is the service's own, or it calls and has jobs."""
        record = self.get(name)
        if name == self._head:
            raise Conflict(f"node {name!r} is the service's own machine: cordon or drain it")
        jobs = sorted({task.job_uuid for task in self._store.tasks.of_node(name)})
        # Not whether it called before: after the service was away for long no node has called yet, and the job trains.
        if jobs and not self._presence.is_absent(name):
            raise Conflict(f"node {name!r} still has {', '.join(jobs)}: drain it first, and remove it when it is empty")
        self._removed[name] = incarnation(record)
        self._store.nodes.remove(name)
        self.forget(name)
        log.info("node %s was removed", name)
        self._wake()

    def forget(self, name: str) -> None:
        """Drop what calls of a node that was removed have left."""
        for part in self._left:
            part.forget(name)

    def was_removed(self, name: str, agent: str) -> bool:
        """Whether a node was removed while this run of its agent had joined."""
        return self._removed.get(name) == agent

    def note_join(self, name: str) -> None:
        """A node of this name is there again."""
        self._removed.pop(name, None)
