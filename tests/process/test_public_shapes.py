"""Every documented shape of rows is trained; what is trained of public sets with calls and thoughts is written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.chat_templates import CHATML
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.methods import METHODS, GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.rows import ROW_SHAPES
from tests.process.public_rows import ASK, COLD, EXAMPLES, SAY
from tests.process.tool_rows import tokenizer_of, trained
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHECK = {"type": "json"}


def test_each_documented_shape_has_a_row_here() -> None:
    for use, rows in EXAMPLES.items():
        assert set(rows) == {shape.columns for shape in ROW_SHAPES if shape.use == use}


@pytest.mark.parametrize("use", EXAMPLES)
def test_rows_of_every_shape_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = [*EXAMPLES[use].values()]
    algorithm, changes = use, dict[str, Any]()
    if use == "prompts":
        algorithm = "grpo"
        reward = RewardSource.model_validate({"name": "json", "check": CHECK})
        changes["method"] = GrpoSpec(rewards=(reward,), num_generations=2, max_completion_length=4)
    spec = job_spec(tmp_path, tiny_model(), algorithm, rows=rows, batch_size=len(rows), **changes)
    status, events = run(tmp_path / "run", spec)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    (prepared,) = of_kind(events, Prepared)
    data = prepared.effective["data"]
    assert (data["num_rows"], data["dropped"]) == (len(rows), 0)
    assert data["kept"] == data["examples"] == len(rows) + (use == "dpo")  # one has two pairs
    assert of_kind(events, Progress)
    assert METHODS[spec.algorithm].rows == use


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"city": "Köln"}
WRITTEN_CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
HERMES = f"<tool_call>\n{WRITTEN_CALL}\n</tool_call>"
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"t": 7}'}
END = "<|im_end|>\n"
CALLED, TOLD = f"{HERMES}{END}", f"Seven degrees.{END}"
THOUGHT = f"<think>\nIt says 7.\n</think>\n\nSeven degrees.{END}"


def _sharegpt(call: str, result: str, **more: Any) -> dict[str, Any]:
    turns = [("human", ASK["content"]), (call, WRITTEN_CALL), (result, RESULT["content"]), ("gpt", SAY["content"])]
    return {"conversations": [{"from": name, "value": text} for name, text in turns], **more}


PUBLIC: dict[str, tuple[dict[str, Any], list[str]]] = {
    "OpenAI: tools, calls, results": (
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, SAY], "tools": [TOOL]},
        [CALLED, TOLD],
    ),
    "OpenAI: parallel calls": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
                RESULT,
                {**RESULT, "tool_call_id": "c2"},
                SAY,
            ],
            "tools": [TOOL],
        },
        [f"{HERMES}\n{HERMES}{END}", TOLD],
    ),
    "OpenAI: weights": (
        {"messages": [ASK, {**COLD, "weight": 0}, ASK, {**SAY, "weight": 1}]},
        [TOLD],
    ),
    "ShareGPT: function_call, observation": (
        _sharegpt("function_call", "observation", tools=json.dumps([FUNCTION])),
        [CALLED, TOLD],
    ),
    "ShareGPT: tool_call, tool_response": (_sharegpt("tool_call", "tool_response", tools=[TOOL]), [CALLED, TOLD]),
    "Hermes: calls and tools in the texts": (
        {
            "conversations": [
                {"from": "system", "value": f"You may call <tools>{json.dumps([TOOL])}</tools>."},
                {"from": "human", "value": ASK["content"]},
                {"from": "gpt", "value": HERMES},
                {"from": "tool", "value": '<tool_response>\n{"t": 7}\n</tool_response>'},
                {"from": "gpt", "value": SAY["content"]},
            ]
        },
        [CALLED, TOLD],
    ),
    "ToolACE: calls in brackets, tools in the system column": (
        {
            "system": f"Here is a list of functions in JSON format: {json.dumps([FUNCTION])}",
            "conversations": [
                {"from": "user", "value": ASK["content"]},
                {"from": "assistant", "value": '[weather(city="Köln")]'},
                {"from": "tool", "value": '[{"t": 7}]'},
                {"from": "assistant", "value": SAY["content"]},
            ],
        },
        [f'[weather(city="Köln")]{END}', TOLD],
    ),
    "xLAM: a query renamed, calls as messages": (
        {
            "messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": ARGUMENTS}]}],
            "tools": json.dumps([{**FUNCTION, "parameters": {"city": {"type": "str", "description": "Where."}}}]),
        },
        [CALLED],
    ),
    "Llama Stack: tool_name, call_id": (
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"call_id": "c1", "tool_name": "weather", "arguments": ARGUMENTS}],
                },
                {"role": "tool", "call_id": "c1", "tool_name": "weather", "content": '{"t": 7}'},
                SAY,
            ],
            "tools": [{"tool_name": "weather", "parameters": {"city": {"param_type": "string", "required": True}}}],
        },
        [CALLED, TOLD],
    ),
    "Anthropic's tools": (
        {
            "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, RESULT, SAY],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        },
        [CALLED, TOLD],
    ),
    "reasoning_content": ({"messages": [ASK, {**SAY, "reasoning_content": "It says 7."}]}, [THOUGHT]),
    "thoughts in the content": (
        {"messages": [ASK, {"role": "assistant", "content": "<think>\nIt says 7.\n</think>\n\nSeven degrees."}]},
        [THOUGHT],
    ),
    "Alpaca": ({"instruction": "Translate.", "input": "warm", "output": "warm"}, [f"warm{END}"]),
}
"""Rows after the documentation of public sets, and what is trained of them under Qwen 2.5's template (ChatML)."""


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_trained_of_public_rows_is_as_written_out(name: str) -> None:
    row, expected = PUBLIC[name]
    assert [text for sequence in trained(tokenizer_of("qwen2_5"), row) for text in sequence] == expected


@pytest.mark.parametrize(("name", "end"), [("gemma3", "<end_of_turn>\n"), ("chatml", END), ("llama3", "<|eot_id|>")])
def test_answers_and_their_ends_are_as_written_out_under_templates_without_tools(name: str, end: str) -> None:
    tokenizer = tokenizer_of("qwen2_5" if name == "chatml" else name)
    if name == "chatml":
        tokenizer.chat_template = CHATML
    if name == "llama3":
        tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    weighed = {"messages": [ASK, {**COLD, "weight": 0}, ASK, {**SAY, "weight": 1}]}
    assert trained(tokenizer, weighed) == [[f"Seven degrees.{end}"]]
    assert trained(tokenizer, {"messages": [ASK, COLD, ASK, SAY]}) == [[f"Cold.{end}", f"Seven degrees.{end}"]]


def test_public_rows_are_trained_together(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.data.chat import Chat

    rows = [row for row, _ in PUBLIC.values()]
    template = str(Chat(tokenizer_of("qwen2_5")).tokenizer.chat_template)
    spec = job_spec(tmp_path, tiny_model(), rows=rows, chat_template=template, batch_size=8)
    status, events = run(tmp_path / "run", spec)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    data = of_kind(events, Prepared)[0].effective["data"]
    assert (data["num_rows"], data["kept"], data["dropped"]) == (len(rows), data["examples"], 0)
    assert not [event.message for event in of_kind(events, Warned) if "leaves out" in event.message]
