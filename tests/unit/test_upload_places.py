"""An export is sent only where the settings allow it when it is sent, with a token that others cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, StoreError
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import TaskSpec, TaskState
from llama_stack_provider_trl.launch.torchrun import training_environment
from llama_stack_provider_trl.requests.untrained import refuse_destination
from llama_stack_provider_trl.specs.events import Finished, Reason
from llama_stack_provider_trl.specs.exports import HUB_TOKEN, HUB_TOKEN_FILE, ExportSpec
from llama_stack_provider_trl.specs.work import ExportWork
from llama_stack_provider_trl_remote.service.settings import ServiceSettings, SettingsError
from tests.fakes import FakeClock, FakeLauncher, job_spec

PLACE = "hf://team/sft-1"


class World:
    def __init__(self, root: Path) -> None:
        self.root, self.launcher = root, FakeLauncher()
        self.store = Store(root / "jobs.db", FakeClock())
        work = ExportWork(export=ExportSpec(target="gguf", upload_to=PLACE))
        spec = job_spec("out", checkpoint_dir=root / "checkpoints" / "out", work=work)
        self.store.add_job(spec, "digest")

    def supervise(self, *allowed: str) -> None:
        """A pass of a service that was just started."""
        Supervisor(self.store, self.launcher, ["cpu"], self.root, export_destinations=allowed).tick()

    @property
    def ended(self) -> tuple[str, Reason | None, str]:
        job = self.store.get("out")
        return job.status, job.reason, job.message


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


REFUSAL = (
    "upload_to='hf://team/sft-1' is not supported: it must lie below one of the configured export_destinations "
    "(hf://other); or download the export. Nothing was uploaded."
)


def test_an_export_that_waited_is_refused_where_the_settings_have_changed(world: World) -> None:
    world.supervise("hf://other")
    assert world.ended == ("failed", Reason.invalid_request, REFUSAL)
    assert not world.launcher.tasks


def test_a_running_export_is_ended_where_the_settings_have_changed_over_a_restart(world: World) -> None:
    world.supervise("hf://team")
    world.supervise("hf://team")
    assert world.launcher.tasks["out-1"].seen.state is TaskState.running
    world.supervise("hf://other")
    assert world.launcher.tasks["out-1"].seen.exit_code == -15
    assert world.ended == ("failed", Reason.invalid_request, REFUSAL)


def test_a_pass_that_fails_before_the_places_are_checked_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.supervise("hf://team")
    supervisor = Supervisor(world.store, world.launcher, ["cpu"], world.root, export_destinations=("hf://other",))
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "active", lambda: (_ for _ in ()).throw(StoreError("the disk is full")))
        with pytest.raises(StoreError):
            supervisor.tick()
    supervisor.tick()
    assert world.ended == ("failed", Reason.invalid_request, REFUSAL)


def test_a_place_of_another_form_is_refused_as_one_that_is_not_allowed() -> None:
    with pytest.raises(InvalidRequest, match=r"upload_to='hf://team/x\.git'"):
        refuse_destination("hf://team/x.git", ["hf://team"])


def test_an_export_that_was_sent_before_the_restart_completes(world: World) -> None:
    world.supervise("hf://team")
    world.launcher.emit("out-1", Finished(step=100, result={}))
    world.launcher.exit("out-1", 0)
    world.supervise("hf://other")
    assert world.store.get("out").status == "completed"


def test_the_token_of_a_hub_is_in_a_file_that_only_its_owner_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("hf_of-a-file\n")
    file.chmod(0o600)
    uploads, trains = (TaskSpec("x-1", tmp_path, ("cpu",), accounts=accounts) for accounts in ((HUB_TOKEN,), ()))
    environ = {"PATH": "/bin", HUB_TOKEN_FILE: str(file)}
    assert training_environment(uploads, environ)[HUB_TOKEN] == "hf_of-a-file"
    assert training_environment(uploads, {**environ, HUB_TOKEN: "hf_own"})[HUB_TOKEN] == "hf_own"
    assert not {HUB_TOKEN, HUB_TOKEN_FILE} & training_environment(trains, environ).keys()
    monkeypatch.setenv(HUB_TOKEN_FILE, str(file))
    settings = ServiceSettings(data_dir=tmp_path)
    settings.check_accounts()
    assert settings.hub_token_file() == file
    file.chmod(0o644)
    with pytest.raises(SettingsError, match=rf"{HUB_TOKEN_FILE}: the token file .* has mode 0644.*chmod 600"):
        settings.check_accounts()
    with pytest.raises(OSError, match=rf"{HUB_TOKEN_FILE}: the token file .* has mode 0644"):
        training_environment(uploads, environ)
