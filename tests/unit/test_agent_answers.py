"""Answers on their way from a node to the service: whole batches, each once, and before the job's end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llama_stack_provider_trl.specs.events import Failed, Finished, Paused, Reason
from llama_stack_provider_trl.specs.work import GenerateSpec
from llama_stack_provider_trl_remote.nodes import uploader as module
from llama_stack_provider_trl_remote.wire import TaskOrder
from tests.fake_head import FakeHead, away, refusal
from tests.orders import write
from tests.unit.agent_world import World, progress
from tests.unit.agent_world import world as world

pytestmark = pytest.mark.timeout(30)
WORK = GenerateSpec(output_dataset_id="d", max_new_tokens=4, temperature=1, top_p=1, seed=1, samples_per_prompt=5)
LINES = [f'{{"row": 0, "sample": {number}}}\n'.encode() for number in range(5)]
FIRST = b"".join(LINES[:2])
ALL = b"".join(LINES)


def ordered(world: World, **job: Any) -> TaskOrder:
    """5 answers in batches of 2."""
    return world.order(job={"work": WORK.model_dump(mode="json"), "batch_size": 2, **job})


class Training:
    """The files that a training writes on the node."""

    def __init__(self, world: World) -> None:
        self.directory = world.home / "checkpoints"

    def append(self, data: bytes, name: str = "answers.jsonl") -> None:
        with open(self.directory / name, "ab") as file:
            file.write(data)


def sent(head: FakeHead, name: str = "answers.jsonl") -> bytes:
    return bytes(head.answer_files.get(name, b""))


def test_whole_batches_go_beside_the_training_and_its_end_waits_for_all_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    training = Training(world)
    kinds_then: list[str] = []

    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        training.append(FIRST + LINES[2][:5])
        world.emit(progress(2))
        await head.until(lambda: sent(head) == FIRST)
        training.append(ALL[len(FIRST) + 5 :])
        await head.until(lambda: sent(head) == ALL)
        head.only, head.trouble = "answers rows", [away() for _ in range(20)]
        training.append(b"rows\n", "rows.jsonl")
        result = {"answers": {"count": 5, "path": str(training.directory / "answers.jsonl")}}
        world.emit(progress(5), Finished(step=5, result=result))
        world.launcher.exit("job-1", 0)
        await head.until(lambda: len(head.trouble) < 10)
        kinds_then.extend(event["type"] for event in head.received_events)
        assert (report := head.report())
        assert not report.shipped
        await head.reported(lambda report: report.shipped)
        assert sent(head, "rows.jsonl") == b"rows\n"
        head.order()
        await head.until(lambda: not world.home.exists())

    world.run(play)
    assert kinds_then == ["progress", "progress"]
    *_, last = world.head.received_events
    assert last["result"]["answers"] == {"count": 5, "path": "/service/checkpoints/job/answers.jsonl"}
    assert [event["type"] for event in world.head.received_events] == ["progress", "progress", "finished"]


@pytest.mark.parametrize("end", [Paused(step=2), Failed(reason=Reason.internal, message="boom"), None])
def test_what_ends_early_sends_its_whole_batches_and_no_rows(world: World, end: Any) -> None:
    training = Training(world)

    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        head.only, head.trouble = "answers", [away() for _ in range(20)]
        training.append(b"".join(LINES[:3]))
        training.append(b"of another attempt\n", "rows.jsonl")
        if end is not None:
            world.emit(end)
        world.launcher.exit("job-1", 1)
        await head.until(lambda: len(head.trouble) < 10)
        assert not head.received_events
        await head.reported(lambda report: report.shipped)

    world.run(play)
    assert sent(world.head) == FIRST
    assert "rows.jsonl" not in world.head.answer_files
    assert [event["type"] for event in world.head.received_events] == ([] if end is None else [end.type])


def test_an_agent_that_is_started_again_sends_the_rest_once(world: World) -> None:
    training = Training(world)

    async def first(head: FakeHead) -> None:
        await world.begin(ordered(world))
        training.append(FIRST)
        await head.until(lambda: sent(head) == FIRST)

    async def second(head: FakeHead) -> None:
        training.append(ALL[len(FIRST) :])
        training.append(b"rows\n", "rows.jsonl")
        world.emit(Finished(step=5))
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)

    world.run(first)
    world.run(second)
    assert (sent(world.head), sent(world.head, "rows.jsonl")) == (ALL, b"rows\n")
    assert world.launcher.started == ["job-1"]
    assert [call for call in world.head.calls if call.startswith("fetch")] == ["fetch answers.jsonl"]


def test_an_attempt_begins_with_the_answers_of_the_service(world: World) -> None:
    """What an earlier training has left on the node is replaced, and a symbolic link of it is not followed."""
    secret = write(world.root / "secret", b"secret")
    (world.home / "checkpoints").mkdir(parents=True)
    (world.home / "checkpoints" / "answers.jsonl").symlink_to(secret)
    world.head.answer_files["answers.jsonl"] = bytearray(FIRST)

    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        Training(world).append(LINES[2] + LINES[3])
        await head.until(lambda: sent(head) == b"".join(LINES[:4]))

    world.run(play)
    file = world.home / "checkpoints" / "answers.jsonl"
    assert file.read_bytes() == b"".join(LINES[:4])
    assert not file.is_symlink()
    assert secret.read_bytes() == b"secret"


def test_answers_are_not_written_into_a_shared_directory(world: World) -> None:
    theirs = world.root / "service" / "checkpoints"
    mark = write(theirs / ".shared", b"job-1")
    order = ordered(world, checkpoint_dir=str(theirs)).model_copy(update={"shared_mark": str(mark)})

    async def play(head: FakeHead) -> None:
        await world.begin(order)

    world.run(play)
    written = json.loads((world.run_dir / "spec.json").read_text())
    assert (written["job"]["checkpoint_dir"], written["turn"]) == (str(world.home / "checkpoints"), None)


def test_answers_that_the_service_will_never_take_end_the_attempt(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        head.only, head.trouble = "answers", [refusal(400, "expected other bytes")]
        Training(world).append(FIRST)
        report = await world.failure()
        assert "does not accept the answers" in report.error
        assert "expected other bytes" in report.error

    world.run(play)


def test_a_training_that_cuts_its_own_file_blocks_nothing(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        head.only, head.trouble = "answers", [away() for _ in range(20)]
        Training(world).append(FIRST)
        await head.until(lambda: len(head.trouble) < 15)  # its batch is known, and not sent
        (world.home / "checkpoints" / "answers.jsonl").write_bytes(b"")
        world.emit(Failed(reason=Reason.internal, message="boom"))
        world.launcher.exit("job-1", 1)
        await head.reported(lambda report: report.shipped)

    world.run(play)
    assert sent(world.head) == b""
    assert [event["type"] for event in world.head.received_events] == ["failed"]


def test_a_training_that_puts_a_link_in_the_place_of_its_file_ends(world: World) -> None:
    secret = write(world.root / "secret", b"secret\n" * 20)

    async def play(head: FakeHead) -> None:
        await world.begin(ordered(world))
        file = world.home / "checkpoints" / "answers.jsonl"
        file.unlink()
        file.symlink_to(secret)
        report = await world.failure()
        assert "answers.jsonl of the training cannot be read" in report.error

    world.run(play)
    assert sent(world.head) == b""
