"""Which sets of answers the page of a job's samples shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Answer, Sampled
from llama_stack_provider_trl.specs.job import SampleMessage, SamplesSpec
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
