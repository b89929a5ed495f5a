"""OpenAI's forms of answers: whole ones, the events of streams, lists of models."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from llama_stack_provider_trl.specs.serving import ChosenToken, TokenLogprob

from .tool_texts import CallReader, ToolCall

Json = dict[str, Any]
Kind = Literal["chat", "completion"]


class _Offsets:
    """Where each token begins in the text of an answer, in characters. Tokens that share a character begin at it."""

    def __init__(self) -> None:
        self._length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: ChosenToken) -> int:
        """Take the next token, and return where it begins."""
        at = self._length
        self._length += len(token.token if token.bytes is None else self._decoder.decode(bytes(token.bytes)))
        return at


@dataclass
class Written:
    """An answer, and the forms in which it is sent.

    Args:
        has_logprobs: whether the request wants log-probabilities.
    """

    kind: Kind
    model: str
    has_logprobs: bool
    prompt_tokens: int = 0
    answer_tokens: int = 0
    reason: str | None = None
    index: int = 0
    """Number of the answer, of several to one request."""
    calls: CallReader | None = None
    """Separates calls of tools from the content; None: what the model writes is content."""
    _texts: list[str] = field(default_factory=list)
    _tokens: list[ChosenToken] = field(default_factory=list)
    _offsets: _Offsets = field(default_factory=lambda: _Offsets())
    _tool_calls: list[Json] = field(default_factory=list)
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid4().hex}"

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> Json | None:
        """Note the next part; returns the event that sends what is known with it, None: nothing is."""
        logprobs = self._logprobs(tokens, self._offsets) if tokens else None
        self._tokens += tokens
        if self.kind == "chat":
            return self._delta([text] if self.calls is None else self.calls.add(text), logprobs)
        self._texts.append(text)
        return self._event({"text": text, "logprobs": logprobs}) if text or tokens else None

    def rest(self) -> Json | None:
        """The event that sends what was waiting for further text; None: nothing was."""
        return None if self.calls is None else self._delta(self.calls.rest(), None)

    def end(self, reason: str, tokens: int) -> None:
        """Note why the answer ended, and how many tokens it has."""
        self.reason = "tool_calls" if self._tool_calls and reason == "stop" else reason
        self.answer_tokens = tokens

    def _delta(self, parts: Iterable[str | ToolCall], logprobs: Json | None) -> Json | None:
        """Note parts of a chat's answer; returns the event that sends them."""
        content, calls = "", []
        for part in parts:
            if isinstance(part, str):
                content += part
                continue
            function = {"name": part.name, "arguments": part.arguments}
            call = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
            calls.append({"index": len(self._tool_calls), **call})
            self._tool_calls.append(call)
        self._texts.append(content)
        delta: Json = {"content": content} if content or not calls else {}
        if calls:
            delta["tool_calls"] = calls
        return self._event({"delta": delta, "logprobs": logprobs}) if content or calls or logprobs else None

    def first(self) -> Json | None:
        """The event that begins a stream; None: there is none."""
        if self.kind == "completion":
            return None
        return self._event({"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def last(self) -> Json:
        """The event with the reason of the end."""
        return self._event({"delta": {}, "logprobs": None} if self.kind == "chat" else {"text": "", "logprobs": None})

    def choice(self) -> Json:
        """The answer in one piece."""
        logprobs = self._logprobs(self._tokens, _Offsets()) if self.has_logprobs else None
        text = "".join(self._texts)
        choice: Json = {"index": self.index, "finish_reason": self.reason, "logprobs": logprobs}
        if self.kind == "chat":
            message: Json = {"role": "assistant", "content": text, "refusal": None}
            if self._tool_calls:
                message |= {"content": text or None, "tool_calls": self._tool_calls}
            choice["message"] = message
        else:
            choice["text"] = text
        return choice

    def _event(self, choice: Json) -> Json:
        return {**self.head(is_event=True), "choices": [{"index": self.index, **choice, "finish_reason": self.reason}]}

    def head(self, *, is_event: bool) -> Json:
        """What answers, and events of streams, have in common."""
        name = "text_completion"
        if self.kind == "chat":
            name = "chat.completion.chunk" if is_event else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[ChosenToken], offsets: _Offsets) -> Json:
        if self.kind == "chat":
            return {
                "content": [{**_of_token(token), "top_logprobs": [*map(_of_token, token.top)]} for token in tokens],
                "refusal": None,
            }
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{each.token: each.logprob for each in token.top} for token in tokens],
            "text_offset": [offsets.add(token) for token in tokens],
        }


def whole_of(answers: Sequence[Written]) -> Json:
    """The answers to a request in one piece."""
    return {
        **answers[0].head(is_event=False),
        "choices": [answer.choice() for answer in answers],
        "usage": _usage_of(answers),
    }


def usage_event_of(answers: Sequence[Written]) -> Json:
    """The event of a stream with its numbers of tokens."""
    return {**answers[0].head(is_event=True), "choices": [], "usage": _usage_of(answers)}


def _usage_of(answers: Sequence[Written]) -> Json:
    prompt, tokens = answers[0].prompt_tokens, sum(answer.answer_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _of_token(token: TokenLogprob) -> Json:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": None if token.bytes is None else list(token.bytes),
    }


def model_row(name: str, created: float, owner: str) -> Json:
    """An entry of the list of models."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


def model_list(rows: Iterable[Json]) -> Json:
    return {"object": "list", "data": [*rows]}
