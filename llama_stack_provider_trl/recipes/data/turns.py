"""Trained turns, each behind exactly what inference renders before it.

A turn with tool calls, thoughts or a weight is trained in the text that the chat template writes for the turns before
it and the header of an answer, followed by the turn. Where the template writes a turn in the same way when others
follow, several turns share a sequence; where it does not (Qwen3 and gpt-oss leave out the thoughts of earlier turns),
each has one of its own. So what is trained and what inference sees cannot differ: the rest is refused by the turn's
number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.rows import Message
from ...specs.tool_calls import texts_of
from .chat import Chat
from .forms import END_THINK, THINK, split_thought, without_thought
from .marks import CLOSE, OPEN, common_prefix, visible
from .places import find_content

_EMPTY_THOUGHT = re.compile(r"\s*(<think>\s*)?</think>\n*")
Span = tuple[int, int]
"""First and last character."""


class TrainedText(NamedTuple):
    text: str
    spans: list[Span]
    begins: list[int]
    """Where each span's answer begins: what is before it inference renders, and tokenizes alone."""


class TrainedTurn(NamedTuple):
    """One answer in the text that ends with it."""

    before: str
    """What inference renders before the answer."""
    text: str
    """The same with the answer, and what the template writes to end it."""
    start: int
    """First trained character."""


def trained_texts(
    chat: Chat, messages: Sequence[Message], turns: Sequence[int], row: int, *, without_thoughts: bool = False
) -> list[TrainedText]:
    """The sequences of a conversation. Raises JobFailure: invalid_dataset; the template refuses the conversation,
    writes a turn otherwise than inference does, or leaves out a part of it.

    Args:
        turns: numbers of the trained turns.
        without_thoughts: what a turn thinks carries no loss.
    """
    found: list[TrainedText] = []
    for turn in turns:
        one = trained_turn(chat, messages, turn, row, without_thoughts=without_thoughts)
        span = (one.start, len(one.text))
        last = found[-1] if found else None
        if last is not None and one.before.startswith(last.text[: last.spans[-1][1]]):
            found[-1] = TrainedText(one.text, [*last.spans, span], [*last.begins, len(one.before)])
        else:
            found.append(TrainedText(one.text, [span], [len(one.before)]))
    chat.expanded += len(found) > 1
    return found


def trained_turn(
    chat: Chat, messages: Sequence[Message], turn: int, row: int, *, without_thoughts: bool = False, count: bool = True
) -> TrainedTurn:
    """One answer, with errors as `trained_texts`.

    Args:
        count: count the turns before it that the template leaves out.
    """
    before, text = turn_text(chat, messages, turn, row)
    message, segment = messages[turn], text[len(before) :]
    _check_written(chat, message, segment, row, turn)
    if count:
        _count_lost(chat, messages[:turn], before, row)
    start = len(before)
    chat.empty_thoughts += before.rstrip().endswith(THINK) and segment.lstrip().startswith(END_THINK)
    if without_thoughts:
        start += _after_thought(message, segment)
    return TrainedTurn(before, text, start)


def whole_text(chat: Chat, messages: Sequence[Message], row: int) -> str:
    """A conversation that ends in an answer, all of which is trained, with errors as `trained_texts`."""
    text = trained_turn(chat, messages, len(messages) - 1, row).text
    thoughts = [split_thought(message)[0] for message in messages[:-1]]
    chat.lost_texts.add(sum(thought is not None and not _is_in(thought, text) for thought in thoughts), row)
    return text


def turn_text(chat: Chat, messages: Sequence[Message], turn: int, row: int) -> tuple[str, str]:
    """What inference renders before an answer, and the same with the answer. Raises JobFailure: invalid_dataset; the
    template refuses the conversation, or writes the turn otherwise than inference does."""
    message, talk = messages[turn], messages[: turn + 1]
    if not turn or (_is_unasked(messages, turn) and chat.render_part(talk) is None):
        return _unasked_text(chat, messages, turn, row)
    thought, content = split_thought(message)
    mentions_end = chat.forms.opens_thought and END_THINK in content
    if mentions_end:  # the template leaves out what is before it
        talk = [*messages[:turn], {**without_thought(message), "content": OPEN}]
    after = chat.written(talk, row)
    before = chat.written(messages[:turn], row, add_generation_prompt=True)
    cut = 0 if message.get("tool_calls") else len(after) - chat.endings.of(talk, after)
    if after.startswith(before):
        text = after
    else:
        header = before.removeprefix(chat.render_part(messages[:turn]) or before)
        answer = _within_thought(chat, messages, turn, header, after, thought or "")
        answer = answer or _rewritten(chat, messages, turn, header, after)
        text = before + answer
        if not answer:
            raise _failure(
                row,
                turn,
                "is written otherwise in a conversation than in generation, by the model's chat template",
                "a template that writes an answer behind what it writes for add_generation_prompt",
            )
    text = text[: len(text) - cut]
    return before, (text.replace(OPEN, content) if mentions_end else text) + chat.endings.stop_of(message)


def _is_unasked(messages: Sequence[Message], turn: int) -> bool:
    return all(message["role"] != "user" for message in messages[:turn])


