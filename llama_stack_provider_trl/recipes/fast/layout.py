"""Where the rows of a batch are in its one sequence.

Rows that share a prefix are a group: the sequence has the prefix once, then what follows it in each row (prefix
sharing, arXiv:2410.20305). A token attends to those before it in its own row. A row that shares nothing is a group of
its own, with an empty prefix. Positions count from each row's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Group = tuple[int, tuple[int, ...]]
"""Tokens of the prefix, and of what follows it in each row; at least one row."""


class Layout:
    """The groups of a sequence, and the masks that its attention needs, which all blocks of a model share.

    A class of its own, and no tuple: accelerate, FSDP2 and pinned memory rebuild tuples, and leave other objects alone.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._masks: dict[tuple[int, int, int, torch.dtype, torch.device], torch.Tensor] = {}

    def sizes(self) -> list[int]:
        """Tokens of the parts of the sequence: of each group its prefix with the first row, then its other rows."""
        return [size for prefix, (first, *others) in self.groups for size in (prefix + first, *others)]

    def mask(self, like: torch.Tensor, keys: int, window: int) -> torch.Tensor:
        """A mask to be added to scores, shape (queries, keys): the last tokens of a row, and all of its tokens.

        Args:
            like: the queries, shape (..., queries, head size), whose dtype and device the mask has.
            window: tokens that a token attends to, itself included.
        """
        queries = like.shape[-2]
        key = queries, keys, window, like.dtype, like.device
        if key not in self._masks:
            at = torch.arange(keys - queries, keys, device=like.device)[:, None]
            other = torch.arange(keys, device=like.device)
            hidden = (other > at) | (other <= at - window)
            zeros = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = zeros.masked_fill(hidden, float("-inf"))
        return self._masks[key]

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Group, ...]]]:
        return Layout, (self.groups,)  # processes that load batches send no masks
