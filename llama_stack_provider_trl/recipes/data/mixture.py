"""Several datasets in one epoch: how many rows it takes of each, and which.

Both are a function of the shares, the sizes, the seed and the epoch, as the order of one dataset is
(`recipes.data.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...specs.job import ShareSpec


@dataclass(frozen=True)
class Mixture:
    """Datasets whose rows follow each other, and how many rows of each an epoch takes."""

    sizes: tuple[int, ...]
    """Rows of each dataset, above 0."""
    counts: tuple[int, ...]
    """Of these, in an epoch; more than there are: some or all of them several times."""

    @property
    def rows_per_epoch(self) -> int:
        return sum(self.counts)

    @property
    def most_repeats(self) -> int:
        """How often an epoch has a row at most: once more where it begins in the middle of a pass."""
        return max(-(-count // size) + (count > size) for count, size in zip(self.counts, self.sizes, strict=True))

    def capped(self, rows: int | None) -> Mixture:
        """The same shares in an epoch of at most so many rows, each exact to one row; None: of any number."""
        if rows is None or rows >= self.rows_per_epoch:
            return self
        return Mixture(self.sizes, apportioned(self.counts, rows))

    def rows(self, epoch: int, seed: int, *, shuffle: bool) -> torch.Tensor:
        """The numbers of the epoch's rows among those of all datasets, dataset by dataset, shape (rows_per_epoch,).

        Each dataset is gone through pass by pass, and an epoch begins where the one before it ended: no row is taken
        again before all of its dataset were, in whichever epochs.

        Args:
            shuffle: whether each pass has an order of its own, by the seed.
        """
        begin, found = 0, []
        for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            taken, end = epoch * count, (epoch + 1) * count
            while taken < end:
                of_pass, first = divmod(taken, size)
                last = min(size, first + end - taken)
                order = self._order(size, of_pass, number, seed) if shuffle else torch.arange(size)
                found.append(begin + order[first:last])
                taken += last - first
            begin += size
        return torch.cat(found)

    def _order(self, size: int, of_pass: int, number: int, seed: int) -> torch.Tensor:
        # On the CPU, so that the numbers do not depend on the training device.
        generator = torch.Generator().manual_seed(((seed * 1_000_003 + of_pass) * 1_009 + number + 1) % (1 << 63))
        return torch.randperm(size, generator=generator)


def mixture_of(shares: Sequence[ShareSpec], rows: Sequence[int], sequences: Sequence[int] | None = None) -> Mixture:
    """The mixture of datasets with these shares.

    Args:
        rows: examples of each dataset that are trained on, above 0.
        sequences: of a packed job, those into which each dataset's rows are packed; None: it is not packed.
    """
    if all(share.weight is not None for share in shares):
        counts = apportioned([share.weight or 0.0 for share in shares], sum(rows))
    else:
        counts = tuple(share.rows or size for share, size in zip(shares, rows, strict=True))
    if sequences is None:
        return Mixture(tuple(rows), counts)
    packed = (round(count / size * of) for count, size, of in zip(counts, rows, sequences, strict=True))
    return Mixture(tuple(sequences), tuple(max(1, count) for count in packed))


def apportioned(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` in parts in proportion to the weights, each less than one from its share: by the largest remainders, of
    equal ones the first."""
    of_all = sum(weights)
    shares = [weight / of_all * total for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return tuple(counts)
