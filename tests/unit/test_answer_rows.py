"""Answers of jobs beside each other."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest

from llama_stack_provider_trl_remote.service.views import answer_rows
from llama_stack_provider_trl_remote.service.views.answer_rows import read_rows


def file(*answers: dict[str, Any]) -> tuple[Any, int]:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in answers)
    return partial(io.BytesIO, data + b'{"row": 9, "half'), len(data)


def answer(row: int, text: str = "yes", sample: int = 0, **passed: bool) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"question {row}"}]
    more = {"passed": passed} if passed else {}
    return {"row": row, "sample": sample, "prompt": prompt, "text": text, "tokens": 2, "complete": True, **more}


def test_answers_to_the_same_row_are_beside_each_other_whatever_rows_a_job_lacks() -> None:
    one = file(answer(0), answer(1), answer(1, "again", sample=1))
    other = file(answer(1, "no"), answer(2))
    found = read_rows([one, None, other], 0, 10, "all")
    assert [(row.row, row.sample) for row in found.rows] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    texts = [[answered and answered.text for answered in row.answers] for row in found.rows]
    assert texts == [["yes", None, None], ["yes", None, "no"], ["again", None, None], [None, None, "yes"]]
    assert found.rows[3].prompt[0]["content"] == "question 2"
    assert (found.has_more, found.is_cut) == (False, False)
    part = read_rows([one, other], 1, 2, "all")
    assert [(row.row, row.sample) for row in part.rows] == [(1, 0), (1, 1)]
    assert part.has_more


def test_rows_that_fail_or_differ_are_found() -> None:
    one = file(answer(0, a=True, b=True), answer(1, a=True, b=False), answer(2, a=True, b=True))
    other = file(answer(0, a=True, b=True), answer(1, a=True, b=False), answer(2, a=False, b=True))
    assert [row.row for row in read_rows([one], 0, 10, "failed").rows] == [1]
    assert [row.row for row in read_rows([one, other], 0, 10, "failed").rows] == [1, 2]
    assert [row.row for row in read_rows([one, other], 0, 10, "differ").rows] == [2]
    texts = [file(answer(0), answer(1)), file(answer(0), answer(1, "no"))]
    assert [row.row for row in read_rows(texts, 0, 10, "differ").rows] == [1]


def test_scores_of_judges_and_graders_are_beside_what_passes() -> None:
    judged = answer(0, good=True, right=False) | {
        "judged": {"good": {"score": 4.0, "verdict": "Score: 4"}},
        "graded": {"right": {"reward": 0.5, "error": None}},
    }
    (row,) = read_rows([file(judged)], 0, 10, "all").rows
    assert row.answers[0] is not None
    assert row.answers[0].scores == {"good": 4.0, "right": 0.5}


def test_no_more_of_the_files_is_read_than_a_page_may(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = file(*[answer(row) for row in range(100)])
    monkeypatch.setattr(answer_rows, "MOST_BYTES", 2 * answers[1] // 10)
    found = read_rows([answers, answers], 0, 1000, "all")
    assert len(found.rows) in (9, 10)
    assert found.is_cut
    with pytest.raises(ValueError, match="no answer"):
        read_rows([(partial(io.BytesIO, b"[1]\n"), 4)], 0, 10, "all")
