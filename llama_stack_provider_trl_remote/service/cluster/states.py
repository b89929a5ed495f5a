"""States of a node and of an attempt over several nodes, the observations that change them, and their deadlines.

Pure functions: a state is computed at every poll from records and clocks. Only the times of calls and of first exits
are in memory, so a restarted service computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ...wire import POLL_SECONDS, SILENCE, Stage

CALL_DUE = 2 * POLL_SECONDS
"""Seconds within which every live node calls once."""
GRACE_FAILED = 10.0
"""Seconds that the other nodes of an attempt have to end, and to report the reason, once one has failed."""
GRACE_DONE = 60.0
"""Seconds that the other nodes have to end once one has ended well."""


class NodeState(StrEnum):
    """State of a node, from its calls."""

    awaited = "awaited"
    """It has not called since the service was started."""
    live = "live"
    unreachable = "unreachable"
    """It has missed its deadline, and so have all others: the service's own network may be cut off, and the node may
    train on."""
    lost = "lost"
    """It has missed its deadline while other nodes call."""


ABSENT = frozenset({NodeState.unreachable, NodeState.lost})
"""States of a node whose deadline is over. It gets no jobs."""


class NodeEvent(StrEnum):
    """Observations of a node, in the order in which they apply."""

    called = "called"
    missed = "missed"
    """No call for SILENCE."""
    missed_alone = "missed_alone"
    """No call for that time, and another node has called since this one's call was due."""


NODE_TRANSITIONS: dict[NodeState, dict[NodeEvent, NodeState]] = {
    NodeState.awaited: {NodeEvent.called: NodeState.live, NodeEvent.missed: NodeState.unreachable},
    NodeState.live: {NodeEvent.missed: NodeState.unreachable},
    NodeState.unreachable: {NodeEvent.called: NodeState.live, NodeEvent.missed_alone: NodeState.lost},
    NodeState.lost: {NodeEvent.called: NodeState.live},
}


class Contact(NamedTuple):
    """The calls of one node, as the service has received them."""

    has_called: bool
    """Seconds since the service was started."""
    silence: float
    """Seconds since its last call, or since the service could receive one."""
    others_after: float
    """Seconds from the time at which its call could be expected to the last call of another node."""


def node_state(contact: Contact) -> NodeState:
    """The state that follows from the calls so far."""
    state = NodeState.awaited
    for event in _node_events(contact):
        state = NODE_TRANSITIONS[state].get(event, state)
    return state


def _node_events(contact: Contact) -> Iterable[NodeEvent]:
    if contact.has_called:
        yield NodeEvent.called
    if contact.silence > SILENCE:
        yield NodeEvent.missed
        if contact.others_after > CALL_DUE:
            yield NodeEvent.missed_alone


class AttemptState(StrEnum):
    """State of an attempt over several nodes."""

    preparing = "preparing"
    """Each node fetches the files that its ranks read."""
    probing = "probing"
    """Each node connects to every other."""
    training = "training"
    """The processes run on every node, or are ordered to save and end."""
    finishing = "finishing"
    """A node has ended well, the others have not ended yet."""
    failing = "failing"
    """A node has ended with an error, the others have not ended yet."""
    ending = "ending"
    """Every node was ordered to end its part."""
    ended = "ended"
    """No reachable node has anything left of the attempt."""


class AttemptEvent(StrEnum):
    """Observations of an attempt. Exits on nodes apply first. Of the others, the first in this order counts; of
    `node_lost` and `task_lost`, that of the lower node rank."""

    exit_failed = "exit_failed"
    """A node has exited with an error."""
    exit_done = "exit_done"
    """A node has exited well."""

    completed = "completed"
    """All nodes have exited, and rank 0's node has uploaded everything."""
    node_lost = "node_lost"
    """A node that is needed is lost."""
    task_lost = "task_lost"
    """A node no longer has its part: it was restarted, or removed."""
    stage_failed = "stage_failed"
    """A node reports that its part has failed."""
    overdue = "overdue"
    """The state's deadline is over, and no node that is still expected can have crashed."""
    prepared = "prepared"
    """All nodes have their files, and there are others to connect to."""
    ready = "ready"
    """All nodes can start their processes."""
    cleared = "cleared"
    """No reachable node has anything left of the attempt."""


