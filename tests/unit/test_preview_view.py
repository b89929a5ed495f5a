"""Previews of rows for people: on the page and in a terminal."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl.specs.events import PreviewedRow
from llama_stack_provider_trl_remote.cli.preview import _lines
from llama_stack_provider_trl_remote.service.pages.preview_view import PART, parts_of

FAMILY = "👩\u200d👧"
ROW: dict[str, Any] = {
    **{"row": 0, "example": 0, "examples": 1, "dataset_id": "", "tokens": 5, "outcome": "trained", "reason": ""},
    **{"parts": {"sequence": 5}, "ids": [1, 2, 3, 4, 5], "texts": ["Hi ", "你", "", FAMILY, "\n"]},
    **{"trained": "01111", "kept": "11111", "special": "00000", "turns": [], "roles": []},
}


def test_a_token_that_is_part_of_a_character_is_marked_on_the_page() -> None:
    (part,) = parts_of(PreviewedRow.model_validate(ROW))
    assert [(token.text, token.kind) for token in part.tokens[:3]] == [("Hi ", ""), ("你", "loss"), (PART, "loss part")]


def test_a_terminal_gets_joined_emoji_as_they_are_in_the_row() -> None:
    counts = dict.fromkeys(("trained", "truncated", "num_rows", "read", "examples", "dropped"), 1)
    data = {**counts, "trained_tokens": 4, "total_tokens": 5, "longest_before_cut": 5, "histogram": []}
    inference = dict.fromkeys(("turns", "equal", "different", "cut", "unasked", "not_compared"), 0)
    found = {"rows": [{**ROW, "thoughts": 0}], "data": data, "max_seq_length": 9, "warnings": []}
    lines = [*_lines({**found, "inference": {**inference, "first_different": ""}})]
    assert f"  + '你{FAMILY}\n'" in lines
