"""The tokenized datasets of a job; those of a mixture as one, whose rows know the dataset that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from datasets import Dataset, concatenate_datasets

from ...errors import InvalidRows, JobFailure
from ...specs.events import EventWriter, Reason
from ...specs.job import DatasetRef, DataSpec, JobSpec
from .duplicates import CountedExamples, ExampleDigests, duplicates
from .lengths import num_rows
from .mixture import Mixture, apportioned, mixture_of
from .prepare import DataReport, with_filler
from .prepared import Preparation, PreparedRows
from .tables import with_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_PASSES = 10_000
"""Of a dataset in an epoch: each takes a permutation of its own."""
_GREATEST = ("max_tokens", "largest_id")
"""Of a report: what is not summed."""


@dataclass(frozen=True)
class MixedRows:
    dataset: Dataset
    report: DataReport
    """On all of them."""
    names: tuple[str, ...]
    """The ids of the datasets."""
    parts: tuple[PreparedRows, ...]
    mixture: Mixture | None = None
    """What an epoch takes of each; None: each row of one dataset once."""
    takes_all: bool = True
    """Whether an epoch, or an evaluation, takes each row."""

    @property
    def found(self) -> dict[str, str]:
        """Dataset -> whether its rows were in the cache (`PreparedRows.source`)."""
        return {name: part.source for name, part in zip(self.names, self.parts, strict=True)}

    def counted(self) -> CountedExamples:
        digests, rows = ExampleDigests(), 0
        for part in self.parts:
            digests.add(part.digests, rows)
            rows += part.report.num_rows
        sizes = [part.report.num_rows for part in self.parts]
        return CountedExamples(digests, self.report.kept, [*zip(self.names, sizes, strict=True)], self.takes_all)

    def described(self) -> list[dict[str, Any]]:
        """The mixture for the job's record: of each dataset the rows that can be trained on, and what an epoch takes of
        them; of a packed job, in sequences."""
        if self.mixture is None:
            return []
        of_epoch = zip(self.names, self.mixture.sizes, self.mixture.counts, strict=True)
        return [{"dataset_id": name, "rows": rows, "rows_per_epoch": count} for name, rows, count in of_epoch]


@dataclass(frozen=True)
class TrainingData:
    """The tokenized datasets of a job, and what became of their rows."""

    train: Dataset
    validation: Dataset | None
    report: DataReport
    validation_report: DataReport | None
    mixed: MixedRows
    """The datasets that are trained on, and of a mixture, what an epoch takes of each."""
    packing: dict[str, int] | None
    """Of a packed job: rows and sequences."""
    sources: dict[str, str]
    """Of a job that has a token cache: dataset -> whether its rows were found there (`PreparedRows.source`)."""
    duplicates: list[str]
    """Sentences on examples that are trained several times, or are in the validation dataset, too."""

    @property
    def warnings(self) -> list[str]:
        of_validation = self.validation_report.warnings if self.validation_report else []
        return [*self.report.warnings, *of_validation, *self.duplicates]

    def with_filler(self) -> TrainingData:
        return replace(self, train=with_filler(self.train), validation=self.validation and with_filler(self.validation))


def prepared_data(
    spec: JobSpec,
    tokenizer: PreTrainedTokenizerBase,
    writer: EventWriter,
    rows_per_step: int,
    teacher: PreTrainedTokenizerBase | None,
    embeddings: int,
) -> TrainingData:
    """Tokenize the job's datasets, and pack them where the job does. Raises JobFailure: as `training_rows`.

    Args:
        rows_per_step: rows of an optimizer step, which limit an epoch of so many steps.
        teacher: the tokenizer of a teacher with another vocabulary.
        embeddings: of the model that reads the rows.
    """
    refs = (ref for one in spec.data.mixed for ref in (one.dataset, one.validation))
    preparation = Preparation(spec, tokenizer, writer, *refs, teacher=teacher, embeddings=embeddings)
    cap = spec.train.max_steps_per_epoch
    train = training_rows(preparation, spec.data, None if cap is None else cap * rows_per_step)
    steps = spec.data.max_validation_steps
    validation = validation_rows(preparation, spec.data, None if steps is None else steps * spec.data.batch_size)
    held_out = validation.counted() if validation else None
    return TrainingData(
        train=train.dataset,
        validation=validation.dataset if validation else None,
        report=train.report,
        validation_report=validation.report if validation else None,
        mixed=train,
        packing={"rows": num_rows(train.dataset), "sequences": len(train.dataset)} if spec.data.packed else None,
        sources=_sources(train, validation) if spec.data.token_cache else {},
        duplicates=duplicates(spec.data.duplicates, train.counted(), held_out),
    )


def _sources(train: MixedRows, validation: MixedRows | None) -> dict[str, str]:
    found = dict[str, str]()
    for use, rows in (("train_dataset", train), ("validation_dataset", validation)):
        if rows is not None:
            several = len(rows.names) > 1
            found |= {f"{use} {name}" if several else use: source for name, source in rows.found.items()}
    return found


def training_rows(preparation: Preparation, data: DataSpec, most: int | None = None) -> MixedRows:
    """Tokenize what a job is trained on. Raises JobFailure: as `Preparation.rows`; invalid_request, an epoch takes no
    row of a dataset.

    Args:
        most: rows of an epoch at most, of packed ones sequences; None: any number.
    """
    refs, shares = [one.dataset for one in data.mixed], [one.share for one in data.mixed]
    rows = _joined(refs, [_prepared(preparation, ref, len(refs)) for ref in refs])
    if len(refs) == 1 and shares[0].rows is None:
        return replace(rows, takes_all=most is None or most >= len(rows.dataset))
    counts = [num_rows(part.dataset) for part in rows.parts]
    whole = mixture_of(shares, counts, [len(part.dataset) for part in rows.parts] if data.packed else None)
    mixture = whole.capped(most)
    for ref, count, share in zip(refs, mixture.counts, shares, strict=True):
        if not count:
            weight = "" if share.weight is None else f" has weight {share.weight:g}, and"
            found = f"dataset {ref.dataset_id!r}{weight} gets none of the {mixture.rows_per_epoch} rows of an epoch"
            raise JobFailure(Reason.invalid_request, f"{found}: give it more, or leave it out")
    if (times := mixture.most_repeats) > _MOST_PASSES:
        found = f"a dataset of the mixture would be gone through {times} times in an epoch"
        raise JobFailure(Reason.invalid_request, f"{found}, at most {_MOST_PASSES} are possible: lower its share")
    takes_all = all(count >= size for count, size in zip(mixture.counts, mixture.sizes, strict=True))
    return replace(rows, mixture=mixture, takes_all=takes_all)


def validation_rows(preparation: Preparation, data: DataSpec, most: int | None) -> MixedRows | None:
    """Tokenize what a job is evaluated on; None: nothing.

    Args:
        most: rows that are used, of several datasets in proportion to their sizes, but one of each; None: all.
    """
    refs = [one.validation for one in data.mixed if one.validation is not None]
    if not refs:
        return None
    firsts: list[int | None] = [most] * len(refs)
    if most is not None and len(refs) > 1:
        firsts = [max(1, share) for share in apportioned([ref.num_rows for ref in refs], most)]
    parts = [_prepared(preparation, ref, len(refs), first) for ref, first in zip(refs, firsts, strict=True)]
    rows = _joined(refs, parts)
    return replace(rows, takes_all=all(num_rows(part.dataset) >= part.report.kept for part in parts))


def _prepared(preparation: Preparation, ref: DatasetRef, of: int, first: int | None = None) -> PreparedRows:
    try:
        return preparation.rows(ref, first)
    except (JobFailure, InvalidRows) as error:
        if of == 1:
            raise
        raise named_by_dataset(error, ref) from error


def named_by_dataset(error: JobFailure | InvalidRows, ref: DatasetRef) -> JobFailure | InvalidRows:
    """The failure of one of several datasets, which names it."""
    if isinstance(error, InvalidRows):
        return InvalidRows(f"dataset {ref.dataset_id!r}, {error}")
    if repr(ref.dataset_id) in error.message:
        return error
    return JobFailure(error.reason, f"dataset {ref.dataset_id!r}: {error.message}")


def _joined(refs: Sequence[DatasetRef], parts: Sequence[PreparedRows]) -> MixedRows:
    names = tuple(ref.dataset_id for ref in refs)
    if len(parts) == 1:
        return MixedRows(parts[0].dataset, parts[0].report, names, tuple(parts))
    rows = concatenate_datasets([with_source(part.dataset, number) for number, part in enumerate(parts)])
    return MixedRows(rows, _combined(names, [part.report for part in parts]), names, tuple(parts))


def _combined(names: Sequence[str], reports: Sequence[DataReport]) -> DataReport:
    largest = max(reports, key=lambda report: report.largest_id)
    values: dict[str, Any] = {}
    for field in fields(DataReport):
        found = [getattr(report, field.name) for report in reports]
        if field.name in ("warnings", "lost_turns"):
            named = zip(names, found, strict=True)
            values[field.name] = [f"dataset {name!r}: {message}" for name, of in named for message in of]
        else:
            values[field.name] = max(found) if field.name in _GREATEST else sum(found)
    return DataReport(**{**values, "largest_id_row": largest.largest_id_row})
