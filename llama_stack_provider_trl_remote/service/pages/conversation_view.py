"""Answers and prompts as the turns of a conversation, for a page. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_stack_provider_trl.specs.events import RolledOut, RolloutAnswer

from ..http.samples import AnswerLine
from ..serving.tool_texts import CallReader, ToolCall
from .rendering import number

_LONGEST = 16_384
"""Characters of a text that a page shows."""
_BEGIN, _END = "<think>", "</think>"


class ShownTurn(NamedTuple):
    """A turn of a conversation."""

    role: str
    text: str
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


class ShownFact(NamedTuple):
    """Something that is known of an answer."""

    name: str
    value: str
    kind: str = ""
    """good or bad; empty: neither."""


class ShownAnswer(NamedTuple):
    """An answer with what is known of it."""

    turn: ShownTurn
    title: str
    facts: Sequence[ShownFact]
    note: str


class ShownExchange(NamedTuple):
    """A prompt with answers to it."""

    title: str
    prompt: Sequence[ShownTurn]
    answers: Sequence[ShownAnswer]
    before: str = ""
    """What is left out before the prompt, in words."""
    behind: str = ""
    """What is left out behind the answers."""


def answer_turn(text: str) -> ShownTurn:
    """An answer as a turn: its thought and its calls of tools apart, where it has the marks of Qwen and others."""
    reasoning, rest = _without_thought(text)
    reader = CallReader()
    parts = [*reader.add(rest), *reader.rest()]
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [ToolCall(part.name, cut(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    return ShownTurn("assistant", cut(content.strip()), cut(reasoning.strip()), calls)


def _without_thought(text: str) -> tuple[str, str]:
    """The thought with which an answer begins, and the rest. One that `max_new_tokens` has ended has no second mark.

    Elsewhere the marks are text: an answer may speak of them. So is a second mark alone, which a thought has that the
    chat template begins: what is stored of an answer does not say whether the template does.
    """
    if not text.lstrip().startswith(_BEGIN):
        return "", text
    thought, _, rest = text.partition(_END)
    return thought.lstrip().removeprefix(_BEGIN), rest


def cut(text: str) -> str:
    """The beginning of a long text, with its length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... (it has {len(text)} characters)"


def exchange_of(found: RolledOut) -> ShownExchange:
    """The answers to a prompt of an optimizer step, the best one first."""
    prompt = [
        ShownTurn(turn.role, turn.content, turn.reasoning, [ToolCall(call.name, call.arguments) for call in turn.calls])
        for turn in found.prompt
    ]
    best = sorted(found.answers, key=lambda answer: -answer.reward)
    return ShownExchange(
        f"Step {found.step}, row {found.row}",
        prompt,
        [_rewarded(answer, place) for place, answer in enumerate(best, 1)],
        f"{found.earlier_turns} turns before these are left out" if found.earlier_turns else "",
        f"{found.further_answers} further answers are left out" if found.further_answers else "",
    )


def _rewarded(answer: RolloutAnswer, place: int) -> ShownAnswer:
    kind = "good" if answer.advantage > 0 else "bad" if answer.advantage < 0 else ""
    facts = [ShownFact("reward", number(answer.reward), kind), ShownFact("advantage", f"{answer.advantage:+.3g}", kind)]
    if len(answer.rewards) > 1:
        facts += [ShownFact(name, number(value)) for name, value in answer.rewards.items()]
    return ShownAnswer(answer_turn(answer.text), f"Answer {place}", facts, _note(answer.tokens, answer.complete))


def exchanges_of(found: Iterable[AnswerLine]) -> list[ShownExchange]:
    """Answers of a file under their prompts: those that follow each other and have the same prompt are together."""
    exchanges: list[ShownExchange] = []
    last: list[dict[str, Any]] | None = None
    answers: list[ShownAnswer] = []
    for line in found:
        if line.prompt != last:
            answers = []
            exchanges.append(ShownExchange(f"Row {line.row}", [_turn_of(turn) for turn in line.prompt], answers))
            last = line.prompt
        answers.append(_checked(line))
    return exchanges


def _checked(line: AnswerLine) -> ShownAnswer:
    facts = [
        ShownFact(name, "took too long" if name in line.timed_out else "passed" if passed else "failed", _kind(passed))
        for name, passed in line.passed.items()
    ]
    facts += [ShownFact(f"{name}, reward", given.error or number(given.reward)) for name, given in line.graded.items()]
    facts += [ShownFact(f"{name}, score", number(verdict.score)) for name, verdict in line.judged.items()]
    return ShownAnswer(answer_turn(line.text), f"Answer {line.sample + 1}", facts, _note(line.tokens, line.complete))


def _kind(passed: bool) -> str:
    return "good" if passed else "bad"


def _note(tokens: int, complete: bool) -> str:
    return f"{tokens} tokens{'' if complete else ', not ended'}"


def _turn_of(turn: Mapping[str, Any]) -> ShownTurn:
    """A turn as rows have it (`specs.rows.Message`), out of a file that a training wrote."""
    calls = turn.get("tool_calls")
    shown = [_given_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    texts = (turn.get(name) for name in ("role", "content", "reasoning"))
    role, content, reasoning = (cut(text) if isinstance(text, str) else "" for text in texts)
    return ShownTurn(role, content, reasoning, shown)


def _given_call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(str(call.get("name", "")), cut(json.dumps(call.get("arguments", {}), ensure_ascii=False)))
