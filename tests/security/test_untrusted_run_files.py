"""What a training writes into its run directory and its checkpoints is input: no link or FIFO of it is followed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, TrlError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.inputs.resume_from import copy_checkpoint
from llama_stack_provider_trl.jobs.store.records import EventFile
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import PATIENCE, Supervisor
from llama_stack_provider_trl.launch.base import TaskState
from llama_stack_provider_trl.launch.local import _lives, _seconds_since_first
from llama_stack_provider_trl.launch.ports import given_port
from llama_stack_provider_trl.launch.runner import Runner, RunnerStatus, _EventFile
from llama_stack_provider_trl.requests.bases import resolve_served
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.events import CheckpointDamaged, CheckpointSaved, Prepared, Started, read_events
from llama_stack_provider_trl.specs.job import ResumeFrom
from llama_stack_provider_trl.system.beneath import NotAFile
from llama_stack_provider_trl.system.files import MANIFEST, RunDir, damage, point_latest, tail, write_manifest
from llama_stack_provider_trl.system.process import myself
from llama_stack_provider_trl_remote.nodes.outbox import first_failed
from llama_stack_provider_trl_remote.nodes.uploader import _part
from llama_stack_provider_trl_remote.service.http.errors import NotFound
from llama_stack_provider_trl_remote.service.serving.served import Files, copy_adapter
from llama_stack_provider_trl_remote.service.space import Space
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests, find_file, list_files
from llama_stack_provider_trl_remote.service.views.events import _read
from tests.fakes import FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


class World:
    """One running job with keep_last=1, whose events the test writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.data.mkdir()
        self.out = root / "checkpoints" / "out" / "a"
        self.store = Store(self.data / "jobs.sqlite3")
        self.launcher = FakeLauncher()
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.data)
        self.store.add_job(job_spec("a", checkpoint_dir=self.out, keep_last=1), "digest")
        self.supervisor.tick()
        self.emit(STARTED)
        assert self.store.get("a").state is JobState.in_progress

    @property
    def run_dir(self) -> Path:
        return Path(self.launcher.tasks["a-1"].spec.run_dir)

    def emit(self, *events: object) -> None:
        self.launcher.emit("a-1", *events)  # type: ignore[arg-type]
        self.supervisor.tick()

    def listed(self) -> list[Path]:
        return [checkpoint.path for checkpoint in self.store.checkpoints("a")]

    def warnings(self) -> str:
        return "\n".join(self.store.get("a").warnings)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def saved(step: int, path: Path) -> CheckpointSaved:
    return CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=1.0)


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "weights.safetensors").write_bytes(b"weights")
    write_manifest(path)
    return path


@pytest.mark.parametrize("name", ["victim", "victim/checkpoint-1", "../out/a/other"])
def test_an_event_cannot_have_a_directory_elsewhere_listed_or_removed(world: World, name: str) -> None:
    victim = world.data / name
    victim.mkdir(parents=True)
    own = checkpoint(world.out / "checkpoint-2")
    world.emit(saved(1, victim), saved(2, own))
    assert victim.is_dir()
    assert world.listed() == [own]
    assert str(victim) in world.warnings()


def test_a_symbolic_link_is_no_checkpoint(world: World) -> None:
    world.out.mkdir(parents=True)
    (world.out / "checkpoint-1").symlink_to(world.data)
    world.emit(saved(1, world.out / "checkpoint-1"))
    assert world.listed() == []
    assert "symbolic link" in world.warnings()


def test_a_damaged_checkpoint_of_another_job_stays_listed_and_the_path_is_reported(world: World) -> None:
    foreign = world.root / "checkpoints" / "out" / "b" / "checkpoint-1"
    world.emit(CheckpointDamaged(path=foreign, message="a bit has flipped"))
    assert "names" in world.warnings()
    assert "a bit has flipped" not in world.warnings()


def test_a_training_resumes_from_no_foreign_directory_on_record(world: World) -> None:
    world.emit(Prepared(total_steps=4, resumed_from=world.data, num_rows=4, trainable_parameters=1, total_parameters=1))
    assert world.store.attempts("a")[-1].resume_from is None
    assert str(world.data) in world.warnings()
    effective = world.store.get("a").effective
    assert effective is not None
    assert effective["total_steps"] == 4


