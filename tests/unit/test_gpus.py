"""What the driver reports of GPUs, on machines that have some and on those that have none."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from llama_stack_provider_trl.launch import devices, gpus
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.gpus import Gpu, gpu_of
from llama_stack_provider_trl.launch.torchrun import lock_name, visible_gpus
from llama_stack_provider_trl_remote.nodes import identity
from llama_stack_provider_trl_remote.service.settings import ServiceSettings, SettingsError, TorchRunConfig
from llama_stack_provider_trl_remote.wire import DeviceReport
from tests import nvml

H100 = ("GPU-aa", 81559 << 20, "NVIDIA H100")
GB10 = ("GPU-bb", None, "NVIDIA GB10")


def test_the_driver_is_read_once_and_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = nvml.install(monkeypatch, H100, GB10)
    expected = (Gpu("0", "GPU-aa", 81559 << 20, "NVIDIA H100"), Gpu("1", "GPU-bb", None, "NVIDIA GB10"))
    assert [gpus.gpus() for _ in range(2)] == [expected, expected]
    assert (driver.opened, driver.closed) == (1, 1)


def test_a_driver_that_fails_is_closed_and_read_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = nvml.install(monkeypatch, H100)
    with monkeypatch.context() as broken:
        broken.setattr(driver, "nvmlDeviceGetCount", failing("the driver is in an unknown state"))
        assert gpus.gpus() == ()
    assert driver.closed == 1
    assert "unknown state" in caplog.text
    assert len(gpus.gpus()) == 1


def test_a_gpu_that_cannot_be_opened_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = nvml.install(monkeypatch, H100, GB10)
    opened = driver.nvmlDeviceGetHandleByIndex
    monkeypatch.setattr(
        driver, "nvmlDeviceGetHandleByIndex", lambda index: opened(index) if index else failing("No permission")()
    )
    assert [(gpu.number, gpu.uuid) for gpu in gpus.gpus()] == [("1", "GPU-bb")]
    assert "GPU 0 is left out: No permission" in caplog.text


def failing(text: str) -> Any:
    def fail(*_: Any) -> None:
        raise nvml.NVMLError(text)

    return fail


@pytest.mark.parametrize(
    ("failure", "log"),
    [
        (nvml.NVMLError_LibraryNotFound("no library"), ""),
        (nvml.NVMLError("Driver/library version mismatch"), "Driver/library version mismatch"),
        (OSError("cannot open shared object"), "cannot open shared object"),
    ],
)
def test_a_machine_whose_driver_is_absent_or_broken_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception, log: str
) -> None:
    nvml.install(monkeypatch, failure=failure)
    assert gpus.gpus() == ()
    assert gpu_of("cuda:0", {}) is None
    assert (log in caplog.text) if log else not caplog.records


def test_a_driver_that_hangs_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, answers = nvml.install(monkeypatch, H100), Event()
    monkeypatch.setattr(driver, "nvmlInit", answers.wait)
    monkeypatch.setattr(gpus, "_TIMEOUT", 0.2)
    assert gpus.gpus() == ()
    assert "the driver has not answered for 0.2 s" in caplog.text
    assert gpus.gpus() == (), "the same call is not waited for twice"
    answers.set()
    assert gpus._query is not None
    gpus._query.join()
    assert len(gpus.gpus()) == 1, "what it answers late is known"
    assert driver.closed == 1


def test_callers_at_the_same_time_get_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, answers, asking = nvml.install(monkeypatch, H100), Event(), Event()
    monkeypatch.setattr(driver, "nvmlInit", lambda: asking.set() or answers.wait())
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(gpus.gpus)
        asking.wait()
        second = callers.submit(gpus.gpus)
        answers.set()
        assert first.result() == second.result() != ()


def test_an_environment_without_the_library_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.gpus() == ()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The driver's /proc directory of a host with four GPUs, as in every container; returns /dev, which is empty."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    for minor in range(4):
        gpu = tmp_path / "gpus" / f"0000:0{minor}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t NVIDIA H100\nDevice Minor: \t {minor}\n")
    monkeypatch.setattr(devices, "_NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(devices, "_DEVICE_NODES", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("host")
def test_a_container_counts_the_gpus_that_the_driver_lists_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, H100, GB10)
    assert usable_devices("auto") == ["cuda:0", "cuda:1"]


def test_a_container_without_the_driver_s_library_counts_the_gpus_that_it_can_open(
    monkeypatch: pytest.MonkeyPatch, host: Path
) -> None:
    nvml.install(monkeypatch, failure=nvml.NVMLError_LibraryNotFound("no library"))
    assert usable_devices("auto") == ["cpu"], "a container without GPUs on a host that has some"
    (host / "nvidia2").touch()
    assert usable_devices("auto") == ["cuda:0"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", ["0", "1"]), ("1,7,0", ["1"]), ("0,-1,1", ["0"]), ("GPU-cc", []), ("GPU-b", ["GPU-b"]), ("", [])],
)
def test_a_gpu_that_is_not_there_ends_the_list_of_visible_ones_as_in_cuda(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    nvml.install(monkeypatch, H100, GB10)
    assert gpus.visible_entries({"CUDA_VISIBLE_DEVICES": visible}) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.count_gpus() == len(expected)


# MIG

WHOLE = ("GPU-cc", 80 << 30, "NVIDIA H100")
SLICES = (("MIG-11", 10 << 30, "NVIDIA H100 MIG 1g.10gb"), None, ("MIG-22", 20 << 30, "NVIDIA H100 MIG 2g.20gb"))


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole GPU, and one in MIG mode with two slices and an empty slot between them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml.install(monkeypatch, H100, WHOLE, slices={1: SLICES})


@pytest.mark.usefixtures("sliced")
def test_the_slices_of_a_gpu_are_devices_and_the_gpu_itself_is_none() -> None:
    assert usable_devices("auto") == ["cuda:0", "cuda:1", "cuda:2"]
    found = [gpu_of(device, {}) for device in usable_devices("auto")]
    assert [gpu and (gpu.uuid, gpu.memory_bytes, gpu.parent) for gpu in found] == [
        ("GPU-aa", 81559 << 20, ""),
        ("MIG-11", 10 << 30, "GPU-cc"),
        ("MIG-22", 20 << 30, "GPU-cc"),
    ]


@pytest.mark.usefixtures("sliced")
def test_two_slices_of_a_gpu_have_two_locks_and_each_training_sees_its_own() -> None:
    tasks = [TaskSpec("a-1", Path("/r"), (f"cuda:{number}",)) for number in range(3)]
    assert [visible_gpus(task, {})["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["GPU-aa", "MIG-11", "MIG-22"]
    assert [lock_name(task.devices[0], {}) for task in tasks] == ["cuda-GPU-aa", "cuda-MIG-11", "cuda-MIG-22"]
    other = {"CUDA_VISIBLE_DEVICES": "MIG-22"}
    assert lock_name("cuda:0", other) == "cuda-MIG-22", "a program that sees that slice only"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["MIG-11", "MIG-22"]),
        ("GPU-cc,0", ["MIG-11", "MIG-22", "0"]),
        ("MIG-22,MIG-11", ["MIG-22", "MIG-11"]),
        ("MIG-33", []),
        ("MIG-GPU-cc/1/0", ["MIG-GPU-cc/1/0"]),
    ],
)
@pytest.mark.usefixtures("sliced")
def test_a_gpu_in_mig_mode_stands_for_its_slices_where_it_is_visible(visible: str, expected: list[str]) -> None:
    assert gpus.visible_entries({"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.usefixtures("sliced")
def test_several_ranks_on_slices_are_refused_before_they_start() -> None:
    with pytest.raises(OSError, match="MIG-11, MIG-22: a CUDA process sees one MIG slice"):
        visible_gpus(TaskSpec("a-1", Path("/r"), ("cuda:1", "cuda:2"), ranks=2), {})


@pytest.mark.usefixtures("sliced")
def test_a_service_on_slices_trains_a_job_on_one_of_them(tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=tmp_path)
    assert settings.default_ranks(("cuda:1", "cuda:2")) == (1, "auto on MIG slices")
    assert settings.for_jobs(("cuda:1", "cuda:2")).max_ranks == 1
    pair = ServiceSettings(data_dir=tmp_path, torch_run_config=TorchRunConfig(nproc_per_node=2))
    with pytest.raises(SettingsError, match="nproc_per_node=2: a CUDA process sees one MIG slice"):
        pair.for_jobs(("cuda:1", "cuda:2"))


@pytest.mark.usefixtures("sliced")
def test_a_service_on_gpus_and_slices_joins_its_whole_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, H100, WHOLE, GB10, slices={1: SLICES})
    devices = tuple(usable_devices("auto"))
    settings = ServiceSettings(data_dir=tmp_path)
    assert len(devices) == 4
    assert settings.default_ranks(devices) == (2, "auto: one per GPU that is no MIG slice")
    assert settings.for_jobs(devices).max_ranks == 2
    triple = ServiceSettings(data_dir=tmp_path, torch_run_config=TorchRunConfig(nproc_per_node=3))
    with pytest.raises(SettingsError, match=r"nproc_per_node=3: .* and 2 whole GPUs may be used here; use 2, or auto"):
        triple.for_jobs(devices)


@pytest.mark.usefixtures("sliced")
def test_an_agent_reports_which_of_its_devices_are_slices() -> None:
    reported = [identity._device(device, {}) for device in ("cpu", *usable_devices("auto"))]
    assert [device.is_slice for device in reported] == [False, False, True, True]
    older = {"name": "cuda:0", "memory_bytes": 1, "model": "NVIDIA H100"}
    assert not DeviceReport.model_validate(older).is_slice


def test_a_slice_that_the_driver_does_not_list_is_one_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch)
    assert gpus.is_slice("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-11"})
    assert not gpus.is_slice("cuda:0", {})


def test_the_library_has_every_name_that_its_fake_has() -> None:
    library = pytest.importorskip("pynvml")
    names = [name for name in vars(nvml.FakeNvml) if not name.startswith("_")]
    assert len(names) == 15
    assert [name for name in names if not hasattr(library, name)] == []
