"""The form in which a chat template takes what a turn has beside its content: calls, thoughts, tools.

Templates disagree: arguments as an object or as JSON text, the content beside calls as "", None or absent, thoughts
under one of three keys or as `<think>` in the content, ids of nine characters (Mistral). What a template takes is found
by rendering one conversation in each form: right is the one that writes the name, the keys and the values, and no text
that is escaped twice (transformers#45419, Qwen3#1894).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count, product, takewhile
from typing import Any, Literal, NamedTuple

from ...specs.images import as_parts
from ...specs.rows import Message
from ...specs.tool_calls import Tool, ToolCall, as_text
from .tokenizer_calls import decoded

Apply = Callable[..., str | None]
"""(messages in a template's form, add_generation_prompt, tools) -> text; None: the template refuses them."""

THINK, END_THINK = "<think>", "</think>"
_TAIL = 16
"""Tokens of which `<think>` and the space behind it take fewer."""
_KEYS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"<think>\s*zqthought")
_NAME, _KEY, _VALUE = "zqname", "zqkey", "zqvalue"
_CALL = {"name": _NAME, "arguments": {_KEY: _VALUE}}
_QUESTION: Message = {"role": "user", "content": "zqquestion"}
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "zqtext"}}, "required": [_KEY]}
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "zqtool", "description": "zqdescription", "parameters": _PARAMETERS},
}


