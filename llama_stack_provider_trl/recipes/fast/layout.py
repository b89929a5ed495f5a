"""Where the rows of a batch are in its one sequence.

Rows that share a prefix are a group: the sequence has the prefix once, then what follows it in each row (prefix
sharing, arXiv:2410.20305). A token attends to those before it in its own row. A row that shares nothing is a group of
its own, with an empty prefix. Positions count from each row's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

Group = tuple[int, tuple[int, ...]]
"""Tokens of the prefix, and of what follows it in each row; at least one row."""


class Places(NamedTuple):
    """Where the queries and the keys of each row are, as kernels for rows of different lengths take it."""

    query_bounds: torch.Tensor
    """Shape (rows + 1,), int32: the first query of each row, and the end of the last one."""
    key_bounds: torch.Tensor
    """The same of the keys, of which a row with a shared prefix has its own copy."""
    longest_query: int
    longest_key: int
    keys: torch.Tensor | None
    """Each row's keys by their places in the sequence, shape (keys,). None: they are the sequence."""
    adds_many: bool
    """Whether more than two rows share a prefix: the sum of two gradients has no order."""


class Layout:
    """The groups of a sequence, and the masks that its attention needs, which all blocks of a model share.

    A class of its own, and no tuple: accelerate, FSDP2 and pinned memory rebuild tuples, and leave other objects alone.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._masks: dict[tuple[int, int, int, torch.dtype, torch.device], torch.Tensor] = {}
        self._places: dict[torch.device, Places] = {}

    @cached_property
    def encoded(self) -> torch.Tensor:
        """The groups as `decoded` reads them, in CPU memory. Of pairs and of an even number of rows its odd size is no
        size of a model."""
        numbers = [number for prefix, parts in self.groups for number in (prefix, len(parts), *parts)]
        return torch.tensor([len(self.groups), *numbers])

    @cached_property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        """Tokens of the parts of the sequence: of each group its prefix with the first row, then its other rows."""
        return [size for prefix, (first, *others) in self.groups for size in (prefix + first, *others)]

    @property
    def longest(self) -> int:
        return max((prefix + size for prefix, continuations in self.groups for size in continuations), default=0)

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

    def places(self, device: torch.device) -> Places:
        """Where the rows' queries and keys are; made once, for all blocks of a model."""
        if device not in self._places:
            spans, at = [], 0  # of each row: the shared prefix's tokens, and its own
            for prefix, (first, *others) in self.groups:
                spans.append(((at, at), (at, at + prefix + first)))
                shared, at = (at, at + prefix), at + prefix + first
                for size in others:
                    spans.append((shared, (at, at + size)))
                    at += size
            queries = [end - start for _, (start, end) in spans]
            keys = [last - first + end - start for (first, last), (start, end) in spans]
            taken = None
            if queries != keys:
                taken = moved(torch.cat([torch.arange(*span) for both in spans for span in both]), device)
            query_bounds, key_bounds = (
                moved(torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32), device)
                for sizes in (queries, keys)
            )
            adds_many = any(prefix and len(parts) > 2 for prefix, parts in self.groups)
            self._places[device] = Places(query_bounds, key_bounds, max(queries), max(keys), taken, adds_many)
        return self._places[device]

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Group, ...]]]:
        return Layout, (self.groups,)  # processes that load batches send no masks


def decoded(encoded: torch.Tensor) -> Layout:
    """The layout with these groups, in one object for all blocks that compute a batch."""
    return _decoded(tuple(encoded.tolist()))


@lru_cache(maxsize=1)
def _decoded(numbers: tuple[int, ...]) -> Layout:
    following = iter(numbers)

    def group() -> Group:
        prefix, count = next(following), next(following)
        return prefix, tuple(next(following) for _ in range(count))

    return Layout([group() for _ in range(next(following))])


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, whose queue is not waited for: it holds the steps before."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)
