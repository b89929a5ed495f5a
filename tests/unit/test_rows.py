"""Every accepted row shape is read as documented; every other row is refused by number, column and reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs.job import RowUse
from llama_stack_provider_trl.specs.rows import ROLES, ROW_SHAPES, PreferenceExample, SftExample, check_rows, parse_row
from tests.tiny import REPOSITORY, shared_dir

NAN = float("nan")
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


QUESTION, ANSWER, WORSE = user("Why?"), assistant("Because."), assistant("No idea.")
ONE_TURN = SftExample([QUESTION, ANSWER], 1)
DIALOG = [system("Be brief."), QUESTION, ANSWER, user("Really?"), assistant("Yes.")]


def test_an_empty_list_of_tools_as_text_is_none() -> None:
    for value in ("[]", "{}", "null", [], None):
        report = check_rows([{"prompt": "Why?", "completion": "So.", "tools": value}], "sft")
        assert report.num_rows == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": "Why?", "completion": [ANSWER]},
        {"prompt": [QUESTION], "completion": [QUESTION, ANSWER]},
        {"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])},
        {"instruction": "Why?", "output": "Because."},
        {"instruction": "Why?", "input": "", "output": "Because."},
        {"instruction": "Why?", "input": NAN, "output": "Because."},
        {"instruction": "Why?", "input": None, "output": "Because."},
        {"input": "Why?", "output": "Because."},
        {"question": "Why?", "answer": "Because."},
        {"chat_completion_input": [QUESTION], "expected_answer": "Because."},
        {"chat_completion_input": json.dumps([QUESTION]), "expected_answer": "Because."},
    ],
    ids=lambda row: json.dumps(row)[:60],
)
def test_every_instruct_shape_is_one_question_and_one_answer(row: dict[str, Any]) -> None:
    assert parse_row(row, 0, "sft") == ONE_TURN


def test_an_instruction_and_its_input_are_parted_by_a_blank_line() -> None:
    example = parse_row({"instruction": "Translate.", "input": "Hund", "output": "dog"}, 0, "sft")
    assert example == SftExample([user("Translate.\n\nHund"), assistant("dog")], 1)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": DIALOG},
        {"messages": json.dumps(DIALOG)},
        {"dialog": DIALOG},
        {"dialog": json.dumps(DIALOG)},
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in DIALOG]},
    ],
    ids=["messages", "messages as JSON", "dialog", "dialog as JSON", "conversations"],
)
def test_every_dialog_shape_keeps_every_turn(row: dict[str, Any]) -> None:
    assert parse_row(row, 0, "sft") == SftExample(DIALOG, None)


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_role_names_of_other_tools_are_mapped(name: str, role: str) -> None:
    turns = [{"from": name, "value": "a"}, {"from": "gpt", "value": "b"}]
    example = parse_row({"conversations": turns}, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages == [{"role": role, "content": "a"}, assistant("b")]


def test_plain_text_stays_text() -> None:
    assert parse_row({"text": "Once upon a time"}, 0, "sft") == SftExample(None, None, "Once upon a time")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert parse_row({"messages": [user(parts), ANSWER]}, 0, "sft") == SftExample([QUESTION, ANSWER], None)
    assert parse_row({"messages": [user(parts[0]), ANSWER]}, 0, "sft") == SftExample([user("Wh"), ANSWER], None)


@pytest.mark.parametrize(("value", "text"), [(42, "42"), (4.5, "4.5"), (True, "true")])
def test_scalars_are_read_as_their_json_text_and_the_report_lists_it(value: Any, text: str) -> None:
    row = {"question": "Why?", "answer": value}
    assert parse_row(row, 0, "sft") == SftExample([QUESTION, assistant(text)], 1)
    warnings = check_rows([row, row], "sft").warnings
    assert warnings == ["numbers or booleans where text is expected, read as their JSON text: answer (2)"]


PAIR = PreferenceExample([QUESTION], [ANSWER], [WORSE])
LONG_PAIR = PreferenceExample(DIALOG[:-1], [assistant("Yes.")], [assistant("No.")])
LONG = {"chosen": DIALOG, "rejected": [*DIALOG[:-1], assistant("No.")]}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}, PAIR),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WORSE]}, PAIR),
        ({"prompt": "Why?", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]}, PAIR),
        ({"prompt": [QUESTION], "chosen": [QUESTION, ANSWER], "rejected": "No idea."}, PAIR),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]}, PAIR),
        ({"chosen": json.dumps([QUESTION, ANSWER]), "rejected": json.dumps([QUESTION, WORSE])}, PAIR),
        (LONG, LONG_PAIR),
        ({"prompt": "Really?", **LONG}, LONG_PAIR),
        ({"prompt": DIALOG[:2], **LONG}, LONG_PAIR),
        ({"prompt": DIALOG[:-1], **LONG}, LONG_PAIR),
    ],
)
def test_the_prompt_of_a_pair_stands_once(row: dict[str, Any], pair: PreferenceExample) -> None:
    assert parse_row(row, 0, "dpo") == pair


def test_dpo_takes_no_notice_of_data_format() -> None:
    row = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}
    assert parse_row(row, 0, "dpo", "dialog") == PAIR
    assert check_rows([row], "dpo", "dialog").warnings == []


def test_identical_answers_are_counted() -> None:
    same = {"prompt": "Why?", "chosen": "Because.", "rejected": "Because."}
    implicit = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}
    other = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}
    report = check_rows([same, implicit, other], "dpo")
    assert report.warnings == ["2 of 3 pairs have identical chosen and rejected answers: no signal"]


BOTH = {"prompt": "Why?", "completion": "Because.", "messages": DIALOG}


@pytest.mark.parametrize(
    ("data_format", "example"),
    [("instruct", ONE_TURN), ("dialog", SftExample(DIALOG, None)), (None, ONE_TURN)],
)
def test_data_format_picks_where_a_row_has_both_shapes(data_format: Any, example: SftExample) -> None:
    assert parse_row(BOTH, 0, "sft", data_format) == example


def test_a_data_format_that_the_rows_do_not_have_is_one_warning() -> None:
    report = check_rows([{"messages": DIALOG}, {"messages": DIALOG}, BOTH], "sft", "instruct")
    assert report.shapes == {"messages": 2, "prompt + completion": 1}
    assert "data_format is 'instruct', but 2 of 3 rows have only messages: read as they are" in report.warnings


def test_columns_and_message_keys_that_are_not_read_are_named() -> None:
    rows: list[dict[str, Any]] = [
        {
            "id": 7,
            "system": "Be brief.",
            "messages": [QUESTION, {**ANSWER, "weight": 1, "name": "bot", "tool_calls": None}],
        },
        {"id": NAN, "score": None, "instruction": "Why?", "input": "", "output": "Because.", "text": "Why? Because."},
    ]
    assert check_rows(rows, "sft").warnings == [
        "columns never read: id, system, text",
        "message keys never read: name, weight",
    ]


SFT_ERRORS: list[tuple[Any, str]] = [
    (
        {"messages": [QUESTION, {**ANSWER, "weight": 0}]},
        "column messages, turn 1: found weight 0, expected 1, or no weight: the loss is on every assistant turn of "
        "a conversation; write the turns that are context only as a prompt (prompt and completion)",
    ),
    (
        {"messages": [QUESTION, {**ANSWER, "reasoning_content": "Let me think."}]},
        "column messages, turn 1: found reasoning_content, which no recipe renders, expected the reasoning as text "
        "in content, or none",
    ),
    (
        {"messages": DIALOG, "tools": [{"name": "search"}]},
        "column tools: found a list [{'name': 'search'}], which no recipe renders: write the tools out as text in "
        "a system message",
    ),
    (
        {"prompt": "Why?"},
        "found the columns prompt, expected for SFT one of: chat_completion_input + expected_answer; ",
    ),
    ({"prompt": "Why?", "completion": NAN}, "found the columns prompt, completion (null), expected for SFT one of"),
    ({"prompt": "Why?", "completion": NAN}, ". Missing or empty in this row: completion"),
    ({"output": "So."}, ". Missing or empty in this row: instruction or input"),
    ({"v": 1, "data": [{"prompt": "a", "completion": "b"}]}, ". The list in 'data' has such rows: write them alone, "),
    (
        {"prompt": "Why?", "completion": {"number": "5000 digits"}},
        "completion: found a number (5000 digits), expected t",
    ),
    ({}, "found the columns of an empty object, expected for SFT one of"),
    ({"Question": "Why?", " answer": "So."}, ". Rename ' answer' to answer, 'Question' to question"),
    ({"Chat-Completion-Input": [], "expected answer": ""}, "'Chat-Completion-Input' to chat_completion_input, 'exp"),
    ({"question;answer": "Why?;So."}, ". The cells are separated by ';': separate them by ','"),
    ({"prompt\tcompletion": "Why?\tSo."}, ". The cells are separated by '\\t': separate them by ','"),
    (["Why?"], "found a list ['Why?'], expected an object with named columns"),
    ({"prompt": "Why?", "completion": ""}, "column completion: found blank text, expected text"),
    ({"prompt": " \n", "completion": "Because."}, "column prompt: found blank text, expected text"),
    ({"prompt": "Why?", "completion": {"a": 1}}, "column completion: found an object {'a': 1}, expected text"),
    ({"prompt": "Why?", "completion": float("inf")}, "column completion: found a number inf, expected text"),
    ({"prompt": "Why?", "completion": "\ud83d"}, "column completion: found half of a UTF-16 surrogate pair"),
    ({"prompt": "Why?", "completion": []}, "column completion: found an empty list, expected at least one message"),
    ({"prompt": [ANSWER], "completion": "More."}, "column prompt: found a prompt that ends in an assistant turn"),
    (
        {"prompt": "Why?", "completion": [user("What?"), ANSWER]},
        "column completion: found a user turn, expected assist",
    ),
    ({"prompt": "[{'role': 'user'}]", "completion": "x"}, "column prompt: found text that is not JSON (Expecting prop"),
    ({"text": "\t"}, "column text: found blank text, expected text"),
    (
        {"messages": "Why?"},
        "column messages: found text that is not JSON (Expecting value at character 0), expected a l",
    ),
    ({"messages": 3}, "column messages: found a number 3, expected a list of {role, content} messages"),
    ({"messages": ["Why?"]}, "column messages, turn 0: found text 'Why?', expected an object with role and content"),
    ({"messages": [QUESTION]}, "column messages: found no assistant turn, expected at least one"),
    ({"messages": [{"content": "Why?"}]}, "column messages, turn 0: found no role, expected one of system, developer"),
    (
        {"messages": [{"role": "ai", "content": "x"}]},
        "column messages, turn 0: found role 'ai', expected one of system",
    ),
    (
        {"messages": [{"role": " Assistant", "content": "x"}]},
        "turn 0: found role ' Assistant', expected 'assistant'",
    ),
    (
        {"messages": [QUESTION, assistant(None)]},
        "column messages, turn 1 (assistant): found null content, expected text",
    ),
    ({"messages": [QUESTION, assistant("")]}, "column messages, turn 1 (assistant): found blank text, expected text"),
    ({"dialog": [user(" "), ANSWER]}, "column dialog, turn 0 (user): found blank text, expected text"),
    (
        {"messages": [user([{"type": "image_url", "image_url": {}}]), ANSWER]},
        "column messages, turn 0 (user): found a content part of type 'image_url', expected text, or parts",
    ),
    (
        {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"id": "1"}]}]},
        "column messages, turn 1: found tool_calls, which no recipe renders",
    ),
    (
        {"chat_completion_input": [QUESTION, ANSWER], "expected_answer": "x"},
        "column chat_completion_input: found a prompt that ends in an assistant turn",
    ),
    (
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        "These columns are DPO's: was POST /v1/post-training/preference-optimize meant?",
    ),
]

DPO_ERRORS: list[tuple[Any, str]] = [
    (
        {"prompt": "Why?", "chosen": "Because."},
        "found the columns prompt, chosen, expected for DPO one of: prompt + cho",
    ),
    ({"prompt": "Why?", "chosen": "Because.", "rejected": ""}, "column rejected: found blank text, expected text"),
    ({"prompt": "Why?", "chosen": "Because.", "rejected": None}, ". Missing or empty in this row: rejected"),
    ({"chosen": "Because.", "rejected": "No."}, "column chosen: found text 'Because.', expected a conversation"),
    (
        {"chosen": [QUESTION, ANSWER], "rejected": [user("What?"), WORSE]},
        "column chosen: found a first turn that differs from that of rejected, expected the same leading turns in both",
    ),
    (
        {"prompt": "Why?", "chosen": [user("What?"), ANSWER], "rejected": [user("What?"), WORSE]},
        "column chosen: found a user turn, expected assistant turns that follow the prompt",
    ),
    (
        {"prompt": "Why?", "completion": "Because."},
        "These columns are SFT's: was POST /v1/post-training/supervised-fine-tune meant?",
    ),
]


@pytest.mark.parametrize(("row", "message"), SFT_ERRORS)
def test_a_bad_sft_row_is_refused_by_number_and_reason(row: Any, message: str) -> None:
    rows = [{"prompt": "Why?", "completion": "Because."}] * 4
    with pytest.raises(InvalidRows, match=rf"^row 4: .*{re.escape(message)}") as caught:
        check_rows([*rows, row], "sft")
    assert caught.value.row == 4


@pytest.mark.parametrize(("row", "message"), DPO_ERRORS)
def test_a_bad_preference_row_is_refused_by_number_and_reason(row: Any, message: str) -> None:
    rows = [{"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}] * 4
    with pytest.raises(InvalidRows, match=rf"^row 4: .*{re.escape(message)}"):
        check_rows([*rows, row], "dpo")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(InvalidRows, match="the dataset is empty"):
        check_rows([], "sft")


@pytest.mark.parametrize(
    ("name", "algorithm", "shape", "count"),
    [
        ("instruct_999.jsonl", "sft", "instruction + output", 999),
        ("preference_300.jsonl", "dpo", "prompt + chosen + rejected", 300),
    ],
)
def test_the_real_datasets_are_read_to_the_last_row(name: str, algorithm: Any, shape: str, count: int) -> None:
    with open(shared_dir() / "data" / name, encoding="utf-8") as file:
        report = check_rows(map(json.loads, file), algorithm)
    assert (report.num_rows, report.shapes, report.warnings) == (count, {shape: count}, [])


def test_the_documented_table_is_the_one_in_the_code() -> None:
    text = Path(REPOSITORY / "docs" / "reference" / "data-formats.md").read_text(encoding="utf-8")
    documented = [line for line in text.splitlines() if re.match(r"\| `.*\| (SFT|DPO|KTO|PROMPTS) \|", line)]
    assert documented == [
        f"| {_columns(shape.columns, shape.optional)} | {shape.use.upper()} | {shape.data_format or '-'} "
        f"| {shape.meaning} |"
        for shape in ROW_SHAPES
    ]


def _columns(columns: tuple[str, ...], optional: tuple[str, ...]) -> str:
    return ", ".join([f"`{column}`" for column in columns] + [f"(`{column}`)" for column in optional])


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (
            {"chosen": "Yes.", "rejected": "No."},
            "these are answers whose prompt is missing: add it as the column prompt",
        ),
        ({"question": "Why?", "chosen": "A.", "rejected": "B."}, "was the column question meant as the prompt"),
        ({"context": [USER], "chosen": [ASSISTANT], "rejected": [USER, ASSISTANT]}, "was the column context meant"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "x"}, "it looks like a dialog in one text"),
        ({"prompt": None, "chosen": [ASSISTANT], "rejected": [ASSISTANT]}, "whose prompt is missing"),
    ],
)
def test_pairs_without_a_prompt_name_the_likely_cause(row: dict[str, Any], cause: str) -> None:
    with pytest.raises(InvalidRows, match="row 0: column chosen: found") as caught:
        check_rows([row], "dpo")
    assert cause in str(caught.value)


REPEATING: list[tuple[RowUse, dict[str, Any]]] = [
    ("sft", {"prompt": "Name a river.", "completion": "Name a river. The Elbe."}),
    ("sft", {"prompt": [USER], "completion": f" {USER['content']}\nBecause."}),
    ("sft", {"instruction": "Add.", "input": "1, 2", "output": "Add.\n\n1, 2\n3"}),
    ("sft", {"question": "2+2?", "answer": "2+2? 4"}),
    ("sft", {"chat_completion_input": [USER], "expected_answer": f"{USER['content']} So."}),
    ("dpo", {"prompt": "1+1?", "chosen": "2", "rejected": "1+1? 3"}),
    ("dpo", {"prompt": [USER], "chosen": [{**ASSISTANT, "content": f"{USER['content']} So."}], "rejected": "No."}),
    ("kto", {"prompt": "1+1?", "completion": "1+1?\n2", "label": True}),
]


@pytest.mark.parametrize(("use", "row"), REPEATING)
def test_answers_that_begin_with_their_prompt_are_counted(use: RowUse, row: dict[str, Any]) -> None:
    other = {"prompt": "a", "completion": "a", "chosen": "b", "rejected": "c", "label": False}
    found = check_rows([row, other, row], use).warnings
    assert [warning for warning in found if "2 of 3 rows have an answer that begins with its prompt's text" in warning]
    assert not [warning for warning in check_rows([other], use).warnings if "begins with" in warning]


@pytest.mark.parametrize("absent", [None, NAN])
def test_a_key_of_a_message_that_is_null_is_a_missing_key(absent: object) -> None:
    """As Parquet writes lists of messages with different keys."""
    written = [
        {"from": absent, "value": absent, "role": "user", "content": "Why?", "tool_calls": absent, "weight": absent},
        {"role": absent, "content": absent, "from": "gpt", "value": "So.", "reasoning": absent, "name": absent},
    ]
    plain = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert parse_row({"messages": written}, 0, "sft") == parse_row({"messages": plain}, 0, "sft")
    assert check_rows([{"messages": written}], "sft").warnings == []


def test_a_weight_that_is_a_boolean_is_no_number() -> None:
    with pytest.raises(InvalidRows, match="found weight True"):
        check_rows([{"messages": [USER, {**ASSISTANT, "weight": True}]}], "sft")
