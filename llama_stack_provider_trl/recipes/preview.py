"""Shows rows as they are trained: their tokens, which of them the loss covers, and what is cut or dropped.

The tokens, masks and cuts are those of `recipes.data`, which trainings use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import batched, islice
from typing import TYPE_CHECKING, NamedTuple

from ..errors import JobFailure
from ..specs.events import MOST_SHOWN, EventWriter, Finished, Previewed, PreviewedRow, Reason
from ..specs.job import JobSpec
from ..specs.methods import METHODS
from ..specs.preflight import PreviewSpec
from ..specs.schedules import problem_of_warmup
from .data.chat import Chat
from .data.embedded import check_embedded
from .data.lengths import histogram
from .data.packing import IGNORED, best_fit
from .data.pieces import Pieces, pieces_of
from .data.prepare import TruncationCounter, read_examples
from .data.prompts import encode_prompts
from .data.sampling import BatchPlan, epoch_of_job
from .data.tokenize import SftEncoder, encode_chats, encode_labelled, encode_pairs
from .model.loading import load_teacher_tokenizer, load_tokenizer, vocabulary_size
from .model.positions import positions_of, within_positions
from .model.saving import lacking_in_exports
from .reward_templates import lost_by_reward_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ROWS = 2000
"""Rows that are tokenized for the counts and the histogram."""
_MOST_TOKENS = 1_000_000
"""Tokens after which no further rows are."""
_CHUNK = 50
_SHOWN_TOKENS = 8000
"""Tokens of all rows that are shown: of further rows there are counts only."""
_MOST_PARTS = 8
"""Tokens that are tried for one character."""
_LONGEST_TEXT = 24
"""Characters of a token: long ones are runs of spaces."""


@dataclass(frozen=True)
class _MaskedPart:
    """A part of a row, with the positions of its tokens that are kept and trained."""

    name: str
    ids: list[int]
    kept: set[int]
    trained: set[int]


@dataclass(frozen=True)
class _MaskedRow:
    """An example: a row, or one of the sequences or pairs that are made of it."""

    parts: list[_MaskedPart]
    length: int
    """Tokens that count against the limit, before the cut."""
    dropped: str = ""
    """Why; empty: it is trained on."""


class _Place(NamedTuple):
    """Which example of the dataset it is."""

    row: int
    example: int
    """Of those of its row, from 0."""
    examples: int
    """Of its row."""


@dataclass
class _Texts:
    """Texts of tokens."""

    tokenizer: PreTrainedTokenizerBase
    special: set[int] = field(default_factory=set)
    _known: dict[int, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Where a character takes several tokens, the first one has it and the others none."""
        texts: list[str] = []
        while len(texts) < len(ids):
            at = len(texts)
            if (text := self._whole(ids[at])) is not None:
                texts.append(text)
                continue
            for count in range(2, min(_MOST_PARTS, len(ids) - at) + 1):
                if "\ufffd" not in (text := self._decoded(ids[at : at + count])):
                    break
            else:
                text, count = self._of_bytes(ids[at : at + _MOST_PARTS])
            texts += [_shortened(text), *[""] * (count - 1)]
        return texts

    def _of_bytes(self, ids: Sequence[int]) -> tuple[str, int]:
        """The text of the first tokens that end with a character, which may be U+FFFD itself, and their number. Where
        none do, as in a row that was cut within a character, the first token as the vocabulary has it."""
        written = b""
        for count, token in enumerate(ids, 1):
            if self._pieces is None or token >= len(self._pieces.written) or self._pieces.written[token] is None:
                break
            written += self._pieces.written[token] or b""
            with suppress(UnicodeDecodeError):
                return written.decode(), count
        return str(self.tokenizer.convert_ids_to_tokens(ids[0])), 1

    @cached_property
    def _pieces(self) -> Pieces | None:
        """Read where it is needed: that takes a second with a large vocabulary."""
        return pieces_of(self.tokenizer)

    def _whole(self, token: int) -> str | None:
        """The text of a token; None: it is a part of a character."""
        if token not in self._known:
            text, written = self._decoded([token]), str(self.tokenizer.convert_ids_to_tokens(token))
            if written.startswith("▁") and not text.startswith(" "):
                text = f" {text}"
            self._known[token] = None if "\ufffd" in text else _shortened(text or written)
        return self._known[token]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def preview(spec: JobSpec, request: PreviewSpec, writer: EventWriter) -> None:
    """Write the event with the examples of the requested rows, and the counts of those that follow them.

    Raises:
        JobFailure: what would fail the job on these rows; invalid_request, there are none.
    """
    spec, notes = within_positions(spec)
    tokenizer = load_tokenizer(spec.source, warn=notes.append)
    notes += lacking_in_exports(spec)
    prompts = encode_prompts(spec.train.samples, tokenizer, positions_of(spec.source))
    chat, teacher = Chat(tokenizer), load_teacher_tokenizer(spec)
    taught = None if teacher is None else Chat(teacher)
    counter = TruncationCounter(
        tokenizer.eos_token_id, tokenizer.bos_token_id, spec.data.max_seq_length, spec.data.truncation_side
    )
    shown: list[PreviewedRow] = []
    lengths: list[int] = []
    kept: list[int] = []
    texts = _Texts(tokenizer)
    left = _SHOWN_TOKENS
    for number, examples in enumerate(_rows(spec, request.first_row, chat, counter, taught)):
        for example, one in enumerate(examples):
            if number < request.rows and len(shown) < MOST_SHOWN:
                place = _Place(request.first_row + number, example, len(examples))
                shown.append(_shown(one, place, counter, texts, left))
                left -= len(shown[-1].ids)
            lengths.append(one.length)
            if not one.dropped:
                kept.append(min(one.length, spec.data.max_seq_length))
    unit = METHODS[spec.algorithm].unit
    if not counter.rows:
        found = f"the dataset has {spec.data.dataset.num_rows} rows and none at {request.first_row}"
        raise JobFailure(Reason.invalid_request, f"{found}: rows are counted from 0, send a smaller first_row")
    if not lengths:
        raise JobFailure(Reason.invalid_dataset, counter.nothing_left(unit))
    lost = _lost_by_reward_models(spec, request.first_row, counter.rows, writer)
    largest = f"row {request.first_row + counter.largest_id_row} of the dataset {spec.data.dataset.dataset_id!r}"
    try:
        check_embedded([counter.largest_id], vocabulary_size(spec.source), tokenizer, largest)
    except JobFailure as error:
        lost.append(f"the job fails: {error.message}")
    if spec.data.dropped_turns == "refuse" and [*prompts.lost_turns, *counter.lost_turns(unit, chat, taught), *lost]:
        lost.append("with dropped_turns 'refuse' the job fails for what a chat template leaves out")
    writer.write(
        Previewed(
            max_seq_length=spec.data.max_seq_length,
            data=_data(spec, counter, lengths),
            rows=shown,
            warnings=[
                *notes,
                *prompts.lost_turns,
                *counter.warnings(unit, chat, taught),
                *lost,
                *_warmup(spec, counter, kept),
            ],
        ),
        durable=True,
    )
    writer.write(Finished(step=0), durable=True)