def opens_thought(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt ends with a `<think>`, as the chat templates of some models write it before each answer."""
    return decoded(tokenizer, ids[-_TAIL:]).rstrip().endswith(THINK)


class CallForm(NamedTuple):
    has_text: bool
    """Arguments are JSON text; else an object."""
    blank: Literal["", "none", "absent"]
    """What stands for a content that is not there."""
    has_nine: bool
    """Ids of calls and results have nine digits, whatever the row has."""


class Forms:
    """What one chat template takes."""

    def __init__(self, apply: Apply) -> None:
        self._write = apply

    def of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in the template's form."""
        calls, (linked, _) = self.calls or CallForm(False, "", False), with_links(messages)
        turns = [_turn(self._with_thought(message), calls) for message in _with_ids(linked, calls.has_nine)]
        if not self.takes_parts and not any("images" in message for message in messages):
            return turns
        return [_in_parts(turn, "images" in message) for turn, message in zip(turns, messages, strict=True)]

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes a text only where it is a list of parts, as those of some vision models do."""
        content = _QUESTION["content"]
        if self._write([_QUESTION]) != self._write([{**_QUESTION, "content": "zqother"}]):
            return False  # it writes something of a text
        written = self._write([_in_parts(_QUESTION)]) or ""
        return content in written and "'type'" not in written  # which is in a list that is written as it is

    def _apply(self, turns: Sequence[dict[str, Any]], **options: Any) -> str | None:
        return self._write([_in_parts(turn) for turn in turns] if self.takes_parts else list(turns), **options)

    @cached_property
    def calls(self) -> CallForm | None:
        """None: the template writes no calls, or not as they are."""
        for has_nine, has_text, blank in product((False, True), (False, True), ("", "none", "absent")):
            form = CallForm(has_text, blank, has_nine)  # type: ignore[arg-type]
            if self._writes_calls(form):
                return form
        return None

    @cached_property
    def names_results(self) -> bool:
        """Whether the template writes of a result which tool's it is, or refuses one that names none (Gemma 4)."""
        if self.calls is None or self.calls.has_nine:
            return False
        call = _turn({"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": "1"}]}, self.calls)
        result = {"role": "tool", "content": "zqresult"}
        named = self._apply([_QUESTION, call, {**result, "tool_call_id": "1", "name": _NAME}])
        return named is not None and (self._apply([_QUESTION, call, result]) or "").count(_NAME) < named.count(_NAME)

    @cached_property
    def writes_tools(self) -> bool:
        text = self._apply([_QUESTION], add_generation_prompt=True, tools=[_TOOL])
        return text is not None and "zqtool" in text

    @cached_property
    def thought_key(self) -> str | None:
        """The key under which the template takes what a turn thinks; None: it takes it in the content."""
        for key in _KEYS:
            text = self._apply([_QUESTION, {"role": "assistant", "content": "zqanswer", key: "zqthought"}])
            if text is not None and text.count("zqthought") == 1 and "zqanswer" in text:
                return key
        return None

    def _writes_calls(self, form: CallForm) -> bool:
        messages = _with_ids(
            [
                _QUESTION,
                {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                {"role": "tool", "content": "zqresult", "name": _NAME},
            ],
            form.has_nine,
        )
        text = self._apply([_turn(message, form) for message in messages])
        if text is None or any(part not in text for part in (_NAME, _KEY, _VALUE, "zqresult")):
            return False
        return f"'{_KEY}'" not in text and f'{_KEY}\\"' not in text

    def takes_content(self, message: Message) -> bool:
        """Whether the template reads the thought in a content as one under its key, or there is none."""
        content = message["content"]
        if message["role"] != "assistant" or END_THINK not in content:
            return True
        if self.begins_thought:
            thought, answer = split_thought(message)
            if thought is None or END_THINK in answer:  # an answer that mentions the tag
                return False
        return self._takes_whole if THINK in content else self._takes_rest

    @cached_property
    def begins_thought(self) -> bool:
        """Whether `add_generation_prompt` begins a thought: then each answer follows `<think>`."""
        text = self._apply([_QUESTION], add_generation_prompt=True)
        return text is not None and text.rstrip().endswith(THINK) and text != self._apply([_QUESTION])

    @cached_property
    def closes_thought(self) -> bool:
        """Whether `add_generation_prompt` writes an empty thought, which the template may leave out of earlier turns
        (Qwen 3.5 that does not think)."""
        text, plain = self._apply([_QUESTION], add_generation_prompt=True), self._apply([_QUESTION])
        return text is not None and plain is not None and END_THINK in text.removeprefix(plain)

    @cached_property
    def opens_thought(self) -> bool:
        """Whether generation begins within a thought, which the template writes for no turn (DeepSeek): so the template
        gets answers alone, as at inference, and the thought of a trained turn is put behind `<think>`."""
        return self.begins_thought and self.thought_key is None and not self._takes_whole

    @cached_property
    def _takes_whole(self) -> bool:
        return self._takes(as_content("zqthought", "zqanswer"))

    @cached_property
    def _takes_rest(self) -> bool:
        return self._takes(as_content("zqthought", "zqanswer").removeprefix(THINK).lstrip())

    def _takes(self, content: str) -> bool:
        """gpt-oss has the tags in its answer, Qwen 3.8 a second thought; Nemotron adds no `<think>` that is missing."""
        text = self._apply([_QUESTION, {"role": "assistant", "content": content}])
        if text is None:
            return True
        if self.thought_key is None:
            return not self.begins_thought or _THOUGHT.search(text) is not None
        turn = {"role": "assistant", "content": "zqanswer", self.thought_key: "zqthought"}
        keyed = self._apply([_QUESTION, turn]) or ""
        return all(text.count(tag) == keyed.count(tag) for tag in (THINK, END_THINK))

    @cached_property
    def writes_content_first(self) -> bool:
        """Whether the template writes the content of a turn before its calls, where a thought in it belongs."""
        if self.calls is None:
            return False
        turn = {
            "role": "assistant",
            "content": "zqanswer",
            "tool_calls": [_CALL],
        }
        text = self._apply(
            [_turn(message, self.calls) for message in _with_ids([_QUESTION, turn], self.calls.has_nine)]
        )
        return text is not None and -1 < text.find("zqanswer") < text.find(_NAME)

    def _with_thought(self, message: Message) -> Message:
        if message["role"] != "assistant" or ("reasoning" not in message and self.takes_content(message)):
            return message
        thought, content = split_thought(message)
        if thought is None:  # an empty thought keeps a template from reading one in the answer
            return message if self.thought_key is None else {**message, self.thought_key: ""}
        message = {key: value for key, value in message.items() if key != "reasoning"}
        if self.thought_key is not None:
            return {**message, "content": content, self.thought_key: thought}
        if self.opens_thought or (message.get("tool_calls") and not self.writes_content_first):
            return {**message, "content": content}
        return {**message, "content": as_content(thought, content)}


def split_thought(message: Message) -> tuple[str | None, str]:
    """What a turn thinks, under its key or at the beginning of its content, and the rest of that.

    In a content `<think>` may be missing, as in what a model writes behind a template that begins the thought: then
    `</think>` begins or ends a line, since a text may mention it.
    """
    if "reasoning" in message:
        return message["reasoning"], message["content"]
    head, end, content = message["content"].partition(END_THINK)
    before, opened, thought = head.partition(THINK) if THINK in head else ("", "", head)
    is_thought = not before.strip() if opened else head.endswith("\n") or content.startswith("\n")
    if message["role"] != "assistant" or not end or not is_thought:
        return None, message["content"]
    return thought.strip("\n"), content.lstrip("\n")


def without_thought(message: Message) -> Message:
    thought, content = split_thought(message)
    if thought is None:
        return message
    return {**{key: value for key, value in message.items() if key != "reasoning"}, "content": content}


def as_content(thought: str, content: str) -> str:
    """A thought and what follows it as one text, as Qwen3's template writes them."""
    return f"{THINK}\n{thought.strip(chr(10))}\n{END_THINK}\n\n{content.lstrip(chr(10))}"


def _in_parts(turn: dict[str, Any], has_images: bool = False) -> dict[str, Any]:
    content = turn.get("content")
    return {**turn, "content": as_parts(content, has_images=has_images)} if isinstance(content, str) else turn


def _turn(message: Message, form: CallForm) -> dict[str, Any]:
    turn = {key: value for key, value in message.items() if key not in ("tools", "weight", "images")}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    if not turn["content"] and form.blank:
        turn |= {"content": None}
        if form.blank == "absent":
            del turn["content"]
    turn["tool_calls"] = [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": as_text(call["arguments"]) if form.has_text else call["arguments"],
            },
            **({"id": call["id"]} if "id" in call else {}),
        }
        for call in calls
    ]
    return turn