ATTEMPT_DEADLINES: dict[AttemptState, float] = {
    AttemptState.finishing: GRACE_DONE,
    AttemptState.failing: GRACE_FAILED,
}
"""Seconds from the first exit on a node after which the attempt is ended on the others."""
_ENDINGS = dict.fromkeys(
    (
        *(AttemptEvent.completed, AttemptEvent.node_lost, AttemptEvent.task_lost),
        *(AttemptEvent.stage_failed, AttemptEvent.overdue),
    ),
    AttemptState.ending,
)
_EXITS = {AttemptEvent.exit_failed: AttemptState.failing, AttemptEvent.exit_done: AttemptState.finishing}
ATTEMPT_TRANSITIONS: dict[AttemptState, dict[AttemptEvent, AttemptState]] = {
    AttemptState.preparing: {
        **_ENDINGS,
        **_EXITS,
        AttemptEvent.prepared: AttemptState.probing,
        AttemptEvent.ready: AttemptState.training,
    },
    AttemptState.probing: {**_ENDINGS, **_EXITS, AttemptEvent.ready: AttemptState.training},
    AttemptState.training: {**_ENDINGS, **_EXITS},
    AttemptState.finishing: {**_ENDINGS, AttemptEvent.exit_failed: AttemptState.failing},
    AttemptState.failing: dict(_ENDINGS),
    AttemptState.ending: {AttemptEvent.cleared: AttemptState.ended},
    AttemptState.ended: {},
}
STAGES: dict[Stage, AttemptState] = {
    Stage.prepare: AttemptState.preparing,
    Stage.probe: AttemptState.probing,
    Stage.run: AttemptState.training,
    Stage.pause: AttemptState.training,
    Stage.stop: AttemptState.ending,
}
"""Stage that the nodes are ordered -> state of an attempt in which no node has exited."""
ORDERED: dict[AttemptState, Stage] = {AttemptState.probing: Stage.probe, AttemptState.training: Stage.run}
"""State that an attempt enters -> stage that its nodes are ordered then."""
_BEFORE_TRAINING = frozenset({AttemptState.preparing, AttemptState.probing})
"""States in which no process trains: nothing is lost where the attempt ends, and it cannot continue without the
service, which orders its next stage."""


@dataclass(frozen=True)
class PartState:
    """One node's part of an attempt, with the fields that the table needs."""

    node_rank: int
    node: NodeState = NodeState.live
    silence: float = 0.0
    """Seconds since the node's last call."""
    gone: bool = False
    """Whether nothing of it is left on the node."""
    stage_done: bool = False
    stage_failed: bool = False
    exited_for: float | None = None
    """Seconds since its exit was seen; None: its processes have not exited."""
    exited_well: bool = False
    uploaded: bool = False
    """Whether the service has all its events, logs and checkpoints."""

    @property
    def has_exited(self) -> bool:
        return self.exited_for is not None


class Observed(NamedTuple):
    """An observation of an attempt."""

    event: AttemptEvent
    part: int | None = None
    """Index of the part that it concerns; None: all."""


def attempt_state(stage: Stage, parts: Sequence[PartState]) -> AttemptState:
    """The state that follows from the last order to the nodes and from the exits so far."""
    state = STAGES[stage]
    for part in parts:
        if part.has_exited:
            event = AttemptEvent.exit_done if part.exited_well else AttemptEvent.exit_failed
            state = ATTEMPT_TRANSITIONS[state].get(event, state)
    return state


def observe(state: AttemptState, parts: Sequence[PartState], on_head: bool) -> Observed | None:
    """The observation that counts in a state; None: nothing changes it.

    Args:
        on_head: the service's own machine takes part: the attempt cannot continue without the service.
    """
    accepted = ATTEMPT_TRANSITIONS[state]
    return next((one for one in _observations(state, parts, on_head) if one.event in accepted), None)


def _observations(state: AttemptState, parts: Sequence[PartState], on_head: bool) -> Iterable[Observed]:
    """All observations that apply, the one that counts first."""
    if all(part.has_exited for part in parts) and parts[0].uploaded:
        yield Observed(AttemptEvent.completed)
    for index, part in enumerate(parts):
        if is_missed(part, on_head or state in _BEFORE_TRAINING):
            yield Observed(AttemptEvent.node_lost, index)
        if part.gone:
            yield Observed(AttemptEvent.task_lost, index)
    for index, part in enumerate(parts):
        if part.stage_failed:
            yield Observed(AttemptEvent.stage_failed, index)
    if _is_overdue(state, parts):
        yield Observed(AttemptEvent.overdue)
    if all(part.stage_done for part in parts):
        several = state is AttemptState.preparing and len(parts) > 1
        yield Observed(AttemptEvent.prepared if several else AttemptEvent.ready)
    if not any(is_left(part) for part in parts):
        yield Observed(AttemptEvent.cleared)


def is_missed(part: PartState, needs_service: bool) -> bool:
    """Whether a part's node is lost for the attempt. While the service itself may be cut off, its nodes may train on,
    and none counts as lost. A node without rank 0 that has exited is not needed any more.

    Args:
        needs_service: the attempt cannot continue without the service.
    """
    if part.gone or (part.has_exited and part.node_rank):
        return False
    return part.node in (ABSENT if needs_service else {NodeState.lost})


def is_left(part: PartState) -> bool:
    """Whether an attempt that ends has to wait for this part."""
    return not (part.gone or part.has_exited or part.node in ABSENT)


def _is_overdue(state: AttemptState, parts: Sequence[PartState]) -> bool:
    deadline = ATTEMPT_DEADLINES.get(state)
    running = [part for part in parts if not part.has_exited]
    if deadline is None or not running:
        return False
    since = max(part.exited_for for part in parts if part.exited_for is not None)
    # A crashed node ends the ranks of the others: it stopped calling before they exited.
    return since > deadline and max(part.silence for part in running) < since
