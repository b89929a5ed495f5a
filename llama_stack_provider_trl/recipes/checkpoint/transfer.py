"""Which ranks see rank 0's disk, and the transfer of checkpoint parts from ranks that do not.

Checkpoints are on the disk of rank 0's machine, or on one that all machines see. Ranks that do not see it send their
parts over the network in pieces, as bytes of files; nothing is gathered in memory.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed import ranks
from .shards import pwrite

PIECE = 16 << 20
"""Bytes that are sent at a time."""


@dataclass(frozen=True)
class Disks:
    """Which ranks see the disk that rank 0 writes to."""

    with_first: tuple[int, ...]
    """Ranks that see rank 0's files, rank 0 included."""
    world_size: int

    @property
    def is_shared(self) -> bool:
        return len(self.with_first) == self.world_size

    @property
    def sees_first(self) -> bool:
        return ranks.rank() in self.with_first

    @property
    def cleans_up(self) -> bool:
        """Whether this rank cleans up its disk: rank 0, or the first rank of a machine with another disk."""
        return ranks.rank() == 0 or (not self.sees_first and ranks.local_rank() == 0)

    def part_of[Value](self, values: Sequence[Value]) -> Sequence[Value]:
        """This rank's part of work that is divided among the ranks of one disk."""
        if self.sees_first:
            return values[self.with_first.index(ranks.rank()) :: len(self.with_first)]
        return values[ranks.local_rank() :: ranks.local_world_size()]


def find_disks(directory: Path) -> Disks:
    """Find the ranks that see a file made by rank 0. A collective; `directory` is each machine's own path."""
    world_size = ranks.world_size()
    if ranks.local_world_size() == world_size:
        return Disks(tuple(range(world_size)), world_size)
    # A new name each time: network file systems cache that a name does not exist.
    (mark, *_) = ranks.gather_all(f".seen-{uuid.uuid4().hex}")
    try:
        if ranks.rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / mark).touch()
        ranks.barrier()
        seen = ranks.gather_all((directory / mark).exists())
    finally:
        if ranks.rank() == 0:
            (directory / mark).unlink(missing_ok=True)
    return Disks(tuple(rank for rank, here in enumerate(seen) if here), world_size)


class Piece(NamedTuple):
    name: str
    offset: int
    data: torch.Tensor
    """uint8, at most PIECE long; valid until the next piece is requested."""


def in_pieces(name: str, parts: Iterator[tuple[int, torch.Tensor]]) -> Iterator[Piece]:
    """Cut parts of a file, (offset, uint8 tensor), into pieces of at most PIECE bytes."""
    for offset, data in parts:
        for start in range(0, data.numel(), PIECE):
            yield Piece(name, offset + start, data[start : start + PIECE])


def send_to_first(pieces: Iterator[Piece], names: Sequence[Sequence[str]], directory: Path, group: Any) -> None:
    """Write the parts of ranks on other disks into rank 0's files. A collective.

    A rank that fails completes the exchange with the others, and raises then. Raises OSError: a file cannot be read, or
    rank 0's disk is full.

    Args:
        pieces: what this rank sends; not consumed on a rank without names.
        names: by rank, the files of which it sends pieces.
        group: a gloo group that no other thread uses meanwhile.
    """
    ours = names[ranks.rank()]
    if ranks.rank() == 0:
        _receive({rank: theirs for rank, theirs in enumerate(names) if theirs}, directory, group)
    elif ours:
        _send(pieces, {name: number for number, name in enumerate(ours)}, group)


def _send(pieces: Iterator[Piece], numbers: Mapping[str, int], group: Any) -> None:
    try:
        for piece in pieces:
            header = torch.tensor([numbers[piece.name], piece.offset, piece.data.numel()])
            dist.send(header, 0, group=group)
            dist.send(piece.data, 0, group=group)
    finally:
        dist.send(torch.tensor([-1, 0, 0]), 0, group=group)


def _receive(senders: Mapping[int, Sequence[str]], directory: Path, group: Any) -> None:
    header, buffer = torch.empty(3, dtype=torch.int64), torch.empty(PIECE, dtype=torch.uint8)
    failure: OSError | None = None
    for rank, names in senders.items():
        while True:
            dist.recv(header, rank, group=group)
            number, offset, length = header.tolist()
            if number < 0:
                break
            dist.recv(buffer[:length], rank, group=group)
            if failure is None:
                try:
                    _write(directory / names[number], offset, buffer[:length])
                except OSError as error:
                    failure = error
    if failure is not None:
        raise failure


def _write(path: Path, offset: int, data: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        pwrite(fd, data.numpy().data, offset)
    finally:
        os.close(fd)
