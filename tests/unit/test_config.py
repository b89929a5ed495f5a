"""The provider's configuration: documented key by key, unknown keys refused, shipped files loadable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.requests.settings import JobSettings
from llama_stack_provider_trl.requests.trackers import TrackerSettings
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_documentation_lists_every_key_and_no_other() -> None:
    text = (REPOSITORY / "docs" / "reference" / "configuration.md").read_text()
    table = text.split("<!-- config -->")[1].split("<!-- /config")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(TrlConfig.model_fields)


@pytest.mark.parametrize("kind", [TrlConfig, ServiceSettings])
def test_every_setting_of_jobs_reaches_the_resolution_of_requests(
    kind: type[TrlConfig] | type[ServiceSettings], tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        **{"data_dir": tmp_path / "data", "max_seq_length": 77, "save_steps": 3, "keep_last": 2, "retries": 1},
        **{"retry_backoff": 5.0},
        **{"oom_retry": False, "max_duration": 9.0, "priority": "high", "min_free_disk_mb": 1},
        **{"checkpoint_roots": (tmp_path / "more",), "trust_remote_code": ("org/name@abc",)},
        **{"harness_roots": (tmp_path / "tasks",), "python_graders": True, "trackers": TrackerSettings()},
    }
    assert values.keys() == JobSettings.model_fields.keys()
    settings = kind.model_validate(values)
    found = settings.for_jobs(("cpu",)) if isinstance(settings, ServiceSettings) else settings.resolving(("cpu",))
    assert {name: getattr(found, name) for name in values} == values


def test_the_service_has_every_setting_of_the_inline_provider() -> None:
    assert TrlConfig.model_fields.keys() <= ServiceSettings.model_fields.keys()


@pytest.mark.parametrize("kind", [TrlConfig, ServiceSettings])
@pytest.mark.parametrize("value", [0, -1, 601, "nan"])
def test_a_wait_before_retries_is_between_nothing_and_ten_minutes(
    kind: type[TrlConfig] | type[ServiceSettings], value: Any
) -> None:
    with pytest.raises(ValidationError, match="retry_backoff"):
        kind.model_validate({"retry_backoff": value})


def test_an_unknown_key_is_refused_when_llama_stack_starts() -> None:
    with pytest.raises(ValidationError, match=r"devise\n  is not a setting: did you mean `device`\? docs/"):
        TrlConfig.model_validate({"devise": "cpu"})
    with pytest.raises(ValidationError, match=r"trackers.wandb.entty\n  is not a setting: did you mean `entity`"):
        TrlConfig.model_validate({"trackers": {"wandb": {"entty": "team"}}, "retries": 1})
    with pytest.raises(ValidationError, match="qqq\n  is not a setting: docs/reference/configuration"):
        TrlConfig.model_validate({"qqq": "cpu"})


def test_an_empty_data_dir_means_the_default_and_paths_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert TrlConfig.model_validate({"data_dir": None}).data_dir == Path("/home/user/.llama/trl")
    assert TrlConfig.model_validate({"data_dir": "here"}).data_dir == Path.cwd() / "here"


def test_directories_of_datasets_become_absolute_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_stack", reason="the external API needs Llama Stack")
    from llama_stack_provider_trl_remote.external_api import inline

    monkeypatch.setenv("HOME", "/home/user")
    config = inline.ExternalTrlConfig.model_validate({"dataset_roots": ["~/rows", "here"]})
    assert config.dataset_roots == [Path("/home/user/rows"), Path.cwd() / "here"]


def test_the_shipped_run_yaml_configures_the_provider_with_known_keys() -> None:
    run = yaml.safe_load((REPOSITORY / "run.yaml").read_text())
    (provider,) = run["providers"]["post_training"]
    assert provider["provider_type"] == "inline::trl"
    assert set(provider["config"]) <= set(TrlConfig.model_fields)


def test_a_device_setting_names_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert usable_devices("auto") == usable_devices("cuda") == ["cuda:0", "cuda:1"]
    assert usable_devices("cuda:1") == ["cuda:1"]
    assert usable_devices("cpu") == ["cpu"]
    with pytest.raises(InvalidRequest, match="cuda:0, cuda:1"):
        usable_devices("cuda:2")


def test_a_machine_without_gpus_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert usable_devices("auto") == ["cpu"]
    with pytest.raises(InvalidRequest, match="device"):
        usable_devices("cuda")
