"""Shows rows as they are trained: their tokens, which of them the loss covers, what is cut or dropped, and whether
inference has the same before each trained turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import JobFailure
from ..specs.events import (
    MOST_SHOWN,
    MOST_TURNS,
    EventWriter,
    Finished,
    InferenceCounts,
    Previewed,
    PreviewedRow,
    PreviewedTurn,
    Reason,
)
from ..specs.job import JobSpec
from ..specs.methods import METHODS
from ..specs.preflight import PreviewSpec
from ..specs.schedules import problem_of_warmup
from .data.chat import Chat, check_chat_template
from .data.duplicates import CountedExamples, duplicates
from .data.embedded import check_embedded
from .data.forms import split_thought
from .data.images import Images
from .data.inferred import ComparedTurn, Inference
from .data.lengths import histogram
from .data.near_duplicates import RowSequences
from .data.packing import best_fit
from .data.prepare import TruncationCounter, read_examples
from .data.prompts import encode_prompts
from .data.sampling import BatchPlan, epoch_of_job
from .data.token_texts import TokenTexts
from .data.tokenizer_calls import decoded
from .masked_rows import MaskedRow, RowReader
from .model.loading import load_job_tokenizer, load_teacher_tokenizer, vocabulary_size
from .model.positions import positions_of, within_positions
from .model.saving import model_warnings
from .reward_templates import lost_by_reward_models
from .vision import with_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ROWS = 2000
"""Rows that are tokenized for the counts and the histogram."""
_MOST_TOKENS = 1_000_000
"""Tokens after which no further rows are."""
_MOST_INFERRED = 4_000_000
"""Tokens that inference renders, after which no further turns are compared: a long conversation has each turn before
all that follow it."""
_MOST_REASONS = 100
"""Differences that are shown with the rows."""
_SHOWN_TOKENS = 8000
"""Tokens of all rows that are shown: of further rows there are counts only."""


class _Place(NamedTuple):
    row: int
    example: int
    """Of those of its row, from 0."""
    examples: int
    """Of its row."""
    dataset_id: str = ""
    """Of a mixture."""

    def of(self, turn: ComparedTurn) -> str:
        """How a message names a turn."""
        pair = f", pair {self.example}" if self.examples > 1 and turn.part in ("chosen", "rejected") else ""
        part = f" ({turn.part})" if turn.part != "sequence" else ""
        of = f"dataset {self.dataset_id!r}, " if self.dataset_id else ""
        return f"{of}row {self.row}{pair}, turn {turn.turn}{part}"


@dataclass
class _Compared:
    """Counts turns that were compared with inference."""

    equal: int = 0
    different: int = 0
    cut: int = 0
    unasked: int = 0
    first_different: str = ""
    reasons: int = 0
    """Differences that are shown with their rows."""

    def add(self, row: MaskedRow, place: _Place) -> None:
        for turn in row.turns:
            if not turn.difference:
                self.equal += not row.is_cut
                self.cut += row.is_cut
                continue
            if turn.is_unasked:
                self.unasked += 1
                continue
            self.different += 1
            self.first_different = self.first_different or (
                f"{place.of(turn)}: {turn.difference}. Expected the tokens of inference, with the loss behind them: "
                "correct the model's chat template, or change the row"
            )

    def shown(self, row: MaskedRow) -> list[PreviewedTurn]:
        found = []
        for turn in row.turns[:MOST_TURNS]:
            reason = turn.difference if self.reasons < _MOST_REASONS else ""
            self.reasons += bool(reason)
            outcome = "unasked" if turn.is_unasked else "different" if turn.difference else "equal"
            if outcome == "equal" and row.is_cut:
                outcome = "cut"
            found.append(PreviewedTurn(turn=turn.turn, part=turn.part, outcome=outcome, reason=reason))  # type: ignore[arg-type]
        return found

    def counts(self, not_compared: int) -> InferenceCounts:
        return InferenceCounts(
            turns=self.equal + self.different + self.cut + self.unasked,
            equal=self.equal,
            different=self.different,
            cut=self.cut,
            unasked=self.unasked,
            not_compared=not_compared,
            first_different=self.first_different,
        )


def preview(spec: JobSpec, request: PreviewSpec, writer: EventWriter) -> None:
    """Write the event with the examples of the requested rows, and the counts of those that follow them. Raises
    JobFailure: what would fail the job on these rows; invalid_request, there are none."""
    writer.write(examined(spec, request, writer.heartbeat), durable=True)
    writer.write(Finished(step=0), durable=True)


def examined(spec: JobSpec, request: PreviewSpec, alive: Callable[[], object], *, every_row: bool = False) -> Previewed:
    """Rows as they are trained, with the counts of the requested ones and those that follow them. Raises JobFailure: as
    `preview`.

    Args:
        every_row: read all rows and compare all turns, and raise where the job would fail on them; else as many as
            there is time for, and a failure that other rows may avert is a warning.
    """
    spec, notes = within_positions(spec)
    tokenizer = load_job_tokenizer(spec, notes.append)
    check_chat_template(spec, tokenizer)
    spec = with_images(spec)
    notes += model_warnings(spec)
    prompts = encode_prompts(spec.train.samples, tokenizer, positions_of(spec.source))
    images = Images(spec.source, tokenizer) if spec.data.has_images else None
    chat, teacher = Chat(tokenizer, images), load_teacher_tokenizer(spec)
    taught = None if teacher is None else Chat(teacher)
    counter = TruncationCounter(
        tokenizer.eos_token_id, tokenizer.bos_token_id, spec.data.max_seq_length, spec.data.truncation_side
    )
    inference = Inference(chat, None if every_row else _MOST_INFERRED)
    shown: list[PreviewedRow] = []
    lengths: list[int] = []
    kept: list[int] = []
    sequences = RowSequences()
    texts, compared = TokenTexts(tokenizer), _Compared()
    left = _SHOWN_TOKENS
    limits = (None, None) if every_row else (_MOST_ROWS, _MOST_TOKENS)
    reader = RowReader(spec, chat, taught, counter, inference)
    for number, examples in enumerate(reader.read(request.first_row, *limits)):
        alive()
        sequences.count(part.ids for one in examples if not one.dropped for part in one.parts)
        for example, one in enumerate(examples):
            name, row = _row_of(spec, request.first_row + number)
            place = _Place(row, example, len(examples), name if spec.data.mixed_with else "")
            compared.add(one, place)
            if number < request.rows and len(shown) < MOST_SHOWN:
                shown.append(_shown(one, place, counter, texts, compared, left))
                left -= len(shown[-1].ids)
            lengths.append(one.length)
            if not one.dropped:
                kept.append(min(one.length, spec.data.max_seq_length))
    unit = METHODS[spec.algorithm].unit
    if not counter.rows:
        found = f"the dataset has {_num_rows(spec)} rows and none at {request.first_row}"
        raise JobFailure(Reason.invalid_request, f"{found}: rows are counted from 0, send a smaller first_row")
    if not lengths or (every_row and not kept):
        raise JobFailure(Reason.invalid_dataset, counter.nothing_left(unit, chat))
    lost = _lost_by_reward_models(spec, request.first_row, counter.rows, alive)
    name, row = _row_of(spec, request.first_row + counter.largest_id_row)
    repeated = _duplicates(spec, counter, sequences, every_row)
    try:
        where = f"row {row} of the dataset {name!r}"
        check_embedded([counter.largest_id], vocabulary_size(spec.source), tokenizer, where)
    except JobFailure as error:
        if every_row:
            raise
        lost.append(f"the job fails: {error.message}")
    if spec.data.dropped_turns == "refuse" and [*prompts.lost_turns, *counter.lost_turns(unit, chat, taught), *lost]:
        lost.append("with dropped_turns 'refuse' the job fails for what a chat template leaves out")
    return Previewed(
        max_seq_length=spec.data.max_seq_length,
        data=_data(spec, counter, lengths),
        rows=shown,
        inference=compared.counts(inference.left_out),
        warnings=[
            *notes,
            *prompts.lost_turns,
            *counter.warnings(unit, chat, taught),
            *repeated,
            *lost,
            *_warmup(spec, counter, kept),
        ],
    )


def _num_rows(spec: JobSpec) -> int:
    return sum(one.dataset.num_rows for one in spec.data.mixed)


def _duplicates(spec: JobSpec, counter: TruncationCounter, sequences: RowSequences, every_row: bool) -> list[str]:
    """As `duplicates`, of the training rows where all of them were read, and a sentence on those that nearly repeat
    others, which no job refuses."""
    if counter.rows < _num_rows(spec):
        return []
    datasets = [(one.dataset.dataset_id, one.dataset.num_rows) for one in spec.data.mixed]
    has_shares = any(one.share.rows or one.share.weight is not None for one in spec.data.mixed)
    takes_all = spec.train.max_steps_per_epoch is None and not has_shares
    counted = CountedExamples(counter.digests, counter.kept, datasets, takes_all)
    try:
        repeated = duplicates(spec.data.duplicates, counted)
        return [*repeated, *(sequences.near_repeats().warnings(counted.place) if spec.data.duplicates else ())]
    except JobFailure as error:
        if every_row:
            raise
        return [f"the job fails: {error.message}"]


def _row_of(spec: JobSpec, number: int) -> tuple[str, int]:
    """The dataset of a row that is counted through all datasets, and its number there."""
    refs = [one.dataset for one in spec.data.mixed]
    for ref in refs[:-1]:
        if number < ref.num_rows:
            return ref.dataset_id, number
        number -= ref.num_rows
    return refs[-1].dataset_id, number


def _lost_by_reward_models(spec: JobSpec, first: int, count: int, alive: Callable[[], object]) -> list[str]:
    """A sentence for each reward model whose chat template leaves out turns of the rows that were read."""
    read = islice(
        enumerate(read_examples(spec.data.dataset.path, "prompts", names=spec.data.dataset.names)), first, first + count
    )
    return lost_by_reward_models(spec.changed(dropped_turns="warn"), alive, read)


def _warmup(spec: JobSpec, counter: TruncationCounter, kept: Sequence[int]) -> list[str]:
    """The warning of a warmup that is not shorter than the job, where rows that were not read are kept, too. Of packed
    ones the steps are known where all were read; of a mixture with rows of an epoch, when all are prepared."""
    unread = _num_rows(spec) - counter.rows
    if not kept or (spec.data.packed and unread) or any(one.share.rows for one in spec.data.mixed):
        return []
    more = unread * counter.examples // counter.rows  # as many of each row as of those that were read
    examples = len(best_fit(kept, spec.data.max_seq_length)) if spec.data.packed else len(kept) + more
    steps = epoch_of_job(spec, examples, BatchPlan.of_job(spec)).steps_per_epoch * spec.train.n_epochs
    return [*filter(None, [problem_of_warmup(spec.train.optimizer, steps)])]


def _shown(
    row: MaskedRow, place: _Place, counter: TruncationCounter, texts: TokenTexts, compared: _Compared, most: int
) -> PreviewedRow:
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
        dataset_id=place.dataset_id,
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
        turns=compared.shown(row),
        **_composition(row, texts.tokenizer),
    )


def _composition(row: MaskedRow, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the row of an example has beside its texts."""
    messages = row.messages
    thoughts = [thought for message in messages if (thought := split_thought(message)[0])]
    parts = row.parts if thoughts else ()
    written = [decoded(tokenizer, part.ids, clean_up_tokenization_spaces=False) for part in parts]
    return {
        "roles": [message["role"] for message in messages[:MOST_TURNS]],
        "tools": len(messages[0].get("tools", ())) if messages else 0,
        "tool_calls": sum(len(message.get("tool_calls", ())) for message in messages),
        "thoughts": len(thoughts),
        "thoughts_kept": sum(any(thought.strip() in text for text in written) for thought in thoughts),
        "untrained_answers": sum(message.get("weight") == 0 for message in messages),
    }


def _marks(length: int, marked: set[int]) -> str:
    return "".join("1" if position in marked else "0" for position in range(length))


def _data(spec: JobSpec, counter: TruncationCounter, lengths: Sequence[int]) -> dict[str, object]:
    ordered = sorted(lengths)
    return {
        "num_rows": _num_rows(spec),
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
        **({"images": counter.images} if counter.images else {}),
    }
