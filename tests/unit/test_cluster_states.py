"""The transition tables of nodes and of attempts over several nodes."""

from __future__ import annotations

import pytest

from llama_stack_provider_trl_remote.service.cluster.states import (
    ATTEMPT_DEADLINES,
    ATTEMPT_TRANSITIONS,
    CALL_DUE,
    GRACE_DONE,
    GRACE_FAILED,
    NODE_TRANSITIONS,
    ORDERED,
    STAGES,
    AttemptEvent,
    AttemptState,
    Contact,
    NodeEvent,
    NodeState,
    Observed,
    PartState,
    attempt_state,
    node_state,
    observe,
)
from llama_stack_provider_trl_remote.wire import SILENCE, Stage

DONE = PartState(0, exited_for=1.0, exited_well=True, uploaded=True)


def test_every_state_has_its_row_and_every_event_is_used() -> None:
    assert set(NODE_TRANSITIONS) == set(NodeState)
    assert set(ATTEMPT_TRANSITIONS) == set(AttemptState)
    assert {event for row in NODE_TRANSITIONS.values() for event in row} == set(NodeEvent)
    assert {event for row in ATTEMPT_TRANSITIONS.values() for event in row} == set(AttemptEvent)
    assert set(STAGES) == set(Stage)
    assert {STAGES[stage] for stage in ORDERED.values()} == set(ORDERED)


def test_every_state_of_an_attempt_leads_to_its_end() -> None:
    for state in AttemptState:
        reached, new = {state}, {state}
        while new:
            new = {following for one in new for following in ATTEMPT_TRANSITIONS[one].values()} - reached
            reached |= new
        assert AttemptState.ended in reached


@pytest.mark.parametrize(
    ("contact", "state"),
    [
        (Contact(False, 1.0, 0.0), NodeState.awaited),
        (Contact(True, SILENCE, 0.0), NodeState.live),
        (Contact(False, SILENCE + 1, 0.0), NodeState.unreachable),
        (Contact(True, SILENCE + 1, CALL_DUE), NodeState.unreachable),
        (Contact(True, SILENCE + 1, CALL_DUE + 1), NodeState.lost),
        (Contact(True, SILENCE - 1, CALL_DUE + 1), NodeState.live),
        (Contact(True, 1e6, 0.0), NodeState.unreachable),
    ],
)
def test_a_node_s_state_follows_from_its_calls_and_those_of_the_others(contact: Contact, state: NodeState) -> None:
    assert node_state(contact) is state


@pytest.mark.parametrize(
    ("stage", "exits", "state"),
    [
        (Stage.prepare, [], AttemptState.preparing),
        (Stage.run, [], AttemptState.training),
        (Stage.pause, [True], AttemptState.finishing),
        (Stage.run, [True, True], AttemptState.finishing),
        (Stage.run, [True, False], AttemptState.failing),
        (Stage.run, [False, True], AttemptState.failing),
        (Stage.stop, [False], AttemptState.ending),
    ],
)
def test_an_attempt_s_state_follows_from_the_stage_and_the_exits(
    stage: Stage, exits: list[bool], state: AttemptState
) -> None:
    parts = [PartState(rank, exited_for=1.0, exited_well=well) for rank, well in enumerate(exits)]
    assert attempt_state(stage, [*parts, PartState(9)]) is state


@pytest.mark.parametrize(
    ("state", "parts", "observed"),
    [
        (AttemptState.training, [PartState(0), PartState(1)], None),
        (AttemptState.preparing, [PartState(0, stage_done=True), PartState(1)], None),
        (AttemptState.preparing, [PartState(0, stage_done=True)] * 2, (AttemptEvent.prepared, None)),
        (AttemptState.preparing, [PartState(0, stage_done=True)], (AttemptEvent.ready, None)),
        (AttemptState.probing, [PartState(0, stage_done=True)] * 2, (AttemptEvent.ready, None)),
        (AttemptState.finishing, [DONE, DONE], (AttemptEvent.completed, None)),
        (AttemptState.training, [PartState(0, node=NodeState.unreachable)], None),
        (AttemptState.training, [PartState(0, node=NodeState.lost)], (AttemptEvent.node_lost, 0)),
        (AttemptState.preparing, [PartState(0, node=NodeState.unreachable)], (AttemptEvent.node_lost, 0)),
        (AttemptState.probing, [PartState(0), PartState(1, node=NodeState.unreachable)], (AttemptEvent.node_lost, 1)),
        (AttemptState.preparing, [PartState(0, node=NodeState.awaited)], None),
        (
            AttemptState.training,
            [PartState(0), PartState(1, node=NodeState.lost, gone=True)],
            (AttemptEvent.task_lost, 1),
        ),
        (
            AttemptState.training,
            [PartState(0, gone=True), PartState(1, node=NodeState.lost)],
            (AttemptEvent.task_lost, 0),
        ),
        (
            AttemptState.training,
            [PartState(0, stage_failed=True), PartState(1, gone=True)],
            (AttemptEvent.task_lost, 1),
        ),
        (AttemptState.probing, [PartState(0), PartState(1, stage_failed=True)], (AttemptEvent.stage_failed, 1)),
        (AttemptState.finishing, [PartState(0), PartState(1, node=NodeState.lost, exited_for=1.0)], None),
        (AttemptState.ending, [PartState(0), PartState(1, gone=True)], None),
        (AttemptState.ending, [PartState(0, node=NodeState.unreachable), DONE], (AttemptEvent.cleared, None)),
        (AttemptState.ending, [PartState(0, stage_failed=True, node=NodeState.lost)], (AttemptEvent.cleared, None)),
    ],
)
def test_one_observation_counts_in_a_state(
    state: AttemptState, parts: list[PartState], observed: tuple[AttemptEvent, int | None] | None
) -> None:
    assert observe(state, parts, on_head=False) == (None if observed is None else Observed(*observed))


def test_an_attempt_on_the_service_s_machine_does_not_wait_for_its_network() -> None:
    parts = [PartState(0), PartState(1, node=NodeState.unreachable)]
    assert observe(AttemptState.training, parts, on_head=False) is None
    assert observe(AttemptState.training, parts, on_head=True) == (AttemptEvent.node_lost, 1)


@pytest.mark.parametrize(
    ("state", "deadline"), [(AttemptState.failing, GRACE_FAILED), (AttemptState.finishing, GRACE_DONE)]
)
def test_a_deadline_counts_from_the_first_exit_and_waits_for_a_node_that_may_be_down(
    state: AttemptState, deadline: float
) -> None:
    assert ATTEMPT_DEADLINES[state] == deadline
    first, second = PartState(0, exited_for=deadline + 2), PartState(1, exited_for=1.0)
    calls, may_be_down = PartState(2, silence=1.0), PartState(2, silence=deadline + 3)
    assert observe(state, [PartState(0, exited_for=deadline), second, calls], on_head=False) is None
    assert observe(state, [first, second, calls], on_head=False) == (AttemptEvent.overdue, None)
    assert observe(state, [first, second, may_be_down], on_head=False) is None
