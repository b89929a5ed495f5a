"""Logs of nodes: whatever offset a node names, the service's disk holds only what it has sent, and a bound of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service import space
from llama_stack_provider_trl_remote.service.cluster.uploads import UploadReceiver
from llama_stack_provider_trl_remote.service.http.errors import NotFound, WrongOffset
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests
from tests.fakes import job_spec

FAR = 1 << 42


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "jobs" / "a" / "attempts" / "1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def shipping(tmp_path: Path, run_dir: Path) -> Iterator[UploadReceiver]:
    """Of a service with one task, of one rank, on node b."""
    store, digests = Store(tmp_path / "jobs.db"), Digests()
    store.add_job(job_spec("a", checkpoint_dir=tmp_path / "checkpoints" / "out", min_free_bytes=1 << 20), "digest")
    store.launch("a", 1, "b/cpu", run_dir)
    store.tasks.add([NodeTaskRecord("a-1", "b", "a", 1, 0, ("b/cpu",), "run", "{}", None, None, False)])
    yield UploadReceiver(store, digests)
    digests.close()
    store.close()


def test_a_log_that_continues_at_four_tebibytes_makes_no_file_of_that_size(
    shipping: UploadReceiver, run_dir: Path
) -> None:
    assert shipping.add_log("a-1", "b", "rank-0.log", 0, b"one\n") == 4
    assert shipping.add_log("a-1", "b", "rank-0.log", FAR, b"later\n") == FAR + 6
    assert shipping.add_log("a-1", "b", "rank-0.log", FAR + 6, b"more\n") == FAR + 11
    assert (run_dir / "rank-0.log").stat().st_size < 200
    text = (run_dir / "rank-0.log").read_text()
    assert f"{FAR - 4} bytes were left out" in text
    assert text.endswith("later\nmore\n")


def test_what_the_service_has_is_known_after_its_restart(shipping: UploadReceiver) -> None:
    shipping.add_log("a-1", "b", "rank-0.log", FAR, b"later\n")
    again = UploadReceiver(shipping._store, shipping._digests)
    assert again.add_log("a-1", "b", "rank-0.log", FAR + 6, b"") == FAR + 6
    with pytest.raises(WrongOffset) as wrong:
        again.add_log("a-1", "b", "rank-0.log", 0, b"")
    assert wrong.value.offset == FAR + 6


def test_a_log_without_end_is_kept_within_a_bound(
    shipping: UploadReceiver, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_stack_provider_trl_remote.service.cluster import logs as node_logs

    monkeypatch.setattr(node_logs, "LOG_BYTES", 1 << 16)
    sent = 0
    for number in range(100):
        line = f"line {number}\n".encode().rjust(1 << 13)
        sent = shipping.add_log("a-1", "b", "rank-0.log", sent, line)
    assert sent == 100 << 13
    assert sum(path.stat().st_size for path in run_dir.iterdir()) <= 1 << 17
    assert (run_dir / "rank-0.log").read_text().endswith("line 99\n")


def test_a_node_has_no_more_logs_than_ranks(shipping: UploadReceiver, run_dir: Path) -> None:
    with pytest.raises(NotFound, match="it has 1 ranks"):
        shipping.add_log("a-1", "b", "rank-1.log", 0, b"x")
    assert not list(run_dir.iterdir())


def test_logs_and_events_leave_room_on_the_disk(
    shipping: UploadReceiver, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda path: 1 << 18)
    with pytest.raises(OSError, match="are free on the disk of"):
        shipping.add_log("a-1", "b", "rank-0.log", 0, b"x")
    with pytest.raises(OSError, match="are free on the disk of"):
        shipping.add_events("a-1", "b", 0, b"")
    assert not list(run_dir.iterdir())
