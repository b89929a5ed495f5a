"""What the page of a job's answers shows: sets of samples, rollouts and the answers of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import (
    Answer,
    RolledOut,
    RolloutAnswer,
    RolloutCall,
    RolloutTurn,
    Sampled,
)
from llama_stack_provider_trl.specs.job import SampleMessage, SamplesSpec
from llama_stack_provider_trl.specs.work import ANSWERS, GenerateSpec
from llama_stack_provider_trl.system.ownership import Ownership
from llama_stack_provider_trl_remote.service.pages.conversation_view import answer_turn, exchange_of, exchanges_of
from llama_stack_provider_trl_remote.service.views.answers import ROLLOUTS, answers_of, rollouts_of
from llama_stack_provider_trl_remote.service.views.samples import COLUMNS, SideBySide, list_samples, side_by_side
from tests.fakes import FakeClock, job_spec

SAMPLES = SamplesSpec(prompts=((SampleMessage(role="user", content="Hi"),),), max_new_tokens=4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "jobs.db", FakeClock())
    found.add_job(job_spec("a", samples=SAMPLES), "digest")
    found.launch("a", 1, "cpu", tmp_path)
    yield found
    found.close()


def add(store: Store, checkpoints: int) -> None:
    answers = [Answer(text="Hi.", tokens=2, complete=True)]
    sets = [Sampled(kind="before", step=0, epoch=0.0, answers=answers)]
    sets += [Sampled(kind="checkpoint", step=step, epoch=0.5, answers=answers) for step in range(1, checkpoints + 1)]
    sets += [Sampled(kind="after", step=checkpoints, epoch=1.0, answers=answers)]
    store.apply_events("a", 1, sets, 10)


def steps(found: SideBySide) -> list[int]:
    return [one.step for one in found.sets]


def test_the_first_and_the_last_set_are_always_there_and_a_few_between_them(store: Store) -> None:
    add(store, 11)
    newest = side_by_side(store, "a", 0)
    assert (steps(newest), newest.older, newest.newer) == ([0, 8, 9, 10, 11, 11], COLUMNS, None)
    middle = side_by_side(store, "a", COLUMNS)
    assert (steps(middle), middle.older, middle.newer) == ([0, 4, 5, 6, 7, 11], 2 * COLUMNS, 0)
    oldest = side_by_side(store, "a", 2 * COLUMNS)
    assert (steps(oldest), oldest.older, oldest.newer) == ([0, 1, 2, 3, 11], None, COLUMNS)
    beyond = side_by_side(store, "a", 1000)
    assert (steps(beyond), beyond.older) == ([0, 11], None)
    assert [turn.content for turn in newest.prompts[0]] == ["Hi"]
    assert [one.step for one in list_samples(store, "a", 3, 10).data] == [10, 11, 11]


def test_few_sets_are_each_shown_once(store: Store) -> None:
    assert (steps(side_by_side(store, "a", 0)), side_by_side(store, "a", 0).state) == ([], JobState.launching)
    answers = [Answer(text="Hi.", tokens=2, complete=True)]
    for number, expected in enumerate(([0], [0, 1], [0, 1, 2])):
        store.apply_events("a", 1, [Sampled(kind="checkpoint", step=number, epoch=0, answers=answers)], 10 + number)
        found = side_by_side(store, "a", 0)
        assert (steps(found), found.older, found.newer, found.cursor) == (expected, None, None, f"1-{10 + number}")


def test_a_job_without_prompts_has_none_and_an_unknown_one_is_named(store: Store) -> None:
    store.add_job(job_spec("b"), "digest")
    assert side_by_side(store, "b", 0).prompts == []
    with pytest.raises(JobNotFound):
        side_by_side(store, "c", 0)


def test_the_thought_and_the_calls_of_an_answer_are_apart_from_its_text() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    whole = answer_turn(f"<think>\nOne and one.\n</think>\n\nI add.\n{call}")
    assert whole[1:3] == ("I add.", "One and one.")
    assert whole.calls == [("add", '{"a": 1}')]
    assert answer_turn(" <think>Cut off")[1:3] == ("", "Cut off")
    broken = '<tool_call>{"name": 1}</tool_call>'
    assert (answer_turn(broken).text, answer_turn(broken).calls) == (broken, [])
    assert answer_turn("It is <b>2</b>.").text == "It is <b>2</b>."


@pytest.mark.parametrize(
    "text",
    ["text about </think> tags", "x <think>a</think> y", "<b><think>a</think>", "Perhaps of a template.</think>2"],
)
def test_marks_of_a_thought_that_an_answer_does_not_begin_with_are_its_text(text: str) -> None:
    assert answer_turn(text)[1:] == (text, "", [])


def rolled_out(step: int, *rewards: float) -> RolledOut:
    answers = [
        RolloutAnswer(
            text=str(number),
            tokens=1,
            complete=number == 0,
            reward=reward,
            advantage=reward - 0.5,
            rewards={"digits": reward, "length": 0.0},
        )
        for number, reward in enumerate(rewards)
    ]
    prompt = [RolloutTurn(role="user", content="Hi", calls=[RolloutCall(name="add", arguments="{}")])]
    return RolledOut(step=step, epoch=0.5, row=7, prompt=prompt, earlier_turns=2, answers=answers, further_answers=1)


def test_the_best_answer_to_a_prompt_of_a_step_comes_first_with_its_rewards(store: Store) -> None:
    store.apply_events("a", 1, [rolled_out(step, 0.0, 1.0) for step in range(1, 8)], 10)
    newest = rollouts_of(store, "a", 0)
    assert ([one.step for one in newest.data], newest.total) == ([7, 6, 5, 4, 3], 7)
    assert (newest.newer, newest.older) == (None, ROLLOUTS)
    last = rollouts_of(store, "a", ROLLOUTS)
    assert ([one.step for one in last.data], last.newer, last.older) == ([2, 1], 0, None)
    shown = exchange_of(newest.data[0])
    assert shown.title == "Step 7, row 7"
    assert [(answer.title, answer.turn.text, answer.note) for answer in shown.answers] == [
        ("Answer 1", "1", "1 tokens, not ended"),
        ("Answer 2", "0", "1 tokens"),
    ]
    best = [(fact.name, fact.value, fact.kind) for fact in shown.answers[0].facts]
    assert best == [("reward", "1", "good"), ("advantage", "+0.5", "good"), ("digits", "1", ""), ("length", "0", "")]
    assert (shown.before, shown.behind) == ("2 turns before these are left out", "1 further answers are left out")
    assert shown.prompt[0].calls == [("add", "{}")]
    plain = RolloutAnswer(text="2", tokens=1, complete=True)
    (answer,) = exchange_of(newest.data[0].model_copy(update={"answers": [plain]})).answers
    assert (answer.turn.text, answer.facts, answer.note) == ("2", [], "1 tokens"), "nothing rewards it"
    assert side_by_side(store, "a", 0).sets == []


def answering(store: Store, root: Path) -> JobRecord:
    choices: dict[str, Any] = {"temperature": 0, "top_p": 1, "seed": 1, "samples_per_prompt": 2}
    work = GenerateSpec(output_dataset_id="made", max_new_tokens=4, **choices)
    store.add_job(job_spec("asks", work=work, checkpoint_dir=root / "checkpoints" / "asks"), "digest")
    store.launch("asks", 1, "cpu", root / "run")
    (root / "checkpoints" / "asks").mkdir(parents=True)
    return store.get("asks")


def test_answers_of_a_file_stand_under_their_prompts_page_by_page(store: Store, tmp_path: Path) -> None:
    job, ownership = answering(store, tmp_path), Ownership(tmp_path)
    file = job.spec.checkpoint_dir / ANSWERS
    assert answers_of(ownership, job, 0) is None
    call = {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [{"name": "add", "arguments": {}}]}
    lines = [
        {
            **{"row": number // 2, "sample": number % 2},
            "prompt": [{"role": "user", "content": str(number // 2)}, call],
            **{
                "text": "Yes.",
                "tokens": 2,
                "complete": True,
                "passed": {"json": bool(number % 2)},
                "expected": {"json": "No."},
            },
        }
        for number in range(30)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    file.write_text(f'{text}[]\n{{"row": 99')
    first = answers_of(ownership, job, 0)
    assert first is not None
    assert first.following is not None
    exchanges = exchanges_of(first.data)
    assert [one.title for one in exchanges] == [f"Row {row}" for row in range(10)]
    assert [fact.value for answer in exchanges[0].answers for fact in answer.facts] == ["expected 'No.'", "passed"]
    assert exchanges[3].prompt[1][1:] == ("", "Hm.", [("add", "{}")])
    rest = answers_of(ownership, job, first.following)
    assert rest is not None
    assert ([line.row for line in rest.data], rest.unreadable, rest.following) == (
        [row for row in range(10, 15) for _ in range(2)],
        1,
        None,
    )
    file.write_bytes(b"x" * (3 << 20))
    assert answers_of(ownership, job, 0) == ([], 1, 1 << 20)
    file.unlink()
    (tmp_path / "secret").write_text("text")
    file.symlink_to(tmp_path / "secret")
    assert answers_of(ownership, job, 0) is None
