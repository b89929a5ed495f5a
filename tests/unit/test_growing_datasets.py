"""Datasets that grow row by row, and the prompts of stored rows."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, QuotaReached, StoreError
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import RowNames
from llama_stack_provider_trl.specs.row_prompts import MOST_CHARACTERS, _prompt
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote.service.datasets import registry as registry_module
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs, Converted
from llama_stack_provider_trl_remote.service.datasets.quotas import CountedRows, HeldRows, Quotas
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry, Growth
from llama_stack_provider_trl_remote.service.datasets.uris import Readable
from llama_stack_provider_trl_remote.service.datasets.votes import row_of
from llama_stack_provider_trl_remote.service.http.chat_bodies import ChatBody, VoteBody
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset, RowsSource, UriSource
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.service.serving.chats import Chats
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

GROWTH = Growth(mark="votes", most_rows=10, most_bytes=1 << 12)


@pytest.fixture
def registry(store: Store, tmp_path: Path) -> DatasetRegistry:
    return registry_of(store, tmp_path)


def registry_of(store: Store, tmp_path: Path) -> DatasetRegistry:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path / "data", "device": "cpu"})
    blobs = Blobs(settings)
    blobs.prepare()
    counted = CountedRows(blobs, store.rows, Quotas(store.rows, 1 << 13))
    registry = DatasetRegistry(settings, blobs, counted=counted)
    registry.prepare()
    return registry


def add(registry: DatasetRegistry, row: dict[str, Any], name: str = "d", owner: str = "a") -> int:
    return asyncio.run(registry.add_row(name, row, GROWTH, owner))


def rows_of(registry: DatasetRegistry, name: str = "d") -> list[Any]:
    path = registry._blobs.path(asyncio.run(registry.rows_of(name)))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_dataset_grows_by_each_new_row_and_keeps_few_of_its_earlier_files(
    registry: DatasetRegistry, store: Store, tmp_path: Path
) -> None:
    rows = [{"n": number} for number in range(10)]
    assert [add(registry, row) for row in rows] == [*range(1, 11)]
    assert add(registry, rows[0]) == add(registry, rows[9]) == 10
    assert rows_of(registry) == rows
    assert registry.get("d").metadata["num_rows"] == 10
    assert rows_of(registry_of(store, tmp_path)) == rows
    assert len(list(registry._blobs.directory.glob("*.jsonl"))) == 4
    with pytest.raises(Conflict, match="may have 10 rows"):
        add(registry, {"n": 10})
    registry.delete("d")
    assert store.rows.used("a") == 0
    assert not list(registry._blobs.directory.glob("*.jsonl"))


def test_a_file_that_would_be_too_large_and_one_that_was_not_begun_by_a_row_do_not_grow(
    registry: DatasetRegistry,
) -> None:
    add(registry, {"n": "x" * 2000})
    with pytest.raises(Conflict, match="choose another name"):
        add(registry, {"n": "y" * 3000})
    assert len(rows_of(registry)) == 1
    other = Growth(mark="others", most_rows=10, most_bytes=1 << 12)
    with pytest.raises(Conflict, match="has other rows"):
        asyncio.run(registry.add_row("d", {"n": 1}, other, "a"))


def test_rows_count_for_the_caller_of_the_first_one(registry: DatasetRegistry, store: Store) -> None:
    add(registry, {"n": "x" * 1500})
    add(registry, {"n": "y" * 1500}, owner="b")
    with pytest.raises(QuotaReached):
        add(registry, {"n": "z" * 900}, owner="b")
    assert store.rows.used("b") == 0
    assert store.rows.used("a") <= 1 << 13


def test_a_disk_that_is_full_keeps_the_rows_that_are_there(
    registry: DatasetRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(registry, {"n": 1})

    def full(announced: int) -> None:
        assert announced > 0
        raise OSError(28, "no space")

    monkeypatch.setattr(registry._blobs, "check_space", full)
    with pytest.raises(StoreError, match="no space"):
        add(registry, {"n": 2})
    assert rows_of(registry) == [{"n": 1}]


def test_rows_that_are_added_at_once_are_all_there(registry: DatasetRegistry) -> None:
    async def together() -> None:
        await asyncio.gather(*(registry.add_row("d", {"n": number}, GROWTH, "a") for number in range(8)))

    asyncio.run(together())
    assert sorted(row["n"] for row in rows_of(registry)) == [*range(8)]


def test_only_a_dataset_that_a_row_began_grows_whatever_its_metadata_says(registry: DatasetRegistry) -> None:
    source = RowsSource(type="rows", rows=[{"n": 0}])
    body = RegisterDataset(dataset_id="d", source=source, metadata={"votes": True})
    asyncio.run(registry.register(body, created_by="a"))
    with pytest.raises(Conflict, match="has other rows"):
        add(registry, {"n": 1})
    assert registry.count("d", GROWTH) == 0
    assert add(registry, {"n": 1}, "e") == registry.count("e", GROWTH) == 1


def test_the_first_row_is_answered_when_its_document_is_on_the_disk(
    registry: DatasetRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(registry_module, "fsync_path", synced.append)
    add(registry, {"n": 1})
    assert synced == [registry._directory]


def test_a_look_at_rows_asks_no_source_and_a_changed_source_leaves_few_old_rows(
    registry: DatasetRegistry, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = RegisterDataset(dataset_id="d", source=UriSource(type="uri", uri="s3://team/rows.jsonl"))
    monkeypatch.setattr(registry, "_readable", lambda uri: Readable(uri, None))
    asyncio.run(registry.register(body, created_by="a"))
    reads: list[str] = []

    async def read(found: Readable, held: HeldRows, known: str | None) -> Converted:
        reads.append(found.name)
        blob = put_rows(registry._blobs.directory, [{"n": len(reads)}], storing=held.add)
        return Converted(blob.sha256, blob.num_rows, str(len(reads)))

    monkeypatch.setattr(registry, "_converted", read)
    for _ in range(7):
        current = asyncio.run(registry.rows_of("d"))
    assert len(reads) == 7
    assert asyncio.run(registry.rows_of("d", is_current=False)) == current
    assert len(reads) == 7
    assert len(store.rows.of_dataset("d")) == len(list(registry._blobs.directory.glob("*.jsonl"))) == 4
    registry._blobs.path(current).unlink()
    registry._blobs.forget(current)
    asyncio.run(registry.rows_of("d", is_current=False))
    assert len(reads) == 8


def test_more_answers_than_chats_at_a_time_are_a_bad_request(tmp_path: Path) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path / "data", "device": "cpu", "max_chats": 2})
    chats = Chats(settings, None, None)  # type: ignore[arg-type]
    body = ChatBody(model="m", messages=[{"role": "user", "content": "x"}], n=3)
    with pytest.raises(InvalidRequest, match=r"^n=3 .*max_chats of the service is 2"):
        asyncio.run(chats.begin(body, "a"))


def test_a_vote_with_a_key_that_chats_refuse_is_refused_by_name() -> None:
    messages = [{"role": "user", "content": "x", "weird": 3}]
    body = VoteBody(dataset_id="d", messages=messages, chosen="a", rejected="b")
    with pytest.raises(InvalidRequest, match=r"messages\.0\.weird=3"):
        row_of(body)


PNG = b"\x89PNG\r\n\x1a\n"
PICTURE = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
}


def test_a_vote_on_a_question_with_an_image_is_refused() -> None:
    body = VoteBody(dataset_id="d", messages=[{"role": "user", "content": [PICTURE]}], chosen="a", rejected="b")
    with pytest.raises(InvalidRequest, match=r"they have images, expected text alone"):
        row_of(body)


def prompt(tmp_path: Path, row: Any, number: int = 1, names: RowNames | None = None) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "first"}\n' + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    (found,) = _prompt(path, number, names)
    return found


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"messages": [USER, {"role": "assistant", "content": "b"}]},
        {
            "chosen": [USER, {"role": "assistant", "content": "b"}],
            "rejected": [USER, {"role": "assistant", "content": "c"}],
        },
        {"question": "a", "answer": "b"},
    ],
)
def test_a_row_of_any_shape_with_a_prompt_has_it(tmp_path: Path, row: Any) -> None:
    assert prompt(tmp_path, row) == {"messages": [USER], "num_rows": 0, "error": None}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "a"}, "row 1: found the columns text"),
        ("{", "row 1: is not JSON"),
        ({"prompt": "a" * (MOST_CHARACTERS + 1)}, "row 1: its prompt has"),
        (
            {"prompt": [{"role": "user", "content": [PICTURE]}], "chosen": "b", "rejected": "c"},
            "row 1: its prompt has images, expected text alone",
        ),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path: Path, row: Any, sentence: str) -> None:
    found = prompt(tmp_path, row)
    assert (found["messages"], sentence in found["error"]) == ([], True), found


def test_a_row_behind_the_last_one_is_none_and_names_of_columns_are_those_of_a_job(tmp_path: Path) -> None:
    assert prompt(tmp_path, {"prompt": "a"}, 2) == {"messages": [], "num_rows": 2, "error": None}
    assert prompt(tmp_path, {"prompt": "a"}, 9)["num_rows"] == 2
    names = RowNames(columns={"prompt": "frage"}, system="Be brief.")
    found = prompt(tmp_path, {"frage": "a"}, names=names)
    assert found["messages"] == [{"role": "system", "content": "Be brief."}, USER]


def test_lists_and_unknown_names_wait_for_no_registration(registry: DatasetRegistry) -> None:
    """It waits for disks, and for other writers of the database."""
    add(registry, {"a": 1})
    found = list[Any]()

    def read() -> None:
        found.append(json.loads(registry.page(10))["data"][0]["identifier"])
        found.append([place.name for place in registry.places("d")] + registry.names())
        with pytest.raises(NotFound):
            registry.get("unknown")
        found.append(registry.get("d").identifier)

    reading = threading.Thread(target=read, daemon=True)
    with registry._registering:
        reading.start()
        reading.join(10)
    assert found == ["d", ["d", "d"], "d"]
