"""What nodes bring: logs and checkpoints, whole or not at all, whichever other node sends them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, LimitReached
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Failed, Progress, Reason
from llama_stack_provider_trl.system.files import MANIFEST, RunDir, file_names, write_manifest
from llama_stack_provider_trl_remote.service import space
from llama_stack_provider_trl_remote.service.cluster import uploads as module
from llama_stack_provider_trl_remote.service.cluster.uploads import UPLOADS, UploadReceiver
from llama_stack_provider_trl_remote.service.http.errors import Gone, NotFound, WrongOffset
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests
from llama_stack_provider_trl_remote.wire import CheckpointFileReport, CheckpointReport
from tests.fakes import job_spec
from tests.orders import write

WEIGHTS = bytes(range(100))
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
EVENT = Progress(step=1, epoch=0.5, metrics={}, peak_memory_bytes=1).model_dump_json().encode()


class Service:
    """One job of nodes b and c, whose attempt is current."""

    def __init__(self, root: Path, **job: Any) -> None:
        self.root, self.run_dir = root, root / "jobs" / "a" / "attempts" / "1"
        self.run_dir.mkdir(parents=True)
        self.store, self.digests = Store(root / "jobs.db"), Digests()
        self.uploads = UploadReceiver(self.store, self.digests)
        self.checkpoints = root / "out"
        self.store.add_job(job_spec("a", checkpoint_dir=self.checkpoints, min_free_bytes=1000, **job), "digest")
        self.store.launch("a", 1, "b/cpu,c/cpu", self.run_dir)
        self.store.tasks.add(
            NodeTaskRecord("a-1", node, "a", 1, rank, (f"{node}/cpu",), "run", "{}", None, None, False)
            for rank, node in enumerate("bc")
        )

    def written(self, name: str = "checkpoint-2") -> Path:
        """A checkpoint as its node has it."""
        path = self.root / "node" / name
        write(path / "additional_chat_templates" / "a.jinja", WEIGHTS)
        write_manifest(path)
        return path

    def reported(self, path: Path, kind: Any = "step") -> CheckpointReport:
        files = [
            CheckpointFileReport(path=name, size=(path / name).stat().st_size, sha256=sha256(path / name))
            for name in file_names(path)
        ]
        return CheckpointReport(kind=kind, files=tuple(files))

    def ask(self, path: Path, kind: Any = "step") -> tuple[str, ...]:
        return self.uploads.ask("a-1", "b", path.name, self.reported(path, kind)).missing

    def send(self, path: Path, name: str, offset: int = 0, data: bytes | None = None) -> int:
        data = (path / name).read_bytes()[offset:] if data is None else data
        return asyncio.run(self.receive(path, name, offset, data))

    async def receive(self, path: Path, name: str, offset: int, *data: bytes) -> int:
        return await self.begin(path, name, offset, pieces(*data))

    async def begin(self, path: Path, name: str, offset: int, coming: AsyncIterator[bytes]) -> int:
        return await self.uploads.receive("a-1", "b", path.name, name, sha256(path / name), offset, coming)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.digests.close()
    service.store.close()


def test_a_checkpoint_is_in_place_once_all_of_it_is_here(service: Service) -> None:
    written = service.written()
    place = service.checkpoints / "checkpoint-2"
    assert set(service.ask(written)) == {"additional_chat_templates/a.jinja", MANIFEST}
    assert service.send(written, "additional_chat_templates/a.jinja") == 100
    assert service.ask(written) == (MANIFEST,)
    assert not place.exists()
    service.send(written, MANIFEST)
    assert service.ask(written) == ()
    assert (place / "additional_chat_templates" / "a.jinja").read_bytes() == WEIGHTS
    assert (service.checkpoints / "latest").read_text() == "checkpoint-2\n"
    assert sorted(path.name for path in service.checkpoints.iterdir()) == ["checkpoint-2", "latest"]
    assert service.ask(written) == ()  # its answer was lost
    assert not list(service.checkpoints.glob("*.tmp"))


def test_the_export_cannot_be_resumed_from(service: Service) -> None:
    written = service.written("final")
    for name in service.ask(written, "final"):
        service.send(written, name)
    assert service.ask(written, "final") == ()
    assert [path.name for path in service.checkpoints.iterdir()] == ["final"]


@pytest.mark.parametrize("lost", ["additional_chat_templates/a.jinja", MANIFEST])
def test_an_incomplete_checkpoint_is_uploaded_again(service: Service, lost: str) -> None:
    written = service.written()
    for name in service.ask(written):
        service.send(written, name)
    service.ask(written)
    (service.checkpoints / "checkpoint-2" / lost).unlink()
    assert set(service.ask(written)) == {"additional_chat_templates/a.jinja", MANIFEST}


def test_a_checkpoint_that_its_own_manifest_does_not_know_so_is_refused(service: Service) -> None:
    written = service.written()
    write(written / "additional_chat_templates" / "a.jinja", WEIGHTS[:-1])
    for name in service.ask(written):
        service.send(written, name)
    with pytest.raises(InvalidRequest, match=r"it is incomplete: additional_chat_templates/a\.jinja has 99 bytes"):
        service.ask(written)
    assert not (service.checkpoints / "checkpoint-2").exists()


def test_a_file_cannot_be_named_twice_nor_the_manifest_left_out(service: Service) -> None:
    report = service.reported(service.written())
    for files, reported_text in ((report.files * 2, "each name once"), (report.files[:1], "send all files of it")):
        with pytest.raises(InvalidRequest, match=reported_text):
            service.uploads.ask("a-1", "b", "checkpoint-2", CheckpointReport(kind="step", files=files))


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("final", "step", "model.safetensors"),
        ("checkpoint-x", "step", "model.safetensors"),
        ("checkpoint-2", "final", "model.safetensors"),
        ("checkpoint-2", "step", "../a.jinja"),
        ("checkpoint-2", "step", "/etc/model.safetensors"),
    ],
)
def test_names_that_no_checkpoint_has_are_refused(service: Service, name: str, kind: Any, path: str) -> None:
    files = tuple(CheckpointFileReport(path=one, size=1, sha256=SHA256) for one in (MANIFEST, path))
    with pytest.raises(InvalidRequest):
        service.uploads.ask("a-1", "b", name, CheckpointReport(kind=kind, files=files))


@pytest.mark.parametrize(
    ("path", "reported_text"),
    [
        ("optimizer/.metadata", "can run code when they are read"),
        ("optimizer/__0_0.distcp", "can run code when they are read"),
        ("rng_state.pth", "can run code when they are read"),
        ("training_args.bin", "a checkpoint holds safetensors, JSON"),
        ("pytorch_model.bin", "a checkpoint holds safetensors, JSON"),
        ("modeling_own.py", "a checkpoint holds code only where the job's model is named in trust_remote_code"),
        (".config.json", "a checkpoint holds safetensors, JSON"),
        ("data/config.json", "a checkpoint holds safetensors, JSON"),
    ],
)
def test_a_checkpoint_that_holds_more_than_data_is_refused_before_a_byte_of_it_is_sent(
    service: Service, path: str, reported_text: str
) -> None:
    files = tuple(CheckpointFileReport(path=one, size=1, sha256=SHA256) for one in (MANIFEST, path))
    with pytest.raises(InvalidRequest, match=reported_text) as refused:
        service.uploads.ask("a-1", "b", "checkpoint-2", CheckpointReport(kind="step", files=files))
    assert refused.value.value == path
    assert not service.checkpoints.exists()


def test_code_comes_only_with_a_model_whose_code_the_operator_trusts(tmp_path: Path) -> None:
    report = CheckpointReport(
        kind="final",
        files=tuple(CheckpointFileReport(path=one, size=1, sha256=SHA256) for one in (MANIFEST, "modeling_own.py")),
    )
    service = Service(tmp_path, trust_remote_code=True)
    assert set(service.uploads.ask("a-1", "b", "final", report).missing) == {MANIFEST, "modeling_own.py"}
    service.digests.close()
    service.store.close()


def test_a_file_of_a_checkpoint_is_written_nowhere_else(service: Service) -> None:
    written = service.written()
    service.ask(written)
    with pytest.raises(NotFound, match="is not the name of a checkpoint"):
        asyncio.run(service.uploads.receive("a-1", "b", "../other", "model.safetensors", SHA256, 0, pieces(WEIGHTS)))
    (requested,) = service.checkpoints.glob("*/report.json")
    requested.write_text(
        requested.read_text().replace("additional_chat_templates/a.jinja", "../a.jinja")
    )  # by who sees this disk
    with pytest.raises(InvalidRequest, match=r"without '\.\.'"):
        asyncio.run(service.uploads.receive("a-1", "b", "checkpoint-2", "../a.jinja", SHA256, 0, pieces(WEIGHTS)))
    assert list(service.root.rglob("a.jinja")) == [written / "additional_chat_templates" / "a.jinja"]


def test_a_file_is_on_the_disk_before_it_counts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    written = service.written()
    service.ask(written)
    monkeypatch.setattr(module.os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(module.os, "replace", lambda *paths, **at: (done.append("replace"), replace(*paths, **at)))
    service.send(written, "additional_chat_templates/a.jinja")
    assert done == ["fsync", "replace"]


def test_two_that_ask_at_once_put_it_in_place_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    written = service.written()
    for name in service.ask(written):
        service.send(written, name)
    inside, release, put = threading.Event(), threading.Event(), module.fsync_tree
    placed: list[Path] = []

    def slowly(path: Path) -> None:
        placed.append(path)
        inside.set()
        assert release.wait(60)
        put(path)

    monkeypatch.setattr(module, "fsync_tree", slowly)
    answers: list[tuple[str, ...]] = []
    asking = [threading.Thread(target=lambda: answers.append(service.ask(written))) for _ in range(2)]
    asking[0].start()
    assert inside.wait(60)
    asking[1].start()
    asking[1].join(0.05)  # it waits for the first
    release.set()
    for one in asking:
        one.join(60)
    assert (answers, len(placed)) == ([(), ()], 1)


# One file


def test_a_file_comes_in_parts_and_counts_once_it_is_whole(service: Service) -> None:
    written = service.written()
    service.ask(written)
    assert service.send(written, "additional_chat_templates/a.jinja", 0, WEIGHTS[:40]) == 40
    assert "additional_chat_templates/a.jinja" in service.ask(written)
    for offset in (0, 39, 41):
        with pytest.raises(WrongOffset) as caught:
            service.send(written, "additional_chat_templates/a.jinja", offset)
        assert caught.value.offset == 40
    assert service.send(written, "additional_chat_templates/a.jinja", 40) == 100
    assert service.ask(written) == (MANIFEST,)
    assert service.send(written, "additional_chat_templates/a.jinja", 0, b"twice") == 100  # it is here: nothing is read
    assert not service.uploads._senders
    assert not service.uploads._requested


def test_a_file_with_another_digest_is_dropped(service: Service) -> None:
    written = service.written()
    service.ask(written)
    with pytest.raises(InvalidRequest, match="nothing was kept, send it again"):
        service.send(written, "additional_chat_templates/a.jinja", 0, b"?" * 100)
    with pytest.raises(InvalidRequest, match="the file has 100"):
        service.send(written, "additional_chat_templates/a.jinja", 0, WEIGHTS + b"?")
    assert service.send(written, "additional_chat_templates/a.jinja") == 100


def test_a_file_that_was_not_requested_is_not_taken(service: Service) -> None:
    written = service.written()
    with pytest.raises(NotFound, match="POST its report first"):
        service.send(written, "additional_chat_templates/a.jinja")
    service.ask(written)
    write(written / "additional_chat_templates" / "a.jinja", b"others")
    with pytest.raises(NotFound, match="POST its report again"):
        service.send(written, "additional_chat_templates/a.jinja")


def test_a_file_that_was_complete_when_the_service_stopped_is_finished_without_a_byte(service: Service) -> None:
    written = service.written()
    service.ask(written)
    write(service.checkpoints / "checkpoint-2.1.tmp" / "parts" / "additional_chat_templates" / "a.jinja", WEIGHTS)
    assert "additional_chat_templates/a.jinja" in service.ask(written)
    with pytest.raises(WrongOffset) as caught:
        service.send(written, "additional_chat_templates/a.jinja")
    assert caught.value.offset == 100
    assert service.send(written, "additional_chat_templates/a.jinja", 100) == 100
    assert service.ask(written) == (MANIFEST,)


def test_of_two_senders_of_a_file_the_last_one_to_begin_writes(service: Service) -> None:
    written = service.written()
    service.ask(written)

    async def run() -> tuple[Any, ...]:
        requested, late = asyncio.Event(), asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            yield WEIGHTS[:30]
            requested.set()
            await late.wait()
            yield b"?" * 30

        first = asyncio.create_task(service.begin(written, "additional_chat_templates/a.jinja", 0, stuck()))
        await requested.wait()

        async def rest() -> AsyncIterator[bytes]:
            yield WEIGHTS[30:50]
            late.set()
            await asyncio.wait([first])
            yield WEIGHTS[50:]

        second = await service.begin(written, "additional_chat_templates/a.jinja", 30, rest())
        return second, *(await asyncio.gather(first, return_exceptions=True))

    second, first = asyncio.run(run())
    assert second == 100
    assert isinstance(first, WrongOffset)
    assert first.offset == 50
    assert service.ask(written) == (MANIFEST,)


def test_one_that_begins_while_the_digest_is_read_may_end_it_first(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = service.written()
    service.ask(written)
    digest = service.uploads._digest
    found: list[Any] = []

    async def slow(path: Path) -> str:
        monkeypatch.setattr(service.uploads, "_digest", digest)
        found.append(await service.receive(written, "additional_chat_templates/a.jinja", 100))
        return await digest(path) if path.exists() else SHA256

    monkeypatch.setattr(service.uploads, "_digest", slow)
    assert service.send(written, "additional_chat_templates/a.jinja") == 100
    assert found == [100]
    assert service.ask(written) == (MANIFEST,)
    assert service.uploads._senders == {}


def test_a_node_has_no_more_uploads_under_way_than_it_may(service: Service) -> None:
    written, name = service.written(), "additional_chat_templates/a.jinja"
    service.ask(written)

    async def run() -> None:
        may_end = asyncio.Event()

        async def nothing() -> AsyncIterator[bytes]:
            await may_end.wait()
            yield b""

        many = [asyncio.ensure_future(service.begin(written, name, 0, nothing())) for _ in range(UPLOADS)]
        await asyncio.sleep(0)
        with pytest.raises(LimitReached, match="'b' has 32 uploads of checkpoints under way"):
            await asyncio.wait_for(service.begin(written, name, 0, nothing()), 10)
        may_end.set()
        await asyncio.gather(*many, return_exceptions=True)
        assert await service.receive(written, name, 0) == 0

    asyncio.run(run())


# Space


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_sent(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = service.written()
    manifest = (written / MANIFEST).stat().st_size
    for free, fits in ((1000 + 100 + manifest, True), (1000 + 100 + manifest - 1, False)):
        monkeypatch.setattr(space, "free_bytes", lambda path, free=free: free)
        if fits:
            service.ask(written)
            continue
        with pytest.raises(OSError, match="are needed") as caught:
            service.ask(written)
        assert caught.value.errno == errno.ENOSPC
    service_has = 100
    monkeypatch.undo()
    assert service.send(written, "additional_chat_templates/a.jinja") == service_has
    monkeypatch.setattr(space, "free_bytes", lambda path: 1000 + manifest)  # of what is here nothing more is needed
    assert service.ask(written) == (MANIFEST,)


def test_a_write_that_the_disk_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file", b"before")
    write_some = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        if offset > 6:
            raise OSError(errno.ENOSPC, "full")
        return write_some(file, data[:3], offset)

    monkeypatch.setattr(module.os, "pwrite", full)
    with module._opened(path) as file, pytest.raises(OSError, match="full"):
        module.write_all(file, 6, b"and more")
    assert path.read_bytes() == b"before"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


# Logs and events


def test_every_node_has_a_torchrun_log_and_no_other_file_is_one(service: Service) -> None:
    for node in "bc":
        assert service.uploads.add_log("a-1", node, "torchrun.log", 0, node.encode()) == 1
    service.uploads.add_log("a-1", "c", "rank-1.log", 0, b"1")
    found = {path.name: path.read_text() for path in service.run_dir.iterdir()}
    assert found == {"torchrun.log": "b", "torchrun-1.log": "c", "rank-1.log": "1"}
    for name in ("spec.json", "rank-1.log.gz", "../rank-1.log", "rank-x.log"):
        with pytest.raises(NotFound):
            service.uploads.add_log("a-1", "b", name, 0, b"x")


@pytest.mark.parametrize("hole", [1, 20, 500])
def test_a_gap_in_a_log_is_noted_in_its_place(service: Service, hole: int) -> None:
    add = service.uploads.add_log
    assert add("a-1", "b", "rank-0.log", 0, b"one\n") == 4
    assert add("a-1", "b", "rank-0.log", 4, b"") == 4
    assert add("a-1", "b", "rank-0.log", 4 + hole, b"later\n") == 10 + hole
    text = (service.run_dir / "rank-0.log").read_text()
    assert text == f"one\n\n[{hole} bytes were left out: the node sent them too late]\nlater\n"
    assert add("a-1", "b", "rank-0.log", 10 + hole, b"more\n") == 15 + hole
    with pytest.raises(WrongOffset):
        add("a-1", "b", "rank-0.log", 3 + hole, b"x")


def test_an_end_that_comes_while_events_do_keeps_them_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that concludes the attempt writes the final line under the same lock."""
    shipping, current = service.uploads, service.uploads.current
    events = RunDir(service.run_dir).events

    def concluded(task_id: str, node: str) -> NodeTaskRecord:
        task = current(task_id, node)
        monkeypatch.setattr(shipping, "current", current)
        service.store.tasks.stop("a-1", "{}")
        shipping.append_event(events, Failed(reason=Reason.rank_failed, message="lost", traceback=""))
        return task

    monkeypatch.setattr(shipping, "current", concluded)
    with pytest.raises((Gone, WrongOffset)):
        shipping.add_events("a-1", "b", 0, b'{"type": "finished", "step": 4}\n')
    (line,) = events.read_bytes().splitlines()
    assert b"lost" in line


