"""The cells of the matrix in docs/reference/compatibility.md: what is trained, how, by how many, on which weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Any

ALGORITHMS = ("sft", "dpo")
METHODS = ("full", "lora", "dora", "qlora")
LAYOUTS = ("1 process", "NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
EMBEDDINGS = ("tied", "untied")
ADAPTERS = ("lora", "dora", "qlora")
"""One family of methods: what depends on its member and the layout is in tests/process/test_quantization.py."""


@dataclass(frozen=True)
class Cell:
    """One way to train. Each is trained, evaluated, saved, resumed, exported and reloaded."""

    algorithm: str
    method: str
    layout: str
    embeddings: str

    def __str__(self) -> str:
        return "-".join(astuple(self)).replace(" ", "")

    @property
    def ranks(self) -> int:
        """HYBRID_SHARD needs two nodes of two ranks to be more than FULL_SHARD."""
        return {"1 process": 1, "HYBRID_SHARD": 4}.get(self.layout, 2)


def all_cells() -> list[Cell]:
    return [Cell(*values) for values in product(ALGORITHMS, METHODS, LAYOUTS, EMBEDDINGS)]


def pairs(cell: Cell) -> set[tuple[Any, ...]]:
    """The combinations of two of its values: ((which, value), (which, value)); with a layout, the method's family."""
    found = set(combinations(enumerate(astuple(cell)), 2))
    if cell.method in ADAPTERS:
        found.remove(((1, cell.method), (2, cell.layout)))
        found.add(((1, "adapter"), (2, cell.layout)))
    return found


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """Few of the cells, in which every pair of values that is in any of them occurs; always the same ones."""
    return list(_covering(list(cells)))


def _covering(cells: list[Cell]) -> Iterator[Cell]:
    missing = set().union(*map(pairs, cells))
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))  # the first of equals
        missing -= pairs(best)
        yield best
