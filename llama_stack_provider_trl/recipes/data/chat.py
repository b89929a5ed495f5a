"""Renders conversations with a tokenizer's chat template, and finds the trained spans of the text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.rows import Message
from .templates import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ '### ' + message['role'] | capitalize + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Assistant:\n' }}{% endif %}"
)
"""For tokenizers without a template: plain-text role headers, no new tokens, an assistant turn ends in `eos_token`."""


DEFAULT_TEMPLATE_WARNING = (
    "the tokenizer has no chat template: it was given a plain one (### User: ... ### Assistant: ...)"
)


_MARKER = "\ue000\ue002\ue001"
"""Replaces a turn's content to find its position. Private-use characters, so that no content matches, and none that a
filter such as `upper` changes."""


_MOST_SHAPES = 10_000
"""Sequences of roles that are remembered."""


TokenIndex = Callable[[int, bool], int]
"""(position, straddling) -> number of tokens that end at or before a character; if straddling, that begin before it."""


Span = tuple[int, int, bool]
"""First and last character, and whether the end is exact; if not, the token around the end is outside the span."""


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give a tokenizer without a chat template the default one.

    Returns:
        The warning to show, or None where the tokenizer had a template.

    Raises:
        JobFailure: `invalid_model` if there is no `eos_token` either: such a model could not learn to stop.
    """
    if tokenizer.chat_template:
        return None
    if tokenizer.eos_token is None:
        raise JobFailure(
            Reason.invalid_model,
            "the tokenizer has neither a chat_template nor an eos_token: set eos_token in its tokenizer_config.json",
        )
    tokenizer.chat_template = default_chat_template(tokenizer)
    return DEFAULT_TEMPLATE_WARNING


def default_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template that a tokenizer without one is given."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return ("{{ bos_token }}" if begins else "") + DEFAULT_CHAT_TEMPLATE


