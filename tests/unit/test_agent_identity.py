"""The name and the description of a machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from llama_stack_provider_trl.system.hub_cache import cached_models
from llama_stack_provider_trl_remote.nodes import identity
from llama_stack_provider_trl_remote.nodes.identity import (
    NodeError,
    host_id,
    machine_id,
    node_name,
    node_report,
    reachable_address,
    versions,
)
from tests import nvml
from tests.orders import write


def test_a_machine_is_known_by_its_own_id_or_the_one_it_is_given(tmp_path: Path) -> None:
    missing, file = tmp_path / "none", write(tmp_path / "machine-id", b"0123abcd\n")
    assert machine_id({}, (missing, file)) == "0123abcd"
    assert machine_id({"TRL_NODE_MACHINE_ID": "rack-7"}, (file,)) == "rack-7"
    assert machine_id({}, (write(tmp_path / "empty", b"\n"), file)) == "0123abcd"  # an image before its first start
    assert machine_id({}, (missing,)) == machine_id({}, (missing,)) != ""


def test_agents_in_two_containers_of_a_machine_have_one_host_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, file = tmp_path / "none", write(tmp_path / "machine-id", b"0123abcd\n")
    empty = write(tmp_path / "empty", b"\n")
    kernel = write(tmp_path / "boot_id", b"run-of-the-kernel\n")
    monkeypatch.setattr(identity, "_BOOT_ID", kernel)
    containers = []
    for name in ("c1", "c2", "c3"):
        monkeypatch.setattr(identity.platform, "node", lambda name=name: name)
        containers.append((machine_id({}, (empty, missing)), host_id({}, (empty, missing))))
    assert len({machine for machine, _ in containers}) == 3
    assert {host for _, host in containers} == {"run-of-the-kernel"}
    pods = [{"TRL_NODE_MACHINE_ID": pod, "TRL_NODE_HOST_ID": "gpu-7"} for pod in ("uid-1", "uid-2")]
    assert [(machine_id(pod), host_id(pod)) for pod in pods] == [("uid-1", "gpu-7"), ("uid-2", "gpu-7")]
    assert host_id({}, (file,)) == "0123abcd"
    assert host_id({"TRL_NODE_MACHINE_ID": "rack-7"}, (file,)) == "rack-7"
    monkeypatch.setattr(identity, "_BOOT_ID", missing)  # macOS
    assert host_id({}, (missing,)) == machine_id({}, (missing,))


def test_a_node_has_the_name_of_its_host_or_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1")
    assert node_name(None) == "host-1"
    assert node_name("gpu.a") == "gpu.a"
    with pytest.raises(NodeError, match="TRL_NODE_NAME"):
        node_name("a/b")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8322", "http://localhost:8322", "http://[::1]:8322"])
def test_a_service_at_a_loopback_address_is_no_use_to_other_machines(url: str) -> None:
    with pytest.raises(NodeError, match="TRL_NODE_ADDRESS"):
        reachable_address(url, {})
    assert reachable_address(url, {"TRL_NODE_ADDRESS": "10.1.2.3"}) == "10.1.2.3"


def test_a_service_whose_name_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        NodeError, match=r"address head\.example cannot be reached from here: Name or service not known"
    ):
        reachable_address("https://head.example", {})


def test_the_address_that_packets_to_the_service_leave_from_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, target: tuple[str, int]) -> None:
            assert target == ("fe80::1%eth0", 443)

        def getsockname(self) -> tuple[str, int]:
            return "fe80::2%eth0", 5

    found = [(socket.AF_INET6, None, None, "", ("fe80::1%eth0", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, type: found)
    monkeypatch.setattr(socket, "socket", Probe)
    assert reachable_address("https://head.example", {}) == "fe80::2"


@pytest.mark.parametrize("chosen", ["127.0.0.1", "::1", "0.0.0.0", "gpu-a"])
def test_a_chosen_address_must_be_one_that_others_reach(chosen: str) -> None:
    with pytest.raises(NodeError, match=f"TRL_NODE_ADDRESS='{chosen}'"):
        reachable_address("http://10.0.0.1:8322", {"TRL_NODE_ADDRESS": chosen})


def test_the_versions_are_those_of_the_interpreter_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cu126", "trl": "1.16.0"}
    monkeypatch.setattr(identity, "_version", lambda name: installed.get(name, ""))
    own = versions()
    assert (own["torch"], own["trl"], own["peft"]) == ("2.13.0", "1.16.0", "")
    assert own["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"llama_stack_provider_trl", "transformers"} <= own.keys()
    with pytest.raises(NodeError, match="/no/python"):
        versions("/no/python")


def test_versions_are_read_from_another_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    assert versions(str(python))["torch"] == ""


def test_an_interpreter_that_fails_is_named(tmp_path: Path) -> None:
    for script in ("exit 1", "echo no json"):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        with pytest.raises(NodeError, match="does not report its versions"):
            versions(str(python))


def test_models_of_the_local_cache_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "hub/models--org--whole/snapshots/abc/config.json", b"{}")
    (tmp_path / "hub/models--org--begun/snapshots").mkdir(parents=True)
    (tmp_path / "hub/datasets--org--rows/snapshots/abc").mkdir(parents=True)
    assert cached_models({"HF_HOME": str(tmp_path)}) == ["org/whole"]
    assert cached_models({"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": "/none"}) == ["org/whole"]
    assert cached_models({"HF_HOME": "/none"}) == []


def test_a_report_names_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, ("GPU-aa", 81559 << 20, "NVIDIA H100"), ("GPU-bb", None, "NVIDIA GB10"))
    environ = {"TRL_NODE_MACHINE_ID": "m", "CUDA_VISIBLE_DEVICES": "1,0"}
    found = node_report("a", "10.0.0.2", ["cuda:0", "cuda:1", "cpu"], tmp_path, environ, labels={"rack": "7"})
    devices = [(device.name, device.memory_bytes, device.model) for device in found.devices]
    assert devices == [("cuda:0", None, "NVIDIA GB10"), ("cuda:1", 81559 << 20, "NVIDIA H100"), ("cpu", None, "")]
    assert (found.name, found.machine_id, found.address, found.labels) == ("a", "m", "10.0.0.2", {"rack": "7"})
    assert found.cpus > 0
    assert found.memory_bytes > 0
    assert found.disk_free_bytes > 0
    assert found.boot_id


def test_a_report_holds_no_more_than_the_service_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "cached_models", lambda environ: [f"org/{number}" for number in range(5000)])
    environ = {"TRL_NODE_MACHINE_ID": "m"}
    found = node_report("a", "10.0.0.2", ["cpu"], tmp_path, environ, ollama=lambda: ("qwen3:4b",))
    assert (len(found.models), found.ollama_models) == (1000, ("qwen3:4b",))
    own = node_report("a", "10.0.0.2", ["cpu"], tmp_path, environ, models=lambda: ["org/fetched"])
    assert (own.models, own.ollama_models) == (("org/fetched",), ())
    with pytest.raises(NodeError, match=r"labels\.rack of this node cannot be reported: .* at most 256 characters"):
        node_report("a", "10.0.0.2", ["cpu"], tmp_path, environ, labels={"rack": "7" * 300})


@pytest.mark.parametrize(
    ("failure", "visible", "expected"),
    [
        (None, "GPU-bb", ("B", 20 << 20)),
        (nvml.NVMLError("Unknown Error"), "0", ("", None)),
    ],
)
def test_a_gpu_is_found_by_its_uuid_and_is_one_without_a_driver_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
    visible: str,
    expected: tuple[str, int | None],
) -> None:
    nvml.install(monkeypatch, ("GPU-aa", 10 << 20, "A"), ("GPU-bb", 20 << 20, "B"), failure=failure)
    environ = {"TRL_NODE_MACHINE_ID": "m", "CUDA_VISIBLE_DEVICES": visible}
    (device,) = node_report("a", "10.0.0.2", ["cuda:0"], tmp_path, environ).devices
    assert (device.name, device.model, device.memory_bytes) == ("cuda:0", *expected)