def with_links(messages: Sequence[Message]) -> tuple[Sequence[Message], list[int]]:
    """The messages with the id and the name of its call in each result: by its id, its name, or the order of the calls
    where each has one result. And the results that have no name, and whose call is not known."""
    found, unknown, numbers = [*messages], list[int](), count()
    for turn, message in enumerate(messages):
        if not (calls := message.get("tool_calls")):
            continue
        behind = takewhile(lambda item: item[1]["role"] == "tool", enumerate(messages[turn + 1 :], turn + 1))
        results, known = dict(behind), {call["id"] for call in calls if "id" in call}
        if all(result.get("tool_call_id") in known for result in results.values()):
            continue
        named = [{"id": f"call_{next(numbers)}", **call} for call in calls]
        found[turn] = {**message, "tool_calls": named}
        of_results = _calls_of(results, named)
        for number, call in of_results.items():
            found[number] = {**messages[number], "tool_call_id": call["id"], "name": call["name"]}
        unknown += [number for number, result in results.items() if number not in of_results and "name" not in result]
    return found, unknown


def _calls_of(results: Mapping[int, Message], calls: Sequence[ToolCall]) -> dict[int, ToolCall]:
    """The call of each result, where it is known."""
    found, waiting = dict[int, ToolCall](), [*calls]
    for number, result in sorted(results.items(), key=lambda item: "tool_call_id" not in item[1]):
        key, value = ("id", result["tool_call_id"]) if "tool_call_id" in result else ("name", result.get("name"))
        if call := next((call for call in waiting if call[key] == value), None):
            found[number] = call
            waiting.remove(call)
    rest = [number for number, result in results.items() if not {"tool_call_id", "name"} & result.keys()]
    return found | dict(zip(rest, waiting, strict=True)) if len(rest) == len(waiting) else found


def _with_ids(messages: Sequence[Message], has_nine: bool) -> Sequence[Message]:
    """The messages with ids of nine digits; a result without an id has that of the first call that waits for one."""
    if not has_nine:
        return messages
    numbers, waiting, new = count(), list[str](), dict[str, str]()
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            named = []
            for call in calls:
                identifier = f"{next(numbers):09d}"
                new[call.get("id", identifier)] = identifier
                waiting.append(identifier)
                named.append({**call, "id": identifier})
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            identifier = new.get(message.get("tool_call_id", ""), "") or (waiting[0] if waiting else "0" * 9)
            if identifier in waiting:
                waiting.remove(identifier)
            message = {**message, "tool_call_id": identifier}
        found.append(message)
    return found
