"""What the registry knows of its datasets without reading their documents: order, names, and who registered them."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence

from ..http.places import ListPlace


class DatasetIndex:
    """Places of datasets by the time of their registration, whose they are, and the digests of their rows.

    Safe to share between threads: who reads a list waits for no registration, which waits for disks."""

    def __init__(self, datasets: Iterable[tuple[ListPlace, str, str | None]]) -> None:
        self._lock = threading.Lock()
        datasets = list(datasets)
        self._owners = {place.name: (place, owner) for place, owner, _ in datasets}
        self._digests: dict[str, str] = {}
        self._rows: Counter[str] = Counter()
        for place, _, sha256 in datasets:
            self._set_rows(place.name, sha256)
        self._places = sorted(place for place, _ in self._owners.values())
        self._counts = Counter(owner for _, owner in self._owners.values())

    def __contains__(self, dataset_id: str) -> bool:
        with self._lock:
            return dataset_id in self._owners

    def count(self, owner: str) -> int:
        """Datasets that a token has registered."""
        with self._lock:
            return self._counts[owner]

    def after(self, place: ListPlace | None) -> Sequence[ListPlace]:
        """What comes behind a place; None: everything."""
        with self._lock:
            return self._places[0 if place is None else bisect_right(self._places, place) :]

    def has_rows(self, sha256: str) -> bool:
        """Whether a dataset has the rows of a digest."""
        with self._lock:
            return self._rows.get(sha256, 0) > 0

    def add(self, place: ListPlace, owner: str, sha256: str | None) -> None:
        with self._lock:
            self._remove_place(place.name)
            self._set_rows(place.name, sha256)
            self._owners[place.name] = place, owner
            self._counts[owner] += 1
            insort(self._places, place)

    def remove(self, dataset_id: str) -> None:
        with self._lock:
            self._remove_place(dataset_id)
            self._set_rows(dataset_id, None)

    def _set_rows(self, dataset_id: str, sha256: str | None) -> None:
        """Note the digest of a dataset's rows; None: it has none, or is gone."""
        if sha256 is not None:
            self._rows[sha256] += 1
        before = self._digests.pop(dataset_id, None)
        if before is not None:
            self._rows[before] -= 1
            if not self._rows[before]:
                del self._rows[before]
        if sha256 is not None:
            self._digests[dataset_id] = sha256

    def _remove_place(self, dataset_id: str) -> None:
        known = self._owners.pop(dataset_id, None)
        if known is not None:
            place, owner = known
            self._counts[owner] -= 1
            self._places.remove(place)
