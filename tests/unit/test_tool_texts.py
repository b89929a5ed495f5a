"""Calls of tools in the text of an answer: whole, and in pieces as they come."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl_remote.service.serving.openai import Written
from llama_stack_provider_trl_remote.service.serving.tool_texts import CallReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ADD = {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}


def written(text: str, size: int) -> tuple[Any, list[Any]]:
    """The whole answer to a text that comes in pieces, and the deltas of its stream."""
    found = Written("chat", "m", False, calls=CallReader())
    events = [found.add(text[at : at + size], ()) for at in range(0, len(text), size)]
    events.append(found.rest())
    found.end("stop", 1)
    deltas = [event["choices"][0]["delta"] for event in events if event]
    assert "".join(delta.get("content", "") for delta in deltas) == (found.choice()["message"]["content"] or "")
    return found.choice(), deltas


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 3 < 4. ", "It is 3 < 4. ", []),
        (CALL, None, [ADD]),
        (f"I add.\n\n{CALL}\n{CALL}\n", "I add.", [ADD, ADD]),
        (f"{CALL} Then I wait.", " Then I wait.", [ADD]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [{"name": "f", "arguments": "{}"}]),
        ("<tool_call>{}</tool_call> a", "<tool_call>{}</tool_call> a", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (
            '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
            [],
        ),
        ("<tool_call>{not JSON</tool_call>", "<tool_call>{not JSON</tool_call>", []),
        (f"<tool_call>{{</tool_call>{CALL}", "<tool_call>{</tool_call>", [ADD]),
        ('a <tool_call>{"name": "f"', 'a <tool_call>{"name": "f"', []),
        ("a <tool_c", "a <tool_c", []),
    ],
)
def test_calls_are_separated_from_the_content(text: str, content: str | None, calls: list[Any], size: int) -> None:
    choice, deltas = written(text, size)
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"] for call in message.get("tool_calls", [])] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    sent = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in sent] == [*range(len(calls))]
    assert [call["function"] for call in sent] == calls
    assert len({call["id"] for call in sent}) == len(calls)


def test_content_is_sent_as_soon_as_no_call_can_begin_in_it() -> None:
    reader = CallReader()

    def pieces(text: str) -> list[Any]:
        return [*reader.add(text)]

    assert pieces("It is") == ["It is"]
    assert pieces(" 3 <") == [" 3"]
    assert pieces("tool") == []
    assert pieces("s>") == [" <tools>"]


def test_an_answer_whose_template_has_no_such_tags_is_content() -> None:
    found = Written("chat", "m", False)
    event = found.add(CALL, ())
    assert event is not None
    assert event["choices"][0]["delta"] == {"content": CALL}
    assert found.rest() is None
