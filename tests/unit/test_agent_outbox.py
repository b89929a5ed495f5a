"""Events on their way to the service: each once, in one order, with the service's paths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes.localize import PathMap
from llama_stack_provider_trl_remote.nodes.outbox import ORDER, Outbox, first_failed
from tests.orders import order


@pytest.fixture
def places(tmp_path: Path) -> PathMap:
    found = PathMap(order(), tmp_path)
    found.run_dir.mkdir(parents=True)
    return found


def emit(places: PathMap, *events: dict[str, Any]) -> None:
    with open(places.files.events, "ab") as file:
        for event in events:
            file.write(json.dumps(event).encode() + b"\n")


def progress(step: int) -> dict[str, Any]:
    return {"type": "progress", "step": step, "note": "é"}


def saved(places: PathMap, step: int) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "kind": "step",
        "step": step,
        "path": str(places.checkpoint_dir / f"checkpoint-{step}"),
    }


def shipped(outbox: Outbox, have: int = 0, limit: int = 1 << 20) -> list[dict[str, Any]]:
    """All that the service gets, in pieces."""
    data = bytearray()
    while have < outbox.size:
        piece = outbox.piece(have, limit)
        assert piece
        data += piece
        have += len(piece)
    return [json.loads(line) for line in data.splitlines()]


def kinds(events: list[dict[str, Any]]) -> list[Any]:
    return [event.get("step", event["type"]) if event["type"] == "progress" else event["type"] for event in events]


def test_events_go_at_once_and_a_checkpoint_when_it_is_with_the_service(places: PathMap) -> None:
    emit(places, progress(1), saved(places, 1), progress(2), {"type": "finished", "step": 2})
    outbox = Outbox(places)
    outbox.read_events()
    assert kinds(shipped(outbox)) == [1, 2]
    assert not outbox.has_finished
    (checkpoint, finished) = outbox.pending
    assert (checkpoint.is_checkpoint, finished.is_checkpoint) == (True, False)
    outbox.release(checkpoint)
    events = shipped(outbox)
    assert kinds(events) == [1, 2, "checkpoint", "finished"]
    assert events[2]["path"] == "/service/checkpoints/job/checkpoint-1"
    assert outbox.pending == ()
    assert outbox.has_finished


@pytest.mark.parametrize("word", ["finished", "failed", "paused"])
@pytest.mark.parametrize("later", [True, False])
def test_a_last_word_waits_for_every_checkpoint_before_it(places: PathMap, word: str, later: bool) -> None:
    outbox = Outbox(places)
    emit(places, saved(places, 1), saved(places, 2))
    if later:
        outbox.read_events()
    emit(places, {"type": word, "step": 2})
    outbox.read_events()
    outbox.release(outbox.pending[0])
    assert kinds(shipped(outbox)) == ["checkpoint"]
    outbox.release(outbox.pending[0])
    assert kinds(shipped(outbox)) == ["checkpoint", "checkpoint", word]


def test_with_a_shared_file_system_a_checkpoint_waits_for_nothing(tmp_path: Path) -> None:
    places = PathMap(order(), tmp_path, shared=True)
    places.run_dir.mkdir(parents=True)
    emit(places, saved(places, 1), {"type": "finished", "step": 1})
    outbox = Outbox(places)
    outbox.read_events()
    assert shipped(outbox)[0]["path"] == "/service/checkpoints/job/checkpoint-1"
    assert outbox.pending == ()


def test_half_a_line_is_left_for_later(places: PathMap) -> None:
    emit(places, progress(1))
    with open(places.files.events, "ab") as file:
        file.write(b'{"type": "prog')
    outbox = Outbox(places)
    outbox.read_events()
    assert kinds(shipped(outbox)) == [1]
    with open(places.files.events, "ab") as file:
        file.write(b'ress", "step": 2}\n')
    outbox.read_events()
    assert kinds(shipped(outbox)) == [1, 2]


@pytest.mark.parametrize("torn", ["", "12", "1 3"])
def test_after_a_restart_the_order_is_the_one_before_it(places: PathMap, torn: str) -> None:
    """The service has what overtook a checkpoint; the new agent must not send it in another order."""
    emit(places, saved(places, 1), progress(2))
    first = Outbox(places)
    first.read_events()
    first.release(first.pending[0])
    emit(places, progress(3), saved(places, 3))
    first.read_events()
    before = first.piece(0)
    with open(places.run_dir / ORDER, "a") as file:
        file.write(torn)
    emit(places, progress(4), {"type": "finished", "step": 4})
    again = Outbox(places)
    assert again.piece(0) == before
    again.read_events()
    assert kinds(shipped(again)) == [2, "checkpoint", 3, 4]
    assert [pending.event["type"] for pending in again.pending] == ["checkpoint", "finished"]
    again.release(again.pending[0])
    third = Outbox(places)
    third.read_events()
    assert kinds(shipped(third)) == [2, "checkpoint", 3, 4, "checkpoint", "finished"]
    assert third.has_finished


@pytest.mark.parametrize("limit", [1, 50, 1 << 20])
def test_the_service_gets_the_rest_wherever_it_stands(places: PathMap, limit: int) -> None:
    emit(places, *(progress(step) for step in range(5)), {"type": "prepared", "resumed_from": None})
    outbox = Outbox(places)
    outbox.read_events()
    whole = outbox.piece(0)
    assert len(whole) == outbox.size
    for have in range(outbox.size):
        rest = bytearray(whole[:have])
        while len(rest) < outbox.size:
            rest += outbox.piece(len(rest), limit)
        assert bytes(rest) == whole
    assert outbox.piece(outbox.size) == b""


def test_an_event_that_cannot_be_recorded_is_not_sent_and_read_again(
    places: PathMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit(places, progress(1))
    outbox = Outbox(places)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr("os.write", lambda fd, data: write(fd, data[:1]))
        with pytest.raises(OSError, match="no space"):
            outbox.read_events()
    assert outbox.size == 0
    outbox.read_events()
    assert kinds(shipped(outbox)) == [1]
    assert kinds(shipped(Outbox(places))) == [1]


def test_a_node_without_rank_0_reports_its_first_failure(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert first_failed(path) is None
    path.write_text('{"type": "failed", "rank": 1}')
    assert first_failed(path) is None  # it is still being written
    path.write_text('{"type": "failed", "rank": 1}\n{"type": "failed", "rank": 3}\n{"type": "fail')
    assert first_failed(path) == {"type": "failed", "rank": 1}