def _lost_by_reward_models(spec: JobSpec, first: int, count: int, writer: EventWriter) -> list[str]:
    """A sentence for each reward model whose chat template leaves out turns of the rows that were read."""
    read = islice(
        enumerate(read_examples(spec.data.dataset.path, "prompts", names=spec.data.dataset.names)), first, first + count
    )
    return lost_by_reward_models(spec.changed(dropped_turns="warn"), writer.heartbeat, read)


def _warmup(spec: JobSpec, counter: TruncationCounter, kept: Sequence[int]) -> list[str]:
    """The warning of a warmup that is not shorter than the job, where rows that were not read are kept, too. Of packed
    ones the steps are known where all were read.

    Args:
        kept: tokens of each example that is trained on.
    """
    unread = spec.data.dataset.num_rows - counter.rows
    if not kept or (spec.data.packed and unread):
        return []
    more = unread * counter.examples // counter.rows  # as many of each row as of those that were read
    examples = len(best_fit(kept, spec.data.max_seq_length)) if spec.data.packed else len(kept) + more
    steps = epoch_of_job(spec, examples, BatchPlan.of_job(spec)).steps_per_epoch * spec.train.n_epochs
    return [*filter(None, [problem_of_warmup(spec.train.optimizer, steps)])]


def _rows(
    spec: JobSpec, first: int, chat: Chat, counter: TruncationCounter, taught: Chat | None
) -> Iterator[list[_MaskedRow]]:
    """The examples of each row from `first` on, until there are enough for the counts."""
    read = enumerate(
        read_examples(spec.data.dataset.path, spec.algorithm, spec.data.data_format, spec.data.dataset.names)
    )
    tokens = 0
    for chunk in batched(islice(read, first, first + _MOST_ROWS), _CHUNK):
        if METHODS[spec.algorithm].rows == "kto":
            labelled = counter.read(encode_labelled(chat, chunk))  # type: ignore[arg-type]
            rows = [[_answer(prompt, ids, counter)] for prompt, ids, _ in labelled]
        elif spec.method.answer_tokens is not None:
            own = [ids for _, ids in encode_chats(chat, chunk)]  # type: ignore[arg-type]
            theirs = [ids for _, ids in encode_chats(taught, chunk)] if taught else own  # type: ignore[arg-type]
            both = counter.read(zip(own, theirs, strict=True))
            rows = [[_prompt(*ids, spec.method.answer_tokens, counter)] for ids in both]
        elif not spec.has_pairs:
            encoder = SftEncoder(chat, spec.data.trained, spec.data.reasoning)
            encoded = counter.read(encoder.encode(chunk))  # type: ignore[arg-type]
            rows = [[_sft_row(ids, labels, counter) for ids, labels in sequences] for sequences in encoded]
        else:
            pairs = counter.read(encode_pairs(chat, chunk))  # type: ignore[arg-type]
            rows = [[_pair(*ids, counter) for ids in row] for row in pairs]
        yield from rows
        tokens += sum(one.length for examples in rows for one in examples)
        if tokens >= _MOST_TOKENS:
            return


