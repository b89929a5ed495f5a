"""Counts examples that are equal token by token: among the trained ones, and between these and those of validation.

Each example has a digest. Of many examples a sample is kept, the digests whose lowest bits are 0: it has all equal
examples or none of them, so that samples of shards can be merged, and those of two datasets compared.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import Duplicates

MOST = 1 << 16
"""Digests of a sample: up to 12 MB in memory, and up to 1.4 MB on disk."""
_DEVIATIONS = 3
"""Standard deviations of the number of different examples within which that of repeated ones is estimated."""
_STORED = {"digests": "<u8", "rows": "<u4", "repeats": "<u4"}
"""Columns of a stored sample, and the types of their numbers."""


@dataclass(slots=True)
class ExampleDigests:
    most: int = MOST
    bits: int = 0
    """Lowest bits that are 0 in each digest: it is a sample of one in 2 ** bits."""
    firsts: dict[int, int] = field(default_factory=dict)
    """Digest -> the first row that has it."""
    repeats: dict[int, int] = field(default_factory=dict)
    """Digest -> how many examples after the first one have it, above 0."""
    pair: tuple[int, int] | None = None
    """The first row that repeats another one, behind that; of a sample without meaning."""

    def count(self, row: int, *parts: Sequence[float]) -> None:
        """Count an example.

        Args:
            row: its number, not smaller than those before.
            parts: token ids and other numbers: those of equal examples are equal.
        """
        # Python hashes numbers and tuples of them the same in each process, three times as fast as BLAKE2 their bytes.
        hashes = array("q", [hash(tuple(part)) for part in parts])
        digest = int.from_bytes(blake2b(hashes.tobytes(), digest_size=8).digest())
        if digest & ((1 << self.bits) - 1):
            return
        first = self.firsts.get(digest)
        if first is None:
            self.firsts[digest] = row
            self._shrink(self.bits)
            return
        self.repeats[digest] = self.repeats.get(digest, 0) + 1
        if self.pair is None and first != row:
            self.pair = (first, row)

    def add(self, later: ExampleDigests, rows: int) -> None:
        """Count what was counted of rows that follow these."""
        if self.pair is None:
            pairs = [(self.firsts[digest], rows + later.firsts[digest]) for digest in self.firsts.keys() & later.firsts]
            pairs += [(rows + first, rows + second) for first, second in filter(None, [later.pair])]
            self.pair = min(pairs, key=lambda pair: pair[1], default=None)
        self._shrink(later.bits)
        rest = (1 << self.bits) - 1
        for digest, row in later.firsts.items():
            if digest & rest:
                continue
            again = later.repeats.get(digest, 0) + (digest in self.firsts)
            self.firsts.setdefault(digest, rows + row)
            if again:
                self.repeats[digest] = self.repeats.get(digest, 0) + again
        self._shrink(self.bits)

    def repeated(self, kept: int) -> int:
        """How many examples repeat an earlier one; of a sample an estimate."""
        found = sum(self.repeats.values()) << self.bits
        if not self.bits:
            return found
        # One example that is repeated often is in the sample with all its repetitions or with none. The number of
        # different examples does not depend on it, but is too coarse for few repetitions.
        different = len(self.firsts) << self.bits
        margin = _DEVIATIONS * len(self.firsts) ** 0.5 * (1 << self.bits)
        return round(max(0, min(max(found, kept - different - margin), kept - different + margin)))

    def stored(self) -> dict[str, Any]:
        columns = {"digests": self.firsts, "rows": self.firsts.values()}
        values = {**columns, "repeats": [self.repeats.get(digest, 0) for digest in self.firsts]}
        packed = {
            name: b64encode(np.array([*values[name]], dtype=kind).tobytes()).decode() for name, kind in _STORED.items()
        }
        return {"bits": self.bits, "pair": self.pair, **packed}

    @classmethod
    def read(cls, stored: dict[str, Any]) -> ExampleDigests:
        digests, rows, repeats = (
            np.frombuffer(b64decode(stored[name]), dtype=kind).tolist() for name, kind in _STORED.items()
        )
        again = {digest: count for digest, count in zip(digests, repeats, strict=True) if count}
        pair = stored["pair"] and (stored["pair"][0], stored["pair"][1])
        return cls(bits=stored["bits"], firsts=dict(zip(digests, rows, strict=True)), repeats=again, pair=pair)

    def _shrink(self, bits: int) -> None:
        """Keep a sample of one in 2 ** bits, or of fewer where these are too many."""
        while bits > self.bits or len(self.firsts) > self.most:
            self.bits += 1
            rest = (1 << self.bits) - 1
            self.firsts = {digest: row for digest, row in self.firsts.items() if not digest & rest}
            self.repeats = {digest: count for digest, count in self.repeats.items() if not digest & rest}


def bits_for(rows: int) -> int:
    """The bits with which the sample of a shard begins: those of all shards together have few times `MOST` digests."""
    return (rows // (4 * MOST)).bit_length()


class CountedExamples(NamedTuple):
    """The examples of datasets that follow each other."""

    digests: ExampleDigests
    kept: int
    """All of them."""
    datasets: Sequence[tuple[str, int]]
    """Id of each dataset, and its rows."""
    takes_all: bool = True
    """Whether an epoch, or an evaluation, takes each of them: no limit of steps, and no mixture, leaves some out."""

    def place(self, row: int) -> str:
        """How a message names a row."""
        if len(self.datasets) == 1:
            return f"row {row}"
        of = 0
        while row >= self.datasets[of][1]:
            row, of = row - self.datasets[of][1], of + 1
        return f"row {row} of dataset {self.datasets[of][0]!r}"


def duplicates(
    use: Duplicates | None, trained: CountedExamples, validation: CountedExamples | None = None
) -> list[str]:
    """A sentence on examples that are trained several times, and one on those of validation that are trained. Raises
    JobFailure: there are such examples, and the job refuses them."""
    found = [] if use is None else [*_repeated(trained), *(_overlap(trained, validation) if validation else ())]
    if found and use == "refuse":
        message = f"{'; '.join(found)}. With duplicates 'warn' the job trains on them all the same"
        raise JobFailure(Reason.invalid_dataset, message)
    return found


def _repeated(trained: CountedExamples) -> Iterable[str]:
    digests = trained.digests
    if count := digests.repeated(trained.kept):
        example = ""
        if digests.pair and not digests.bits:
            example = f" ({trained.place(digests.pair[1])} repeats {trained.place(digests.pair[0])})"
        number = _about(digests.bits, count)
        yield f"{number} of {trained.kept} training examples repeat an earlier one{example}{_left_out(trained)}"


def _overlap(trained: CountedExamples, validation: CountedExamples) -> Iterable[str]:
    theirs, ours = validation.digests, trained.digests
    bits = max(theirs.bits, ours.bits)
    if common := theirs.firsts.keys() & ours.firsts:
        count = sum(1 + theirs.repeats.get(digest, 0) for digest in common) << bits
        row, digest = min((theirs.firsts[digest], digest) for digest in common)
        example = f"(validation {validation.place(row)} is training {trained.place(ours.firsts[digest])})"
        number = _about(bits, min(count, validation.kept))
        yield (
            f"{number} of {validation.kept} validation examples are trained, too {example}: the evaluation does not "
            f"show how the model does on new rows{_left_out(trained, validation)}"
        )


def _left_out(*counted: CountedExamples) -> str:
    """How a sentence ends where some examples are not taken; empty: all are."""
    if all(one.takes_all for one in counted):
        return ""
    return "; rows that a limit of steps or a mixture leaves out are compared, too"


def _about(bits: int, count: int) -> str:
    return f"about {count}" if bits else f"{count}"
