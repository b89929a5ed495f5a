"""The cells of the matrix in docs/reference/compatibility.md: what is trained, how, by how many, on which weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

ALGORITHMS = ("sft", "dpo")
METHODS = ("full", "lora", "dora", "qlora")
LAYOUTS = ("1 process", "NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
EMBEDDINGS = ("tied", "untied")
FAMILIES = {
    **dict.fromkeys(("lora", "dora", "qlora"), "adapter"),
    **dict.fromkeys(("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"), "sharded"),
}
"""Value -> its family. What depends on the kind of an adapter and the layout is in tests/process/test_quantization.py,
on the layout alone in test_ranks.py and test_nodes.py, on the algorithm and shards in test_rows_by_method.py there."""


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


def families(cell: Cell) -> set[tuple[Any, ...]]:
    """Of each of its values: (which, the family)."""
    return {*enumerate(FAMILIES.get(value, value) for value in astuple(cell))}


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """Few of the cells, in which every family that is in any of them occurs; always the same ones."""
    return list(_covering(list(cells)))


def _covering(cells: list[Cell]) -> Iterator[Cell]:
    missing = set().union(*map(families, cells))
    while missing:
        best = max(cells, key=lambda cell: len(families(cell) & missing))  # the first of equals
        missing -= families(best)
        yield best
