"""Finds the trained spans of rendered conversations: where answers begin and end in what a chat template writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.rows import Message, is_plain
from .chat import Chat, TokenIndex
from .marks import common_prefix, unmarked, visible
from .places import ContentPlace, find_content
from .turns import trained_turn

Span = tuple[int, int, bool]
"""First and last character, and whether the end is exact; if not, the token around the end is outside the span."""


_ANY_THINK = re.compile("</?think>")
_THINK = "<think>"
"""Opens a thought: templates write it for answers without one, and in generation, by rules of their own."""


class SplitRow(NamedTuple):
    prompt: list[int]
    answers: list[list[int]]
    """Each begins where the template writes it, and ends with what the template writes to end the turn."""


class _RenderedRow(NamedTuple):
    number: int
    prompt: Sequence[Message]
    answers: Sequence[Sequence[Message]]
    before: str
    """The prompt with the header of an answer, as in generation."""
    texts: list[str]
    """The prompt with each answer, and what the template writes after it."""
    ended: list[str]
    """The texts, each as far as its answer ends."""
    is_by_turns: bool = False
    """Each answer stands behind what generation has before it: so do its tokens."""

    @property
    def diverges(self) -> bool:
        """Whether an answer has the template write the prompt differently."""
        return not all(text.startswith(self.before) for text in self.texts)

    def of(self, group: Sequence[int]) -> _RenderedRow:
        """The row with some of its answers."""
        answers = [self.answers[number] for number in group]
        texts = [self.texts[number] for number in group]
        return self._replace(answers=answers, texts=texts, ended=[self.ended[number] for number in group])


def split_rows(
    chat: Chat,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[Sequence[Sequence[Message]]],
    numbers: Sequence[int],
) -> Iterator[SplitRow]:
    """Tokenize prompts with each of their answers.

    Args:
        prompts: turns of each row before its answers.
        answers: of each row the turns of each answer.
    """
    groups = [[range(len(of_row))] for of_row in answers]
    return (split for (split,) in split_groups(chat, prompts, answers, numbers, groups))


def split_groups(
    chat: Chat,
    prompts: Sequence[Sequence[Message]],
    answers: Sequence[Sequence[Sequence[Message]]],
    numbers: Sequence[int],
    groups: Sequence[Sequence[Sequence[int]]],
) -> Iterator[list[SplitRow]]:
    """As `split_rows`, of rows whose answers are trained in several groups, such as pairs. Each answer is rendered and
    tokenized once, and each group is split as if its row had its answers only.

    Args:
        groups: of each row the answers of each group, as indexes.
    """
    rows = [_rendered(chat, *row) for row in zip(numbers, prompts, answers, strict=True)]
    headers = iter(chat.tokenize([row.before for row in rows]))
    sequences = iter(chat.tokenize([text for row in rows if not row.diverges for text in row.ended]))
    indexed = iter(chat.tokenize_with_index([text for row in rows if row.diverges for text in row.ended]))
    for row, of_row in zip(rows, groups, strict=True):
        header = next(headers)
        found = [next(indexed) if row.diverges else (next(sequences), None) for _ in row.texts]
        yield [_split(chat, row.of(group), header, [found[n] for n in group]) for group in of_row]


def _by_turns(chat: Chat, number: int, prompt: Sequence[Message], answers: Sequence[Sequence[Message]]) -> _RenderedRow:
    """A row with tool calls or thoughts: each answer behind exactly what generation has before it, with its thought
    where generation begins one."""
    before, ended = "", []
    for place, answer in enumerate(answers):
        talk = [*prompt, *answer]
        found = [
            trained_turn(chat, talk, len(prompt) + turn, number, count=not place and not turn)
            for turn in range(len(answer))
        ]
        before = found[0].before
        for earlier, later in pairwise(found):
            if not later.before.startswith(earlier.text):
                raise JobFailure(
                    Reason.invalid_dataset,
                    f"row {number}: an answer has several turns, of which the model's chat template writes the first "
                    "otherwise when others follow. Expected one assistant turn in each answer",
                )
        ended.append(found[-1].text)
    return _RenderedRow(number, prompt, answers, before, ended, ended, is_by_turns=True)


def _rendered(chat: Chat, number: int, prompt: Sequence[Message], answers: Sequence[Sequence[Message]]) -> _RenderedRow:
    if chat.forms.begins_thought or not is_plain(prompt) or not all(map(is_plain, answers)):
        return _by_turns(chat, number, prompt, answers)
    talks = [[*prompt, *answer] for answer in answers]
    found = [chat.render_whole(talk, number, trained_from=len(prompt)) for talk in talks]
    before = chat.render(prompt, number, add_generation_prompt=True)
    texts = [one.text for one in found]
    ended = [ended_text(chat, talk, text) for talk, text in zip(talks, texts, strict=True)]
    row = _RenderedRow(number, prompt, answers, before, texts, ended)
    if not row.diverges:
        for answer, text in zip(answers, texts, strict=True):
            _count_header(chat, answer[0], text, len(before))
    lost = {turn for one in found for turn in one.unwritten if turn < len(prompt)}
    roles = [prompt[turn]["role"] for turn in sorted(lost)]
    for answer, one in zip(answers, found, strict=True):
        roles += [answer[turn - len(prompt)]["role"] for turn in one.unwritten if turn >= len(prompt)]
    chat.lost.add(roles, number)
    chat.lost_texts.add(sum(len(one.partly) for one in found), number)
    return row


def ended_text(chat: Chat, messages: Sequence[Message], text: str) -> str:
    """A rendered conversation as far as its last answer ends, with the token by which the model stops."""
    return text[: chat.endings.of(messages, text)] + chat.endings.stop_of(messages[-1])


def _split(
    chat: Chat, row: _RenderedRow, header: list[int], found: Sequence[tuple[list[int], TokenIndex | None]]
) -> SplitRow:
    if row.diverges:
        return _split_diverging(chat, row, header, [(ids, index) for ids, index in found if index is not None])
    sequences = [ids for ids, _ in found]
    if row.is_by_turns and (own := _own_tokens(chat, row.before, row.ended, header, sequences)):
        return SplitRow(header, own)
    return _split_plain(chat, header, sequences)


def _own_tokens(
    chat: Chat, before: str, texts: Sequence[str], header: list[int], sequences: Sequence[list[int]]
) -> list[list[int]] | None:
    """The tokens of answers alone, where a token spans the border before one, which none does in generation. None: none
    does, or an answer alone has other tokens than behind a text."""
    if all(ids[: len(header)] == header for ids in sequences):
        return None
    parts = [text[len(before) :] for text in texts]
    answers = chat.tokenize(parts)
    spaced = any(begins_with_space(chat, part, own) for part, own in zip(parts, answers, strict=True))
    return None if spaced else answers


def tokens_behind(chat: Chat, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
    """The tokens of conversations whose last answer stands behind what generation has before it, as `split_rows` has
    them.

    Args:
        texts: of each what generation has, and the same with the answer (`turns.turn_text`).
    """
    found = []
    headers, sequences = (chat.tokenize([pair[part] for pair in texts]) for part in (0, 1))
    for (before, text), header, ids in zip(texts, headers, sequences, strict=True):
        own = _own_tokens(chat, before, [text], header, [ids])
        found.append(header + own[0] if own else ids)
    return found


def _split_plain(chat: Chat, header: list[int], sequences: list[list[int]]) -> SplitRow:
    """The template writes what it writes in generation, then the answer. Tokens may still span the border."""
    length = min(common_prefix(header, ids) for ids in sequences)
    chat.diverged += length < len(header)
    return SplitRow(sequences[0][:length], [ids[length:] for ids in sequences])


def _split_diverging(
    chat: Chat, row: _RenderedRow, header: list[int], found: Sequence[tuple[list[int], TokenIndex]]
) -> SplitRow:
    """Mistral's templates write the system turn into the last user turn, and only where that is the last turn: then the
    prompt is what they write before the answer. Where that depends on the answer, the prompt is that of generation."""
    chat.diverged += 1
    starts = [
        len(row.before) if text.startswith(row.before) else _answer_start(chat, row, answer, text)
        for answer, text in zip(row.answers, row.texts, strict=True)
    ]
    first = min(starts)
    sequences = [ids for ids, _ in found]
    if all(_shares_prompt(chat, row, text, start, first) for text, start in zip(row.texts, starts, strict=True)):
        length = min(index(first, False) for _, index in found)
        length = min(common_prefix(sequences[0][:length], ids) for ids in sequences)
        return SplitRow(sequences[0][:length], [ids[length:] for ids in sequences])
    chat.two_prompts += 1
    return SplitRow(header, [ids[index(start, False) :] for (ids, index), start in zip(found, starts, strict=True)])


def _shares_prompt(chat: Chat, row: _RenderedRow, text: str, start: int, first: int) -> bool:
    """Whether a text has the prompt of its row up to `first`, the first start of an answer, and then the answer, or the
    rest of its header."""
    if text[:first] != row.texts[0][:first]:
        return False
    if start == first:
        return True
    if not text.startswith(row.before):
        return False
    render = partial(chat.render_part, add_generation_prompt=True)
    place = find_content(render, row.prompt, len(row.prompt) - 1, row.before)
    return place is not None and place.end <= first


def _answer_start(chat: Chat, row: _RenderedRow, answer: Sequence[Message], text: str) -> int:
    place = find_content(chat.render_part, [*row.prompt, *answer], len(row.prompt), text)
    if place is None:
        raise JobFailure(
            Reason.invalid_dataset,
            f"row {row.number}: the model's chat template writes the prompt differently when the answer follows, and "
            "where the answer begins cannot be found: the template writes something else for the same answer with a "
            "mark in it. Change the row, or the template in the model's tokenizer files",
        )
    return _header_end(chat, row.prompt, row.before, text, place)


def _header_end(chat: Chat, prompt: Sequence[Message], before: str | None, text: str, place: ContentPlace) -> int:
    """Where the header of an answer ends that generation has, too, and what follows is trained.

    Templates that open a thought in generation close it before an answer without one. A note between the prompt and the
    header is no part of the answer, and where the prompt itself is written differently the answer begins with its
    content.
    """
    if before and text.startswith(before):
        return len(before)
    plain = chat.render_part(prompt)
    if not before or plain is None or not text.startswith(plain) or not before.startswith(plain):
        return place.start
    header = before[len(plain) :]
    found = [at for at in range(len(plain), place.mark) if text[at] == header[:1]]
    shared = [(common_prefix(header, text[at:]), at) for at in found]
    length, at = max(shared, default=(0, 0))
    if not header or length < len(header.partition(_THINK)[0]):
        return place.start
    opened = len(_THINK) * text.startswith(_THINK, place.mark)  # by generation, and in the row
    return min(at + length, place.mark + opened)


def _count_header(chat: Chat, answer: Message, text: str, start: int) -> None:
    """Count what is trained before an answer's thought and content where the template ignores `add_generation_prompt`:
    what generation lacks the model has to write."""
    if not chat.has_generation_header:
        header = text[start : max(text.find(answer["content"].strip(), start), start)]
        chat.trained_headers.add(_ANY_THINK.split(header)[0])


def begins_with_space(chat: Chat, text: str, ids: list[int]) -> bool:
    """Whether a tokenizer puts a space before a text, as it does before a whole one (SentencePiece)."""
    first = chat.tokenizer.convert_ids_to_tokens(ids[:1])
    return bool(first) and first[0].startswith("\u2581") and not text.startswith(" ")


def answer_spans(chat: Chat, messages: Sequence[Message], text: str) -> Iterator[Span]:
    """The spans of the answers in `text`, the rendered conversation: after each answer's header, up to and including
    what ends the turn."""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render_part(messages[:turn], add_generation_prompt=True)
        after = text if turn == len(messages) - 1 else chat.render_part(messages[: turn + 1])
        if before and after and text.startswith(after) and after.startswith(before):
            end = chat.endings.of(messages[: turn + 1], after)
            _count_header(chat, message, after, len(before))
            yield len(before), end, end == len(after)
        elif place := find_content(chat.render_part, messages, turn, text):
            yield _span_at(chat, messages, turn, text, before, place)
        elif visible(message):
            chat.unplaced_turns += 1


def _span_at(
    chat: Chat, messages: Sequence[Message], turn: int, text: str, before: str | None, place: ContentPlace
) -> Span:
    """The span of a turn that the template writes differently when other turns follow.

    Qwen3 drops the thinking of earlier turns, Phi-3 ends the last turn with a further token.
    """
    start = _header_end(chat, messages[:turn], before, text, place)
    marked = chat.render_part(place.marking.put_into(messages, turn)[: turn + 1])
    bounds = None if marked is None else place.marking.bounds(marked)
    if marked is None or bounds is None:
        end = place.end + chat.endings.asked(messages[turn], text[place.end :])
        return start, end, True
    whole = unmarked(marked)
    length = chat.endings.length(messages[: turn + 1], place.marking, whole, bounds[1])
    shared = chat.endings.shared(whole[bounds[1] :][:length], text[place.end :])
    return start, place.end + shared, shared == len(whole) - bounds[1]
