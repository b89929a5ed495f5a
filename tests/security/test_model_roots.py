"""Where a request may name a model by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl_remote.service.loading import load_settings
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

TRAINING = {
    "n_epochs": 1,
    "data_config": {"dataset_id": "d", "batch_size": 1, "shuffle": False},
}


def model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model(tmp_path / "models" / "base")
    model(tmp_path / "elsewhere" / "secret")
    model(tmp_path / "data" / "checkpoints" / "earlier" / "final")
    model(tmp_path / "data" / "jobs" / "x" / "model")
    model(tmp_path / "exports" / "earlier" / "merged")
    model(tmp_path / "trusted")
    return tmp_path


def settings(home: Path, **changes: Any) -> Settings:
    given = {
        **{"data_dir": home / "data", "device": "cpu", "checkpoint_roots": [home / "exports"]},
        **{"host": "0.0.0.0", "insecure": True, "api_token": "t", "trust_remote_code": [str(home / "trusted")]},
        **changes,
    }
    return ServiceSettings.model_validate(given).for_jobs(("cpu",))


def resolved(named: str | Path, with_: Settings) -> str:
    body = {"job_uuid": "a", "model": str(named), "training_config": TRAINING}
    return str(resolve(SupervisedFineTuneRequest.model_validate(body), ProviderOptions(), with_).fields["source"].model)


def test_beyond_loopback_no_path_is_taken_without_model_roots(home: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"model='.*base'.*model_roots \(none is configured\).*model id"):
        resolved(home / "models" / "base", settings(home))
    assert resolved("org/name", settings(home)) == "org/name"


def test_on_loopback_any_path_is_taken_unless_there_are_model_roots(home: Path) -> None:
    loopback = settings(home, host="127.0.0.1")
    assert resolved(home / "elsewhere" / "secret", loopback) == str(home / "elsewhere" / "secret")
    with pytest.raises(InvalidRequest, match="model_roots"):
        resolved(home / "elsewhere" / "secret", settings(home, host="127.0.0.1", model_roots=[home / "models"]))


@pytest.mark.parametrize(
    "allowed", ["models/base", "data/checkpoints/earlier/final", "exports/earlier/merged", "trusted"]
)
def test_below_a_root_and_among_our_own_checkpoints_a_path_is_taken(home: Path, allowed: str) -> None:
    assert resolved(home / allowed, settings(home, model_roots=[home / "models"])) == str(home / allowed)


@pytest.mark.parametrize(
    "refused", ["elsewhere/secret", "data/jobs/x/model", "models/../elsewhere/secret", "models/link"]
)
def test_no_link_and_no_way_up_leads_out_of_the_roots(home: Path, refused: str) -> None:
    (home / "models" / "link").symlink_to(home / "elsewhere" / "secret")
    with pytest.raises(InvalidRequest, match="must lie below one of the configured model_roots"):
        resolved(home / refused, settings(home, model_roots=[home / "models"]))


def test_whether_a_path_outside_exists_is_not_disclosed(home: Path) -> None:
    sentences = set()
    for name in ("elsewhere/secret", "elsewhere/nothing"):
        with pytest.raises(InvalidRequest) as error:
            resolved(home / name, settings(home))
        sentences.add(str(error.value).replace(name, ""))
    assert len(sentences) == 1


def test_a_relative_path_is_confined_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for named in ("elsewhere/secret", "./elsewhere/secret", "elsewhere/../elsewhere/secret", "x/../../etc"):
        with pytest.raises(InvalidRequest, match="model_roots"):
            resolved(named, settings(home))


def test_the_reference_model_is_confined_like_the_model(home: Path) -> None:
    body = {
        "job_uuid": "a",
        "finetuned_model": "org/name",
        "training_config": TRAINING,
        "algorithm_config": {"beta": 0.1},
    }
    options = ProviderOptions(reference_model=str(home / "elsewhere" / "secret"))
    with pytest.raises(InvalidRequest, match=r"reference_model.*model_roots"):
        resolve(PreferenceOptimizeRequest.model_validate(body), options, settings(home))


def test_the_roots_come_from_a_variable_too(home: Path) -> None:
    found, _ = load_settings(
        home / "run.yaml" if (home / "run.yaml").exists() else None,
        {"TRL_SERVICE_MODEL_ROOTS": f"{home}/models:{home}/exports", "HOME": str(home)},
    )
    assert found.model_roots == (home / "models", home / "exports")
    assert load_settings(None, {"HOME": str(home)})[0].model_roots == ()
