"""Options `columns` and `roles`: rows under the names of their dataset are those under the names of shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.jobs.submission import keep_rows
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.specs.job import RowNames
from llama_stack_provider_trl.specs.rows import check_rows, parse_row

NAMES = RowNames(columns={"prompt": "question_text", "completion": "reply"})
ROW = {"question_text": "Why?", "reply": "So.", "id": 1}
TALK = [{"role": "customer", "content": "Why?"}, {"role": "agent", "content": "So."}]


def test_columns_are_read_under_other_names() -> None:
    assert parse_row(ROW, 0, "sft", None, NAMES) == parse_row({"prompt": "Why?", "completion": "So."}, 0, "sft")
    assert check_rows([ROW], "sft", None, NAMES).warnings == ["columns never read: id"]
    pair = {"q": "Why?", "good": "So.", "bad": "No."}
    names = RowNames(columns={"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert parse_row(pair, 0, "dpo", None, names) == parse_row(
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."}, 0, "dpo"
    )


def test_a_column_may_be_read_as_two_and_names_may_be_swapped() -> None:
    names = RowNames(columns={"prompt": "completion", "completion": "prompt"})
    assert parse_row({"completion": "Why?", "prompt": "So."}, 0, "sft", None, names) == parse_row(
        {"prompt": "Why?", "completion": "So."}, 0, "sft"
    )


def test_roles_are_read_under_other_names() -> None:
    names = RowNames(roles={"customer": "user", "agent": "assistant"})
    plain = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for talk in (TALK, json.dumps(TALK), [{"from": turn["role"], "value": turn["content"]} for turn in TALK]):
        assert parse_row({"messages": talk}, 0, "sft", None, names) == parse_row({"messages": plain}, 0, "sft")
    swapped = RowNames(roles={"user": "assistant", "assistant": "user"})
    turned = [{**turn, "role": {"user": "assistant", "assistant": "user"}[turn["role"]]} for turn in plain]
    assert parse_row({"messages": turned}, 0, "sft", None, swapped) == parse_row({"messages": plain}, 0, "sft")
    assert check_rows([{"messages": plain}], "sft", None, names).warnings == [
        "the option roles names roles that no message has: agent, customer"
    ]


def test_names_that_do_not_fit_the_rows_are_refused() -> None:
    with pytest.raises(InvalidRows, match="no row has the column reply_text, which the option columns names"):
        check_rows([{"prompt": "Why?", "completion": "So."}], "sft", None, RowNames(columns={"answer": "reply_text"}))
    with pytest.raises(InvalidRows, match="column prompt: it is there beside column question_text, which the option"):
        check_rows([{**ROW, "prompt": "What?"}], "sft", None, NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"query": "q"}}, "'query' is no column of a row shape, expected one of"),
        ({"columns": {"prompt": " "}}, "'prompt' has no name, expected that of a column"),
        ({"columns": {"prompt": 3}}, "columns"),
        ({"roles": {"human": "x"}}, "'human' is no role, expected one of assistant, system, tool, user"),
        ({"roles": {"user": "x", "assistant": ["y", "x"]}}, "'x' is there for user and for assistant: name it once"),
    ],
)
def test_options_that_name_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ProviderOptions.parse(options)


def test_options_become_names() -> None:
    options = ProviderOptions.parse({"columns": {"prompt": "q"}, "roles": {"user": ["a", "b"], "assistant": "c"}})
    roles = {"a": "user", "b": "user", "c": "assistant"}
    assert options.row_names == RowNames(columns={"prompt": "q"}, roles=roles)
    assert ProviderOptions.parse({}).row_names is None


def test_rows_are_kept_as_they_are_and_read_under_their_names(tmp_path: Path) -> None:
    ref, warnings = keep_rows(tmp_path, "rows", [ROW], "sft", None, NAMES)
    assert warnings == ["columns never read: id"]
    assert json.loads(ref.path.read_text()) == ROW
    with pytest.raises(InvalidRows, match="dataset 'rows', row 0: "):
        keep_rows(tmp_path, "rows", [ROW], "sft", None)
