"""The bytes of rows that a token may have stored: counted once, freed by deletes, a limit for uploads together."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from llama_stack_provider_trl.errors import LimitReached, QuotaReached, StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.housekeeping import remove_unused_rows
from llama_stack_provider_trl.specs.events import Finished, Prepared
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.quotas import UPLOADS, CountedRows, Quotas
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.datasets.uploads import RowUploads
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.service.routes.datasets import put_blob
from llama_stack_provider_trl_remote.service.security.access import BODY, Caller
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import job_spec

MIB = 1 << 20


@contextmanager
def arriving(quotas: Quotas, announced: int, owner: str = "a") -> Iterator[Callable[[int], None]]:
    """`Quotas.arriving`, in a loop of its own for each of its ends."""
    upload = quotas.arriving(owner, announced)
    with closing(asyncio.new_event_loop()) as loop:
        arrived = loop.run_until_complete(upload.__aenter__())
        try:
            yield arrived
        finally:
            loop.run_until_complete(upload.__aexit__(None, None, None))
            loop.run_until_complete(loop.shutdown_default_executor())


def no_dataset(sha256: str) -> bool:
    return False


def rows(tmp_path: Path, text: str = "x") -> Path:
    return put_rows(tmp_path / "datasets", [{"text": text}]).path


def test_rows_count_once_for_each_token_and_are_freed_with_their_last_dataset(store: Store, tmp_path: Path) -> None:
    path = rows(tmp_path)
    store.rows.note(path.stem, "a", 10)
    store.rows.note(path.stem, "a", 10, "one")
    store.rows.note(path.stem, "a", 10, "two")
    store.rows.note(path.stem, "b", 10)
    assert (store.rows.used("a"), store.rows.used("b"), store.rows.used("c")) == (10, 10, 0)
    assert not store.rows.release("one", path, no_dataset)
    assert store.rows.used("a") == 10
    assert not store.rows.release("two", path, no_dataset)  # b has uploaded them too
    assert (store.rows.used("a"), path.exists()) == (0, True)
    store.rows.note(path.stem, "b", 10, "three")
    assert store.rows.release("three", path, no_dataset)
    assert (store.rows.used("b"), path.exists()) == (0, False)


def test_rows_that_a_job_reads_of_an_earlier_one_are_kept_until_it_has_ended(store: Store, tmp_path: Path) -> None:
    path = rows(tmp_path)
    maker = job_spec("a", checkpoint_dir=tmp_path / "a")
    store.add_job(maker, "digest")
    store.launch("a", 1, "cpu", tmp_path / "a-1", None)
    ready = Prepared(total_steps=1, num_rows=1, trainable_parameters=0, total_parameters=1, time=1.0)
    made = Finished(step=1, result={"dataset": {"sha256": path.stem, "num_rows": 1}})
    store.apply_events("a", 1, [ready, made], 10)
    store.transition("a", 1, store.get("a").state, JobState.completed)
    unknown = maker.data.dataset.model_copy(update={"sha256": "", "num_rows": 0, "of_job": "a"})
    store.add_job(job_spec("b", checkpoint_dir=tmp_path / "b", dataset=unknown, after=("a",)), "digest")
    store.rows.note(path.stem, "a", 10, "answers")
    assert not store.rows.release("answers", path, no_dataset)
    assert (store.rows.used("a"), path.exists()) == (10, True)
    assert path.stem in store.digests()
    assert remove_unused_rows(path.parent, store, -1.0) == []
    store.request_cancel("b")
    assert remove_unused_rows(path.parent, store, -1.0) == [path.stem]
    assert store.rows.used("a") == 0


def test_the_sum_of_a_token_is_kept_and_not_computed(store: Store, tmp_path: Path) -> None:
    random = Random(0)
    path = tmp_path / "datasets" / f"{0:064}.jsonl"
    for _ in range(300):
        number, owner, name = random.randrange(5), random.choice("ab"), random.choice(("one", "two"))
        digest = f"{number:064}"
        match random.randrange(5):
            case 0:
                store.rows.note(digest, owner, number + 1)
            case 1:
                store.rows.note(digest, owner, number + 1, name)
            case 2:
                store.rows.count_for(owner, digest, number + 1)
            case 3:
                store.rows.release(name, path.with_name(f"{digest}.jsonl"), no_dataset)
            case _ if not random.randrange(5):
                store.rows.forget([digest])
        with closing(sqlite3.connect(store.path)) as database:
            for token in "ab":
                rows = "SELECT DISTINCT sha256, bytes FROM stored_rows WHERE owner = ?"
                [(computed,)] = database.execute(f"SELECT coalesce(sum(bytes), 0) FROM ({rows})", token)
                assert store.rows.used(token) == computed


def test_reading_the_sum_of_a_token_takes_no_longer_with_many_rows(store: Store) -> None:
    store.rows.note("0" * 64, "a", 1)

    def steps() -> int:
        """Instructions of SQLite that the sum takes."""
        connection, counted = store.database._connection(), []
        connection.set_progress_handler(lambda: counted.append(1), 1)
        try:
            store.rows.used("a")
        finally:
            connection.set_progress_handler(None, 1)
        return len(counted)

    few = steps()
    with store.database.transaction() as execute:
        for number in range(1, 1000):
            row = {"sha256": f"{number:064}", "owner": "a", "bytes": 1, "dataset_id": ""}
            execute("insert_stored_rows", row)
    assert (store.rows.used("a"), steps()) == (1000, few)


def test_an_upload_reads_the_sum_of_its_token_in_threads(store: Store, tmp_path: Path) -> None:
    readers: set[int] = set()

    class Owners:
        def used(self, owner: str) -> int:
            readers.add(threading.get_ident())
            return 0

    quotas = Quotas(Owners(), 100 * MIB)  # type: ignore[arg-type]
    blobs = Blobs(ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu", "min_free_disk_mb": 0}))
    blobs.prepare()
    body = b'{"prompt": "a"}\n' * (1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), MIB):
            yield body[begin : begin + MIB]

    async def upload() -> None:
        async with quotas.arriving("a", 0) as arrived:
            await blobs.receive(hashlib.sha256(body).hexdigest(), pieces(), 0, arrived)

    asyncio.run(upload())
    assert readers
    assert threading.get_ident() not in readers


def test_parts_that_a_job_makes_count_for_its_token_unless_a_token_has_them(store: Store) -> None:
    store.rows.note("1" * 64, "a", 10, "one")
    store.rows.count_for("b", "1" * 64, 10)
    store.rows.count_for("b", "2" * 64, 7)
    assert (store.rows.used("a"), store.rows.used("b")) == (10, 7)


def test_a_token_stores_no_more_than_it_may_and_others_are_not_concerned(store: Store) -> None:
    quotas = Quotas(store.rows, 10 * MIB)
    store.rows.note("1" * 64, "a", 8 * MIB, "one")
    quotas.require("a", 2 * MIB)
    quotas.require("b", 10 * MIB)
    with pytest.raises(QuotaReached, match=r"'a' has stored 8 MiB .* max_stored_mb allows 10: delete datasets") as full:
        quotas.require("a", 2 * MIB + 1)
    assert full.value.status_code == 507
    with arriving(quotas, 2 * MIB), pytest.raises(QuotaReached), arriving(quotas, 1):
        pass
    with arriving(quotas, 2 * MIB):
        pass


def test_what_is_refused_takes_nothing_from_other_requests_of_its_token(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, refused = Quotas(store.rows, 10 * MIB), []
    read = store.rows.used

    def used(owner: str) -> int:
        """While the large one reads the database, a small one comes."""
        if not refused:
            refused.append("begun")
            with quotas.taking("a") as small:
                small(2 * MIB)
        return read(owner)

    monkeypatch.setattr(store.rows, "used", used)
    with quotas.taking("a") as large, pytest.raises(QuotaReached):
        large(1000 * MIB)
    with quotas.taking("a") as one, quotas.taking("a") as other:
        one(6 * MIB)
        with pytest.raises(QuotaReached, match="has stored 6 MiB of rows, these take 6 MiB more"):
            other(6 * MIB)
        other(4 * MIB)
    assert not quotas._arriving


def test_rows_that_are_stored_while_the_sum_is_read_are_in_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas, read, calls = Quotas(store.rows, 10 * MIB), store.rows.used, []

    def used(owner: str) -> int:
        """An upload ends after the database was read, and before its answer is used."""
        found = read(owner)
        calls.append(found)
        if len(calls) == 2:
            store.rows.note("1" * 64, "a", 8 * MIB, "one")
            first.close()
        return found

    monkeypatch.setattr(store.rows, "used", used)
    first = ExitStack()
    first.enter_context(quotas.taking("a"))(8 * MIB)
    with quotas.taking("a") as take, pytest.raises(QuotaReached, match="has stored 8 MiB"):
        take(3 * MIB)
    assert calls == [0, 0, 8 * MIB]


def test_a_token_has_no_more_uploads_under_way_than_it_may_and_others_are_not_concerned(store: Store) -> None:
    quotas = Quotas(store.rows, 10 * MIB)
    with ExitStack() as stack:
        for _ in range(UPLOADS):
            stack.enter_context(arriving(quotas, 0))
        with pytest.raises(LimitReached, match=r"'a' has 16 uploads of rows under way.* send this one again") as full:
            stack.enter_context(arriving(quotas, 0))
        assert full.value.retry_after > 0
        stack.enter_context(arriving(quotas, 0, "b"))
    with arriving(quotas, 0):
        pass


def test_an_upload_that_announces_no_size_ends_at_the_quota(store: Store) -> None:
    quotas = Quotas(store.rows, 10 * MIB)
    arrived: list[int] = []

    def upload() -> None:
        with arriving(quotas, 0) as note:
            for number in range(100):
                note(MIB)
                arrived.append(number)

    with pytest.raises(QuotaReached):
        upload()
    assert len(arrived) < 12
    quotas.require("a", 10 * MIB)


def registry_of(store: Store, tmp_path: Path, most: int = MIB) -> DatasetRegistry:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path / "data", "device": "cpu"})
    blobs = Blobs(settings)
    blobs.prepare()
    registry = DatasetRegistry(
        settings,
        blobs,
        counted=CountedRows(blobs, store.rows, Quotas(store.rows, most)),
    )
    registry.prepare()
    return registry


def register(registry: DatasetRegistry, name: str, owner: str = "a", text: str = "a") -> Path:
    rows = [{"prompt": text, "completion": "b"}]
    body = {"dataset_id": name, "purpose": "post-training/messages", "source": {"type": "rows", "rows": rows}}
    made = asyncio.run(registry.register(RegisterDataset.model_validate(body), created_by=owner))
    return registry._blobs.path(made.metadata["sha256"])


def fails(*_: object) -> NoReturn:
    raise StoreError("database is locked")


def test_rows_that_were_not_counted_when_the_service_ended_count_after_its_next_start(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = register(registry_of(store, tmp_path), "counted", text="c").stat().st_size
    registry = registry_of(store, tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr(store.rows, "note", fails)  # between the dataset's document and the database
        with pytest.raises(StoreError):
            register(registry, "one")
    assert store.rows.used("a") == counted
    for _ in range(2):
        registry = registry_of(store, tmp_path)
        assert store.rows.used("a") == counted + registry._blobs.path(sha256_of(registry, "one")).stat().st_size


def sha256_of(registry: DatasetRegistry, name: str) -> str:
    return str(registry.get(name).metadata["sha256"])


def test_rows_of_a_dataset_are_kept_where_the_database_could_not_record_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_of(store, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(store.rows, "note", fails)
        with pytest.raises(StoreError):
            register(registry, "one")
    [path] = registry._blobs.directory.glob("*.jsonl")
    assert registry.holds("one")
    registry = registry_of(store, tmp_path)  # the service was restarted
    register(registry, "other", text="c")
    with pytest.raises(Conflict):
        register(registry, "other")
    assert path.exists()
    with pytest.raises(QuotaReached):
        register(registry_of(store, tmp_path, most=0), "two", "b")
    assert path.exists()
    registry = registry_of(store, tmp_path)
    register(registry, "two", "b")
    registry.delete("two")
    assert path.exists()
    register(registry, "one")  # a retry records them
    registry.delete("one")
    assert not path.exists()


def test_a_delete_that_the_database_refused_is_finished_by_the_next_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_of(store, tmp_path)
    path = register(registry, "one")
    with monkeypatch.context() as broken:
        broken.setattr(store.rows, "release", fails)
        with pytest.raises(StoreError):
            registry.delete("one")
    assert store.rows.used("a") > 0
    with pytest.raises(NotFound):
        registry.delete("one")
    assert (store.rows.used("a"), path.exists()) == (0, False)


@pytest.mark.parametrize("refusal", [QuotaReached, Conflict, None], ids=["quota", "conflict", "deleted"])
@pytest.mark.parametrize("later", ["registered", "uploaded"])
def test_a_refusal_leaves_the_rows_that_another_request_has_stored_and_not_recorded_yet(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[Exception] | None, later: str
) -> None:
    """The other request, of b, is stopped when its rows are stored, and before anything mentions them."""
    registry, ended = registry_of(store, tmp_path), []
    if refusal is QuotaReached:
        store.rows.note("f" * 64, "a", MIB)
    elif refusal is Conflict:
        register(registry, "taken", "b", text="another")
    else:
        register(registry, "deleted")

    def meanwhile() -> None:
        if ended:
            return
        ended.append(True)
        if refusal is None:
            registry.delete("deleted")
        else:
            with pytest.raises(refusal):
                register(registry, "taken")

    claim, keep, blobs = registry._claim, registry._blobs.keep, registry._blobs
    if later == "registered":

        def stopped(entry: Any) -> Any:
            if entry.created_by == "b":
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(meanwhile).result(20)
            return claim(entry)

        monkeypatch.setattr(registry, "_claim", stopped)
        path = register(registry, "ours", "b")
    else:
        body = put_rows(tmp_path / "sent", [{"prompt": "a", "completion": "b"}]).path.read_bytes()

        def stopped_upload(file: Path, sha256: str) -> None:
            keep(file, sha256)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(meanwhile).result(20)

        monkeypatch.setattr(blobs, "keep", stopped_upload)
        if refusal is None:
            registry._blobs.path(hashlib.sha256(body).hexdigest()).unlink()  # so that it is sent again
        uploads = RowUploads(blobs, registry._counted, registry._counted._quotas)

        async def stream() -> AsyncIterator[bytes]:
            yield body

        request: Any = SimpleNamespace(scope={BODY: SimpleNamespace(announced=len(body))}, stream=stream)
        path = blobs.path(hashlib.sha256(body).hexdigest())
        assert asyncio.run(put_blob(uploads, path.stem, request, Caller("submit", "b"))).status_code == 201
    assert ended
    assert path.exists()
    assert store.rows.owns(path.stem, "b")
    assert not registry._counted._held


def test_of_two_refusals_of_the_same_rows_the_last_one_removes_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, ended = registry_of(store, tmp_path), []
    for name in ("one", "two"):
        register(registry, name, "c", text="another")
    claim = registry._claim

    def stopped(entry: Any) -> Any:
        if not ended:
            ended.append(True)
            with ThreadPoolExecutor(1) as thread, pytest.raises(Conflict):
                thread.submit(register, registry, "two", "a").result(20)
            assert len([*registry._blobs.directory.glob("*.jsonl")]) == 2
        return claim(entry)

    monkeypatch.setattr(registry, "_claim", stopped)
    with pytest.raises(Conflict):
        register(registry, "one", "b")
    assert len([*registry._blobs.directory.glob("*.jsonl")]) == 1


def test_a_request_that_ends_waits_for_no_transaction_and_holds_nothing_afterwards(
    store: Store, tmp_path: Path
) -> None:
    """It ends on the event loop."""
    counted = registry_of(store, tmp_path)._counted
    with counted.holding() as held:
        held.add("1" * 64)
        counted._removing.acquire()  # as another request, which waits for the database
    counted._removing.release()
    held.add("2" * 64)  # by a thread that it has left behind
    assert not counted._held
