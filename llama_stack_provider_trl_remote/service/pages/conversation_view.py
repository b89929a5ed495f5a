"""Answers and prompts as the turns of a conversation, for a page. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_stack_provider_trl.specs.events import RolledOut, RolloutAnswer

from ..http.bodies import AnswerLine
from ..serving.tool_texts import CallReader, ToolCall
from ..views.answers import AnsweredRow
from .rendering import number

_LONGEST = 16_384
"""Characters of a text that a page shows."""
_LONGEST_READ = 1 << 17
"""Characters of an answer whose calls of tools are looked for: each call copies what is behind it."""
_MOST_TURNS, _MOST_CALLS, _MOST_FACTS = 50, 20, 50
"""Turns of a prompt, calls of a turn and facts of an answer that a page shows: a MiB of a file has 50,000 short turns,
and a browser needs seconds for them."""
_BEGIN, _END = "<think>", "</think>"


class ShownTurn(NamedTuple):
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


class ShownBeside(NamedTuple):
    """A prompt with what each of several jobs has answered to it."""

    title: str
    note: str
    """Why jobs have no answer here that have one to the row of this number; empty: there are none."""
    prompt: Sequence[ShownTurn]
    before: str
    answers: Sequence[ShownAnswer | None]


def answer_turn(text: str) -> ShownTurn:
    """An answer as a turn: its thought and its calls of tools apart, where it has the marks of Qwen and others."""
    reasoning, rest = _without_thought(text)
    if len(rest) > _LONGEST_READ:
        return ShownTurn("assistant", cut(rest.strip()), cut(reasoning.strip()))
    reader = CallReader()
    parts = [*reader.add(rest), *reader.rest()]
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [ToolCall(cut(part.name), cut(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    shown = _with_rest(calls[:_MOST_CALLS], len(calls))
    return ShownTurn("assistant", cut(content.strip()), cut(reasoning.strip()), shown)


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
    """The answers to a prompt of an optimizer step, the best one first where they are rewarded."""
    prompt = [
        ShownTurn(turn.role, turn.content, turn.reasoning, [ToolCall(call.name, call.arguments) for call in turn.calls])
        for turn in found.prompt
    ]
    best = sorted(found.answers, key=lambda answer: -(answer.reward or 0.0))
    return ShownExchange(
        f"Step {found.step}, row {found.row}",
        prompt,
        [_rewarded(answer, place) for place, answer in enumerate(best, 1)],
        f"{found.earlier_turns} turns before these are left out" if found.earlier_turns else "",
        f"{found.further_answers} further answers are left out" if found.further_answers else "",
    )


def _rewarded(answer: RolloutAnswer, place: int) -> ShownAnswer:
    advantage, facts = answer.advantage, list[ShownFact]()
    kind = "" if not advantage else "good" if advantage > 0 else "bad"
    if answer.reward is not None:
        facts.append(ShownFact("reward", number(answer.reward), kind))
    if advantage is not None:
        facts.append(ShownFact("advantage", f"{advantage:+.3g}", kind))
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
            turns, before = _prompt_of(line.prompt)
            exchanges.append(ShownExchange(f"Row {line.row}", turns, answers, before))
            last = line.prompt
        answers.append(_checked(line))
    return exchanges


def beside(row: AnsweredRow) -> ShownBeside:
    """What jobs have answered to a prompt."""
    turns, before = _prompt_of(row.prompt)
    note = (
        "Jobs have other prompts in the row of this number: they have read different rows. Each prompt is by itself"
        if row.has_others
        else ""
    )
    answers = [_checked(line) if line is not None else None for line in row.answers]
    title = f"Row {row.row}, answer {row.sample + 1}" if row.sample else f"Row {row.row}"
    return ShownBeside(title, note, turns, before, answers)


def _prompt_of(turns: Sequence[Mapping[str, Any]]) -> tuple[list[ShownTurn], str]:
    """The last turns of a prompt, and what is left out before them."""
    left = len(turns) - _MOST_TURNS
    return [_turn_of(turn) for turn in turns[-_MOST_TURNS:]], (
        f"{left} turns before these are left out" if left > 0 else ""
    )


def _checked(line: AnswerLine) -> ShownAnswer:
    facts = [ShownFact(name, _outcome(line, name), _kind(passed)) for name, passed in line.passed.items()]
    facts += [ShownFact(f"{name}, reward", given.error or number(given.reward)) for name, given in line.graded.items()]
    facts += [
        ShownFact(f"{name}, score", number(verdict.score) or "unreadable") for name, verdict in line.judged.items()
    ]
    shown = [ShownFact(cut(one.name), cut(one.value), one.kind) for one in facts[:_MOST_FACTS]]
    if len(facts) > len(shown):
        shown.append(ShownFact(f"{len(facts) - len(shown)} more", "are left out"))
    return ShownAnswer(answer_turn(line.text), f"Answer {line.sample + 1}", shown, _note(line.tokens, line.complete))


def _outcome(line: AnswerLine, check: str) -> str:
    """What a check has found, in words."""
    if check in line.timed_out:
        return "took too long"
    if line.passed[check]:
        return "passed"
    return f"expected {line.expected[check]!r}" if check in line.expected else "failed"


def _kind(passed: bool) -> str:
    return "good" if passed else "bad"


def _note(tokens: int, complete: bool) -> str:
    return f"{tokens} tokens{'' if complete else ', not ended'}"


def _turn_of(turn: Mapping[str, Any]) -> ShownTurn:
    """A turn as rows have it (`specs.rows.Message`), out of a file that a training wrote."""
    calls = turn.get("tool_calls")
    given = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    shown = _with_rest([_given_call(call) for call in given[:_MOST_CALLS]], len(given))
    texts = (turn.get(name) for name in ("role", "content", "reasoning"))
    role, content, reasoning = (cut(text) if isinstance(text, str) else "" for text in texts)
    return ShownTurn(role, content, reasoning, shown)


def _given_call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(cut(str(call.get("name", ""))), cut(json.dumps(call.get("arguments", {}), ensure_ascii=False)))


def _with_rest(calls: list[ToolCall], total: int) -> list[ToolCall]:
    """Calls, and how many there are more."""
    left = total - len(calls)
    return [*calls, ToolCall(f"({left} further calls are left out)", "")] if left else calls
