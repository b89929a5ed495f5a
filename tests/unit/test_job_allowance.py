"""What a request writes for its jobs: within the space of the disk and the quota of its token, or nothing stays."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from llama_stack_provider_trl.errors import QuotaReached, StoreError
from llama_stack_provider_trl.jobs.inputs.resume_from import _link
from llama_stack_provider_trl.jobs.inputs.row_parts import NewRows, stored_shard
from llama_stack_provider_trl.jobs.store import store as store_module
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Submitter, keep_rows, split_rows, submit
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DatasetRef, ShardSpec
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote.service import space as space_module
from llama_stack_provider_trl_remote.service.datasets.quotas import JobAllowance, Quotas
from llama_stack_provider_trl_remote.service.space import PIECE, Space

MIB = 1 << 20
Allowances = Callable[..., JobAllowance]
INDEX, COUNT = "provider_options.shard.index", "provider_options.shard.count"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are free, which a test changes."""
    found = [1 << 40]
    monkeypatch.setattr(space_module, "free_bytes", lambda path: found[0])
    return found


def dataset(tmp_path: Path, rows: int = 8, size: int = MIB) -> DatasetRef:
    blob = put_rows(tmp_path / "datasets", ({"prompt": f"{n}", "completion": "x" * size} for n in range(rows)))
    return DatasetRef(dataset_id="d", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)


@pytest.fixture
def allowance() -> Iterator[Allowances]:
    """Makes what a request of the token `a` may write, whose rows arrive until the test ends."""
    with ExitStack() as stack:

        def make(store: Store, quota: int = 1 << 40, min_free: int = 0) -> JobAllowance:
            quotas = Quotas(store.rows, quota)
            return JobAllowance(Space(min_free), quotas, stack.enter_context(quotas.taking("a")))

        yield make


def submitted(store: Store, root: Path, allowed: JobAllowance, **search: Any) -> bool:
    body = {
        "job_uuid": "s",
        "model": "org/model",
        "hyperparam_search_config": {"method": "grid", "parameters": search} if search else None,
        "logger_config": {},
        "training_config": {
            "n_epochs": 1,
            "data_config": {"dataset_id": "d", "batch_size": 1, "validation_dataset_id": "d"},
        },
    }
    request = SupervisedFineTuneRequest.model_validate({k: v for k, v in body.items() if v is not None})
    rows = [{"prompt": f"{number}", "completion": "x" * 1000} for number in range(8)]

    async def datasets(dataset_id: str, use: Any, data_format: Any) -> tuple[DatasetRef, list[str]]:
        return keep_rows(root / "datasets", dataset_id, rows, use, data_format)

    settings = Settings(data_dir=root, devices=("cpu",))
    options = ProviderOptions.parse({"preflight": "off", "shard": {"index": 0, "count": 4}})
    return asyncio.run(submit(request, options, "digest", settings, store, datasets, Submitter("a", None, allowed)))


def stored(root: Path) -> set[str]:
    return {path.stem for path in (root / "datasets").iterdir()}


@pytest.mark.parametrize("parts", ["shard", "split"])
def test_no_part_is_written_below_the_line_of_the_disk(
    tmp_path: Path, store: Store, free: list[int], parts: str, allowance: Allowances
) -> None:
    whole = dataset(tmp_path, rows=32)
    rows = NewRows(allowance(store, min_free=100 * MIB))
    free[0] = 100 * MIB + PIECE - 1
    make = {
        "shard": lambda: stored_shard(whole, ShardSpec(index=0, count=2), rows.put),
        "split": lambda: split_rows(whole, 0.5, 0, rows.put),
    }
    with pytest.raises((OSError, StoreError), match="are needed"):
        make[parts]()
    assert stored(tmp_path) == {whole.sha256}


def test_a_part_ends_where_the_disk_fills_up_meanwhile(
    tmp_path: Path, store: Store, free: list[int], allowance: Allowances
) -> None:
    whole, allowed = dataset(tmp_path, rows=32), allowance(store, min_free=100 * MIB)
    rows, read = NewRows(allowed), 0
    free[0] = 100 * MIB + PIECE

    def lines() -> Iterator[bytes]:
        nonlocal read
        for line in whole.path.read_bytes().splitlines(keepends=True):
            free[0] -= len(line)
            read += 1
            yield line

    with pytest.raises(OSError, match="are needed") as full:
        rows.put(whole.path.parent, lines())
    assert (full.value.errno, read < 16, stored(tmp_path)) == (errno.ENOSPC, True, {whole.sha256})


