"""Ranks on several machines: that they reach each other is known before anything is loaded, and that one of them no
longer answers within a minute.

Collective operations wait for each other for days (`ranks.PATIENCE`): an export or a checkpoint may take hours on one
rank. So they cannot tell a link that is cut from a long wait, and TCP itself never tells who only receives. A thread on
each rank exchanges a number with every other rank instead, over connections of its own: it answers however long
anything else takes, as long as its process runs and the network carries.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ...errors import JobFailure
from ...specs.events import EventWriter, Failed, Reason, Silent
from ...system.files import RunDir
from . import ranks

ARRIVAL = 180.0
"""Seconds that ranks wait for each other at the start. Their launchers are told at once; one may read torch from a cold
disk."""
SILENCE = 60.0
"""Seconds without an answer after which a rank counts as lost. A machine that swaps stands still for some."""
BEAT = 5.0
"""Seconds between two exchanges."""
FAREWELL = 30.0
"""Seconds in which a process ends by itself after another rank has closed its connections: at the end of a job, or
because that rank has failed and says why. Under NCCL nothing else would end it."""

_PORTS = "open TCP port {port} and, for gloo and NCCL, the ephemeral range between the nodes"


@contextmanager
def in_contact(device: torch.device, run_dir: Path, writer: EventWriter | Silent) -> Iterator[None]:
    """Open the process group of a job of several ranks; while this is open, those of several machines watch each other.

    A rank that finds another one silent writes `failed` into its run directory's events and ends its process: whatever
    its other threads wait for will not come.

    Raises:
        JobFailure: launch_failed, naming who was not reached as far as is known.
    """
    if ranks.world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    several = ranks.world_size() > ranks.local_world_size()
    with _beating(writer) if several else nullcontext():
        pulse = _Pulse(*_meet(), run_dir) if several else None
        # Here, and with the group's timeout: accelerate opens CPU ranks' with torch's own, 30 minutes.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=ranks.PATIENCE)
        if pulse:
            pulse.start()
            pulse.within(ARRIVAL, "the first all-reduce", lambda: _all_reduce(device))
    try:
        yield
    finally:
        if pulse:
            pulse.end()


@contextmanager
def _beating(writer: EventWriter | Silent) -> Iterator[None]:
    """While ranks wait for each other at the start, which has limits of its own, none of them counts as hung."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            writer.beat()

    thread = threading.Thread(target=beat, name="waits for the other ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _meet() -> tuple[dist.ProcessGroup, list[str]]:
    """A group of gloo's own in which every rank has heard of every other, and the host names by rank."""
    here = f"rank {ranks.rank()} on {socket.gethostname()}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=ARRIVAL)
    ports = _PORTS.format(port=port)
    try:
        listens = ranks.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        server = dist.TCPStore(
            address, port, is_master=listens, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
        store = dist.PrefixStore("contact", server)
        store.set(str(ranks.rank()), socket.gethostname())
    except RuntimeError as error:
        raise _unreached(f"{here} cannot reach rank 0 at {address} port {port}", ports, error) from error
    names = [str(rank) for rank in range(ranks.world_size())]
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        missing = ", ".join(name for name in names if not store.check([name]))
        raise _unreached(
            f"{here} has waited {ARRIVAL:.0f} s, and of {len(names)} ranks these did not come: {missing or 'unknown'}",
            "see their logs on their machines",
            error,
        ) from error
    hosts = [store.get(name).decode() for name in names]
    try:
        group = dist.ProcessGroupGloo(store, ranks.rank(), ranks.world_size(), timedelta(seconds=SILENCE))
        total = torch.ones(1)
        group.allreduce([total]).wait()
    except RuntimeError as error:
        others = ", ".join(f"rank {name} on {host}" for name, host in zip(names, hosts, strict=True))
        own = os.environ.get("GLOO_SOCKET_IFNAME", "the host name's interface")
        raise _unreached(f"{here} does not reach all of {others} over {own}", ports, error) from error
    return group, hosts


def _all_reduce(device: torch.device) -> None:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert int(total) == ranks.world_size()


def _unreached(found: str, advice: str, error: Exception | None = None) -> JobFailure:
    said = f" ({' '.join(str(error).split())[:300]})" if error else ""
    return JobFailure(Reason.launch_failed, f"{found}{said}: {advice}")


class _Pulse:
    """The thread that exchanges a number with every other rank."""

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[str], run_dir: Path) -> None:
        self._group, self._hosts = group, hosts
        self._events = EventWriter(RunDir(run_dir).events)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches the other ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Others may end now. Returns at once: who waits for an answer that will not come dies with its process."""
        self._over.set()

    def within(self, seconds: float, what: str, work: Callable[[], None]) -> None:
        """Do something that waits for other ranks, and end this process where it takes longer."""
        places = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(self._hosts))
        failure = _unreached(
            f"{what} of {places} was not over after {seconds:.0f} s",
            f"see what NCCL or gloo says in the ranks' logs, and {_PORTS.format(port=os.environ['MASTER_PORT'])}",
        )
        timer = threading.Timer(seconds, self._end_process, [Reason.launch_failed, failure.message])
        timer.daemon = True
        timer.start()
        work()
        timer.cancel()

    def _run(self) -> None:
        while not self._over.wait(BEAT):
            self._exchange()

    def _exchange(self) -> None:
        others = [rank for rank in range(len(self._hosts)) if rank != ranks.rank()]
        said, heard = torch.ones(1), torch.zeros(len(self._hosts), 1)
        under_way: list[tuple[int, dist.Work]] = []
        rank = 0
        try:
            for rank in others:
                under_way.append((rank, self._group.recv([heard[rank]], rank, 0)))
                under_way.append((rank, self._group.send([said], rank, 0)))
            for rank, work in under_way:  # noqa: B007 - it is who failed
                work.wait(timedelta(seconds=SILENCE))
        except RuntimeError as error:
            self._lose(rank, str(error))

    def _lose(self, rank: int, said: str) -> None:
        is_silent = "timed out" in said.lower() or "timeout" in said.lower()
        if not is_silent:  # it has ended, and its launcher or itself says how
            if not self._over.wait(FAREWELL):
                os._exit(1)
            return
        if not self._over.is_set():
            host = self._hosts[rank]
            self._end_process(
                Reason.node_lost,
                f"rank {rank} on {host} has not answered rank {ranks.rank()} on {self._hosts[ranks.rank()]} for "
                f"{SILENCE:.0f} s: {host} is down, stands still, or the link between them is cut",
            )

    def _end_process(self, reason: Reason, message: str) -> NoReturn:
        self._events.write(Failed(rank=ranks.rank(), reason=reason, message=message), durable=True)
        os._exit(1)
