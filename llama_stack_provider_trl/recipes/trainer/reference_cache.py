"""A cache on disk of the reference's log-probabilities of a dataset, for later jobs with the same reference and rows.

`<data_dir>/reference/<key>.safetensors` holds one tensor, `log_probs`, float32, shape (rows, 2). The key is a digest of
all inputs that determine the numbers, except rounding. `digests.json` beside it holds the digests of weight files.
Files that were not used for `KEEP_SECONDS` are removed, and the oldest ones beyond `KEEP_BYTES`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...system.digests import KeptDigests
from ...system.files import atomic_write
from ..data.tables import IMAGES

KEEP_SECONDS = 30 * 24 * 3600.0
KEEP_BYTES = 1 << 30
"""100 million pairs."""
_WEIGHTS = re.compile(r".+\.(safetensors|bin|py)|(adapter_)?config\.json")
"""Files of a model's directory that determine what it computes."""
_ROWS = 1000


class LogProbCache:
    """The cache directory. Several processes may use it at a time.

    Args:
        heartbeat: called while files are read, which takes minutes with large models.
    """

    def __init__(self, directory: Path, heartbeat: Callable[[], None]) -> None:
        self.directory, self._heartbeat = directory, heartbeat
        self._digests = KeptDigests(directory / "digests.json")

    def key(self, model: str, commit: str | None, rows: Iterator[bytes], **settings: Any) -> str | None:
        """The key of the log-probabilities of `rows` under `model`; None where its weights cannot be identified.

        Args:
            model: a directory, known by the content of its files, or a model id, known by `commit`.
            rows: the token ids and images, as bytes. What decided them (tokenizer, chat template, truncation) is in
                them.
            settings: other inputs that determine the numbers; JSON values.
        """
        weights = self.content(Path(model)) if Path(model).is_dir() else commit and f"{model}@{commit}"
        if not weights:
            return None
        digest = hashlib.sha256(json.dumps([weights, settings], sort_keys=True, default=str).encode())
        for part in rows:
            digest.update(part)
            self._heartbeat()
        return digest.hexdigest()

    def find(self, key: str, num_rows: int) -> torch.Tensor | None:
        """The log-probabilities under `key`; None where there are none, or the file is damaged."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                values: torch.Tensor = file.get_tensor("log_probs")
                intact = file.metadata()["sha256"] == _sha256(values) and values.shape == (num_rows, 2)
            if intact:
                os.utime(path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None
        return values if intact else None

    def store(self, key: str, values: torch.Tensor) -> bool:
        """Keep log-probabilities, float32 in CPU memory, shape (rows, 2); returns whether they were written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), save({"log_probs": values}, metadata={"sha256": _sha256(values)}))
            self._tidy()
        except OSError:
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def _tidy(self) -> None:
        found = []
        for path in self.directory.glob("*.safetensors"):
            try:
                found.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another job has removed it
                continue
        total, now = 0, time.time()
        for used, size, path in sorted(found, reverse=True):
            total += size
            if total > KEEP_BYTES or now - used > KEEP_SECONDS:
                path.unlink(missing_ok=True)

    def content(self, model: Path) -> str:
        """Digest of the files of a model's directory. Those of files that have not changed are kept."""
        with suppress(OSError):  # without it they are read again next time
            self.directory.mkdir(parents=True, exist_ok=True)
        parts = []
        for path in sorted(path for path in model.iterdir() if _WEIGHTS.fullmatch(path.name) and path.is_file()):
            with open(path, "rb") as file:
                parts.append((path.name, self._digests.of(file, lambda size: self._heartbeat())))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def row_bytes(rows: Dataset, num_rows: int) -> Iterator[bytes]:
    """The token ids of a tokenized DPO dataset's first `num_rows` pairs, and their images; lengths and ids, and the
    sizes and bytes of images, determine the bytes."""
    for lists in _lists(rows, num_rows):
        for column in lists:
            yield column.value_lengths().to_numpy().tobytes()
            yield column.flatten().to_numpy().tobytes()
    if IMAGES in rows.column_names:
        arrow = rows.with_format("arrow")
        for row in range(num_rows):  # one may have 16 MiB
            images = arrow[row : row + 1].column(IMAGES).combine_chunks().flatten()
            yield len(images).to_bytes(8)
            for image in images:
                yield len(image.as_buffer()).to_bytes(8)
                yield image.as_buffer()


def pair_lengths(rows: Dataset, num_rows: int) -> torch.Tensor:
    """Tokens of the longer sequence of each of the first `num_rows` pairs, shape (num_rows,)."""
    found = [torch.zeros(0, dtype=torch.int64)]
    for lists in _lists(rows, num_rows):
        prompt, chosen, rejected = (torch.tensor(column.value_lengths().to_numpy()).long() for column in lists)
        found.append(prompt + torch.maximum(chosen, rejected))
    return torch.cat(found)


def _lists(rows: Dataset, num_rows: int) -> Iterator[list[Any]]:
    """Arrow's list arrays of the three columns, some rows at a time."""
    arrow = rows.with_format("arrow")
    for start in range(0, num_rows, _ROWS):
        table = arrow[start : min(start + _ROWS, num_rows)]
        yield [table.column(name).combine_chunks() for name in ("prompt_ids", "chosen_ids", "rejected_ids")]


def _sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
