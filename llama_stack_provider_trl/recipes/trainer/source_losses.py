"""The loss of each dataset of a mixture, beside that of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..data.tables import IGNORED, IMAGES, SOURCE
from ..fast.layout import moved
from .metrics import TrainingMetrics

PREFIX = "loss/"
"""Of the metrics: the id of the dataset follows."""
type Collate = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


def with_sources(collate: Collate, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of a batch, with `sources`, the number of each row's dataset, and of SFT's rows also `scored_tokens`,
    how many the loss covers. Both are tuples, which no device has to be waited for."""
    inputs = collate([{name: value for name, value in row.items() if name != SOURCE} for row in rows])
    inputs["sources"] = tuple(row[SOURCE] for row in rows)
    if "labels" in rows[0]:
        labels = [row["labels"] for row in rows]
        inputs["scored_tokens"] = tuple(len(of) - 1 - of[1:].count(IGNORED) for of in labels)
    return inputs


class SourceLosses(TrainingMetrics):
    """A trainer that reports the loss of each dataset as `loss/DATASET_ID`, where there are several."""

    data_collator: Any
    _signature_columns: list[str]

    @property
    def reports_sources(self) -> bool:
        return len(self.source_names) > 1

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        for column in (SOURCE, IMAGES):
            if column not in self._signature_columns:  # else it would be removed from the rows
                self._signature_columns = [*self._signature_columns, column]

    def _get_dataloader(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
        collate: Collate = self.data_collator
        if not self.reports_sources or SOURCE not in dataset[0]:
            return super()._get_dataloader(dataset, *arguments, **named)
        self.data_collator = partial(with_sources, collate)
        try:
            return super()._get_dataloader(dataset, *arguments, **named)
        finally:
            self.data_collator = collate

    def add_source_losses(self, losses: torch.Tensor, counts: torch.Tensor, sources: Sequence[int] | None) -> None:
        """Add the losses of a batch to those of the datasets. A collective.

        Args:
            losses: shape (n,), of tokens, rows or pairs.
            counts: what each counts for in the mean, same shape.
            sources: the numbers of their datasets; None: there is one dataset, and nothing is added.
        """
        if sources is None:
            return
        sums = self.over_ranks(sums_by_source(losses, counts, sources, len(self.source_names)))
        for name, (total, count) in zip(self.source_names, sums, strict=True):
            self.add_metrics({PREFIX + name: total}, count)

    def evaluated_sources(
        self, losses: torch.Tensor, counts: torch.Tensor, sources: Sequence[int] | None
    ) -> dict[str, float]:
        """The metrics of an evaluation, from the losses of all its rows. As `add_source_losses`."""
        if sources is None:
            return {}
        sums = self.accelerator.reduce(sums_by_source(losses, counts, sources, len(self.source_names)))
        named = zip(self.source_names, sums, strict=True)
        return {f"eval_{PREFIX}{name}": float(total / count) for name, (total, count) in named if count > 0}

    def means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The metrics that are logged; the loss of a dataset of which no row was taken is left out."""
        return super().means({name: pair for name, pair in sums.items() if not name.startswith(PREFIX) or pair[1] > 0})


def sums_by_source(losses: torch.Tensor, counts: torch.Tensor, sources: Sequence[int], of: int) -> torch.Tensor:
    """Sum of the losses and of their counts by dataset, shape (of, 2)."""
    numbers = moved(torch.tensor(sources), losses.device)
    is_of = (numbers == torch.arange(of, device=losses.device)[:, None]).float()
    # A product and no index_add, whose sums on a GPU differ from run to run.
    return is_of @ torch.stack([losses.detach().float(), counts.float()], dim=1)
