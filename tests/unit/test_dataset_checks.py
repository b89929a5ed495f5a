"""Checks of datasets that are requested at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, StoreError
from llama_stack_provider_trl.system.offload import CostlyWork, caller_name, serving
from llama_stack_provider_trl_remote.service.datasets import blobs as module
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.http.errors import NotFound
from llama_stack_provider_trl_remote.service.settings import ServiceSettings


def test_rows_that_are_requested_at_once_are_read_and_checked_once_and_leave_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data", dataset_roots=(tmp_path / "roots",))
    blobs = Blobs(settings)
    registry = DatasetRegistry(settings, blobs)
    blobs.prepare()
    registry.prepare()
    (tmp_path / "roots").mkdir()
    rows = tmp_path / "roots" / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    body = {"dataset_id": "d", "purpose": "post-training/messages", "source": {"type": "uri", "uri": str(rows)}}
    done: list[str] = []

    def check(*given: Any) -> Any:
        done.append("checked")
        return found(*given)

    async def convert(uri: str, file: int | None = None, *given: Any) -> Any:
        done.append("read")
        return await read(uri, file)

    found, read = module.check_within, blobs.convert
    monkeypatch.setattr(module, "check_within", check)
    monkeypatch.setattr(blobs, "convert", convert)

    async def fetch() -> None:
        await registry.register(RegisterDataset.model_validate(body))
        await asyncio.gather(*(registry.fetch("d", "sft", None) for _ in range(4)))

    asyncio.run(fetch())
    assert done == ["read", "checked"]
    assert (len(blobs._checking), len(registry._reading)) == (0, 0)


def test_rows_that_are_deleted_while_they_are_checked_are_gone_and_storage_is_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data")
    blobs = Blobs(settings)
    registry = DatasetRegistry(settings, blobs)
    blobs.prepare()
    registry.prepare()
    row = {"prompt": "a", "completion": "b"}
    body = {"dataset_id": "d", "purpose": "post-training/messages", "source": {"type": "rows", "rows": [row]}}

    def check(limits: Any, path: Path, *given: Any) -> Any:
        path.unlink()  # another request deletes the dataset
        return found(limits, path, *given)

    found = module.check_within
    monkeypatch.setattr(module, "check_within", check)

    async def fetch() -> None:
        await registry.register(RegisterDataset.model_validate(body))
        await registry.fetch("d", "sft", None)

    with pytest.raises(InvalidRequest, match=r"its rows \([0-9a-f]{64}\) are gone: register it again"):
        asyncio.run(fetch())


@pytest.mark.parametrize("further", [0, 3])
@pytest.mark.parametrize("what", ["checked", "read"])
def test_a_caller_whose_check_waits_delays_no_other_one_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, further: int
) -> None:
    (tmp_path / "roots").mkdir()
    rows = tmp_path / "roots" / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    settings = ServiceSettings(data_dir=tmp_path / "data", dataset_roots=(tmp_path / "roots",))
    registry = DatasetRegistry(settings, blobs := Blobs(settings))
    blobs.prepare()
    registry.prepare()
    body = {"dataset_id": "d", "purpose": "post-training/messages", "source": {"type": "uri", "uri": str(rows)}}
    blocked, released = asyncio.Event(), asyncio.Event()

    def waiting(method: Any) -> Any:
        async def call(*given: Any) -> Any:
            if caller_name() == "slow":
                blocked.set()
                await released.wait()
            return await method(*given)

        return call

    name = {"checked": "_check", "read": "convert"}[what]
    monkeypatch.setattr(blobs, name, waiting(getattr(blobs, name)))
    work = CostlyWork(threads=2, per_caller=1)

    async def fetch(caller: str) -> None:
        with serving(work, caller):
            await registry.fetch("d", "sft", None)

    async def both() -> None:
        await registry.register(RegisterDataset.model_validate(body))
        slow = asyncio.create_task(fetch("slow"))
        await blocked.wait()
        more = [asyncio.create_task(fetch("slow")) for _ in range(further)]
        await asyncio.wait_for(fetch("other"), 60)
        assert not slow.done()
        released.set()
        await asyncio.gather(slow, *more)

    asyncio.run(both())
    work.close()


def test_an_upload_holds_no_more_than_a_small_part_of_it_in_memory(tmp_path: Path) -> None:
    blobs = Blobs(ServiceSettings(data_dir=tmp_path / "data"))
    blobs.prepare()
    piece = b"x" * (8 << 10)
    held: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(100):
            written = sum(path.stat().st_size for path in blobs.directory.glob("*/rows"))
            held.append(number * len(piece) - written)
            yield piece

    digest = hashlib.sha256(100 * piece).hexdigest()
    asyncio.run(blobs.receive(digest, pieces(), 100 * len(piece)))
    assert blobs.path(digest).read_bytes() == 100 * piece
    assert 0 < max(held) <= 64 << 10


def test_datasets_whose_directory_is_away_for_a_moment_are_not_forgotten(tmp_path: Path) -> None:
    """Their names left the list until a restart, and jobs with them were refused."""
    settings = ServiceSettings(data_dir=tmp_path)
    blobs = Blobs(settings)
    registry = DatasetRegistry(settings, blobs)
    blobs.prepare()
    registry.prepare()
    rows = [{"prompt": "a", "completion": "b"}]
    for name in ("a", "b"):
        body = {"dataset_id": name, "purpose": "post-training/messages", "source": {"type": "rows", "rows": rows}}
        asyncio.run(registry.register(RegisterDataset.model_validate(body)))
    blobs.directory.rename(tmp_path / "away")
    for call in (
        lambda: registry.get("a"),
        lambda: registry.page(10),
        lambda: registry.delete("a"),
        lambda: registry.holds("new"),
        lambda: asyncio.run(registry.fetch("a", "sft", None)),
        lambda: asyncio.run(blobs.holds("0" * 64)),
    ):
        with pytest.raises(StoreError, match="is not there, and what it holds is not known: mount its disk"):
            call()
    (tmp_path / "away").rename(blobs.directory)
    assert registry.names() == ["a", "b"]
    assert [one["identifier"] for one in json.loads(registry.page(10))["data"]] == ["a", "b"]
    assert asyncio.run(registry.fetch("a", "sft", None))[0].num_rows == 1
    # One whose file is removed is gone.
    next(path for path in registry._directory.iterdir() if '"a"' in path.read_text()).unlink()
    with pytest.raises(NotFound):
        registry.get("a")
    assert registry.names() == ["b"]
