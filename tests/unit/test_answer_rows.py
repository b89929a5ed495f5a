"""Answers of jobs beside each other."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest

from llama_stack_provider_trl_remote.service.pages.conversation_view import answer_turn, beside
from llama_stack_provider_trl_remote.service.pages.rendering import _environment
from llama_stack_provider_trl_remote.service.security.access import Caller
from llama_stack_provider_trl_remote.service.views import answers as module
from llama_stack_provider_trl_remote.service.views.answers import read_rows


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
    assert (row.answers[0].judged["good"].score, row.answers[0].graded["right"].reward) == (4.0, 0.5)


def test_no_more_of_the_files_is_read_than_a_page_may(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = file(*[answer(row) for row in range(100)])
    monkeypatch.setattr(module, "MOST_BYTES", 2 * answers[1] // 10)
    found = read_rows([answers, answers], 0, 1000, "all")
    assert len(found.rows) in (9, 10)
    assert found.is_cut


def test_answers_to_another_prompt_have_a_line_of_their_own_and_are_no_difference() -> None:
    other = [{"role": "user", "content": "of other rows"}]
    one = file(answer(0), answer(1, "of one", a=True))
    two = file(answer(0, "no"), answer(1, "of two", a=False) | {"prompt": other})
    found = read_rows([one, two], 0, 10, "all").rows
    assert [(row.row, row.prompt[0]["content"], row.has_others) for row in found] == [
        (0, "question 0", False),
        (1, "question 1", True),
        (1, "of other rows", True),
    ]
    texts = [[answered and answered.text for answered in row.answers] for row in found]
    assert texts == [["yes", "no"], ["of one", None], [None, "of two"]]
    assert [row.row for row in read_rows([one, two], 0, 10, "differ").rows] == [0]
    assert "have read different rows" in beside(found[1]).note


@pytest.mark.parametrize(
    "line",
    [
        *([1], {"row": 0}, {"row": "text", "sample": 0, "prompt": [], "text": "", "tokens": 1, "complete": True}),
        {"row": 0, "sample": 0, "prompt": [], "text": ""},
    ],
)
def test_a_line_that_is_no_answer_is_counted_and_left_out(line: Any) -> None:
    found = read_rows([file(line, answer(1), line)], 0, 10, "all")
    assert ([row.row for row in found.rows], found.unreadable, found.is_cut) == ([1], 2, False)


def test_a_long_line_is_left_out_and_those_behind_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST", 400)
    found = read_rows([file(answer(0), answer(1, "x" * 1000), answer(2))], 0, 10, "all")
    assert ([row.row for row in found.rows], found.unreadable, found.is_cut) == ([0, 2], 1, False)


def test_turns_without_content_are_shown_and_of_many_the_last_ones() -> None:
    calls = [{"name": f"tool-{number}", "arguments": {}} for number in range(1000)]
    turns = [{}, *[{"role": "user", "content": "x"}] * 1000, {"role": "assistant", "tool_calls": calls}]
    line = answer(0, "y" * 100_000) | {"prompt": turns, "passed": {f"check-{number}": True for number in range(1000)}}
    (row,) = read_rows([file(line)], 0, 10, "all").rows
    shown = beside(row)
    assert (len(shown.prompt), shown.before) == (50, "952 turns before these are left out")
    assert shown.prompt[-1].calls[0].name == "tool-0"
    assert (len(shown.prompt[-1].calls), shown.prompt[-1].calls[-1].name) == (21, "(980 further calls are left out)")
    (answered,) = shown.answers
    assert answered is not None
    assert (len(answered.facts), answered.facts[-1].name) == (51, "950 more")
    assert len(answered.turn.text) < 20_000
    assert "it has 100000 characters" in answered.turn.text
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert len(answer_turn(call * 100).calls) == 21
    assert not answer_turn(call * 10_000).calls
    assert answer_turn(call * 10_000).text.startswith(call)


def test_the_page_shows_calls_reasoning_and_lines_that_it_cannot_read() -> None:
    turn = {"role": "assistant", "reasoning": "I add.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    found = read_rows([file({"row": 0}, answer(0, a=True, b=False) | {"prompt": [{}, turn]})], 0, 10, "all")
    jobs: dict[str, Any] = {"jobs": ["one"], "missing": {}, "measures": [], "results": {}, "wanted": {}, "show": "all"}
    values = jobs | {"found": found, "rows": [beside(row) for row in found.rows], "older": "", "newer": "", "most": 4}
    base = {"caller": Caller(None), "form_token": "", "asset": str, "navigation": [], "here": "", "version": ""}
    text = _environment().get_template("answers.html").render(**base, **values)
    for part in ("I add.", "<code>add</code>", "{&#34;a&#34;: 1}", "✓ a<", "✗ b<", "read, 1 cannot be shown"):
        assert part in text, part
