"""The machines that jobs may run on, as lists show them: devices, jobs, states and loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.files import free_bytes

from ..http.node_bodies import DeviceLoads, LastLoad, NodeLoadResponse, NodeRow
from .joined_nodes import JoinedNodes
from .loads import Loads
from .membership import Cluster


class NodeRows:
    """Reads the rows of machines."""

    def __init__(
        self, store: Store, nodes: JoinedNodes, cluster: Cluster, loads: Loads, devices: Sequence[str], data_dir: Path
    ) -> None:
        self._store, self._nodes, self._cluster, self._loads = store, nodes, cluster, loads
        self._devices, self._data_dir = devices, data_dir

    def all(self) -> list[NodeRow]:
        """Every machine; the service's own first."""
        head = self._cluster.head
        holders = self._store.holders()
        machines = self._cluster.machines()
        memory = psutil.virtual_memory()
        found = [
            NodeRow(
                node=head,
                devices=list(self._devices),
                jobs={place: job for place, job in holders.items() if "/" not in place},
                cpus=psutil.cpu_count() or 1,
                memory_bytes=memory.total,
                memory_available_bytes=memory.available,
                disk_free_bytes=free_bytes(self._data_dir),
                head=True,
                agent=False,
                machine=machines[head],
                state="open",
                load=self._last_load(head),
            )
        ]
        for record in self._store.nodes.all():
            report = self._cluster.report(record)
            if report is None:
                found.append(_unreadable(record.name))
                continue
            shown: dict[str, Any] = {
                "agent": True,
                "machine": machines.get(record.name),
                "load": self._last_load(record.name),
                "state": self._cluster.why_closed(record, report) or "open",
                "address": report.address,
                "versions": report.versions,
                "labels": report.labels,
                "loaned": report.loaned,
                "models": list(report.models),
                "ollama_models": list(report.ollama_models),
                "memory_of_devices": {one.name: one.memory_bytes for one in report.devices if one.memory_bytes},
            }
            if record.name == head:
                found[0] = found[0].model_copy(update=shown)
                continue
            begin = f"{record.name}/"
            found.append(
                NodeRow(
                    node=record.name,
                    devices=[device.name for device in report.devices],
                    jobs={place.removeprefix(begin): job for place, job in holders.items() if place.startswith(begin)},
                    cpus=report.cpus,
                    memory_bytes=report.memory_bytes,
                    memory_available_bytes=None,
                    disk_free_bytes=report.disk_free_bytes,
                    **shown,
                )
            )
        return found

    def load(self, name: str, since: float) -> NodeLoadResponse:
        """How loaded a machine was, by minutes. Raises NotFound.

        Args:
            since: seconds since the epoch.
        """
        if name != self._cluster.head:
            self._nodes.get(name)
        found = self._loads.of(name, since)
        loads = [load for _, load in found]
        of_devices = [{device.name: device for device in load.devices} for load in loads]
        return NodeLoadResponse(
            time=[minute for minute, _ in found],
            cpu_percent=[load.cpu_percent for load in loads],
            memory_used_bytes=[load.memory_used_bytes for load in loads],
            disk_free_bytes=[load.disk_free_bytes for load in loads],
            devices={
                device: DeviceLoads.model_validate(
                    {
                        field: [getattr(of_minute.get(device), field, None) for of_minute in of_devices]
                        for field in DeviceLoads.model_fields
                    }
                )
                for device in dict.fromkeys(name for of_minute in of_devices for name in of_minute)
            },
        )

    def _last_load(self, name: str) -> LastLoad | None:
        found = self._loads.last(name)
        return None if found is None else LastLoad(**dict(found[1]), age_seconds=round(found[0], 1))


def _unreadable(name: str) -> NodeRow:
    """The row of a node whose report another release stored: without it the list would fail for all nodes."""
    return NodeRow(
        node=name,
        devices=[],
        jobs={},
        cpus=0,
        memory_bytes=0,
        memory_available_bytes=None,
        disk_free_bytes=0,
        agent=False,
        state="its stored report cannot be read: start its agent again",
    )
