"""What the registry knows of its datasets without reading their documents: order, names, and who registered them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest


class DatasetPlace(NamedTuple):
    """The place of a dataset in lists: they begin with the oldest."""

    registered_at: float
    dataset_id: str

    @property
    def cursor(self) -> str:
        """The place as text. It leads to what follows the dataset, even if that is deleted meanwhile."""
        return f"{self.registered_at!r}~{self.dataset_id}"

    @classmethod
    def of_cursor(cls, text: str) -> DatasetPlace:
        """Raises InvalidRequest: it is no cursor."""
        seconds, separator, name = text.partition("~")
        try:
            if separator:
                return cls(float(seconds), name)
        except ValueError:
            pass
        raise InvalidRequest("after", text, "expected `next` of the page before, or nothing for the first page")


class DatasetIndex:
    """Places of datasets, whose they are, and the digests of their rows. Not safe to share between threads, `has_rows`
    excepted: the registry has a lock."""

    def __init__(self, datasets: Iterable[tuple[DatasetPlace, str, str | None]]) -> None:
        datasets = list(datasets)
        self._owners = {place.dataset_id: (place, owner) for place, owner, _ in datasets}
        self._digests = {place.dataset_id: sha256 for place, _, sha256 in datasets}
        self._places = sorted(place for place, _ in self._owners.values())
        self._counts = Counter(owner for _, owner in self._owners.values())

    def __contains__(self, dataset_id: str) -> bool:
        return dataset_id in self._owners

    def count(self, owner: str) -> int:
        """Datasets that a token has registered."""
        return self._counts[owner]

    def after(self, place: DatasetPlace | None) -> Sequence[DatasetPlace]:
        """What comes behind a place; None: everything."""
        return self._places[0 if place is None else bisect_right(self._places, place) :]

    def has_rows(self, sha256: str) -> bool:
        """Whether a dataset has the rows of a digest."""
        return sha256 in list(self._digests.values())

    def add(self, place: DatasetPlace, owner: str, sha256: str | None) -> None:
        self._remove_place(place.dataset_id)
        self._digests[place.dataset_id] = sha256
        self._owners[place.dataset_id] = place, owner
        self._counts[owner] += 1
        insort(self._places, place)

    def remove(self, dataset_id: str) -> None:
        self._remove_place(dataset_id)
        self._digests.pop(dataset_id, None)

    def _remove_place(self, dataset_id: str) -> None:
        known = self._owners.pop(dataset_id, None)
        if known is not None:
            place, owner = known
            self._counts[owner] -= 1
            self._places.remove(place)
