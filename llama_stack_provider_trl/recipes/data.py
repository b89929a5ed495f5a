"""Examples -> token ids and labels for TRL's trainers, which get the finished dataset and prepare nothing themselves.

Three properties that a trained model shows if they are missing:

- the text is what the tokenizer's chat template writes, tokenized once and without further special tokens, so there is
  no second BOS and the prompt stands in a sequence once;
- the loss covers the answers and the token that ends them, so that the model learns to stop, and nothing that a user,
  a system or a tool said;
- what is cut, dropped or guessed is counted and said in the `DataReport`.

On prompt/completion rows and preference pairs, ids and labels are those of TRL 1.16 (tests/process/test_data_trl.py).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from datasets import Dataset, Features, List, Value, concatenate_datasets
from jinja2 import TemplateError

from ..errors import InvalidRows, JobFailure
from .events import Reason
from .packing import IGNORED, pack
from .rows import Example, Message, PreferenceExample, SftExample, parse_row
from .spec import Algorithm, DataFormat, TruncationSide

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

_CHUNK = 1000
"""Rows tokenized at once: enough to amortize a call, few enough that their Python lists stay below 100 MB."""

_MARK = "\ue000turn\ue001"
"""Stands in for a turn's content when its place is searched: private-use characters, so that no content matches."""

Encoded = tuple[list[int], list[int]]
"""Token ids and labels of one sequence, not yet cut."""

Places = Callable[[int, bool], int]
"""(position, straddling) -> how many tokens end at or before a character; if straddling, how many begin before it."""

Span = tuple[int, int, bool]
"""Characters from, to, and whether the end is exact; if not, the token in which it lies does not belong to the span."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows. `num_rows` = `kept` + `dropped`."""

    num_rows: int
    kept: int
    truncated: int
    """Kept rows (or pairs) that were cut to `max_seq_length`."""
    dropped: int
    """Rows whose loss would be empty: after the cut (or, rarely, by the template) no trained token is left."""
    total_tokens: int
    """Tokens of all kept sequences after the cut; a pair counts prompt + chosen and prompt + rejected."""
    trained_tokens: int
    """Tokens that the loss covers."""
    max_tokens: int
    """The longest sequence before the cut: the `max_seq_length` at which nothing is cut."""
    warnings: list[str]


@overload
def read_examples(
    path: Path, algorithm: Literal["sft"], data_format: DataFormat | None = None
) -> Iterator[SftExample]: ...
@overload
def read_examples(
    path: Path, algorithm: Literal["dpo"], data_format: DataFormat | None = None
) -> Iterator[PreferenceExample]: ...
def read_examples(path: Path, algorithm: Algorithm, data_format: DataFormat | None = None) -> Iterator[Example]:
    """The examples of an NDJSON file, one at a time.

    Raises:
        InvalidRows: a line is not JSON, or its row fits no shape.
    """
    with open(path, encoding="utf-8") as file:
        for index, line in enumerate(file):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidRows(f"not JSON ({error.msg} at character {error.pos})", row=index) from error
            yield parse_row(row, index, algorithm, data_format)