class Chat:
    """A tokenizer and its chat template, with counts of what the template changed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template_warning: str | None = None
        """The warning that the default template was given."""
        self.has_rendered = False
        """Whether a conversation was rendered, and the tokenizer has a template for it."""
        self.diverged = 0
        """Rows whose prompt the template writes differently when the answer follows."""
        self.missing_turns = 0
        """Assistant turns that the template does not write."""
        self.dropped_turns: Counter[str] = Counter()
        """Role -> turns of that role that the template does not write."""
        self.rows_with_dropped_turns = 0
        self._unwritten: dict[tuple[bool, tuple[str, ...]], list[int] | None] = {}
        """By what the last turn is for, and the roles of the turns: the turns that the template does not write; None:
        that depends on the contents, too."""

    def render(self, messages: Sequence[Message], row: int, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text; `add_generation_prompt` adds the header of the next answer."""
        self.template_warning = ensure_chat_template(self.tokenizer) or self.template_warning
        self.has_rendered = True
        try:
            text = self._render(messages, add_generation_prompt)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}: the model's chat template refuses the turns {roles}: {error}. "
                "Change the row, or the template in the model's tokenizer files",
            ) from error
        if not add_generation_prompt and not self._writes_answer(messages, text):
            raise _left_out(row)
        return text

    def count_dropped(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> None:
        """Count the turns of a row, but for answers, that the template does not write."""
        dropped = [
            messages[turn]["role"]
            for turn in self._unwritten_turns(messages, add_generation_prompt)
            if messages[turn]["role"] != "assistant" and messages[turn]["content"].strip()
        ]
        self.dropped_turns.update(dropped)
        self.rows_with_dropped_turns += bool(dropped)

    def _writes_answer(self, messages: Sequence[Message], text: str) -> bool:
        """Whether the last answer is in the text (what it thought before may rightly be missing)."""
        last = next((turn for turn in reversed(range(len(messages))) if messages[turn]["role"] == "assistant"), None)
        answer = "" if last is None else messages[last]["content"]
        if not (words := re.findall(r"\w+", answer.rpartition("</think>")[2][-200:])):
            return True
        # A word such as "A" may be among the template's own: so the place of the turn's content is looked for, too.
        return words[-1] in text and last not in self._unwritten_turns(messages, False)

    def _unwritten_turns(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """Turns whose content the template does not write. That depends on the roles alone, so most rows of a dataset
        need one rendering for all of them, unless the template refuses other contents."""
        roles = tuple(message["role"] for message in messages)
        key = add_generation_prompt, roles
        if key not in self._unwritten:
            if len(self._unwritten) >= _MOST_SHAPES:
                self._unwritten.clear()
            self._unwritten[key] = self._find_unwritten(roles, add_generation_prompt)
        unwritten = self._unwritten[key]
        if unwritten is not None:
            return unwritten
        texts = [
            self.render_part(_with_marker(messages, turn), add_generation_prompt=add_generation_prompt)
            for turn in range(len(messages))
        ]
        return [turn for turn, text in enumerate(texts) if text is not None and _MARKER not in text]

    def _find_unwritten(self, roles: Sequence[str], add_generation_prompt: bool) -> list[int] | None:
        marked = [{"role": role, "content": f"{_MARKER}{turn}{_MARKER}"} for turn, role in enumerate(roles)]
        text = self.render_part(marked, add_generation_prompt=add_generation_prompt)
        if text is None:  # a template that reads contents, such as arguments in JSON
            return None
        return [turn for turn, message in enumerate(marked) if message["content"] not in text]

    def render_part(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """Render the beginning of a conversation; None where the template refuses it, even if it accepts the whole."""
        if not messages:
            return None
        try:
            return self._render(messages, add_generation_prompt)
        except (TemplateError, TypeError, ValueError):
            return None

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return rendered(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts: the template has already written the special tokens."""
        return call_tokenizer(self.tokenizer, texts, add_special_tokens=False)["input_ids"]

    def tokenize_with_index(self, texts: list[str]) -> list[tuple[list[int], TokenIndex]]:
        """Ids, and the positions of their tokens in the text."""
        if not self.tokenizer.is_fast:
            return [
                (ids, self._index_from_prefixes(text, ids))
                for text, ids in zip(texts, self.tokenize(texts), strict=True)
            ]
        encoded = call_tokenizer(self.tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [
            (ids, _index_from_offsets(offsets, self._index_from_prefixes(text, ids))) for text, ids, offsets in columns
        ]

    def _index_from_prefixes(self, text: str, ids: list[int]) -> TokenIndex:
        # Without offsets: tokenize the text up to the position, and count the ids that agree.
        return lambda position, straddling: _common_prefix(self.tokenize([text[:position]])[0], ids)

    def prompt_lengths(
        self, prompts: Sequence[Sequence[Message]], answers: Sequence[Sequence[Sequence[Message]]], rows: Sequence[int]
    ) -> Iterator[tuple[int, list[list[int]]]]:
        """Tokenize prompts with each of their answers.

        Args:
            prompts: turns of each row before its answers.
            answers: of each row the turns of each answer; all rows have the same number of them.
            rows: number of each row, for messages.

        Yields:
            Of each row the tokens before its answers, which all its sequences begin with, and the sequences.
        """
        befores: list[str] = []
        texts: list[list[str]] = []
        for prompt, several, row in zip(prompts, answers, rows, strict=True):
            texts.append([self.render([*prompt, *answer], row) for answer in several])
            befores.append(self.render(prompt, row, add_generation_prompt=True))
        headers = self.tokenize(befores)
        encoded = iter(self.tokenize([text for several in texts for text in several]))
        for number, (prompt, several, row) in enumerate(zip(prompts, answers, rows, strict=True)):
            self.count_dropped([*prompt, *several[0]])
            sequences = [next(encoded) for _ in several]
            length = min(_common_prefix(headers[number], ids) for ids in sequences)
            if length < len(headers[number]):
                self.diverged += 1
                starts = [
                    self._answer_start([*prompt, *answer], len(prompt), text, befores[number], row)
                    for answer, text in zip(several, texts[number], strict=True)
                ]
                if None not in starts:
                    length = self._tokens_before(texts[number], starts, sequences)
            yield length, sequences

    def _answer_start(self, messages: Sequence[Message], turn: int, text: str, before: str, row: int) -> int | None:
        """Character at which the answer's content begins in the text; None: the prompt is written as it is without the
        answer, up to the header of the answer.

        Mistral's templates write the system turn into the last user turn, and only where that is the last turn: then
        the texts diverge within the user's turn, which is no answer.
        """
        shared = _common_prefix(before, text)
        if shared == len(before) or turn == 0:
            return None
        floor = _content_bounds(self, messages, turn - 1, text)
        if floor is not None and shared >= floor[1]:
            return None
        bounds = _content_bounds(self, messages, turn, text)
        if bounds is None:
            raise _left_out(row)
        return bounds[0]

    def _tokens_before(self, texts: list[str], starts: Sequence[int | None], sequences: list[list[int]]) -> int:
        """Tokens that all sequences of a row begin with and that end before their answers."""
        found = self.tokenize_with_index(texts)
        length = min(index(start or 0, False) for (_, index), start in zip(found, starts, strict=True))
        return min(length, *(_common_prefix(sequences[0][:length], ids) for ids in sequences))


def answer_spans(chat: Chat, messages: Sequence[Message], text: str) -> Iterator[Span]:
    """The spans of the answers in `text`, the rendered conversation: after each answer's header, up to and including
    what the template writes to end the turn."""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render_part(messages[:turn], add_generation_prompt=True)
        after = text if turn == len(messages) - 1 else chat.render_part(messages[: turn + 1])
        if before and after and text.startswith(after) and after.startswith(before):
            span: Span | None = len(before), len(after), True
        else:
            span = _span_by_marker(chat, messages, turn, text, before)
        if span is None:
            chat.missing_turns += 1
        else:
            yield span


def _span_by_marker(chat: Chat, messages: Sequence[Message], turn: int, text: str, before: str | None) -> Span | None:
    """The span of a turn that the template writes differently when other turns follow.

    Qwen3 drops the thinking of earlier turns, Phi-3 ends the last turn with a further token. So the content's position
    is found by rendering the whole conversation with a marker instead of it.
    """
    bounds = _content_bounds(chat, messages, turn, text)
    if bounds is None:
        return None
    start, end = bounds
    marked = chat.render_part(_with_marker(messages, turn)[: turn + 1]) or ""
    ending = marked.rpartition(_MARKER)[2]
    shared = _common_prefix(ending, text[end:])
    if before:
        # Where the earlier turns are written differently too, the header's end is unknown. Then the span starts with
        # the content.
        floor = _content_bounds(chat, messages, turn - 1, text)
        header_end = _common_prefix(before, text)
        start = min(start, header_end) if floor is not None and header_end >= floor[1] else start
    return start, end + shared, shared == len(ending)


def _content_bounds(chat: Chat, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int] | None:
    """Start and end of one turn's content in `text`, None where the template does not write it."""
    marked = chat.render_part(_with_marker(messages, turn))
    if marked is None or _MARKER not in marked:
        return None
    start = _common_prefix(text, marked)
    tail = _common_prefix(text[: start - 1 : -1] if start else text[::-1], marked[::-1])
    return start, len(text) - tail


def _with_marker(messages: Sequence[Message], turn: int) -> list[Message]:
    return [*messages[:turn], {"role": messages[turn]["role"], "content": _MARKER}, *messages[turn + 1 :]]


def call_tokenizer(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
    # verbose=False: a sequence longer than the model takes is cut and counted here; a further warning is redundant.
    return tokenizer(texts, return_attention_mask=False, truncation=False, verbose=False, **options)


def _index_from_offsets(offsets: list[tuple[int, int]], searched: TokenIndex) -> TokenIndex:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]

    def index(position: int, straddling: bool) -> int:
        ended = bisect_right(ends, position)
        if straddling:
            return max(ended, bisect_left(starts, position))
        # Some tokenizers leave spaces out of the offsets: only tokenizing finds the token of a space in such a gap.
        return searched(position, False) if ended < len(starts) and starts[ended] > position else ended

    return index


def _left_out(row: int) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"row {row}: the model's chat template leaves out the answer's text, as templates of vision models do "
        "with plain text: give the model's tokenizer files a chat template for text",
    )


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
