"""How loaded machines are: measured, reported with polls, and kept for a day."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llama_stack_provider_trl.jobs.store.monitoring.loads import KEPT_SECONDS
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.nodes import load as nodes_load
from llama_stack_provider_trl_remote.nodes.load import LoadMeter
from llama_stack_provider_trl_remote.service.cluster.loads import Loads, MeanLoad
from llama_stack_provider_trl_remote.wire import MOST_DEVICES, DeviceLoad, Load
from tests import nvml
from tests.fakes import FakeClock

GIB = 1 << 30


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_800_000_000.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "jobs.sqlite3")
    yield store
    store.close()


def taken(cpu: float, memory: int = GIB, **gpu: float) -> Load:
    devices = [DeviceLoad.model_validate({"name": "cuda:0", **gpu})] if gpu else []
    return Load(cpu_percent=cpu, memory_used_bytes=memory, disk_free_bytes=GIB, devices=tuple(devices))


def test_the_cpu_is_measured_since_the_call_before(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [(10.0, 100.0), (40.0, 200.0), (40.0, 200.0)]
    monkeypatch.setattr(nodes_load, "cpu_seconds", lambda: seconds.pop(0))
    meter = LoadMeter(["cpu"], tmp_path, {}, clock)
    found = meter.read()
    assert found is not None
    assert (found.cpu_percent, found.devices) == (30.0, ())
    assert 0 < found.memory_used_bytes <= psutil.virtual_memory().total
    assert found.disk_free_bytes > 0
    assert meter.read() is found  # within a second
    clock.advance(2)
    again = meter.read()
    assert again is not None
    assert again.cpu_percent == 0.0


def test_gpus_are_those_of_the_node_with_what_their_driver_reports(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = {1: [("MIG-a", 8 * GIB, "slice")]}
    nvml.install(monkeypatch, ("GPU-a", None, "GB10"), ("GPU-b", 80 * GIB, "H100"), slices=slices)
    found = LoadMeter(["cuda:0", "cuda:1"], tmp_path, {}, clock).read()
    assert found is not None
    assert [one.model_dump(exclude_none=True) for one in found.devices] == [
        {"name": "cuda:0", "utilization_percent": 75, "power_watts": 250.5},
        {"name": "cuda:1", "memory_used_bytes": 4 * GIB},
    ]


def test_a_driver_that_hangs_delays_no_poll(tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, over = nvml.install(monkeypatch, ("GPU-a", GIB, "H100")), threading.Event()
    monkeypatch.setattr(fake, "nvmlInit", lambda: over.wait(30))
    monkeypatch.setattr(nodes_load, "_DRIVER_SECONDS", 0.01)
    meter = LoadMeter(["cuda:0"], tmp_path, {}, clock)
    for _ in range(3):
        found = meter.read()
        assert found is not None
        assert found.devices == ()
        clock.advance(2)
    (hanging,) = [thread for thread in threading.enumerate() if thread.name == "trl-load"]
    over.set()
    hanging.join(10)
    assert not hanging.is_alive()


def test_a_machine_that_cannot_be_measured_still_polls(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path) -> int:
        raise OSError("no such device")

    meter = LoadMeter(["cpu"], tmp_path, {}, clock)
    assert meter.read() is not None
    monkeypatch.setattr(nodes_load, "free_bytes", fails)
    for _ in range(3):
        clock.advance(2)
        assert meter.read() is None
    assert caplog.text.count("cannot be measured: no such device") == 1


def test_the_mean_of_loads_is_of_the_values_that_are_known() -> None:
    loads = [taken(10.0, 2 * GIB, utilization_percent=50.0), taken(30.0, 4 * GIB), taken(50.0, 6 * GIB, power_watts=9)]
    mean = MeanLoad()
    for load in loads:
        mean.add(load)
    assert mean.mean == taken(30.0, 4 * GIB, utilization_percent=50.0, power_watts=9.0)


def test_a_minute_of_many_polls_takes_no_more_memory_than_one_of_few(store: Store, clock: FakeClock) -> None:
    """A node polled 100 times a second with the loads of 64 devices, and the service kept them all: 140 MB a minute."""
    loads = Loads(store, clock)

    def held(polls: int) -> int:
        devices = tuple(DeviceLoad(name=f"cuda:{number}", power_watts=1.5) for number in range(MOST_DEVICES))
        load = Load(cpu_percent=1.0, memory_used_bytes=1, disk_free_bytes=1, devices=devices)
        gc.collect()
        tracemalloc.start()
        for _ in range(polls):
            loads.note("a", load.model_copy(deep=True))
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    held(5)
    assert held(400) < 200_000
    assert loads.of("a", 0)[0][1].devices[MOST_DEVICES - 1].power_watts == 1.5


def test_a_minute_has_no_more_devices_than_a_load(store: Store, clock: FakeClock) -> None:
    loads = Loads(store, clock)
    for number in range(1000):
        device = DeviceLoad(name=f"gpu {number}", power_watts=1.0)
        loads.note("a", Load(cpu_percent=1.0, memory_used_bytes=1, disk_free_bytes=1, devices=(device,)))
    clock.advance(60)
    loads.note("a", Load(cpu_percent=1.0, memory_used_bytes=1, disk_free_bytes=1))
    assert len(loads.of("a", 0)[0][1].devices) == MOST_DEVICES


def test_a_day_of_minutes_is_kept_over_restarts(store: Store, clock: FakeClock) -> None:
    loads, begin = Loads(store, clock), int(clock.now)
    for second in range(0, 180, 20):
        loads.note("a", taken(second / 2))
        clock.advance(20)
    minutes = [(begin, 10.0), (begin + 60, 40.0), (begin + 120, 70.0)]
    assert [(minute, load.cpu_percent) for minute, load in loads.of("a", 0)] == minutes
    assert loads.of("b", 0) == []
    restarted = Loads(store, clock)
    assert [(minute, load.cpu_percent) for minute, load in restarted.of("a", begin + 60)] == minutes[1:2]
    clock.advance(KEPT_SECONDS)
    for _ in range(2):
        restarted.note("a", taken(1.0))
        clock.advance(60)
    assert [load.cpu_percent for _, load in restarted.of("a", 0)] == [1.0, 1.0]
    store.nodes.join("a", "m", "1", "{}")
    store.nodes.remove("a")
    restarted.forget("a")
    assert restarted.of("a", 0) == []


def test_the_last_load_has_its_age(store: Store, clock: FakeClock) -> None:
    loads = Loads(store, clock)
    assert loads.last("a") is None
    loads.note("a", taken(5.0))
    assert loads.last("a") == (0.0, taken(5.0))
    clock.advance(31)
    assert loads.last("a") == (31.0, taken(5.0))
    clock.advance(-40)
    assert loads.last("a") == (0.0, taken(5.0)), "the clock was set back"


def test_a_full_disk_fails_no_poll(store: Store, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads(store, clock)
    loads.note("a", taken(5.0))
    store.close()
    store.path.rename(store.path.with_name("away"))
    store.path.mkdir()
    clock.advance(60)
    loads.note("a", taken(6.0))
    assert loads.last("a") == (0.0, taken(6.0))
    assert "the load of node a is not stored" in caplog.text
