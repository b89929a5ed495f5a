"""Arrow tables of token ids, which datasets and the cache are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.table import InMemoryTable

IGNORED = -100
"""Label of a token outside the loss (the default of PyTorch's cross-entropy)."""
SFT_COLUMNS = ("input_ids", "labels")
IMAGES = "image_files"
"""The bytes of a row's images, in the order of their tokens. TRL takes rows with a column `images` for its own ones."""
PACKED_COLUMNS = (*SFT_COLUMNS, "seq_lengths")
PROMPT_COLUMNS = ("prompt_ids", "row")
"""`row`: one number, that of the row in its file."""
TAUGHT_COLUMNS = (*PROMPT_COLUMNS, "teacher_ids")
"""The last one: of a teacher with another vocabulary, the prompt as it reads it."""
DPO_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
MARGIN = "margin"
"""A number of a pair, of jobs whose pairs have margins."""
MARGIN_COLUMNS = (*DPO_COLUMNS, MARGIN)
IMAGE_COLUMNS: dict[str, tuple[str, ...]] = {"sft": (*SFT_COLUMNS, IMAGES), "dpo": (*DPO_COLUMNS, IMAGES)}
"""By `specs.methods.Method.rows`, of rows that may have images."""
KTO_COLUMNS = ("prompt_ids", "completion_ids", "label")
SOURCE = "source"
"""A number: that of the dataset which a row is of, in a mixture."""
COLUMNS = {"sft": SFT_COLUMNS, "dpo": DPO_COLUMNS, "kto": KTO_COLUMNS, "prompts": PROMPT_COLUMNS}
"""By `specs.methods.Method.rows`."""


def schema(columns: Sequence[str]) -> pa.Schema:
    """Columns of lists of numbers, of single values (`label`, a boolean, and `margin`, a number), and of lists of bytes
    (`IMAGES`)."""
    # int32 holds every vocabulary and takes half the memory; the collators make int64 tensors of it.
    kinds = {"label": Value("bool"), MARGIN: Value("float32"), IMAGES: List(Value("binary"))}
    return Features({column: kinds.get(column) or List(Value("int32")) for column in columns}).arrow_schema


def table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> pa.Table:
    """Rows, each with a value per column, as a table."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    of = schema(columns)
    return pa.Table.from_arrays(
        [pa.array(value, type=field.type) for value, field in zip(values, of, strict=True)], schema=of
    )


def in_memory(tables: Iterable[pa.Table]) -> Dataset:
    """Tables of the same columns, at least one, as a dataset."""
    # Without a fingerprint datasets would compute one from all ids.
    return Dataset(InMemoryTable(pa.concat_tables(tables)), fingerprint=uuid4().hex)


def with_source(dataset: Dataset, number: int) -> Dataset:
    """The rows with the column `SOURCE`, which has this number."""
    column = pa.table({SOURCE: pa.array(np.full(len(dataset), number, dtype=np.int32))})
    return concatenate_datasets([dataset, in_memory([column])], axis=1)
