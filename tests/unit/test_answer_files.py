"""Which part of a file of answers counts, and which files a job that answers has."""

from __future__ import annotations

import io
from typing import Any

import pytest

from llama_stack_provider_trl.specs import answer_files as module
from llama_stack_provider_trl.specs.answer_files import NONE, Whole, whole_batches
from llama_stack_provider_trl.specs.work import TRAINS, CheckedAnswering, EvaluateSpec, GenerateSpec, Work
from llama_stack_provider_trl_remote.nodes.localize import PathMap
from tests.orders import order, spec

SAMPLING: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1}
LINES = [b"one\n", b"three\n", b"\n", b"fifteen\n", b"x\n"]


@pytest.mark.parametrize(
    ("lines", "rest", "answers"),
    [(0, b"", 0), (1, b"", 0), (2, b"", 2), (2, b"thr", 2), (3, b"thr", 2), (4, b"", 4), (4, b"x", 4), (5, b"", 5)],
)
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_whole_batches_and_a_shorter_last_one_count(
    monkeypatch: pytest.MonkeyPatch, lines: int, rest: bytes, answers: int, piece: int
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    whole = Whole(answers, len(b"".join(LINES[:answers])))
    file = io.BytesIO(b"".join(LINES[:lines]) + rest)
    assert whole_batches(file, 2, 5) == whole
    known = Whole(2, len(LINES[0] + LINES[1])) if answers >= 2 else NONE
    assert whole_batches(file, 2, 5, known) == whole


def test_what_follows_the_last_answer_does_not_count() -> None:
    assert whole_batches(io.BytesIO(b"a\n" * 9), 2, 5) == Whole(5, 10)
    assert whole_batches(io.BytesIO(b"a\n" * 9), 2, 5, Whole(5, 10)) == Whole(5, 10)


def test_a_file_that_is_shorter_than_what_is_known_of_it_has_nothing_more() -> None:
    assert whole_batches(io.BytesIO(b"a\n"), 1, 9, Whole(3, 40)) == Whole(3, 40)


def test_a_node_has_the_files_that_the_job_has_and_counts_the_answers_of_its_prompts(tmp_path: Any) -> None:
    cases: list[tuple[Work | None, tuple[str, ...]]] = [
        (None, ()),
        (EvaluateSpec(), ()),
        (GenerateSpec(output_dataset_id="d", **{**SAMPLING, "samples_per_prompt": 3}), ("answers.jsonl", "rows.jsonl")),
        (EvaluateSpec(answers=CheckedAnswering(checks=(), **SAMPLING)), ("answers.jsonl",)),
    ]
    for work, names in cases:
        job = {"work": None if work is None else work.model_dump(mode="json"), "batch_size": 4}
        paths = PathMap(order(spec=spec(job=job)), tmp_path)
        assert (work or TRAINS).answer_files == paths.answer_files == names
    assert PathMap(order(spec={}), tmp_path).answer_files == ()  # cancelled before it was ordered
    of_generate = {"work": cases[2][0].model_dump(mode="json") if cases[2][0] else None, "batch_size": 4}
    paths = PathMap(order(spec=spec(job=of_generate)), tmp_path)
    assert paths.whole_answers(io.BytesIO(b"a\n" * 6), NONE) == Whole(6, 12)  # 3 of each of 2 prompts
    assert paths.whole_answers(io.BytesIO(b"a\n" * 5), NONE) == Whole(4, 8)
