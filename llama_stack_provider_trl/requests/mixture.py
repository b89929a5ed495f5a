"""Resolves the datasets of a job: that of `data_config`, or the mixture that begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InvalidRequest
from ..specs.job import Algorithm, DatasetRef, MixedDataset, RowNames, ShareSpec
from ..specs.methods import METHODS
from .bodies import DataConfig
from .data import rows_job_of
from .options import MixtureEntry, ProviderOptions, row_names

FIELD = "provider_options.mixture"


class NamedDataset(NamedTuple):
    """A dataset to train on, by its id."""

    dataset_id: str
    names: RowNames | None = None
    """What its rows are read by; None: by the names of shapes and roles."""
    share: ShareSpec = ShareSpec()


def resolve_datasets(data: DataConfig, options: ProviderOptions, algorithm: Algorithm) -> tuple[NamedDataset, ...]:
    """The datasets that a job is trained on. Raises InvalidRequest: they cannot be mixed."""
    given = options.mixture
    if given is None:
        return (NamedDataset(data.dataset_id, options.row_names),)
    if METHODS[algorithm].rows == "prompts":
        hint = f"{METHODS[algorithm].title} takes the prompts of one dataset: leave it out"
        raise InvalidRequest(FIELD, _values(given), hint)
    if options.shard is not None:
        hint = "a mixture takes its own part of each dataset: leave one of them out"
        raise InvalidRequest("provider_options.shard", options.shard.model_dump(), hint)
    if given[0].dataset_id != data.dataset_id:
        hint = f"data_config names {data.dataset_id!r}: send that first in the mixture, or the same id in both"
        raise InvalidRequest(f"{FIELD}.0.dataset_id", given[0].dataset_id, hint)
    _check_weights(given)
    ids = [one.dataset_id for one in given]
    for number, dataset_id in enumerate(ids):
        if ids.index(dataset_id) < number:
            hint = f"it is number {ids.index(dataset_id)} of the mixture, too: name each dataset once"
            raise InvalidRequest(f"{FIELD}.{number}.dataset_id", dataset_id, hint)
        if rows_job_of(dataset_id) is not None:
            hint = "rows that a job makes are not known yet: name the dataset that it registers, once it has completed"
            raise InvalidRequest(f"{FIELD}.{number}.dataset_id", dataset_id, hint)
    return tuple(
        NamedDataset(one.dataset_id, _names(one, options), ShareSpec(weight=one.weight, rows=one.rows)) for one in given
    )


def _names(one: MixtureEntry, options: ProviderOptions) -> RowNames | None:
    return row_names(
        one.columns or options.columns, one.roles or options.roles, one.system_prompt or options.system_prompt
    )


def with_margins(names: RowNames | None) -> RowNames:
    """What rows are read by whose pairs have margins."""
    return (names or RowNames()).model_copy(update={"margins": True})


def with_rows(
    named: Sequence[NamedDataset], rows: Sequence[tuple[DatasetRef, DatasetRef | None]], names: RowNames | None
) -> dict[str, Any]:
    """Fields of a job: its datasets, with their names and shares.

    Args:
        rows: of each dataset, and those to evaluate on: held out of it, or the first one's of another dataset.
        names: what rows of another dataset are read by.
    """
    mixed = []
    for one, (dataset, validation) in zip(named, rows, strict=True):
        if validation is not None:
            is_part = validation.dataset_id == dataset.dataset_id
            validation = validation.model_copy(update={"names": one.names if is_part else names})
        dataset = dataset.model_copy(update={"names": one.names})
        mixed.append(MixedDataset(dataset=dataset, validation=validation, share=one.share))
    own = {name: getattr(mixed[0], name) for name in MixedDataset.model_fields}
    return {**own, "mixed_with": tuple(mixed[1:])}


def _check_weights(given: list[MixtureEntry]) -> None:
    weighed = [number for number, one in enumerate(given) if one.weight is not None]
    if weighed and len(given) == 1:
        hint = "one dataset has all of an epoch: send rows, or leave it out"
        raise InvalidRequest(f"{FIELD}.0.weight", given[0].weight, hint)
    if weighed and len(weighed) < len(given):
        lacking = next(number for number in range(len(given)) if number not in weighed)
        hint = f"number {weighed[0]} of the mixture has a weight: send one for each dataset, or for none"
        raise InvalidRequest(f"{FIELD}.{lacking}", _values(given)[lacking], hint)


def _values(given: list[MixtureEntry]) -> list[dict[str, object]]:
    return [one.model_dump(exclude_unset=True) for one in given]
