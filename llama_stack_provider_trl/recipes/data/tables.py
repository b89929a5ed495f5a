"""Arrow tables of token ids, which datasets and the cache are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.table import InMemoryTable

SFT_COLUMNS = ("input_ids", "labels")
PACKED_COLUMNS = (*SFT_COLUMNS, "seq_lengths")
PROMPT_COLUMNS = ("prompt_ids", "row")
"""`row`: one number, that of the row in its file."""
DPO_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
COLUMNS = {"sft": SFT_COLUMNS, "dpo": DPO_COLUMNS, "prompts": PROMPT_COLUMNS}
"""By what rows are read for (`specs.methods.Method.rows`)."""


def schema(columns: Sequence[str]) -> pa.Schema:
    """Columns of lists of numbers."""
    # int32 holds every vocabulary and takes half the memory; the collators make int64 tensors of it.
    return Features({column: List(Value("int32")) for column in columns}).arrow_schema


def table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> pa.Table:
    """Rows, each a list of numbers per column, as a table."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    of = schema(columns)
    return pa.Table.from_arrays([pa.array(value, type=of.field(0).type) for value in values], schema=of)


def in_memory(tables: Iterable[pa.Table]) -> Dataset:
    """Tables of the same columns, at least one, as a dataset."""
    # Without a fingerprint datasets would compute one from all ids.
    return Dataset(InMemoryTable(pa.concat_tables(tables)), fingerprint=uuid4().hex)
