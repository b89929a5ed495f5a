"""Lists have pages and limits, so that none grows with what others have stored."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.records import PointRecord
from llama_stack_provider_trl_remote.client import ServiceClient, Timeouts
from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset, RowsSource
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.service.http.places import ListPlace, page_of
from llama_stack_provider_trl_remote.service.routes.job_files import job_metrics
from llama_stack_provider_trl_remote.service.routes.nodes import nodes
from llama_stack_provider_trl_remote.service.routes.tokens import list_tokens
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

WITHOUT_PAGES = {
    "/pools": "the configuration has the pools, and each shows its current requests and the last 20",
    "/post-training/jobs/{job_uuid}/artifacts": "the checkpoints of one job, which its save_steps and its disk bound",
    "/post-training/job/artifacts": "as above",
    "/post-training/jobs/{job_uuid}/checkpoints": "as above",
    "/post-training/jobs/{job_uuid}/checkpoints/{identifier}": "the files of one checkpoint",
    "/post-training/jobs/{job_uuid}/status": "one job",
    "/post-training/job/status": "one job",
    "/post-training/jobs/{job_uuid}/series": "`points` bounds each curve",
    "/post-training/events": "`job` names at most 100 jobs",
    "/datasets/{dataset_id}": "one dataset, whose name, source and metadata are bounded",
    "/nodes/{name}": "one node, whose report is bounded",
    "/nodes/{name}/load": "the minutes that are kept of one node",
}
"""Calls that answer with a list and have no pages -> what bounds them."""


def _has_list(schema: Any, schemas: dict[str, Any], depth: int = 0) -> bool:
    """Whether an answer of this schema may hold a list, at any depth."""
    if depth > 12:
        return False
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            return True
        if reference := schema.get("$ref"):
            return _has_list(schemas[reference.rpartition("/")[2]], schemas, depth + 1)
        return any(_has_list(value, schemas, depth + 1) for value in schema.values())
    if isinstance(schema, list):
        return any(_has_list(value, schemas, depth + 1) for value in schema)
    return False


def test_every_call_that_answers_with_a_list_has_pages_or_a_reason(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    service = Service(ServiceSettings(data_dir=tmp_path))
    document = make_app(service).openapi()
    schemas = document["components"]["schemas"]
    without = set()
    for path, calls in document["paths"].items():
        call = calls.get("get", {})
        content = call.get("responses", {}).get("200", {}).get("content", {})
        if not _has_list(content.get("application/json", {}).get("schema"), schemas):
            continue
        limits = [one["schema"] for one in call.get("parameters", ()) if one["name"] == "limit"]
        if not limits:
            without.add("/" + path.partition("/v")[2].partition("/")[2])
        for limit in limits:
            assert 1 <= limit["default"] <= limit["maximum"] <= 10_000, path
    assert without == WITHOUT_PAGES.keys()
    service.stop()


def _registry(root: Path, **settings: Any) -> DatasetRegistry:
    configured = ServiceSettings(data_dir=root, min_free_disk_mb=1, **settings)
    blobs = Blobs(configured)
    blobs.prepare()
    registry = DatasetRegistry(configured, blobs)
    registry.prepare()
    return registry


def _register(registry: DatasetRegistry, name: str, caller: str = "", **more: Any) -> None:
    body = RegisterDataset(dataset_id=name, source=RowsSource(type="rows", rows=[{"text": "a"}]), **more)
    asyncio.run(registry.register(body, created_by=caller))


def test_pages_of_datasets_have_each_once_while_others_come_and_go(tmp_path: Path) -> None:
    registry = _registry(tmp_path)
    for number in range(7):
        _register(registry, f"set-{number}")
    first = json.loads(registry.page(3))
    registry.delete("set-2")  # the cursor's
    registry.delete("set-4")
    _register(registry, "set-7")
    second = json.loads(registry.page(3, first["next"]))
    third = json.loads(registry.page(3, second["next"]))
    names = [[one["identifier"] for one in page["data"]] for page in (first, second, third)]
    assert names == [["set-0", "set-1", "set-2"], ["set-3", "set-5", "set-6"], ["set-7"]]
    assert third["next"] is None
    again = _registry(tmp_path)  # another service on the same directory
    assert [one["identifier"] for one in json.loads(again.page(100))["data"]] == [
        *("set-0", "set-1", "set-3", "set-5", "set-6", "set-7")
    ]
    with pytest.raises(InvalidRequest, match="after='set-1' is not supported: expected `next` of the page before"):
        registry.page(3, "set-1")


def test_no_call_reads_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = _registry(tmp_path)
    _register(registry, "questions")
    monkeypatch.setattr(Path, "glob", None)
    monkeypatch.setattr(Path, "iterdir", None)
    monkeypatch.setattr(os, "scandir", None)
    _register(registry, "answers")
    assert registry.names() == ["questions", "answers"]
    assert len(json.loads(registry.page(10))["data"]) == 2
    assert registry.holds("answers")
    registry.delete("answers")
    assert not registry.holds("answers")
    with pytest.raises(NotFound):
        registry.delete("answers")


def test_a_token_registers_so_many_datasets_and_another_one_as_many(tmp_path: Path) -> None:
    registry = _registry(tmp_path, max_datasets=2)
    for name in ("one", "two", "two"):
        _register(registry, name, "client")
    with pytest.raises(
        Conflict, match="has registered 2 datasets, and max_datasets allows no more: delete some that no job needs"
    ):
        _register(registry, "three", "client")
    _register(registry, "three", "another")
    registry.delete("one")
    _register(registry, "four", "client")
    with pytest.raises(Conflict, match="max_datasets"):
        _register(_registry(tmp_path, max_datasets=2), "five", "client")


def test_a_page_ends_early_where_its_datasets_are_large(tmp_path: Path) -> None:
    registry = _registry(tmp_path)
    for number in range(100):
        _register(registry, f"set-{number:03}", metadata={"note": "x" * (60 << 10)})
    page = registry.page(1000)
    assert len(page) < 5 << 20
    assert json.loads(page)["next"]


@pytest.mark.parametrize("gone", ["the cursor's", "one before it", "one behind it", "all but the last"])
def test_a_page_continues_behind_an_entry_that_is_gone(gone: str) -> None:
    rows = [ListPlace(0.0, "head"), *(ListPlace(float(number), f"node-{number}") for number in range(1, 6))]
    pages, after = [], None
    while not pages or after is not None:
        page, after = page_of(rows[::-1], lambda place: place, 2, after)
        pages.append([place.name for place in page])
    assert pages == [["head", "node-1"], ["node-2", "node-3"], ["node-4", "node-5"]]
    assert page_of([], lambda place: place, 2, None) == ([], None)
    _, after = page_of(rows, lambda place: place, 3, None)
    removed = {"the cursor's": [2], "one before it": [1], "one behind it": [3], "all but the last": [0, 1, 2, 3, 4]}
    left = [place for number, place in enumerate(rows) if number not in removed[gone]]
    page, last = page_of(left, lambda place: place, 10, after)
    assert ([place.name for place in page], last) == ([row.name for row in left if row > rows[2]], None)
    with pytest.raises(InvalidRequest, match="after='node-9' is not supported: expected `next` of the page before"):
        page_of(rows, lambda place: place, 2, "node-9")


def test_pages_of_tokens_and_nodes_continue_when_the_entry_of_their_cursor_is_deleted(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    tokens = [{"token": f"{name:x>32}", "name": name, "role": "submit"} for name in ("b", "a")]
    service = Service(ServiceSettings.model_validate({"data_dir": tmp_path, "tokens": tokens}))
    for name in ("e", "d", "c"):
        service.tokens.create(name, "submit", "a")
    first = json.loads(asyncio.run(list_tokens(service.tokens, service.settings, 3, None)).body)
    assert [row["name"] for row in first["data"]] == ["a", "b", "e"]
    service.tokens.revoke("e")
    second = json.loads(asyncio.run(list_tokens(service.tokens, service.settings, 3, first["next"])).body)
    assert ([row["name"] for row in second["data"]], second["next"]) == (["d", "c"], None)
    for name in ("z", "y", "x"):
        service.store.nodes.join(name, "machine", "boot", "{}")
    first = json.loads(asyncio.run(nodes(service.node_rows, 2, None)).body)
    assert [row["node"] for row in first["data"]] == [service.node_name, "x"]
    service.nodes.remove("x")
    second = json.loads(asyncio.run(nodes(service.node_rows, 5, first["next"])).body)
    assert ([row["node"] for row in second["data"]], second["next"]) == (["y", "z"], None)
    service.stop()


def test_pages_of_metric_points_never_divide_a_step() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    kinds = [("train", step) for step in range(15)] + [("validation", step) for step in range(0, 15, 2)]
    points = [
        PointRecord(kind=kind, step=step, epoch=0.0, time=at, metrics={})
        for kind, step in sorted(kinds, key=lambda one: (one[1], one[0]))
    ]

    def stored(job_uuid: str, after: int, limit: int) -> list[PointRecord]:
        return [point for point in points if point.step > after][:limit]

    store: Any = SimpleNamespace(points=stored)
    found: list[Any] = []
    after: int | None = -1
    while after is not None:
        page = json.loads(bytes(asyncio.run(job_metrics(store, "job", after, 10)).body))
        assert 0 < len(page["data"]) <= 10
        found += page["data"]
        after = page["next"]
    assert [(one["kind"], one["step"]) for one in found] == [(point.kind, point.step) for point in points]


def test_clients_read_all_pages_and_end_where_a_service_repeats_itself() -> None:
    client = ServiceClient("http://127.0.0.1:1", "", Timeouts())
    calls: list[Any] = []

    async def get(path: str, **params: Any) -> Any:
        calls.append(params.get("after"))
        return {"data": [len(calls)], "next": f"page-{len(calls)}" if len(calls) < 3 else None}

    client.get = get  # type: ignore[method-assign]
    assert asyncio.run(client.get_all("/v1/nodes", limit=1))["data"] == [1, 2, 3]
    assert calls == [None, "page-1", "page-2"]

    async def empty(path: str, **params: Any) -> Any:
        return {"data": [], "next": "again"}

    client.get = empty  # type: ignore[method-assign]
    assert asyncio.run(client.get_all("/v1/nodes"))["data"] == []