def prepare_sft(
    examples: Iterable[SftExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    train_on_input: bool = False,
    side: TruncationSide = "right",
) -> tuple[Dataset, DataReport]:
    """Tokenize for `SFTTrainer` with `dataset_kwargs={"skip_prepare_dataset": True}`.

    Args:
        tokenizer: one without a chat template is given `DEFAULT_CHAT_TEMPLATE`, so that checkpoints carry it.
        max_seq_length: tokens; longer sequences are cut.
        train_on_input: the loss covers every token instead of the answers alone.
        side: right, sequences lose their end; left, their beginning, but for a `bos_token`.

    Returns:
        A dataset with the columns `input_ids` and `labels`, and what was done to get it.

    Raises:
        JobFailure: `invalid_dataset` if the template refuses a row or no row is left, `invalid_model` if a chat is to
            be rendered and the tokenizer has neither a template nor an `eos_token`.
    """
    encoder = _SftEncoder(_Chat(tokenizer), train_on_input)
    tally = _Tally(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length, side)
    chunks = [
        _dataset([cut for ids, labels in encoder.encode(chunk) if (cut := tally.cut_row(ids, labels))], _SFT_COLUMNS)
        for chunk in batched(enumerate(examples), _CHUNK)
    ]
    report = tally.report("row", encoder.chat)
    return concatenate_datasets(chunks), report


def prepare_dpo(
    pairs: Iterable[PreferenceExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    side: TruncationSide = "right",
) -> tuple[Dataset, DataReport]:
    """Tokenize for `DPOTrainer` with its `_prepare_dataset` switched off.

    The prompt is the common token prefix of the rendered prompt and of both full sequences, so it is in each sequence
    once. Arguments, errors and the report are those of `prepare_sft`, but for `side`. right: answers lose their end,
    and a pair whose prompt leaves no room for one is dropped. left: first the prompt loses its beginning, as far as its
    last token, then answers that are still too long their end.

    Returns:
        A dataset with the columns `prompt_ids`, `chosen_ids` and `rejected_ids`, cut so that the prompt with either
        answer has at most `max_seq_length` tokens, and what was done to get it.
    """
    chat = _Chat(tokenizer)
    tally = _Tally(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length, side)
    chunks = [
        _dataset([cut for ids in _encode_pairs(chat, chunk) if (cut := tally.cut_pair(*ids))], _DPO_COLUMNS)
        for chunk in batched(enumerate(pairs), _CHUNK)
    ]
    report = tally.report("pair", chat)
    return concatenate_datasets(chunks), report


def with_filler(dataset: Dataset) -> Dataset:
    """The dataset and one row more that has no loss: what fills up the last shares of several ranks.

    An SFT row of which nothing is trained, or a pair with two empty completions.
    """
    first = dataset[0]
    if "labels" in first:
        ids = first["input_ids"][:2]
        filler = _dataset([(ids, [-100] * len(ids))], _SFT_COLUMNS)
        if "seq_lengths" in first:
            filler = pack(filler, len(ids))
    else:
        filler = _dataset([(first["prompt_ids"][:2] or first["chosen_ids"][:2], [], [])], _DPO_COLUMNS)
    return concatenate_datasets([dataset, filler])


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
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + DEFAULT_CHAT_TEMPLATE
    return "the tokenizer has no chat template: it was given a plain one (### User: ... ### Assistant: ...)"


class _Chat:
    """A tokenizer and its chat template, with an account of what the template did."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.given: str | None = None
        """The warning that the default template was given."""
        self.diverged = 0
        """Rows whose prompt the template writes differently when the answer follows."""
        self.left_out = 0
        """Assistant turns that the template does not write."""

    def render(self, messages: Sequence[Message], row: int, *, ask: bool = False) -> str:
        """The conversation as text; `ask` adds the header of the answer to come."""
        self.given = ensure_chat_template(self.tokenizer) or self.given
        try:
            text = self._render(messages, ask)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row}: the model's chat template refuses the turns {roles}: {error}. "
                "Change the row, or the template in the model's tokenizer files",
            ) from error
        if not ask and not _answer_written(messages, text):
            raise JobFailure(
                Reason.invalid_model,
                f"row {row}: the model's chat template leaves out the answer's text, as templates of vision models do "
                "with plain text: give the model's tokenizer files a chat template for text",
            )
        return text

    def render_part(self, messages: Sequence[Message], *, ask: bool = False) -> str | None:
        """As `render`, for the beginning of a conversation, which a template may refuse although it takes the whole."""
        if not messages:
            return None
        try:
            return self._render(messages, ask)
        except (TemplateError, TypeError, ValueError):
            return None

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts: the template has already written the special tokens."""
        return _call(self.tokenizer, texts, add_special_tokens=False)["input_ids"]

    def tokenize_with_places(self, texts: list[str]) -> list[tuple[list[int], Places]]:
        """Ids, and where in the text their tokens stand."""
        if not self.tokenizer.is_fast:
            return [(ids, self._searched(text, ids)) for text, ids in zip(texts, self.tokenize(texts), strict=True)]
        encoded = _call(self.tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(ids, _known(offsets, self._searched(text, ids))) for text, ids, offsets in columns]

    def _searched(self, text: str, ids: list[int]) -> Places:
        # Without offsets: tokenize the text up to the position, and see how far the ids agree.
        return lambda position, straddling: _common_prefix(self.tokenize([text[:position]])[0], ids)

    def prompt_length(self, prompt: list[int], *sequences: list[int]) -> int:
        """Tokens of the prompt that all sequences begin with; the answer starts where they diverge, as in TRL."""
        length = min(_common_prefix(prompt, sequence) for sequence in sequences)
        self.diverged += length < len(prompt)
        return length


class _SftEncoder:
    """Numbered examples -> ids and labels, a chunk at a time."""

    def __init__(self, chat: _Chat, train_on_input: bool) -> None:
        self.chat, self.train_on_input = chat, train_on_input

    def encode(self, chunk: Sequence[tuple[int, SftExample]]) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        for kind, encode in self._kinds():
            rows = {row: example for row, example in chunk if kind(example)}
            encoded |= zip(rows, encode(rows) if rows else (), strict=True)
        return [encoded[row] for row, _ in chunk]

    def _kinds(self) -> list[tuple[Callable[[SftExample], bool], Callable[[dict[int, SftExample]], list[Encoded]]]]:
        return [
            (lambda example: example.messages is None, self._texts),
            (lambda example: example.messages is not None and self.train_on_input, self._whole_chats),
            (lambda example: example.prompt_turns is not None and not self.train_on_input, self._answers),
            (lambda example: _is_dialog(example) and not self.train_on_input, self._dialogs),
        ]

    def _texts(self, rows: dict[int, SftExample]) -> list[Encoded]:
        eos = self.chat.tokenizer.eos_token_id
        sequences = _call(self.chat.tokenizer, [example.text or "" for example in rows.values()])["input_ids"]
        ended = [ids if eos is None or ids[-1:] == [eos] else [*ids, eos] for ids in sequences]
        return [(ids, ids) for ids in ended]

    def _whole_chats(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = [self.chat.render(example.messages or (), row) for row, example in rows.items()]
        return [(ids, ids) for ids in self.chat.tokenize(texts)]

    def _answers(self, rows: dict[int, SftExample]) -> list[Encoded]:
        prompts, texts = [], []
        for row, example in rows.items():
            messages = example.messages or []
            texts.append(self.chat.render(messages, row))
            prompts.append(self.chat.render(messages[: example.prompt_turns], row, ask=True))
        encoded = []
        for prompt, ids in zip(self.chat.tokenize(prompts), self.chat.tokenize(texts), strict=True):
            start = self.chat.prompt_length(prompt, ids)
            encoded.append((ids, [IGNORED] * start + ids[start:]))
        return encoded

    def _dialogs(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = [self.chat.render(example.messages or (), row) for row, example in rows.items()]
        encoded = []
        for example, text, (ids, place) in zip(
            rows.values(), texts, self.chat.tokenize_with_places(texts), strict=True
        ):
            labels = [IGNORED] * len(ids)
            for start, end, exact in answer_spans(self.chat, example.messages or [], text):
                trained = slice(place(start, False), place(end, exact))
                labels[trained] = ids[trained]
            encoded.append((ids, labels))
        return encoded


def answer_spans(chat: _Chat, messages: Sequence[Message], text: str) -> Iterator[Span]:
    """Where in `text`, the rendered conversation, the model's own words stand: after each answer's header, up to and
    with what the template writes to end the turn."""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render_part(messages[:turn], ask=True)
        after = text if turn == len(messages) - 1 else chat.render_part(messages[: turn + 1])
        if before and after and text.startswith(after) and after.startswith(before):
            span: Span | None = len(before), len(after), True
        else:
            span = _searched_span(chat, messages, turn, text, before)
        if span is None:
            chat.left_out += 1
        else:
            yield span


def _searched_span(chat: _Chat, messages: Sequence[Message], turn: int, text: str, before: str | None) -> Span | None:
    """The span of a turn that the template writes differently once the conversation goes on.

    Qwen3 drops the thinking of earlier turns, Phi-3 ends the last turn with a further token. So the content's place is
    found by rendering the whole conversation with a mark in its stead.
    """
    place = _place(chat, messages, turn, text)
    if place is None:
        return None
    start, end = place
    marked = chat.render_part(_marked(messages, turn)[: turn + 1]) or ""
    ending = marked.rpartition(_MARK)[2]
    shared = _common_prefix(ending, text[end:])
    if before:
        # Where the earlier turns are written differently too, the header's end is unknown: the content's start will do.
        floor = _place(chat, messages, turn - 1, text)
        header_end = _common_prefix(before, text)
        start = min(start, header_end) if floor is not None and header_end >= floor[1] else start
    return start, end + shared, shared == len(ending)


def _place(chat: _Chat, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int] | None:
    """Start and end of one turn's content in `text`, None where the template does not write it."""
    marked = chat.render_part(_marked(messages, turn))
    if marked is None or _MARK not in marked:
        return None
    start = _common_prefix(text, marked)
    tail = _common_prefix(text[: start - 1 : -1] if start else text[::-1], marked[::-1])
    return start, len(text) - tail


def _marked(messages: Sequence[Message], turn: int) -> list[Message]:
    return [*messages[:turn], {"role": messages[turn]["role"], "content": _MARK}, *messages[turn + 1 :]]


def _encode_pairs(
    chat: _Chat, chunk: Sequence[tuple[int, PreferenceExample]]
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected ids of each pair, not yet cut."""
    chosen = chat.tokenize([chat.render(pair.prompt + pair.chosen, row) for row, pair in chunk])
    prompts = chat.tokenize([chat.render(pair.prompt, row, ask=True) for row, pair in chunk])
    rejected = chat.tokenize([chat.render(pair.prompt + pair.rejected, row) for row, pair in chunk])
    for prompt, one, other in zip(prompts, chosen, rejected, strict=True):
        length = chat.prompt_length(prompt, one, other)
        yield prompt[:length], one[length:], other[length:]


@dataclass(slots=True)
class _Tally:
    """Cuts sequences to `limit` tokens and keeps the account."""

    eos: int | None
    bos: int | None
    limit: int
    side: TruncationSide = "right"
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    identical: int = 0
    """Kept pairs that differ only in what was cut."""
    total_tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    eos_trained: bool = False
    example_end: list[int] = field(default_factory=list)
    """The last ids of the first sequence that was not cut."""

    def cut_row(self, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]] | None:
        """The row, cut; None if it is dropped. The first label never counts: nothing predicts the first token."""
        self._see(len(ids))
        kept_ids, kept_labels = self._cut(ids, ids, self.limit), self._cut(labels, ids, self.limit)
        trained = len(kept_labels) - 1 - kept_labels[1:].count(IGNORED)
        if trained <= 0:
            return None
        self._keep(len(kept_ids), trained, len(ids) > self.limit, labels)
        return kept_ids, kept_labels

    def cut_pair(
        self, prompt: list[int], chosen: list[int], rejected: list[int]
    ) -> tuple[list[int], list[int], list[int]] | None:
        """The pair, cut; None if it is dropped because the prompt leaves no room for an answer."""
        longest = max(len(chosen), len(rejected))
        length = len(prompt) + longest
        self._see(length)
        if self.side == "left":
            prompt = self._cut(prompt, prompt, max(self.limit - longest, 1))
        room = self.limit - len(prompt)
        one, other = chosen[: max(room, 0)], rejected[: max(room, 0)]
        if not one or not other:
            return None
        self.identical += one == other and chosen != rejected
        trained = len(one) + len(other)
        self._keep(2 * len(prompt) + trained, trained, length > self.limit, chosen)
        return prompt, one, other

    def _cut(self, values: list[int], ids: list[int], limit: int) -> list[int]:
        """Of `values`, one per token of `ids`, those of the tokens that stay."""
        if len(values) <= limit:
            return values
        if self.side == "right":
            return values[:limit]
        # Models lose their footing without the token that they have seen at the beginning of every text.
        head = 1 if self.bos is not None and ids[0] == self.bos and limit > 1 else 0
        return values[:head] + values[len(values) - limit + head :]

    def _see(self, length: int) -> None:
        self.rows += 1
        self.longest = max(self.longest, length)

    def _keep(self, tokens: int, trained: int, cut: bool, answer: list[int]) -> None:
        self.kept += 1
        self.truncated += cut
        self.total_tokens += tokens
        self.trained_tokens += trained
        if not cut:
            self.eos_trained = self.eos_trained or self.eos in answer
            self.example_end = self.example_end or answer[-3:]

    def report(self, unit: str, chat: _Chat) -> DataReport:
        """The account, in words too.

        Raises:
            JobFailure: nothing is left to train on.
        """
        if not self.kept:
            raise JobFailure(Reason.invalid_dataset, self._nothing_left(unit))
        warnings = [*self._template_warnings(unit, chat), *self._cut_warnings(unit)]
        return DataReport(
            num_rows=self.rows,
            kept=self.kept,
            truncated=self.truncated,
            dropped=self.rows - self.kept,
            total_tokens=self.total_tokens,
            trained_tokens=self.trained_tokens,
            max_tokens=self.longest,
            warnings=warnings,
        )

    def _nothing_left(self, unit: str) -> str:
        if not self.rows:
            return "the dataset is empty: expected at least one row"
        return (
            f"none of the {self.rows} {unit}s has a token left to train on within max_seq_length={self.limit}: "
            f"raise max_seq_length (the longest {unit} has {self.longest} tokens) or shorten the prompts"
        )

    def _template_warnings(self, unit: str, chat: _Chat) -> Iterator[str]:
        if chat.given:
            yield chat.given
        if chat.diverged:
            yield (
                f"{chat.diverged} of {self.rows} {unit}s: the chat template writes the prompt differently when the "
                "answer follows; the loss starts where they diverge"
            )
        if chat.left_out:
            yield f"the chat template leaves out {chat.left_out} assistant turns: they are not trained"
        if self.example_end and self.eos is not None and not self.eos_trained:
            yield (
                f"answers end in {chat.tokenizer.decode(self.example_end)!r}, not in the tokenizer's eos_token "
                f"{chat.tokenizer.eos_token!r}: generation stops there only if generation_config.eos_token_id lists it"
            )

    def _cut_warnings(self, unit: str) -> Iterator[str]:
        if self.truncated:
            yield (
                f"{self.truncated} of {self.rows} {unit}s were cut to max_seq_length={self.limit} tokens and lack "
                f"{'the end of the answer' if self.side == 'right' else 'their beginning'} "
                f"(the longest has {self.longest})"
            )
        if self.kept < self.rows:
            yield (
                f"{self.rows - self.kept} of {self.rows} {unit}s were dropped: within max_seq_length={self.limit} "
                "tokens nothing is left to train on"
            )
        if self.identical:
            yield f"{self.identical} pairs differ only in what was cut: they carry no signal"


_SFT_COLUMNS = ("input_ids", "labels")
_DPO_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def _dataset(rows: list[Any], columns: tuple[str, ...]) -> Dataset:
    # int32 holds every vocabulary and takes half the memory; the collators make int64 tensors of it.
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    data = {column: list(value) for column, value in zip(columns, values, strict=True)}
    return Dataset.from_dict(data, features=Features({column: List(Value("int32")) for column in columns}))


def _call(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
    # verbose=False: a sequence longer than the model takes is cut here and counted, which is all there is to say.
    return tokenizer(texts, return_attention_mask=False, truncation=False, verbose=False, **options)


def _is_dialog(example: SftExample) -> bool:
    return example.messages is not None and example.prompt_turns is None


def _known(offsets: list[tuple[int, int]], searched: Places) -> Places:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]

    def place(position: int, straddling: bool) -> int:
        ended = bisect_right(ends, position)
        if straddling:
            return max(ended, bisect_left(starts, position))
        # Some tokenizers leave spaces out of the offsets: whose the spaces in such a gap are, only tokenizing can tell.
        return searched(position, False) if ended < len(starts) and starts[ended] > position else ended

    return place


def _answer_written(messages: Sequence[Message], text: str) -> bool:
    """Whether the last word of the last answer is in the text (what it thought before may rightly be missing)."""
    answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
    words = re.findall(r"\w+", answer.rpartition("</think>")[2][-200:])
    return not words or words[-1] in text


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
