"""Tools and calls as datasets write them are the same conversation."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs.job import RowNames
from llama_stack_provider_trl.specs.rows import SftExample, check_rows, parse_row

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Warm?", "parameters": SCHEMA}}
FUNCTION = TOOL["function"]
CALL = {"name": "weather", "arguments": {"city": "Köln"}}
USER, ANSWER = {"role": "user", "content": "Warm?"}, {"role": "assistant", "content": "7."}
RESULT = {"role": "tool", "content": "7"}
TALK: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER]
EXPECTED = SftExample([{**USER, "tools": [TOOL]}, *TALK[1:]], None)

ARGUMENTS = json.dumps(CALL["arguments"])
CALLS: dict[str, dict[str, Any]] = {
    "openai": {"content": None, "tool_calls": [{"type": "function", "function": {**CALL, "arguments": ARGUMENTS}}]},
    "objects": {"content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    "without an envelope": {"tool_calls": [CALL]},
    "text": {"tool_calls": json.dumps([CALL])},
    "encoded twice": {"tool_calls": [{**CALL, "arguments": json.dumps(ARGUMENTS)}]},
    "merged by a table": {"tool_calls": [{**CALL, "arguments": {"city": "Köln", "days": None}, "id": None}]},
    "one old call": {"function_call": {**CALL, "arguments": ARGUMENTS}},
    "parameters": {"tool_calls": [{"name": "weather", "parameters": CALL["arguments"]}]},
    "llama stack": {
        "tool_calls": [{"tool_name": "weather", "arguments": CALL["arguments"], "arguments_json": ARGUMENTS}]
    },
}
TOOLS: dict[str, Any] = {
    "objects": [TOOL],
    "text": json.dumps([TOOL]),
    "texts": [json.dumps(TOOL)],
    "one": TOOL,
    "functions": [FUNCTION],
    "anthropic": [{"name": "weather", "description": "Warm?", "input_schema": SCHEMA}],
    "mcp": [{"name": "weather", "description": "Warm?", "inputSchema": SCHEMA}],
    "xlam": [{"name": "weather", "description": "Warm?", "parameters": {"city": {"type": "str"}}}],
    "merged by a table": [{**TOOL, "function": {**TOOL["function"], "strict": None}}],  # type: ignore[dict-item]
    "llama stack": [
        {"tool_name": "weather", "description": "Warm?", "parameters": {"city": {"param_type": "string"}}},
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_kind_are_one_conversation(name: str) -> None:
    row = {"messages": [USER, {"role": "assistant", **CALLS[name]}, RESULT, ANSWER], "tools": [TOOL]}
    assert parse_row(row, 0, "sft") == EXPECTED
    assert check_rows([row], "sft").warnings == []


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_of_every_kind_are_the_same(name: str, column: str) -> None:
    assert parse_row({"messages": TALK, column: TOOLS[name]}, 0, "sft") == EXPECTED


def test_types_and_defaults_of_xlam_are_those_of_json_schema() -> None:
    parameters = {
        "days": {"description": "How many.", "type": "int, optional", "default": 3},
        "cities": {"type": "List[str]"},
        "limits": {"type": "Tuple[int, int]"},
        "by": {"type": "Dict[str, float], optional"},
        "flag": {"type": "bool", "required": False},
        "ratio": {"type": "float", "default": "0.5"},
        "type": {"type": "Callable[[float], float]"},
        "properties": {"type": "set", "description": "Which."},
        "either": {"type": ["string", "null"]},
    }
    example = parse_row({"messages": TALK, "tools": [{"name": "weather", "parameters": parameters}]}, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages is not None
    assert example.messages[0]["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "description": "How many.", "default": 3},
            "cities": {"type": "array", "items": {"type": "string"}},
            "limits": {"type": "array"},
            "by": {"type": "object"},
            "flag": {"type": "boolean"},
            "ratio": {"type": "number", "default": "0.5"},
            "type": {"type": "Callable[[float], float]"},
            "properties": {"type": "array", "description": "Which."},
            "either": {"type": ["string", "null"]},
        },
        "required": ["cities", "limits", "type", "properties", "either"],
    }


@pytest.mark.parametrize(
    "schema",
    [
        {},
        SCHEMA,
        {"type": "object"},
        {"$defs": {"a": {"type": "string"}}},
        {"properties": {"type": {"type": "string"}}},
    ],
)
def test_schemas_stay_as_they_are(schema: dict[str, Any]) -> None:
    example = parse_row({"messages": [USER, ANSWER], "tools": [{"name": "f", "parameters": schema}]}, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages is not None
    assert example.messages[0]["tools"][0]["function"]["parameters"] == schema


def test_a_schema_that_is_there_twice_is_refused() -> None:
    tool = {"name": "f", "parameters": SCHEMA, "input_schema": SCHEMA}
    with pytest.raises(InvalidRows, match=r"tool 0 \(f\): found parameters and input_schema, expected the schema once"):
        parse_row({"messages": [USER, ANSWER], "tools": [tool]}, 0, "sft")


def test_sharegpt_writes_calls_and_results_as_turns() -> None:
    talk = [
        {"from": "human", "value": "Warm?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "7."},
    ]
    assert parse_row({"conversations": talk, "tools": json.dumps([FUNCTION])}, 0, "sft") == EXPECTED


def test_calls_as_turns_are_read_under_other_names_too_but_for_a_role_that_is_named() -> None:
    talk = [
        {"from": "client", "value": "Warm?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "7."},
    ]
    row = {"talk": talk, "tools": [FUNCTION]}
    names = RowNames(columns={"conversations": "talk"}, roles={"client": "user"})
    assert parse_row(row, 0, "sft", names=names) == EXPECTED
    plain = [{**turn, "from": "human"} if turn["from"] == "client" else turn for turn in talk]
    system = parse_row({"conversations": plain, "tools": [FUNCTION]}, 0, "sft", names=RowNames(system="Be brief."))
    assert isinstance(system, SftExample)
    assert system.messages is not None
    assert system.messages[2]["tool_calls"] == [CALL]
    named = names.model_copy(update={"roles": {"client": "user", "function_call": "assistant"}})
    example = parse_row(row, 0, "sft", names=named)
    assert isinstance(example, SftExample)
    assert example.messages is not None
    assert example.messages[1]["content"] == json.dumps(CALL)


def test_ids_and_names_of_results_are_kept() -> None:
    talk = [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": "c1"}]}]
    for result in ({"tool_call_id": "c1", "name": "weather"}, {"call_id": "c1", "tool_name": "weather"}):
        row = {"messages": [*talk, {"role": "tool", "content": {"t": 7}, **result}, ANSWER]}
        example = parse_row(row, 0, "sft")
        assert isinstance(example, SftExample)
        assert example.messages is not None
        assert example.messages[1]["tool_calls"] == [{**CALL, "id": "c1"}]
        assert example.messages[2] == {"role": "tool", "content": '{"t": 7}', "tool_call_id": "c1", "name": "weather"}
        assert check_rows([row], "sft").warnings == []
    both = [*talk, {**RESULT, "call_id": "c1", "tool_call_id": "c2"}, ANSWER]
    with pytest.raises(InvalidRows, match="different texts in tool_call_id and call_id, expected one of them"):
        parse_row({"messages": both}, 0, "sft")


def test_nulls_in_text_are_the_rows_own() -> None:
    call = {"name": "weather", "arguments": '{"city": null}'}
    example = parse_row({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages is not None
    assert example.messages[1]["tool_calls"][0]["arguments"] == {"city": None}


def test_weights_and_thoughts_are_read_under_each_of_their_names() -> None:
    for key, value, found in (
        ("weight", 0, {"weight": 0}),
        ("weight", 1, {}),
        ("train", False, {"weight": 0}),
        ("reasoning_content", "Hm.", {"reasoning": "Hm."}),
        ("reasoning", "Hm.", {"reasoning": "Hm."}),
        ("thinking", "Hm.", {"reasoning": "Hm."}),
        ("thinking", "", {}),
    ):
        example = parse_row({"messages": [USER, {**ANSWER, key: value}]}, 0, "sft")
        assert example == SftExample([USER, {**ANSWER, **found}], None)


def test_a_system_column_is_the_first_turn() -> None:
    system = {"role": "system", "content": "Be brief."}
    for row, turns in (
        ({"messages": [USER, ANSWER], "system": "Be brief."}, None),
        ({"messages": [system, USER, ANSWER], "system": "Be brief."}, None),
        ({"instruction": "Warm?", "output": "7.", "system": "Be brief."}, 2),
    ):
        assert parse_row(row, 0, "sft") == SftExample([system, USER, ANSWER], turns)
    for blank in ("", " ", None):
        assert parse_row({"messages": [USER, ANSWER], "system": blank}, 0, "sft") == SftExample([USER, ANSWER], None)
    with pytest.raises(InvalidRows, match="column system: found another text than that of the first turn"):
        parse_row({"messages": [system, USER, ANSWER], "system": "Be long."}, 0, "sft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tool_calls": [{**CALL, "arguments": "{city: 1}"}]},
            "turn 1 (assistant), tool_calls, call 0 (weather): found",
        ),
        ({"tool_calls": [{**CALL, "arguments": [1]}]}, "found [1], expected arguments as an object, or its JSON text"),
        ({"tool_calls": [{**CALL, "confidence": 1}]}, "found the keys confidence, expected a call"),
        ({"tool_calls": [{**CALL, "args": {}}]}, "found arguments and args, expected arguments once"),
        ({"tool_calls": [{"type": "code_interpreter"}]}, "found a call of type 'code_interpreter'"),
        ({"tool_calls": ["weather"]}, "found text that is not JSON"),
        (
            {"tool_calls": [CALL], "function_call": CALL},
            "found function_call beside tool_calls, expected the calls once",
        ),
        ({"tool_calls": [{"name": "\ud800", "arguments": {}}]}, "found half of a UTF-16 surrogate pair"),
    ],
)
def test_what_is_no_call_is_refused_by_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRows, match=re.escape(message)):
        parse_row({"messages": [USER, {"role": "assistant", **change}]}, 0, "sft")


def test_calls_of_other_turns_are_refused() -> None:
    with pytest.raises(InvalidRows, match=r"turn 0 \(user\): found tool_calls"):
        parse_row({"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]}, 0, "sft")


def test_weights_of_other_turns_have_no_effect_and_those_that_are_not_0_are_counted() -> None:
    system = {"role": "system", "content": "Be brief.", "weight": 0, "train": False}
    row = {"messages": [system, {**USER, "weight": 1}, ANSWER, {**USER, "train": True}, ANSWER]}
    plain = [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, ANSWER]
    assert parse_row(row, 0, "sft") == SftExample(plain, None)
    assert check_rows([row, {"messages": [{**system, "weight": 1}, *plain[1:]]}], "sft").warnings == [
        "weight 1, or train true, of turns that are not assistant's has no effect: system (1), user (2)"
    ]
    with pytest.raises(InvalidRows, match="weight 2"):
        parse_row({"messages": [{**USER, "weight": 2}, ANSWER]}, 0, "sft")


def test_calls_that_do_not_fit_their_tools_are_counted() -> None:
    calls = [{"name": "news", "arguments": {}}, {"name": "weather", "arguments": {"days": 1}}]
    rows = [{"messages": [USER, {"role": "assistant", "tool_calls": calls}], "tools": [TOOL]}]
    assert check_rows(rows, "sft").warnings == [
        "tool calls that do not fit their tools: a required argument missing (1), a tool that is not listed (1), "
        "an argument that is not in the schema (1)"
    ]


@pytest.mark.parametrize("written", [json.dumps([TOOL]), str([TOOL]), json.dumps(FUNCTION), '{"name":"weather"}'])
def test_tools_that_the_system_turn_lists_are_not_given_twice(written: str) -> None:
    system = {"role": "system", "content": f"You may call <tools>{written}</tools>."}
    for row in (
        {"messages": [system, *TALK], "tools": [TOOL]},
        {"messages": TALK, "system": system["content"], "tools": [TOOL]},
    ):
        assert parse_row(row, 0, "sft") == SftExample([system, *TALK], None)
        (warning,) = check_rows([row], "sft").warnings
        assert warning.startswith(
            "1 of 1 rows list their tools in the system turn, too: they are trained as it has them"
        )
    news = {"name": "news"}
    example = parse_row({"messages": [system, *TALK], "tools": [TOOL, news]}, 0, "sft")
    assert isinstance(example, SftExample)
    assert example.messages is not None
    assert len(example.messages[0]["tools"]) == 2
    mentioned = {"role": "system", "content": "Call weather, or nothing."}
    example = parse_row({"messages": [mentioned, *TALK], "tools": [TOOL]}, 0, "sft")
    assert example == SftExample([{**mentioned, "tools": [TOOL]}, *TALK], None)


def test_tools_beside_messages_stay_under_a_system_column() -> None:
    row = {"input": {"messages": [USER], "tools": [TOOL]}, "system": "Be brief."}
    row |= {"preferred_output": [ANSWER], "non_preferred_output": [{**ANSWER, "content": "8."}]}
    example: Any = parse_row(row, 0, "dpo")
    assert example.prompt == [{"role": "system", "content": "Be brief.", "tools": [TOOL]}, USER]


def test_weights_in_the_answers_of_pairs_and_labelled_ones_are_refused() -> None:
    silent = {**ANSWER, "weight": 0}
    for use, row in (
        ("dpo", {"prompt": "Warm?", "chosen": [silent], "rejected": "8."}),
        ("kto", {"messages": [USER, silent], "label": True}),
    ):
        with pytest.raises(InvalidRows, match="found weight 0, expected no weight"):
            parse_row(row, 0, use)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"x": float("inf")}, "arguments.x: found inf"),
        ('{"x": NaN}', "arguments.x: found nan"),
        ({"x": [1, {"y": float("-inf")}]}, "arguments.x[1].y: found -inf"),
        ({"x": {"number": "inf"}}, "arguments.x: found inf"),
    ],
)
def test_numbers_that_json_lacks_are_refused_by_their_key(arguments: Any, found: str) -> None:
    talk = [USER, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": arguments}]}]
    with pytest.raises(
        InvalidRows, match=re.escape(f"row 3: column messages, turn 1 (assistant), tool_calls, call 0, {found}")
    ):
        parse_row({"messages": talk}, 3, "sft")
    tool = {"name": "f", "parameters": {"properties": {"a": {"default": float("inf")}}}}
    with pytest.raises(InvalidRows, match=re.escape("tool 0, function.parameters.properties.a.default: found inf")):
        parse_row({"messages": [USER, ANSWER], "tools": [tool]}, 0, "sft")
    result = {"role": "tool", "content": {"t": float("nan")}}
    with pytest.raises(InvalidRows, match=r"turn 1 \(tool\): found a result that is no JSON"):
        parse_row({"messages": [USER, result, ANSWER]}, 0, "sft")


def test_nan_in_arguments_of_a_table_is_an_absent_value() -> None:
    call = {**CALL, "arguments": {**CALL["arguments"], "days": float("nan")}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, ANSWER]}
    assert parse_row({**row, "tools": [TOOL]}, 0, "sft") == EXPECTED


def test_a_list_of_texts_that_a_tool_returns_is_its_json_text() -> None:
    for content, text in (
        (["7", "8"], '["7", "8"]'),
        ([{"type": "text", "text": "7"}, {"type": "text", "text": "8"}], "78"),
        ([], "[]"),
    ):
        example = parse_row({"messages": [USER, {"role": "tool", "content": content}, ANSWER]}, 0, "sft")
        assert example == SftExample([USER, {"role": "tool", "content": text}, ANSWER], None)


def test_a_system_column_that_is_no_text_is_refused_and_its_parts_are_read() -> None:
    for parts in ({"type": "text", "text": "Be brief."}, [{"type": "text", "text": "Be "}, "brief."]):
        example = parse_row({"messages": [USER, ANSWER], "system": parts}, 0, "sft")
        assert example == SftExample([{"role": "system", "content": "Be brief."}, USER, ANSWER], None)
    for value in (True, 42, {"version": 1}, [], [1]):
        with pytest.raises(InvalidRows, match=r"column system: .*expected the text of the system turn"):
            parse_row({"messages": [USER, ANSWER], "system": value}, 0, "sft")


def test_flags_are_no_thoughts_and_deep_values_are_refused() -> None:
    assert parse_row({"messages": [USER, {**ANSWER, "thinking": False}]}, 0, "sft") == SftExample([USER, ANSWER], None)
    with pytest.raises(InvalidRows, match="thinking: found a boolean True, expected text"):
        parse_row({"messages": [USER, {**ANSWER, "thinking": True}]}, 0, "sft")
    deep: Any = 1
    for _ in range(990):
        deep = {"a": deep}
    with pytest.raises(InvalidRows, match=r"nested too deeply|no JSON"):
        parse_row({"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "arguments": deep}]}]}, 0, "sft")


def test_tools_beside_a_plain_text_are_refused() -> None:
    with pytest.raises(InvalidRows, match="found tools beside a plain text"):
        parse_row({"text": "So.", "tools": [TOOL]}, 0, "sft")
