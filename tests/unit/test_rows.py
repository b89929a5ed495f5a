"""Every accepted row shape is read as documented; every other row is refused by number, column and reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs.job import RowUse
from llama_stack_provider_trl.specs.rows import (
    CALL_ROLES,
    ROLES,
    ROW_SHAPES,
    LabelledExample,
    PreferenceExample,
    PromptExample,
    SftExample,
    check_rows,
    holds_pairs,
    parse_row,
)
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


@pytest.mark.parametrize(("name", "role"), [(name, role) for name, role in ROLES.items() if name not in CALL_ROLES])
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


PAIR = PreferenceExample.of([QUESTION], [ANSWER], [WORSE])
LONG_PAIR = PreferenceExample.of(DIALOG[:-1], [assistant("Yes.")], [assistant("No.")])
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


BAD = assistant("Go away.")
SEVERAL = PreferenceExample.of([QUESTION], [ANSWER], [WORSE], [BAD])
BETTER = "Because.", "No idea.", "Go away."
SPEAKS = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Why?\n\nAssistant: "
CONTEXT = [user("Hi"), assistant("Hello!"), QUESTION]


def scored(key: str, *scores: Any) -> list[dict[str, Any]]:
    return [{"response": text, key: score} for text, score in zip(BETTER, scores, strict=False)]


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "Why?", "chosen": "Because.", "rejected": ["No idea.", "Go away."]}, SEVERAL),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": ["No idea."]}, PAIR),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [[WORSE], "Go away."]}, SEVERAL),
        ({"prompt": "Why?", "chosen": [QUESTION, ANSWER], "rejected": [[QUESTION, WORSE], [QUESTION, BAD]]}, SEVERAL),
        ({"chosen": [QUESTION, ANSWER], "rejected": [[QUESTION, WORSE], json.dumps([QUESTION, BAD])]}, SEVERAL),
        (
            {"chosen": DIALOG, "rejected": [[*DIALOG[:-1], WORSE], [*DIALOG[:-1], BAD]]},
            PreferenceExample.of(DIALOG[:-1], DIALOG[-1:], [WORSE], [BAD]),
        ),
        (
            {"prompt": "Why?", "chosen": DIALOG[1:], "rejected": [[*DIALOG[1:-1], WORSE], [*DIALOG[1:-1], BAD]]},
            PreferenceExample.of(DIALOG[1:-1], DIALOG[-1:], [WORSE], [BAD]),
        ),
        ({"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}, PAIR),
        (
            {
                "input": json.dumps({"messages": CONTEXT, "tools": [], "parallel_tool_calls": True}),
                "preferred_output": json.dumps([ANSWER]),
                "non_preferred_output": [WORSE],
            },
            PreferenceExample.of(CONTEXT, [ANSWER], [WORSE]),
        ),
        ({"instruction": "Why?", "completions": scored("overall_score", 7, 5.5, 2)}, SEVERAL),
        ({"instruction": "Why?", "completions": scored("fine-grained_score", "4.5", "4.25", 2)}, SEVERAL),
        ({"instruction": "Why?", "completions": json.dumps(scored("fine_grained_score", 3, 2, 1))}, SEVERAL),
        (
            {"instruction": "Why?", "completions": scored("overall_score", 5, 5, 2)},
            PreferenceExample.of([QUESTION], [ANSWER], [BAD]),
        ),
        (
            {
                "prompt": "Why?",
                "answers": [{"answer": text, "rank": rank} for text, rank in zip(BETTER[::-1], (3, 2, 1), strict=True)],
            },
            PreferenceExample.of([QUESTION], [ANSWER], [BAD], [WORSE]),
        ),
        (
            {"prompt": SPEAKS, "answers": [{"answer": "Because.", "rank": 1.0}, {"answer": "No idea.", "rank": 2.0}]},
            PreferenceExample.of(CONTEXT, [ANSWER], [WORSE]),
        ),
        ({"prompt": "Why?", "responses": [*BETTER], "scores": [0.5, 0.25, -1]}, SEVERAL),
        ({"prompt": "Why?", "responses": [*BETTER], "ranks": [0, 1, 1]}, SEVERAL),
        ({"prompt": [QUESTION], "responses": [[QUESTION, ANSWER], [WORSE]], "ranks": [1, 2]}, PAIR),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_preferences_are_read_as_other_datasets_write_them(row: dict[str, Any], example: PreferenceExample) -> None:
    assert parse_row(row, 0, "dpo") == example
    for method in ("orpo", "simpo", "reward"):
        assert parse_row(row, 0, method) == example
    assert check_rows([row], "dpo").warnings == []
    assert holds_pairs(row)
    assert [(pair.chosen, pair.rejected) for pair in example.written_out()] == [
        (example.answers[0], answer) for answer in example.answers[1:]
    ]


def test_a_row_without_a_better_answer_makes_no_pair_and_is_counted() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Why?", "responses": ["So.", "Because."], "scores": [3, 3]},
        {"instruction": "Why?", "completions": []},
        {"prompt": "Why?", "answers": [{"answer": "So.", "rank": 1}]},
        {"prompt": "Why?", "chosen": "Because.", "rejected": ["Because.", "No."]},
    ]
    assert parse_row(rows[0], 0, "dpo") == PreferenceExample([QUESTION], [], [])
    assert check_rows(rows, "dpo").warnings == [
        "1 of 2 pairs have identical chosen and rejected answers: no signal",
        "3 of 4 rows make no pair: no preference, since no answer is better",
    ]


def test_scores_of_a_pair_are_compared_and_equal_ones_are_counted() -> None:
    pair = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}
    several = {**pair, "rejected": ["No idea.", "Go away."]}
    rows: list[dict[str, Any]] = [
        {**pair, "score_chosen": 8, "score_rejected": "7.5"},
        {**pair, "score_chosen": 8, "score_rejected": 8.0},
        {**several, "score_chosen": 8.0, "score_rejected": [8, 1]},
        {**pair, "score_chosen": 8.0, "score_rejected": NAN},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE], "score_chosen": 1, "score_rejected": 1},
    ]
    assert parse_row(rows[0], 0, "dpo") == PAIR
    assert check_rows(rows, "dpo").warnings == [
        "3 of 5 rows have the same score for chosen and rejected answers: no preference is known, and they are "
        "trained as the columns have it"
    ]


def test_what_is_not_read_of_answers_with_scores_is_named() -> None:
    completions = [{**one, "model": "m", "critique": "c"} for one in scored("overall_score", 2, 1)]
    row = {"source": "s", "instruction": "Why?", "completions": completions}
    assert check_rows([row], "dpo").warnings == [
        "columns never read: source",
        "message keys never read: critique, model",
    ]
    openai = {"input": {"messages": [QUESTION], "n": 1}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}
    assert check_rows([openai], "dpo").warnings == ["message keys never read: input.n"]


def test_keys_of_text_parts_that_nothing_reads_are_named() -> None:
    part = {"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}, "index": None}
    row = {"messages": [{"role": "user", "content": [part]}, ANSWER]}
    assert check_rows([row], "sft").warnings == ["message keys never read: text.cache_control"]


def test_a_label_of_a_conversation_is_about_the_assistant_turns_at_its_end() -> None:
    row = {"messages": [*CONTEXT, ANSWER, BAD], "label": False}
    assert parse_row(row, 0, "kto") == LabelledExample(CONTEXT, [ANSWER, BAD], False)
    assert check_rows([row], "kto").warnings == []
    for messages, found in (
        (
            CONTEXT,
            "column messages: found a conversation that ends in a user turn, expected assistant turns at its end",
        ),
        ([ANSWER], "column messages: found assistant turns only, expected a turn before them that asks for an answer"),
    ):
        with pytest.raises(InvalidRows, match=re.escape(f"row 0: {found}")):
            check_rows([{"messages": messages, "label": True}], "kto")
    with pytest.raises(InvalidRows, match="column label: found a number 1, expected true"):
        check_rows([{"messages": DIALOG, "label": 1}], "kto")


def test_rows_that_sft_reads_too_hold_pairs_only_as_chosen_and_rejected() -> None:
    assert holds_pairs({"messages": DIALOG, "prompt": "Why?", "chosen": "A.", "rejected": "B."})
    assert not holds_pairs({"prompt": "Why?", "completion": "So.", "answers": ["So."]})
    assert not holds_pairs({"prompt": "Why?", "completion": "So.", "chosen": "A.", "rejected": None})


def test_prompts_are_read_of_rows_of_preferences_too() -> None:
    openai = {"input": {"messages": CONTEXT}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}
    assert parse_row(openai, 0, "prompts") == PromptExample(CONTEXT)
    ultrafeedback = {"instruction": "Why?", "completions": scored("overall_score", 2, 1)}
    assert parse_row(ultrafeedback, 0, "grpo") == PromptExample([QUESTION])


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
            "context": "Be brief.",
            "messages": [QUESTION, {**ANSWER, "weight": 1, "name": "bot", "tool_calls": None}],
        },
        {"id": NAN, "score": None, "instruction": "Why?", "input": "", "output": "Because.", "text": "Why? Because."},
    ]
    assert check_rows(rows, "sft").warnings == [
        "columns never read: context, id, text",
        "message keys never read: name",
    ]


SFT_ERRORS: list[tuple[Any, str]] = [
    (
        {"messages": [QUESTION, {**ANSWER, "weight": 0.5}]},
        "column messages, turn 1 (assistant): found weight 0.5, expected 0, no loss on this turn, or 1",
    ),
    (
        {"messages": [QUESTION, {**ANSWER, "reasoning_content": "Let me think.", "thinking": "Hm."}]},
        "column messages, turn 1 (assistant): found different texts in reasoning_content and thinking, expected the "
        "reasoning once",
    ),
    (
        {"messages": DIALOG, "tools": [{"description": "finds"}]},
        "column tools, tool 0: found no name, expected a tool",
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
    ({"messages_": []}, ". Rename 'messages_' to messages"),
    ({"prompts": "Why?", "prompt_id": "7", "completion": "So."}, ". Rename 'prompts' to prompt"),
    ({"ask": "Why?", "reply": "So."}, "Rename them, or tell a training what they are by the option `columns`"),
    (
        {"ask" * n: "Why?" for n in range(1, 200)},
        "Rename them, or tell a training what they are by the option `columns`",
    ),
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
        "column messages, turn 0 (user), part 0: found an object without the bytes of an image, expected a data URI",
    ),
    (
        {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"id": "1"}]}]},
        "column messages, turn 1 (assistant), tool_calls, call 0: found no name, expected a call",
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
    ({"prompt": "Why?", "chosen": "Because.", "rejectd": "No."}, ". Rename 'rejectd' to rejected"),
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
    ({"prompt": "Why?", "chosen": "A.", "rejected": []}, "column rejected: found an empty list, expected at least one"),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": ["B.", ""]},
        "column rejected, answer 1: found blank text, expected text",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": ["B.", None]},
        "column rejected, answer 1: found null, expected text",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": ["B.", [QUESTION, BAD, QUESTION]]},
        "column rejected, answer 1: found a user turn, expected assistant turns that follow the prompt",
    ),
    (
        {"chosen": [QUESTION, ANSWER], "rejected": [[QUESTION, WORSE], "No."]},
        "column rejected, answer 1: found text 'No.', expected a conversation as a list of messages",
    ),
    (
        {"chosen": [QUESTION, ANSWER], "rejected": [[QUESTION, WORSE], [user("What?"), BAD]]},
        "column chosen: found a first turn that differs from that of rejected, expected the same leading turns in all",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": "B.", "score_chosen": 2, "score_rejected": 7.5},
        "column score_chosen: found 2 where score_rejected is 7.5, expected a score that is not below that of a "
        "rejected answer: swap the answers, or correct the scores",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": "B.", "score_chosen": True, "score_rejected": 1},
        "column score_chosen: found a boolean True, expected a number",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": "B.", "score_chosen": 1.5, "score_rejected": 10**400},
        "column score_rejected: found a number 1000",
    ),
    (
        {"prompt": "Why?", "responses": ["A.", "B."], "scores": [10**400, 1.5]},
        "column scores, number 0: found a number 1000",
    ),
    (
        {"prompt": "Why?", "chosen": "A.", "rejected": ["B.", "C."], "score_chosen": 2, "score_rejected": 1},
        "column score_rejected: found 1 scores, expected 2, one for each rejected answer",
    ),
    (
        {"input": {"messages": []}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]},
        "column input.messages: found an empty list, expected at least one message",
    ),
    (
        {"input": [QUESTION], "preferred_output": [ANSWER], "non_preferred_output": [WORSE]},
        "column input: found a list [{'role': 'user', 'content': 'Why?'}], expected an object with messages",
    ),
    (
        {
            "input": {"messages": [QUESTION], "tools": [{"type": "function"}]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WORSE],
        },
        "column input.tools, tool 0: found no name, expected a tool",
    ),
    (
        {"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER], "non_preferred_output": [QUESTION]},
        "column non_preferred_output: found a user turn, expected assistant turns",
    ),
    (
        {"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER]},
        ". Missing or empty in this row: non_preferred",
    ),
    (
        {"instruction": "Why?", "completions": [{"response": "A.", "overall_score": 1}, {"response": "B."}]},
        "column completions: found answers without a score, expected a score of each answer, under the same key: "
        "overall_score or fine-grained_score or fine_grained_score",
    ),
    (
        {"instruction": "Why?", "completions": [{"response": "A.", "overall_score": "good"}]},
        "column completions, answer 0, overall_score: found text 'good', expected a number",
    ),
    (
        {"instruction": "Why?", "completions": ["A."]},
        "column completions, answer 0: found text 'A.', expected an object",
    ),
    ({"instruction": "Why?", "completions": 3}, "column completions: found a number 3, expected a list of objects"),
    (
        {"prompt": "Why?", "answers": [{"answer": "A.", "rank": 1}, {"answer": "B."}]},
        "column answers, answer 1, rank: found null, expected a number",
    ),
    (
        {"prompt": "Why?", "responses": ["A.", "B."], "scores": [1]},
        "column scores: found 1 numbers, expected 2, one for each of responses",
    ),
    (
        {"prompt": "Why?", "responses": ["A.", "B."], "ranks": [1, float("inf")]},
        "column ranks, number 1: found a number inf, expected a number",
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


@pytest.mark.parametrize(
    ("row", "lacking"),
    [
        ({"prompt": "Why?", "chosen": "So."}, "rejected"),
        ({"prompt": "Why?", "responses": ["A.", "B."]}, "scores or ranks"),
        ({"instruction": "Why?"}, "completions"),
    ],
)
def test_the_column_is_named_that_the_closest_shape_lacks(row: dict[str, Any], lacking: str) -> None:
    with pytest.raises(InvalidRows, match=rf"\. Missing or empty in this row: {lacking}$"):
        check_rows([row], "dpo")


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


@pytest.mark.parametrize(("last", "counted"), [(USER, True), (ASSISTANT, False)])
def test_conversations_that_end_in_a_question_are_counted(last: dict[str, Any], counted: bool) -> None:
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, last]}]
    found = check_rows(rows, "sft").warnings
    assert any("1 of 2 rows end in a user turn, behind the last answer" in one for one in found) == counted


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