def test_events_are_not_taken_after_the_end_though_they_fit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    shipping, current = service.uploads, service.uploads.current

    def stopped(task_id: str, node: str) -> NodeTaskRecord:
        task = current(task_id, node)
        service.store.tasks.stop("a-1", "{}")
        return task

    monkeypatch.setattr(shipping, "current", stopped)
    with pytest.raises(Gone):
        shipping.add_events("a-1", "b", 0, b'{"type": "finished", "step": 4}\n')
    assert RunDir(service.run_dir).events.read_bytes() == b""
    assert service.store.get("a").state is JobState.launching


class Lock:
    """Knows whether it is held."""

    held = False

    def __enter__(self) -> None:
        assert not self.held
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_one_thread_at_a_time_writes_a_file_of_an_attempt(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock()
    written: list[bool] = []

    def noted(write: Any) -> Any:
        def noting(*given: Any) -> Any:
            written.append(lock.held)
            return write(*given)

        return noting

    monkeypatch.setattr(service.uploads, "_lock", lock)
    for name in ("write_all", "append_log", "EventWriter"):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    service.uploads.add_events("a-1", "b", 0, EVENT + b"\n")
    service.uploads.add_log("a-1", "b", "rank-0.log", 0, b"x")
    last = Failed(reason=Reason.rank_failed, message="lost", traceback="")
    service.uploads.append_event(RunDir(service.run_dir).events, last)
    assert written == [True] * 3


def test_half_a_line_is_no_event(service: Service) -> None:
    with pytest.raises(InvalidRequest, match="send whole lines"):
        service.uploads.add_events("a-1", "b", 0, EVENT)
    assert service.uploads.add_events("a-1", "b", 0, b"") == 0


@pytest.mark.parametrize("moment", ["before", "between", "while"])
@pytest.mark.parametrize(
    "link", ["", "files", "parts", "files/additional_chat_templates", "parts/additional_chat_templates", "report.json"]
)
def test_nothing_is_written_through_a_link_where_a_checkpoint_is_received(
    service: Service, link: str, moment: str
) -> None:
    """A training on this machine, or on one that shares the disk, may put it there at any moment."""
    written, elsewhere = service.written(), service.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.jinja").write_text("ours")
    (elsewhere / MANIFEST).write_text("ours")
    place = service.checkpoints / "checkpoint-2.1.tmp" / link
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}

    def exchange() -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
            place.rename(service.root / "exchanged")
        place.symlink_to(elsewhere / MANIFEST if link == "report.json" else elsewhere)

    async def pieces_meanwhile(data: bytes) -> AsyncIterator[bytes]:
        yield data[:10]
        exchange()
        yield data[10:]

    name = "additional_chat_templates/a.jinja"
    with suppress(InvalidRequest, NotFound, WrongOffset):
        if moment == "before":
            exchange()
        service.ask(written)
        if moment == "between":
            exchange()
        data = (written / name).read_bytes()
        coming = pieces_meanwhile(data) if moment == "while" else pieces(data)
        asyncio.run(service.begin(written, name, 0, coming))
        service.send(written, MANIFEST)
        service.ask(written)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert not (service.checkpoints / "checkpoint-2").is_symlink()
    assert elsewhere.is_dir()