def _sft_row(ids: list[int], labels: list[int], counter: TruncationCounter) -> _MaskedRow:
    if counter.cut_row(ids, labels) is None:
        why = f"within max_seq_length={counter.limit} tokens nothing is left to train on"
        if len(labels) - 1 - labels[1:].count(IGNORED) <= 0:
            why = "the loss covers none of its tokens"
        return _MaskedRow([_MaskedPart("sequence", ids, set(), set())], len(ids), why)
    kept = counter.cut([*range(len(ids))], ids, counter.limit)
    # Nothing predicts the first token.
    trained = {position for position in kept[1:] if labels[position] != IGNORED}
    return _MaskedRow([_MaskedPart("sequence", ids, {*kept}, trained)], len(ids))


def _prompt(ids: list[int], theirs: list[int], answer: int, counter: TruncationCounter) -> _MaskedRow:
    """A prompt, also as a teacher reads it: the longer one decides whether it is dropped."""
    longest = max(ids, theirs, key=len)
    if counter.keeps(longest if ids and theirs else [], answer):
        return _MaskedRow([_MaskedPart("prompt", ids, {*range(len(ids))}, set())], len(longest))
    why = f"within max_seq_length={counter.limit} tokens it leaves fewer than the {answer} of an answer"
    return _MaskedRow([_MaskedPart("prompt", ids, set(), set())], len(longest), why)


def _pair(prompt: list[int], chosen: list[int], rejected: list[int], counter: TruncationCounter) -> _MaskedRow:
    length = len(prompt) + max(len(chosen), len(rejected))
    found = counter.cut_pair(prompt, chosen, rejected)
    if found is None:
        parts = [("prompt", prompt), ("chosen", chosen), ("rejected", rejected)]
        why = f"within max_seq_length={counter.limit} tokens the prompt leaves none for an answer"
        if not chosen or not rejected:
            why = "an answer has no token"
        return _MaskedRow([_MaskedPart(name, ids, set(), set()) for name, ids in parts], length, why)
    kept = [{*counter.cut([*range(len(prompt))], prompt, len(found[0]))}, *({*range(len(one))} for one in found[1:])]
    return _MaskedRow(
        [
            _MaskedPart("prompt", prompt, kept[0], set()),
            _MaskedPart("chosen", chosen, kept[1], kept[1]),
            _MaskedPart("rejected", rejected, kept[2], kept[2]),
        ],
        length,
    )


def _answer(prompt: list[int], answer: list[int], counter: TruncationCounter) -> _MaskedRow:
    length = len(prompt) + len(answer)
    found = counter.cut_answer(prompt, answer)
    if found is None:
        why = f"within max_seq_length={counter.limit} tokens the prompt leaves none for the answer"
        if not answer:
            why = "the answer has no token"
        parts = [("prompt", prompt), ("completion", answer)]
        return _MaskedRow([_MaskedPart(name, ids, set(), set()) for name, ids in parts], length, why)
    kept, trained = {*counter.cut([*range(len(prompt))], prompt, len(found[0]))}, {*range(len(found[1]))}
    parts_kept = [_MaskedPart("prompt", prompt, kept, set()), _MaskedPart("completion", answer, trained, trained)]
    return _MaskedRow(parts_kept, length)


def _shown(row: _MaskedRow, place: _Place, counter: TruncationCounter, texts: _Texts, most: int) -> PreviewedRow:
    ids = [token for part in row.parts for token in part.ids][:most]
    kept = "".join(_marks(len(part.ids), part.kept) for part in row.parts)
    lost = kept.count("0")
    outcome, reason = "trained", ""
    if row.dropped:
        outcome, reason = "dropped", row.dropped
    elif lost:
        found = "1 token does" if lost == 1 else f"{lost} tokens do"
        outcome, reason = "cut", f"{found} not fit into max_seq_length={counter.limit}"
    return PreviewedRow(
        row=place.row,
        example=place.example,
        examples=place.examples,
        tokens=len(kept),
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        parts={part.name: len(part.ids) for part in row.parts},
        ids=ids,
        # Each part on its own: what follows a chosen answer is the rejected one.
        texts=[text for part in row.parts for text in texts.of(part.ids[:most])][:most],
        trained="".join(_marks(len(part.ids), part.trained) for part in row.parts)[:most],
        kept=kept[:most],
        special="".join("1" if token in texts.special else "0" for token in ids),
    )


def _marks(length: int, marked: set[int]) -> str:
    return "".join("1" if position in marked else "0" for position in range(length))


def _data(spec: JobSpec, counter: TruncationCounter, lengths: Sequence[int]) -> dict[str, object]:
    ordered = sorted(lengths)
    return {
        "num_rows": spec.data.dataset.num_rows,
        "read": counter.rows,
        "examples": counter.examples,
        "trained": counter.kept,
        "truncated": counter.truncated,
        "dropped": counter.dropped,
        "total_tokens": counter.total_tokens,
        "trained_tokens": counter.trained_tokens,
        "longest_before_cut": counter.longest,
        "median_tokens": ordered[len(ordered) // 2],
        "histogram": histogram(ordered),
    }