@pytest.mark.parametrize(
    "search",
    [
        {INDEX: [0, 1, 2, 3]},
        {COUNT: [2, 3, 4]},
        {INDEX: [0, 1], COUNT: [2, 3]},
    ],
    ids=["indices", "counts", "both"],
)
def test_the_parts_of_all_trials_count_for_the_token_of_a_search(
    tmp_path: Path, store: Store, search: dict[str, list[Any]], allowance: Allowances
) -> None:
    allowed = allowance(store)
    assert submitted(store, tmp_path, allowed, **search)
    parts = {store.get(name).spec.data.dataset.sha256 for name in store.names() if name != "s"}
    assert len(parts) > 2
    assert allowed.rows.keys() == parts
    size = sum(blob.path.stat().st_size for blob in allowed.rows.values())
    small = tmp_path / "small"
    with closing(Store(small / "jobs.sqlite3")) as other:
        with pytest.raises(QuotaReached, match=r"'a' has stored 0 MiB of rows.* max_stored_mb allows"):
            submitted(other, small, allowance(other, size - 1), **search)
        assert other.names() == []
        [left] = stored(small)  # the dataset itself
        assert left not in parts
        assert submitted(other, small, allowance(other, size), **search)


@pytest.mark.parametrize("search", [{}, {INDEX: [0, 1, 2, 3]}], ids=["job", "search"])
def test_rows_count_from_the_moment_their_jobs_are_stored_and_never_without_them(
    tmp_path: Path, store: Store, search: dict[str, list[Any]], allowance: Allowances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is counted in a second step, before which the service may end."""
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "count_rows", cut_off)
        with pytest.raises(StoreError):
            submitted(store, tmp_path, allowance(store), **search)
    assert (store.names(), store.rows.used("a")) == ([], 0)
    assert submitted(store, tmp_path, allowance(store), **search)
    specs = [store.get(name).spec for name in store.names()]
    rows = {ref.path for spec in specs for ref in (spec.data.dataset, spec.data.validation) if ref is not None}
    assert len(rows) == (5 if search else 2)  # shards, and the whole dataset for validation
    assert store.rows.used("a") == sum(path.stat().st_size for path in rows)


def cut_off(*_: object) -> NoReturn:
    raise StoreError("the disk is full")


def test_parts_that_are_stored_already_take_nothing_of_the_quota(
    tmp_path: Path, store: Store, allowance: Allowances
) -> None:
    whole = dataset(tmp_path, size=1000)
    first = allowance(store)
    for part in split_rows(whole, 0.5, 0, NewRows(first).put):
        store.rows.count_for("a", part.sha256, part.path.stat().st_size)
    again = allowance(store, quota=store.rows.used("a"))
    split_rows(whole, 0.5, 0, NewRows(again).put)
    assert again.rows == {}
    with pytest.raises(QuotaReached):
        split_rows(whole, 0.5, 1, NewRows(again).put)


def test_requests_at_the_same_time_share_the_quota_and_one_that_was_cancelled_takes_nothing(
    tmp_path: Path, store: Store
) -> None:
    whole = dataset(tmp_path, size=1000)
    quotas = Quotas(store.rows, whole.path.stat().st_size)
    with quotas.taking("a") as take:
        first = JobAllowance(Space(0), quotas, take)
        split_rows(whole, 0.5, 0, NewRows(first).put)
        with quotas.taking("a") as also, pytest.raises(QuotaReached):
            split_rows(whole, 0.5, 1, NewRows(JobAllowance(Space(0), quotas, also)).put)
        with pytest.raises(QuotaReached):
            quotas.require("a", 1)
    take(1 << 40)  # by a thread that the request has left behind
    quotas.require("a", whole.path.stat().st_size)
    with quotas.taking("a") as take:
        split_rows(whole, 0.5, 1, NewRows(JobAllowance(Space(0), quotas, take)).put)


def test_a_large_checkpoint_is_copied_only_as_far_as_the_disk_allows(
    tmp_path: Path, store: Store, free: list[int], monkeypatch: pytest.MonkeyPatch, allowance: Allowances
) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    with open(source, "wb") as file:
        file.truncate(4 * PIECE)
    with allowance(store, min_free=MIB).writing(tmp_path) as written:
        free[0] = 0
        _link(written, str(source), str(target))  # a link takes no space
    target.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(
        space_module,
        "free_bytes",
        lambda path: MIB + 2 * PIECE - (target.stat().st_size if target.exists() else 0),
    )
    with allowance(store, min_free=MIB).writing(tmp_path) as written, pytest.raises(OSError, match="are needed"):
        _link(written, str(source), str(target))
    assert target.stat().st_size <= 2 * PIECE
