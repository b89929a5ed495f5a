"""`logger_config`: a request chooses among the trackers of the configuration, which alone decides where they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests import trackers
from llama_stack_provider_trl.requests.trackers import TrackerChoice, TrackerSettings, resolve_trackers
from llama_stack_provider_trl_remote.service.loading import load_settings
from llama_stack_provider_trl_remote.service.settings import SettingsError

CONFIGURED = {"default": ["tensorboard"], "tensorboard": {}, "mlflow": {"project": "ours"}}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> TrackerSettings:
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    return TrackerSettings.model_validate(CONFIGURED)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"tensorboard": ("llama-stack-trl", "job-1")}),
        ({}, {"tensorboard": ("llama-stack-trl", "job-1")}),
        ({"tensorboard": False}, {}),
        (
            {"tensorboard": None, "mlflow": True},
            {"tensorboard": ("llama-stack-trl", "job-1"), "mlflow": ("ours", "job-1")},
        ),
        ({"tensorboard": {"project": "p", "run": "r-1"}}, {"tensorboard": ("p", "r-1")}),
    ],
)
def test_a_job_has_the_default_trackers_and_those_that_it_chooses(
    settings: TrackerSettings, given: Any, expected: dict[str, tuple[str, str]]
) -> None:
    found = resolve_trackers(given, settings, "job-1")
    assert found == tuple(TrackerChoice(name, *names) for name, names in expected.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "wandb"}, r"^logger_config=.*'type' is no tracker.*configured here are: tensorboard, mlflow"),
        ({"wandb": True}, r"^logger_config=.*'wandb' is no tracker"),
        ({"mlflow": {"uri": "http://169.254.169.254"}}, r"^logger_config.mlflow.uri=.*no such option.*project, run"),
        ({"tensorboard": {"directory": "/etc"}}, r"^logger_config.tensorboard.directory=.*the configuration decides"),
        ({"tensorboard": {"run": "../../x"}}, r"^logger_config.tensorboard.run='../../x'.*letters, digits"),
        ({"tensorboard": {"run": "a\n"}}, r"^logger_config.tensorboard.run="),
        ({"tensorboard": {"project": "a.stale-1"}}, r"^logger_config.tensorboard.project='a.stale-1'"),
        ({"tensorboard": {"project": ""}}, r"^logger_config.tensorboard.project=''"),
        ({"tensorboard": {"run": ["x"]}}, r"^logger_config.tensorboard.run="),
        ({"tensorboard": 1}, r"^logger_config.tensorboard=1.*true, false, or an object"),
        ({"tensorboard": "yes"}, r"^logger_config.tensorboard='yes'"),
    ],
)
def test_what_a_client_may_not_choose_is_refused_by_name(settings: TrackerSettings, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_trackers(given, settings, "job-1")
    assert re.search(message, str(refused.value), re.DOTALL), str(refused.value)


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    settings: TrackerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "alembic" else name)
    message = r"alembic is not installed.*pip install 'llama_stack_provider_trl\[mlflow\]'"
    with pytest.raises(InvalidRequest, match=message):
        resolve_trackers({"mlflow": True}, settings, "job-1")
    resolve_trackers({"tensorboard": True}, settings, "job-1")


@pytest.mark.parametrize("project", ["registry-x", "mine_system", "mine_Configs", "x_artifact_versions"])
def test_a_project_that_trackio_cannot_have_is_refused(settings: TrackerSettings, project: str) -> None:
    trackio = TrackerSettings.model_validate({"trackio": {}})
    with pytest.raises(InvalidRequest, match=r"logger_config.trackio.project=.*trackio reserves"):
        resolve_trackers({"trackio": {"project": project}}, trackio, "job-1")
    assert resolve_trackers({"trackio": {"project": "systems"}}, trackio, "job-1")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"default": ["mlflow"]}, "default names mlflow, which has no block"),
        ({"default": ["comet"]}, "default"),
        ({"comet": {}}, "comet is not a setting"),
        ({"tensorboard": {"project": "../x"}}, "project"),
        ({"mlflow": {"uri": "https://me:hush-hush@host"}}, "credentials do not belong into the URI"),
        ({"mlflow": {"uri": "https://host?token=hush-hush"}}, "credentials do not belong into the URI"),
        ({"mlflow": {"uri": "file:///hush-hush"}}, r"expected http\(s\)://HOST"),
        ({"mlflow": {"uri": "sqlite:///hush-hush"}}, r"absolute path"),
        ({"wandb": {"uri": "https://host"}}, r"uri has no effect where runs are written offline: set mode: online"),
        ({"wandb": {"entity": "team"}}, r"entity has no effect where runs are written offline"),
        ({"wandb": {"mode": "online", "uri": "ftp://hush-hush"}}, r"expected http\(s\)://HOST of a server"),
        ({"wandb": {"mode": "online", "uri": "https://api:hush-hush@host"}}, "credentials .* WANDB_API_KEY"),
        ({"wandb": {"mode": "online", "entity": "a b"}}, "entity"),
        ({"wandb": {"mode": "shared"}}, "mode"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_at_start_without_its_values(
    block: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError):
        TrackerSettings.model_validate(block)
    with pytest.raises(SettingsError, match=message) as refused:
        load_settings(None, {}, trackers=block)
    assert "hush" not in str(refused.value)
