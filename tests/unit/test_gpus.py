"""What the driver reports of GPUs, on machines that have some and on those that have none."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from llama_stack_provider_trl.launch import devices, gpus
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.gpus import Gpu, gpu_of
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
    monkeypatch.setattr(gpus, "_TIMEOUT", 0.01)
    assert gpus.gpus() == ()
    assert "the driver has not answered for 0.01 s" in caplog.text
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


def test_gpus_are_counted_by_the_driver_where_it_has_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_NVIDIA_GPUS", tmp_path / "none")
    nvml.install(monkeypatch, H100, GB10)
    assert usable_devices("auto") == ["cuda:0", "cuda:1"]


def test_the_library_has_every_name_that_its_fake_has() -> None:
    library = pytest.importorskip("pynvml")
    names = [name for name in vars(nvml.FakeNvml) if not name.startswith("_")]
    assert len(names) == 9
    assert [name for name in names if not hasattr(library, name)] == []
