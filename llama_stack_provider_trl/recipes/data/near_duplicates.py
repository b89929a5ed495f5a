"""Finds rows that nearly repeat an earlier one, by the sequences of tokens that both have.

The share of common sequences is the resemblance of A. Broder, "On the resemblance and containment of documents" (1997),
estimated by a sample that is the same of each row: the sequences whose hash is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH = 5
"""Tokens of a sequence."""
RESEMBLANCE = 0.8
"""Share of the sequences of two rows that both have, from which the later one nearly repeats the other."""
LEAST = 10
"""Sequences that a compared row has at least, before a sample is taken: of fewer, one more or less decides."""
_LEAST_SAMPLED = 5
MOST_ROWS = 100_000
"""Rows that are compared, from the first one on."""
MOST_HASHES = 4 << 20
"""Sequences that are kept, with 8 bytes each; of more, those with the smaller hashes."""
_COMMON_ROWS, _COMMON_SHARE = 20, 0.05
"""Sequences that more rows than both have tell nothing of a row that has others: they are those of a system prompt.
Where little else is in the rows that have them, one row was written down many times: see `_telling`."""
_FACTORS = np.random.default_rng(0).integers(1 << 62, 1 << 63, WIDTH, dtype=np.uint64) | np.uint64(1)
_NONE = np.zeros(0, dtype=np.uint64)


class NearRepeats(NamedTuple):
    found: int
    compared: int
    """Rows that have enough to be compared by, and do not equal an earlier one."""
    pair: tuple[int, int] | None
    """The earlier row, and the first one that nearly repeats it."""

    def warnings(self, place: Callable[[int], str]) -> list[str]:
        """A sentence on them; none where there are none."""
        if not self.pair:
            return []
        example = f"{place(self.pair[1])} nearly repeats {place(self.pair[0])}"
        found = f"{self.found} of {self.compared} compared rows nearly repeat an earlier one ({example})"
        return [f"{found}: {RESEMBLANCE:.0%} or more of what is in one of both is in the other, too"]


class RowSequences:
    """The sequences of tokens of rows, or a sample of them."""

    def __init__(self, most_rows: int = MOST_ROWS, most_hashes: int = MOST_HASHES) -> None:
        self.most_rows, self.most_hashes = most_rows, most_hashes
        self._below = 1 << 64
        self._kept = 0
        self._hashes: list[NDArray[np.uint64]] = []
        """Of each row, ascending, each once; none of a row that equals an earlier one."""
        self._numbers: list[int] = []
        """Of each row, how many it has before a sample is taken."""
        self._digests = set[bytes]()

    def count(self, parts: Iterable[Sequence[int]]) -> None:
        if len(self._hashes) == self.most_rows:
            return
        texts = [np.array(part, dtype=np.uint64) for part in parts]
        digest = blake2b(b"".join(len(text).to_bytes(8) + text.tobytes() for text in texts), digest_size=16).digest()
        is_equal = digest in self._digests
        self._digests.add(digest)
        hashes = [] if is_equal else [_hashes(text) for text in texts]
        different = np.unique(np.concatenate([_NONE, *hashes]))
        self._numbers.append(len(different))
        self._hashes.append(self._sampled(different))
        self._kept += len(self._hashes[-1])
        while self._kept > self.most_hashes:
            self._below >>= 1
            self._hashes = [self._sampled(hashes) for hashes in self._hashes]
            self._kept = sum(map(len, self._hashes))

    def near_repeats(self) -> NearRepeats:
        """Rows that resemble an earlier one, by `RESEMBLANCE` at least, and do not equal one."""
        number = len(self._hashes)
        sampled = np.array([len(hashes) for hashes in self._hashes], dtype=np.int64)
        rows, hashes = np.repeat(np.arange(number), sampled), np.concatenate([_NONE, *self._hashes])
        order = np.argsort(hashes, kind="stable")  # of equal hashes the earliest row stays the first one
        hashes, rows = hashes[order], rows[order]
        stand_for = np.array(self._numbers, dtype=np.int64) / np.maximum(1, sampled)  # what one of a sample stands for
        tells = _telling(hashes, rows, stand_for)
        hashes, rows = hashes[tells], rows[tells]
        begins, counts = _runs(hashes)
        place = np.arange(len(hashes)) - np.repeat(begins, counts)  # of a row among those with the same hash
        first, before = np.repeat(rows[begins], counts), np.roll(rows, 1)
        sizes = np.bincount(rows, minlength=number)
        is_compared = (sizes >= _LEAST_SAMPLED) & (_rounded(sizes * stand_for) >= LEAST)
        # The first row that has a sequence, and the last one before: of many alike, one resemblance is enough.
        with_first, with_last = place > 0, place > 1
        earlier = np.concatenate([first[with_first], before[with_last]])
        later = np.concatenate([rows[with_first], rows[with_last]])
        pairs, common = np.unique(earlier * number + later, return_counts=True)
        earlier, later = pairs // max(1, number), pairs % max(1, number)
        of_both = sizes[earlier] + sizes[later] - common
        alike = (common >= RESEMBLANCE * of_both) & is_compared[earlier] & is_compared[later]
        earlier, later = earlier[alike], later[alike]
        repeats, at = np.unique(later, return_index=True)
        pair = (int(earlier[at[0]]), int(repeats[0])) if len(repeats) else None
        return NearRepeats(len(repeats), int(is_compared.sum()), pair)

    def _sampled(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        end = np.searchsorted(hashes, np.uint64(self._below - 1), side="right")
        # A view would keep the memory of all of them.
        return hashes if end == len(hashes) else hashes[:end].copy()


def _telling(hashes: NDArray[np.uint64], rows: NDArray[np.int64], stand_for: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which sequences rows are compared by: all but those of a system prompt.

    A system prompt is what many rows have that have something else, too. A row that was written down many times with a
    word changed is as common, but what else its rows have is little. Of a sample a single row does not show this, so
    that the mean over the rows decides; a row that clearly has enough of its own is compared by that in any case.

    Args:
        hashes: ascending.
        rows: with each hash.
        stand_for: of each row, how many of its sequences one of the sample stands for.
    """
    begins, counts = _runs(hashes)
    is_common = counts > max(_COMMON_ROWS, _COMMON_SHARE * len(stand_for))
    own = _rounded(np.bincount(rows[~np.repeat(is_common, counts)], minlength=len(stand_for)) * stand_for)
    sums = np.add.reduceat(own[rows], begins) if len(begins) else own[:0]
    of_prompt = is_common & (sums >= LEAST * counts)
    return ~(np.repeat(of_prompt, counts) | (np.repeat(is_common, counts) & (own[rows] >= 2 * LEAST)))


def _runs(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where equal ones begin, of some in ascending order, and how many there are."""
    begins = np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1)))
    return begins, np.diff(begins, append=len(hashes))


def _rounded(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without what a division and a multiplication add: 10 sequences are not 9.999."""
    return np.round(numbers, 6)


def _hashes(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each sequence of `WIDTH` tokens: as many as there are tokens from the `WIDTH`-th one on."""
    if len(ids) < WIDTH:
        return _NONE
    return (np.lib.stride_tricks.sliding_window_view(ids, WIDTH) * _FACTORS).sum(axis=1, dtype=np.uint64)