def _unasked_text(chat: Chat, messages: Sequence[Message], turn: int, row: int) -> tuple[str, str]:
    """As `turn_text`, of an answer before the first user's turn, such as a greeting. Inference renders nothing before
    it, and Qwen 3.5's template refuses a conversation without a user: then it is looked for in that up to the first."""
    asked = next((n for n in range(turn, len(messages)) if messages[n]["role"] == "user"), turn)
    chat.written(messages[: asked + 1], row)
    for talk in (messages[: turn + 1], messages[: asked + 1]):
        text = chat.render_part(talk)
        place = None
        if text is not None and not messages[turn].get("tool_calls"):
            place = find_content(chat.render_part, talk, turn, text)
        if text is not None and place is not None:
            is_last = len(talk) == turn + 1
            end = (
                chat.endings.of(talk, text)
                if is_last
                else place.end + chat.endings.asked(messages[turn], text[place.end :])
            )
            return text[: place.start], text[:end] + chat.endings.stop_of(messages[turn])
    raise _failure(row, turn, "is an answer before any question", "a user's turn before it, or weight 0")


def _within_thought(chat: Chat, messages: Sequence[Message], turn: int, header: str, after: str, thought: str) -> str:
    """What follows the header of an answer where generation begins within a thought, and the template does not write
    the turn so: the row's thought, or none, `</think>`, and the answer (DeepSeek, Nemotron). Empty: it is not so."""
    plain = chat.render_part(messages[:turn]) or ""
    opening, think, space = header.rpartition(THINK)
    if not think or not after.startswith(plain + opening):
        return ""
    answer = after[len(plain + opening) :]
    if answer.startswith(THINK):  # closed at once, in the template's own way
        answer = answer.removeprefix(THINK).removeprefix(space)
        if not thought.strip() or not answer.lstrip().startswith(END_THINK):
            return answer
        answer = answer.lstrip()
    answer = answer.removeprefix(END_THINK).lstrip("\n")
    return f"{thought.strip(chr(10))}{space}{END_THINK}{space * 2}{answer}"


def _rewritten(chat: Chat, messages: Sequence[Message], turn: int, header: str, after: str) -> str:
    """What follows the header of an answer where the template writes the turns before it otherwise once there is an
    answer, as gpt-oss leaves out the thought before a call. Empty: where the header is, is not known."""
    other: Message = {"role": "assistant", "content": OPEN + CLOSE}
    marked = chat.render_part([*messages[:turn], other])
    if not header or marked is None:
        return ""
    at = after.rfind(header, 0, common_prefix(after, marked))
    between = marked[at + len(header) : marked.find(OPEN)]
    # Gemma 4 writes several answers behind one header: that of an earlier one is none of this turn's.
    if at < 0 or any(visible(message) in between for message in messages[:turn] if visible(message)):
        return ""
    return after[at + len(header) :]


def _check_written(chat: Chat, message: Message, segment: str, row: int, turn: int) -> None:
    end = 0
    for call in message.get("tool_calls", ()):
        at = segment.find(call["name"], end)  # in their order: two calls may be alike
        end = at + len(call["name"])
        if at < 0 or not all(_is_in(text, segment[end:]) for text in texts_of(call["arguments"])):
            raise _failure(
                row,
                turn,
                f"calls {call['name']!r}, which the model's chat template does not write as it is in this turn",
                "one call in a turn, and no content beside it, as most of such templates require",
            )
    if message.get("tool_calls") and not (segment.strip()[-1:] in (">", "]") or _ends(chat, segment)):
        chat.endings.open += 1
    thought, content = split_thought(message)
    # A thought that the template leaves out of the last turn is not trained, which the job's dropped_turns decides on.
    chat.lost_texts.add(int(thought is not None and not _is_in(thought, segment)), row)
    # Of a thought that no tag closes, generation may have opened it.
    if not _is_in(content.strip().removeprefix(THINK), segment):
        raise _failure(
            row,
            turn,
            "has a content that the model's chat template does not write as it is",
            "another template, or calls without content beside them",
        )


def _ends(chat: Chat, segment: str) -> bool:
    return any(segment.rstrip().endswith(str(token)) for token in chat.tokenizer.all_special_tokens)


def _count_lost(chat: Chat, messages: Sequence[Message], text: str, row: int) -> None:
    lost = []
    for turn, message in enumerate(messages):
        content = visible(without_thought(message))
        if content and not _is_in(content, text) and not chat.writes_turn(messages, turn, text):
            lost.append(message["role"])
    chat.lost.add(lost, row)


def _after_thought(message: Message, segment: str) -> int:
    """Where in a turn the thought has ended: behind its tag, or before the content."""
    thought, _ = split_thought(message)
    if not thought:
        empty = _EMPTY_THOUGHT.match(segment)
        return empty.end() if empty else 0
    at = segment.find(thought.strip())
    if at < 0:
        return 0
    end = at + len(thought.strip())
    rest = segment[end:].lstrip("\n")
    if rest.startswith(END_THINK):
        return len(segment) - len(rest.removeprefix(END_THINK).lstrip("\n"))
    return end


def _is_in(text: str, written: str) -> bool:
    text = text.strip()
    return text in written or json.dumps(text, ensure_ascii=False)[1:-1] in written


def _failure(row: int, turn: int, found: str, expected: str) -> JobFailure:
    return JobFailure(Reason.invalid_dataset, f"row {row}, turn {turn}: it {found}. Expected {expected}")


def trained_numbers(messages: Sequence[Message], first: int) -> Iterator[int]:
    """The turns of a conversation that are trained: answers from `first` on, without those of weight 0."""
    for number, message in enumerate(messages):
        if number >= first and message["role"] == "assistant" and message.get("weight") != 0:
            yield number
