"""Parts of a dataset, which jobs train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.inputs.row_parts import stored_shard
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.specs.job import DatasetRef, ShardSpec
from llama_stack_provider_trl.system.files import put_rows


def rows_of(dataset: DatasetRef) -> list[int]:
    return [json.loads(line)["n"] for line in dataset.path.read_text().splitlines()]


def test_the_parts_of_a_dataset_have_each_row_once_and_in_its_order(tmp_path: Path) -> None:
    blob = put_rows(tmp_path, [{"n": n} for n in range(7)])
    whole = DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)
    parts = [stored_shard(whole, ShardSpec(index=index, count=3)) for index in range(3)]
    assert [rows_of(part) for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [part.num_rows for part in parts] == [3, 2, 2]
    assert all(part.path.stem == part.sha256 for part in parts)
    stored_shard(whole, ShardSpec(index=6, count=7))
    with pytest.raises(InvalidRequest, match=r"provider_options\.shard\.count=8.*at most 7 rows"):
        stored_shard(whole, ShardSpec(index=0, count=8))


def test_a_part_that_does_not_exist_is_refused() -> None:
    assert ProviderOptions.parse({"shard": {"index": 1, "count": 2}}).shard is not None
    with pytest.raises(InvalidRequest, match=r"shard=.*index is 2: with count 2 it is 0 to 1"):
        ProviderOptions.parse({"shard": {"index": 2, "count": 2}})