@pytest.mark.parametrize("kind", ["directory", "file", "inside", "fifo"])
def test_a_checkpoint_with_a_link_or_a_fifo_is_not_copied_for_another_job(world: World, kind: str) -> None:
    own = world.out / "checkpoint-2"
    own.mkdir(parents=True)
    (own / "weights.safetensors").write_bytes(b"weights")
    if kind == "fifo":
        os.mkfifo(own / "odd")
        write_sizes(own, "weights.safetensors")
    else:
        target = {"directory": world.data, "file": world.data / "jobs.sqlite3", "inside": "weights.safetensors"}[kind]
        write_manifest(own)
        (own / "odd").symlink_to(target)
    world.emit(saved(2, own))
    spec = job_spec("b", resume_from=ResumeFrom(job_uuid="a"))
    with pytest.raises(InvalidRequest, match="'odd' in that checkpoint"):
        copy_checkpoint(spec, world.store, world.data)
    assert not list((world.data / "jobs" / "b").rglob("odd"))


def write_sizes(directory: Path, *names: str) -> None:
    sizes = {name: (directory / name).stat().st_size for name in names}
    (directory / MANIFEST).write_text(json.dumps({"files": sizes}))


def replaced(path: Path, kind: str, target: Path) -> None:
    """Put a symbolic link to `target`, a FIFO or a directory at `path`."""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


ODD = pytest.mark.parametrize("kind", ["link", "fifo", "directory"])


@ODD
def test_a_run_file_that_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 1}\n')
    paths = RunDir(tmp_path / "run")
    paths.root.mkdir()
    for path in (paths.log, paths.events, paths.runner_status, paths.task):
        replaced(path, kind, secret)
    assert tail(paths.log) == ""
    assert RunnerStatus.read(paths.runner_status) is None
    assert given_port(paths.root) is None
    assert _read(EventFile(1, paths.root, 100), 0, 10, 1000) == ([], 0, True)
    assert first_failed(paths.events) is None
    assert _EventFile(paths.events).seconds_since_final() == 0.0
    with pytest.raises(NotAFile):
        read_events(paths.events)
    with pytest.raises(NotAFile):
        _part(paths.log, 0)


@ODD
def test_a_job_whose_event_file_was_replaced_does_not_stop_the_supervisor(world: World, kind: str) -> None:
    replaced(RunDir(world.run_dir).events, kind, world.data / "jobs.sqlite3")
    world.supervisor.tick()
    world.store.add_job(job_spec("b", checkpoint_dir=world.root / "checkpoints" / "out" / "b"), "digest")
    world.launcher.exit("a-1", 1)
    for _ in range(PATIENCE + 1):
        world.supervisor.tick()
    assert world.store.get("a").state is JobState.failed
    assert world.store.get("b").state is JobState.launching


def test_a_cancel_creates_no_file_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "cancelled").symlink_to(tmp_path / "created")
    _seconds_since_first(tmp_path / "cancelled")
    assert not (tmp_path / "created").exists()


def test_the_mark_of_the_latest_checkpoint_is_written_through_no_symbolic_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "latest.tmp").symlink_to(victim)
    point_latest(tmp_path, "checkpoint-2")
    assert victim.read_text() == "kept"
    assert (tmp_path / "latest").read_text() == "checkpoint-2\n"


def test_a_stack_directory_that_leads_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "7").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stacks").symlink_to(tmp_path / "elsewhere")
    runner = Runner.__new__(Runner)
    runner.paths = RunDir(tmp_path / "run")
    assert runner._stack("stacks/7") is None


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_checkpoint_does_not_hand_out_what_a_link_in_it_leads_to(world: World, kind: str) -> None:
    own = checkpoint(world.out / "checkpoint-2")
    replaced(own / "odd.txt", kind, world.data / "jobs.sqlite3")
    world.emit(saved(2, own))
    digests = Digests()
    try:
        listed = list_files(world.store, digests, "a", "checkpoint-2")
        assert [file.path for file in listed.files] == ["manifest.json", "weights.safetensors"]
        with pytest.raises(TrlError):
            find_file(world.store, digests, "a", "checkpoint-2", "odd.txt")
    finally:
        digests.close()


