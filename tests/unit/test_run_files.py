"""The run files for our external API match run.yaml and run_fsdp.yaml."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
NAME = "trl_post_training"
ADAPTER_READS = {"url", "api_token", "connect_timeout", "read_timeout", "total_timeout", "submit_timeout"}


def read(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


def external(native: Any) -> Any:
    """What a native run file becomes."""
    (provider,) = native["providers"].pop("post_training")
    del provider["module"]
    if provider["provider_type"] == "remote::trl_remote":
        provider["config"] = {name: provider["config"][name] for name in ADAPTER_READS}
    native["providers"][NAME] = [provider]
    native["apis"][native["apis"].index("post_training")] = NAME
    return native | {"external_apis_dir": "${env.TRL_EXTERNAL_APIS:=external_apis.d}"}


def ogx(file: Any) -> Any:
    """What that becomes where there are no datasets, and where the registry is another one."""
    file["apis"].remove("datasetio")
    del file["providers"]["datasetio"], file["metadata_store"]
    for backend in file["storage"]["backends"].values():
        backend["db_path"] = backend["db_path"].replace("/llama-stack/", "/ogx/")
    return {"distro_name" if key == "image_name" else key: value for key, value in file.items()}


@pytest.mark.parametrize("suffix", ["", "_fsdp"])
def test_they_differ_in_the_api_only(suffix: str) -> None:
    wanted = external(read(f"run{suffix}.yaml"))
    assert read(f"run_external{suffix}.yaml") == wanted
    assert read(f"run_ogx{suffix}.yaml") == ogx(wanted)


def test_the_external_api_names_what_there_is() -> None:
    pytest.importorskip("llama_stack", reason="the external API needs Llama Stack")
    spec = read(f"external_apis.d/{NAME}.yaml")
    module = importlib.import_module(spec["module"])
    assert spec["name"] == NAME
    assert hasattr(module, spec["protocol"])
    assert {"available_providers", "create_router", "get_provider_impl", "get_adapter_impl"} <= set(dir(module))
