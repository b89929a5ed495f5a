"""Finds calls of tools in an answer's text, as Hermes and Qwen write them: a JSON object with `name` and `arguments`
between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from llama_stack_provider_trl.specs.serving import CALL_BEGIN as BEGIN
from llama_stack_provider_trl.specs.serving import CALL_END as END
from llama_stack_provider_trl.system.texts import parse_json


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


class CallReader:
    """Splits the text of an answer, as it comes, into content and calls.

    What may be the beginning of a call, and white space around calls, waits for the text behind it. A call that cannot
    be read is content.
    """

    def __init__(self) -> None:
        self._waiting = ""
        self._has_calls = False

    def add(self, text: str) -> Iterator[str | ToolCall]:
        """The parts that are known with the next piece of the text."""
        self._waiting += text
        yield from self._parts(is_last=False)

    def rest(self) -> Iterator[str | ToolCall]:
        """The parts that are left at the end of the answer."""
        yield from self._parts(is_last=True)

    def _parts(self, *, is_last: bool) -> Iterator[str | ToolCall]:
        while (at := self._waiting.find(BEGIN)) >= 0:
            end = self._waiting.find(END, at)
            if end < 0 and not is_last:
                yield from self._content(len(self._waiting[:at].rstrip()))
                return
            if end < 0:
                break
            stop = end + len(END)
            call = _call_of(self._waiting[at + len(BEGIN) : end])
            if call is None:
                yield from self._content(stop)
                continue
            yield from self._content(at, before_call=True)
            self._waiting = self._waiting[stop - at :]
            self._has_calls = True
            yield call
        yield from self._content(len(self._waiting) if is_last else self._known())

    def _content(self, length: int, *, before_call: bool = False) -> Iterator[str]:
        """The beginning of what waits, as content."""
        text, self._waiting = self._waiting[:length], self._waiting[length:]
        if before_call:
            text = text.rstrip()
        if self._has_calls and not text.strip():
            return
        if text:
            yield text

    def _known(self) -> int:
        """Characters of what waits that are content, whatever follows."""
        text = self._waiting
        for length in range(min(len(BEGIN), len(text)), 0, -1):
            if BEGIN.startswith(text[-length:]):
                text = text[:-length]
                break
        return len(text.rstrip())


def _call_of(text: str) -> ToolCall | None:
    """A call from the JSON that an answer has; None: it is none."""
    try:
        found: Any = parse_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False))