def test_a_file_that_becomes_a_link_after_it_was_found_is_not_served(world: World) -> None:
    own = checkpoint(world.out / "checkpoint-2")
    world.emit(saved(2, own))
    digests = Digests()
    opener, _, _ = find_file(world.store, digests, "a", "checkpoint-2", "weights.safetensors")
    replaced(own / "weights.safetensors", "link", world.data / "jobs.sqlite3")
    with pytest.raises(OSError, match=r"link|device"):
        opener()
    shutil.rmtree(own)
    own.symlink_to(world.data)
    with pytest.raises(NotFound):
        find_file(world.store, digests, "a", "checkpoint-2", "jobs.sqlite3")
    digests.close()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_a_manifest_names_is_opened_below_the_checkpoint_only(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    own = checkpoint(tmp_path / "checkpoint-2")
    replaced(own / "weights.safetensors", kind, secret)
    (own / MANIFEST).write_text(json.dumps({"files": {"weights.safetensors": 6}}))
    assert damage(own) is not None
    (own / MANIFEST).write_text(json.dumps({"files": {str(secret): 6}}))
    assert damage(own) is not None
    replaced(own / MANIFEST, kind, secret)
    assert damage(own) is not None


def test_a_process_without_the_tasks_marks_is_not_its_runner(tmp_path: Path) -> None:
    status = RunnerStatus("a-1", myself(), TaskState.running)
    assert not _lives(status, {"TRL_TASK_ID": "a-1", "TRL_RUN_DIR": str(tmp_path)})


@pytest.mark.parametrize("name", ["chat_template.jinja", "adapter_model.safetensors", "additional_chat_templates"])
def test_no_file_elsewhere_is_copied_as_one_of_an_adapter(tmp_path: Path, name: str) -> None:
    adapter = adapter_of(tmp_path)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "settings.jinja").write_text("admin token")
    (adapter / name).unlink(missing_ok=True)
    (adapter / name).symlink_to(secrets if name == "additional_chat_templates" else secrets / "settings.jinja")
    with pytest.raises(InvalidRequest, match="a symbolic link leads out of its directory"):
        copy_adapter(Files.of(adapter), tmp_path / "served" / "adapters" / "one", Space(0))
    assert list((tmp_path / "served").glob("adapters/*")) == []


def test_the_files_of_an_adapter_are_copied(tmp_path: Path) -> None:
    adapter, copy = adapter_of(tmp_path), tmp_path / "adapters" / "one"
    copy.parent.mkdir()
    (adapter / "optimizer.safetensors").write_bytes(b"state")
    copy_adapter(Files.of(adapter), copy, Space(0))
    assert sorted(path.name for path in copy.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (copy / "adapter_model.safetensors").read_bytes() == b"weights"


def test_an_adapter_in_a_snapshot_of_a_cache_is_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--lora"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    adapter_of(tmp_path).rename(blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    base = resolve_served("model", str(snapshot), Settings(data_dir=tmp_path / "data", devices=("cpu",)))
    assert base.adapter is not None
    copy_adapter(Files.of(snapshot), tmp_path / "one", Space(0))
    assert not (tmp_path / "one" / "adapter_model.safetensors").is_symlink()


@pytest.mark.parametrize("target", ["/proc/kmsg", "other.json"])
def test_no_other_file_is_read_as_the_configuration_of_an_adapter(tmp_path: Path, target: str) -> None:
    """/proc/kmsg is a regular file of no bytes whose reader waits for as long as the kernel reports nothing."""
    adapter = adapter_of(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"peft_type": "a secret of another file"}))
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").symlink_to(tmp_path / target)
    if not (adapter / "adapter_config.json").is_file():
        pytest.skip(f"this machine has no {target}")
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json cannot be read: a symbolic link leads out"):
        resolve_served("model", str(adapter), Settings(data_dir=tmp_path / "data", devices=("cpu",)))


def adapter_of(root: Path) -> Path:
    adapter = root / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    return adapter
