"""Preflights of the service: nothing of an earlier service's stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_stack_provider_trl.launch.base import TaskSpec, TaskState
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from llama_stack_provider_trl_remote.service.views.preflights import Preflights
from tests.fakes import FakeLauncher


def test_what_an_earlier_service_left_running_is_ended_though_it_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = TaskSpec("preflight-left", tmp_path / "preflights" / "left", ())
    left.run_dir.mkdir(parents=True)
    launcher = FakeLauncher()
    launcher.start(left)
    # What it writes while its directory is removed keeps the directory there.
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    Preflights(ServiceSettings(data_dir=tmp_path), launcher, "cpu", 1).prepare()
    assert launcher.poll(left).state is TaskState.exited
