"""The models of a node: found in its cache, fetched from the service, removed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, ServiceUnreachable
from llama_stack_provider_trl.specs.model_files import files_digest
from llama_stack_provider_trl_remote.nodes import models as module
from llama_stack_provider_trl_remote.nodes.localize import PathMap, check_order
from llama_stack_provider_trl_remote.nodes.models import KEEP, KEEP_PARTS, ModelMissing, Models, models_used
from llama_stack_provider_trl_remote.wire import ModelFile, ModelFiles, TaskOrder
from tests.fake_head import FakeHead, away
from tests.orders import order, spec, write
from tests.unit.snapshots import COMMIT, snapshot

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def listed(files: dict[str, bytes] = FILES, model: str = "org/model", **more: Any) -> ModelFiles:
    found = tuple(
        ModelFile(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()
    )
    digest = files_digest((file.path, file.size, file.sha256) for file in found)
    return ModelFiles(model=model, sha256=digest, files=found, **more)


class Node:
    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 1000.0
        self.environ = {"HF_HUB_CACHE": str(root / "hub"), "HF_HUB_OFFLINE": "1"}
        self.head = FakeHead()
        self.head.models = {hashlib.sha256(data).hexdigest(): data for data in FILES.values()}
        self.details: list[str] = []
        self.start()

    def start(self) -> None:
        self.models = Models(self.root / "node", self.environ, lambda: self.now)

    def provide(self, *models: ModelFiles, used: tuple[str, ...] = (), **job: Any) -> dict[str, Path]:
        requested = order(spec=spec(job=job), models=models)
        check_order(requested)
        job_asked = PathMap(requested, self.root / "node").attempt.job
        given = self.models.provide(requested, job_asked, "b", self.head, self.details.append, lambda: used)
        return asyncio.run(given)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_model_is_fetched_once_under_its_digest_and_reported(node: Node) -> None:
    wanted = listed()
    found = node.provide(wanted)
    directory = node.root / "node" / "models" / wanted.sha256
    assert found == {"org/model": directory}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    assert "fetches org/model from the service, 22 % of 0.0 MiB, file 2 of 2: model.safetensors" in node.details
    assert node.models.names() == ["org/model"]
    node.head.calls.clear()
    node.start()
    assert node.provide(wanted) == found
    assert node.head.calls == []
    assert node.provide(listed(model="org/same"), model="org/same") == {"org/same": directory}  # the same bytes
    assert node.models.names() == ["org/model", "org/same"]


def test_the_cache_of_the_node_is_used_where_its_files_are_the_same(node: Node) -> None:
    directory = snapshot(node.root, FILES, model="org/model") / "models--org--model" / "snapshots" / COMMIT
    assert node.provide(listed()) == {"org/model": directory}
    assert node.head.calls == []
    other = listed({**FILES, "config.json": b"[]"})
    node.head.models[hashlib.sha256(b"[]").hexdigest()] = b"[]"
    assert node.provide(other) == {"org/model": node.root / "node" / "models" / other.sha256}


def test_the_commit_of_the_service_is_used_where_the_branch_has_moved_on(node: Node) -> None:
    snapshot(node.root, FILES, model="org/model")
    snapshot(node.root, {**FILES, "config.json": b"[]"}, commit="d" * 40, model="org/model")
    assert node.provide(listed(commit=COMMIT))["org/model"].name == COMMIT
    assert node.head.calls == []


def test_a_path_that_is_the_same_here_stays_and_another_one_is_fetched(node: Node) -> None:
    plain = node.root / "plain"
    for name, data in FILES.items():
        write(plain / name, data)
    wanted = listed(model=str(plain))
    assert node.provide(wanted, model=str(plain)) == {}
    write(plain / "config.json", b"[]")
    assert node.provide(wanted, model=str(plain)) == {str(plain): node.root / "node" / "models" / wanted.sha256}


def test_what_was_compared_is_not_fetched_again_after_an_interruption(node: Node) -> None:
    node.head.only, node.head.trouble = "model model", [away()]
    with pytest.raises(ServiceUnreachable):
        node.provide(listed())
    assert not list((node.root / "node" / "models").glob("?" * 64))
    node.head.calls.clear()
    node.start()  # a new agent
    node.provide(listed())
    assert node.head.calls == ["model model.safetensors"]


def test_a_damaged_copy_is_fetched_again(node: Node) -> None:
    directory = node.provide(listed())["org/model"]
    write(directory / "model.safetensors", b"wEights")
    node.provide(listed())
    assert (directory / "model.safetensors").read_bytes() == b"weights"


def disk(monkeypatch: pytest.MonkeyPatch, node: Node, size: int) -> None:
    """A disk that holds so many bytes of models."""

    def free(_: Path) -> int:
        taken = [path.stat().st_size for path in (node.root / "node" / "models").glob(f"{'?' * 64}/*")]
        return size - sum(taken)

    monkeypatch.setattr(module, "free_bytes", free)


def test_a_disk_without_room_is_named_before_anything_is_fetched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, node, 5)
    with pytest.raises(OSError, match=r"the model org/model takes 0\.0 MiB more in .* of node b, where"):
        node.provide(listed())
    assert node.head.calls == []


def test_room_is_made_by_removing_what_was_used_least_recently(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["org/one", "org/two", "org/three"]
    models = [listed({**FILES, "note.txt": name.encode() * 100}, model=name) for name in names]
    for number, (name, model) in enumerate(zip(names, models, strict=True)):
        data = name.encode() * 100
        node.head.models[hashlib.sha256(data).hexdigest()] = data
        if number < 2:
            node.provide(model, model=name)
            os.utime(node.root / "node" / "models" / f"{model.sha256}.json", (number, number))
    disk(monkeypatch, node, 709 + 709 + 500)  # two models, and less than the third one takes
    node.provide(models[2], model=names[2], used=(models[0].sha256,))
    assert node.models.names() == ["org/one", "org/three"]  # the first one was older, and is in use


def test_a_model_that_a_task_begins_with_while_room_is_made_for_another_one_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = listed(model="org/one"), listed({**FILES, "note.txt": b"x" * 100}, model="org/two")
    node.head.models[hashlib.sha256(b"x" * 100).hexdigest()] = b"x" * 100
    directory = node.provide(first, model="org/one")["org/one"]
    used: list[str] = []

    def full(path: Path) -> int:
        used.append(first.sha256)  # its task begins in the event loop, which does not wait for this thread
        return 0

    monkeypatch.setattr(module, "free_bytes", full)
    requested = order(spec=spec(job={"model": "org/two"}), models=(second,))
    job = PathMap(requested, node.root / "node").attempt.job
    with pytest.raises(OSError, match="takes"):
        asyncio.run(node.models.provide(requested, job, "b", node.head, node.details.append, lambda: tuple(used)))
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES


def test_what_no_attempt_uses_is_removed_after_a_week(node: Node) -> None:
    wanted = listed()
    directory = node.provide(wanted)["org/model"]
    part = write(directory.with_name(f"{'0' * 64}.tmp") / "config.json.part", b"{")
    half_removed = write(directory.with_name(f"{'1' * 64}.old") / "model.safetensors", b"weights").parent
    node.now = part.stat().st_mtime + KEEP_PARTS - 60
    node.models.clean(tuple)
    assert part.exists()
    assert not half_removed.exists()
    node.now += 120
    node.models.clean(tuple)
    assert not part.parent.exists()
    node.now += KEEP
    node.models.clean(lambda: {wanted.sha256})
    assert directory.is_dir()
    node.models.clean(tuple)
    assert not directory.exists()
    assert node.models.names() == []


def test_a_fetched_model_that_a_task_has_found_by_its_name_stays(node: Node) -> None:
    """The order of such a task has no digest: the service does not send the model any more."""
    wanted, gone = listed(), ModelFiles(model="org/model", why_not="it is not on the service's machine")
    directory = node.provide(wanted)["org/model"]
    by_name = order(spec=spec(job={"model": "org/model"}), models=(gone,))
    assert node.provide(gone, model="org/model") == {"org/model": directory}
    assert models_used(PathMap(by_name, node.root)) == {"org/model"}
    assert models_used(PathMap(order(models=(wanted,)), node.root)) == {wanted.sha256}
    assert models_used(PathMap(order(spec={}), node.root)) == set()
    node.now = directory.stat().st_mtime + KEEP + 120
    node.models.clean(lambda: models_used(PathMap(by_name, node.root)))
    assert directory.is_dir()
    node.models.clean(tuple)
    assert not directory.exists()


def test_a_model_that_the_service_does_not_send_is_this_nodes_own_or_missing(node: Node) -> None:
    refused = ModelFiles(model="org/model", why_not="the service does not send it: no")
    expected = r"node b does not have the model org/model in its cache, is offline .* does not send it: no"
    with pytest.raises(ModelMissing, match=expected):
        node.provide(refused)
    with pytest.raises(ModelMissing, match="the model /big is not on node b, and the service does not send it: no"):
        node.provide(ModelFiles(model="/big", why_not="the service does not send it: no"), model="/big")
    fetched = node.provide(listed())
    assert node.provide(refused) == fetched  # the service had it before
    shutil.rmtree(fetched["org/model"])
    snapshot(node.root, FILES, model="org/model")
    assert node.provide(refused) == {}
    node.environ["HF_HUB_OFFLINE"] = "0"
    assert node.provide(ModelFiles(model="org/online", why_not="no"), model="org/online") == {}  # from the hub


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "org/another"}, "models.model"),
        ({"sha256": "0" * 64}, "models.sha256"),
        ({"files": ()}, "models.files"),
        ({"files": (ModelFile(path="modeling.py", size=1, sha256="0" * 64),)}, "models.files"),
        ({"files": (ModelFile(path="../config.json", size=1, sha256="0" * 64),)}, "models.files"),
        ({"files": listed().files * 2}, "models.files"),
    ],
)
def test_an_order_with_other_models_than_its_job_or_other_files_is_refused(changes: Any, field: str) -> None:
    wrong: TaskOrder = order(models=(listed().model_copy(update=changes),))
    with pytest.raises(InvalidRequest, match=field):
        check_order(wrong)
