from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import JobConflict
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.events import Finished, Reason, Started
from llama_stack_provider_trl.system.ownership import Ownership, record
from tests.fakes import FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint directory that two data directories name."""
    return tmp_path / "results" / "a"


def claimed(data_dir: Path, place: Path) -> Ownership:
    owner = Ownership(data_dir)
    owner.claim(place, "a")
    return owner


def test_a_directory_that_another_data_directory_owns_is_refused_with_its_name(tmp_path: Path, place: Path) -> None:
    claimed(tmp_path / "one", place)
    two = Ownership(tmp_path / "two")
    with pytest.raises(JobConflict, match=f"job 'a' of another data directory, {tmp_path}/one.*remove {record(place)}"):
        two.claim(place, "a")
    assert not two.is_ours(place)
    two.release(place)
    assert record(place).stat().st_mode & 0o777 == 0o644  # another user's service reads it


def test_what_has_no_owner_may_be_claimed_and_is_ours_then_however_often(tmp_path: Path, place: Path) -> None:
    assert not Ownership(tmp_path / "one").is_ours(place)
    Ownership(tmp_path / "one").check_unused(place)
    claimed(tmp_path / "one", place)
    one = claimed(tmp_path / "one", place)
    assert one.is_ours(place)
    assert list(place.parent.iterdir()) == [record(place)]
    one.release(place)
    assert claimed(tmp_path / "two", place).is_ours(place)


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a")])
def test_a_directory_above_or_below_another_ones_is_refused(tmp_path: Path, first: str, second: str) -> None:
    results = tmp_path / "results"
    claimed(tmp_path / "one", results / first)
    with pytest.raises(JobConflict, match="another data directory"):
        Ownership(tmp_path / "two").claim(results / second, "b")


def test_a_data_directory_that_was_moved_still_owns_its_jobs(tmp_path: Path, place: Path) -> None:
    claimed(tmp_path / "one", place)
    (tmp_path / "one").rename(tmp_path / "moved")
    moved = claimed(tmp_path / "moved", place)
    assert moved.is_ours(place)
    with pytest.raises(JobConflict, match=str(tmp_path / "moved")):
        Ownership(tmp_path / "one").check(place)


def test_another_path_to_a_data_directory_is_the_same_one(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(tmp_path / "one", place)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.setattr(Path, "resolve", lambda path: path)  # as with a second mount of it
    assert Ownership(tmp_path / "link").is_ours(place)


def test_a_copy_of_a_data_directory_does_not_own_the_jobs_of_the_first(tmp_path: Path, place: Path) -> None:
    claimed(tmp_path / "one", place)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(JobConflict, match=f"{tmp_path}/one"):
        Ownership(tmp_path / "copy").claim(place, "a")


def test_a_damaged_record_belongs_to_another_directory(tmp_path: Path, place: Path) -> None:
    one = claimed(tmp_path / "one", place)
    record(place).write_text("")
    assert not one.is_ours(place)
    with pytest.raises(JobConflict, match="is damaged"):
        Ownership(tmp_path / "without-a-name").check(place)


def test_the_second_of_two_concurrent_claims_is_refused(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Ownership(tmp_path / "two")
    link = os.link

    def late(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        claimed(tmp_path / "one", place)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(JobConflict, match=f"{tmp_path}/one"):
        two.claim(place, "a")
    assert Ownership(tmp_path / "one").is_ours(place)
    assert list(place.parent.iterdir()) == [record(place)]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    claimed(tmp_path / "one", place)
    with pytest.raises(JobConflict):
        claimed(tmp_path / "two", place)


# Two supervisors


def test_of_two_data_directories_with_the_same_job_the_second_leaves_the_firsts_checkpoints_alone(
    tmp_path: Path, place: Path
) -> None:
    stores = {name: Store(tmp_path / name / "jobs.db") for name in ("one", "two")}
    launchers = {name: FakeLauncher() for name in stores}
    supervisors = {name: Supervisor(stores[name], launchers[name], ["cpu"], tmp_path / name) for name in stores}
    stores["one"].add_job(job_spec("a", checkpoint_dir=place), "digest")
    supervisors["one"].tick()
    (place / "checkpoint-3").mkdir(parents=True)  # and no event names it yet
    stores["two"].add_job(job_spec("a", checkpoint_dir=place, retries=3), "digest")
    supervisors["two"].tick()
    refused = stores["two"].get("a")
    assert (refused.state, refused.reason) == (JobState.failed, Reason.invalid_request)
    assert str(tmp_path / "one") in refused.message
    assert (launchers["one"].started, launchers["two"].started) == (["a-1"], [])
    assert [path.name for path in place.iterdir()] == ["checkpoint-3"]
    launchers["one"].emit("a-1", STARTED, Finished(step=4))
    launchers["one"].exit("a-1", 0)
    supervisors["one"].tick()
    assert stores["one"].get("a").state is JobState.completed
    for store in stores.values():
        store.close()


def test_a_conclusion_removes_nothing_of_a_directory_that_is_another_ones_by_now(tmp_path: Path, place: Path) -> None:
    store, launcher = Store(tmp_path / "one" / "jobs.db"), FakeLauncher()
    supervisor = Supervisor(store, launcher, ["cpu"], tmp_path / "one")
    store.add_job(job_spec("a", checkpoint_dir=place), "digest")
    supervisor.tick()
    record(place).unlink()  # an operator's hand, too early
    claimed(tmp_path / "two", place)
    (place / "checkpoint-3").mkdir(parents=True)
    launcher.exit("a-1", 1)
    supervisor.tick()
    assert store.get("a").state is JobState.failed
    assert (place / "checkpoint-3").exists()
    store.close()


def test_the_name_of_a_data_directory_is_made_once(tmp_path: Path, place: Path) -> None:
    claimed(tmp_path / "one", place)
    name = (tmp_path / "one" / "identity").read_text()
    claimed(tmp_path / "one", place.with_name("b"))
    assert (tmp_path / "one" / "identity").read_text() == name


def test_a_data_directory_of_the_same_path_on_another_machine_owns_what_lies_behind_a_link_by_its_identity(
    tmp_path: Path,
) -> None:
    shared, data_dir = tmp_path / "shared", tmp_path / "data"
    shared.mkdir()
    data_dir.mkdir()
    (data_dir / "checkpoints").symlink_to(shared)
    claimed(data_dir, data_dir / "checkpoints" / "a")
    (data_dir / "identity").unlink()  # what the other machine has in its place
    with pytest.raises(JobConflict, match="another data directory"):
        Ownership(data_dir).claim(data_dir / "checkpoints" / "a", "a")


def test_results_in_a_data_directory_stay_its_own_where_its_identity_was_lost(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    claimed(data_dir, data_dir / "checkpoints" / "a")
    (data_dir / "identity").unlink()
    assert claimed(data_dir, data_dir / "checkpoints" / "a").is_ours(data_dir / "checkpoints" / "a")
