"""Rendezvous of ranks on several machines, and detection of ranks that stop answering.

Ranks connect to each other before anything is loaded. From then on a thread on each rank exchanges a number with every
other rank, over connections of its own. It answers as long as its process runs and the network works. The timeout of
collective operations cannot do this: it is days (`ranks.COLLECTIVE_TIMEOUT`), because an export or a checkpoint may
take hours on one rank.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ...errors import JobFailure
from ...specs.events import EventWriter, Failed, Reason
from ...system.files import RunDir
from . import ranks

RENDEZVOUS_TIMEOUT = 180.0
"""Seconds that ranks wait for each other at the start. Launchers start them together; a cold disk delays one."""
PEER_TIMEOUT = 60.0
"""Seconds without an answer after which a rank counts as lost. A machine that swaps pauses for several."""
EXCHANGE_INTERVAL = 5.0
"""Seconds between two exchanges."""
EXIT_GRACE = 30.0
"""Seconds that a process has to end by itself after another rank has closed its connections, at the end of a job or
because of that rank's failure, which that rank reports. Under NCCL nothing else would end it."""

_MEASURED = 0.3
"""Seconds for which bytes are exchanged to measure the link."""
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 25

_PORTS = "open TCP port {port} and, for gloo and NCCL, the ephemeral range between the nodes"


@contextmanager
def connected_peers(device: torch.device, run_dir: Path, writer: EventWriter) -> Iterator[float | None]:
    """Open the process group of a job with several ranks, and monitor the ranks of other machines while it is open.

    A rank that finds another one lost writes `failed` into its run directory's events and ends its process, since its
    other threads may wait for that rank indefinitely. Raises JobFailure: launch_failed, naming the ranks that were not
    reached as far as they are known.

    Yields:
        Mbit/s between the nodes, each way; None: there is one node, or NCCL exchanges over a network of its own choice.
    """
    if ranks.world_size() == 1:
        yield None
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    several = ranks.world_size() > ranks.local_world_size()
    mbit_per_s = None
    with _heartbeats(writer) if several else nullcontext():
        monitor = None
        if several:
            group, hosts = _rendezvous()
            mbit_per_s = _measure_link(group, hosts) if device.type == "cpu" else None
            monitor = _PeerMonitor(group, hosts, run_dir)
        # accelerate would open the group of CPU ranks with torch's default timeout, 30 minutes.
        # Without `device_id`, which would form NCCL's communicator here, where a rank that does not come is not named.
        # The device is set, and no barrier has to guess it: ours are gloo's, accelerate names the device of its own.
        dist.init_process_group(backend_of(device), timeout=ranks.COLLECTIVE_TIMEOUT)
        if monitor:
            monitor.start()
            monitor.within(RENDEZVOUS_TIMEOUT, "the first all-reduce", lambda: _all_reduce(device))
    try:
        yield mbit_per_s
    finally:
        if monitor:
            monitor.end()


def backend_of(device: torch.device) -> str:
    """The backend of a process group. Beside NCCL there is gloo: under fsdp_cpu_offload gradients are clipped, and
    checkpoints saved, from tensors in CPU memory, which NCCL does not exchange (pytorch#148532). `TRL_CUDA_BACKEND`
    names another one than NCCL, for benchmarks/gpu.py: before 2.30 NCCL refuses two ranks on one GPU."""
    return f"cpu:gloo,cuda:{os.environ.get('TRL_CUDA_BACKEND') or 'nccl'}" if device.type == "cuda" else "gloo"


@contextmanager
def _heartbeats(writer: EventWriter) -> Iterator[None]:
    """Send heartbeats while this is open: the rendezvous has timeouts of its own, so no rank counts as hung."""
    over = threading.Event()

    def heartbeat() -> None:
        while not over.wait(EXCHANGE_INTERVAL):
            writer.heartbeat()

    thread = threading.Thread(target=heartbeat, name="rendezvous heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _rendezvous() -> tuple[dist.ProcessGroup, list[str]]:
    """Connect all ranks; returns a gloo group that no one else uses, and the host names by rank."""
    here = f"rank {ranks.rank()} on {socket.gethostname()}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=RENDEZVOUS_TIMEOUT)
    ports = _PORTS.format(port=port)
    try:
        listens = ranks.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        server = dist.TCPStore(
            address, port, is_master=listens, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
        store = dist.PrefixStore("contact", server)
        store.set(str(ranks.rank()), socket.gethostname())
    except RuntimeError as error:
        raise _unreachable(f"{here} cannot reach rank 0 at {address} port {port}", ports, error) from error
    names = [str(rank) for rank in range(ranks.world_size())]
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        missing = ", ".join(name for name in names if not store.check([name]))
        raise _unreachable(
            f"{here} has waited {RENDEZVOUS_TIMEOUT:.0f} s, and of {len(names)} ranks these did not come: "
            f"{missing or 'unknown'}",
            "see their logs on their machines",
            error,
        ) from error
    hosts = [store.get(name).decode() for name in names]
    try:
        group = dist.ProcessGroupGloo(store, ranks.rank(), ranks.world_size(), timedelta(seconds=PEER_TIMEOUT))
        total = torch.ones(1)
        group.allreduce([total]).wait()
    except RuntimeError as error:
        others = ", ".join(f"rank {name} on {host}" for name, host in zip(names, hosts, strict=True))
        own = os.environ.get("GLOO_SOCKET_IFNAME", "the host name's interface")
        raise _unreachable(f"{here} does not reach all of {others} over {own}", ports, error) from error
    return group, hosts


def _measure_link(group: dist.ProcessGroup, hosts: Sequence[str]) -> float:
    """Mbit/s of the slowest link of the ring of nodes, each way, while all of them are in use. A collective.

    The first rank of each node sends to the next node's, and receives from the one before, as a reduction does. It
    begins with 64 KiB, which take 0.05 s at 10 Mbit/s, and exchanges more until that takes 0.3 s, and that again.
    """
    per_node = ranks.local_world_size()
    node, nodes = ranks.rank() // per_node, ranks.world_size() // per_node
    following, before = (node + 1) % nodes * per_node, (node - 1) % nodes * per_node
    size, is_warm = _FIRST_BYTES, False
    try:
        while True:
            began = time.perf_counter()
            if ranks.local_rank() == 0:
                incoming = torch.empty(size, dtype=torch.uint8)
                received = group.recv([incoming], before, 1)
                group.send([torch.zeros(size, dtype=torch.uint8)], following, 1).wait()
                received.wait()
            slowest = torch.tensor([time.perf_counter() - began])
            group.allreduce([slowest], dist.ReduceOp.MAX).wait()
            seconds = max(float(slowest), 1e-6)
            rate = size / seconds
            if seconds > _MEASURED / 2 or size == _MOST_BYTES:
                if is_warm:
                    return rate * 8 / 1e6
                is_warm = True  # the first time TCP finds its rate: 804 of 956 Mbit/s, then 913
                continue
            size = min(_MOST_BYTES, 16 * size, int(rate * _MEASURED))  # at least twice as many
    except RuntimeError as error:
        others = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts))
        raise _unreachable(f"the link between {others} broke while it was measured", "see their logs", error) from error


def _all_reduce(device: torch.device) -> None:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert int(total) == ranks.world_size()


def _unreachable(found: str, advice: str, error: Exception | None = None) -> JobFailure:
    detail = f" ({' '.join(str(error).split())[:300]})" if error else ""
    return JobFailure(Reason.launch_failed, f"{found}{detail}: {advice}")


class _PeerMonitor:
    """Exchanges a number with every other rank, in a thread."""

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[str], run_dir: Path) -> None:
        self._group, self._hosts = group, hosts
        self._events = EventWriter(RunDir(run_dir).events)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Accept that other ranks end. Returns at once: a pending exchange ends with the process."""
        self._over.set()

    def within(self, seconds: float, what: str, work: Callable[[], None]) -> None:
        """Run `work`, which waits for other ranks, and end this process where it takes longer than `seconds`."""
        peers = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(self._hosts))
        failure = _unreachable(
            f"{what} of {peers} was not over after {seconds:.0f} s",
            f"see the messages of NCCL or gloo in the ranks' logs, and {_PORTS.format(port=os.environ['MASTER_PORT'])}",
        )
        timer = threading.Timer(seconds, self._end_process, [Reason.launch_failed, failure.message])
        timer.daemon = True
        timer.start()
        work()
        timer.cancel()

    def _run(self) -> None:
        while not self._over.wait(EXCHANGE_INTERVAL):
            self._exchange()

    def _exchange(self) -> None:
        others = [rank for rank in range(len(self._hosts)) if rank != ranks.rank()]
        outgoing, incoming = torch.ones(1), torch.zeros(len(self._hosts), 1)
        pending: list[tuple[int, dist.Work]] = []
        rank = 0
        try:
            for rank in others:
                pending.append((rank, self._group.recv([incoming[rank]], rank, 0)))
                pending.append((rank, self._group.send([outgoing], rank, 0)))
            for rank, work in pending:  # noqa: B007 - it names the rank that failed
                work.wait(timedelta(seconds=PEER_TIMEOUT))
        except RuntimeError as error:
            self._lose(rank, str(error))

    def _lose(self, rank: int, error: str) -> None:
        has_timed_out = "timed out" in error.lower() or "timeout" in error.lower()
        if not has_timed_out:  # it has ended, and itself or its launcher reports why
            if not self._over.wait(EXIT_GRACE):
                os._exit(1)
            return
        if not self._over.is_set():
            host = self._hosts[rank]
            self._end_process(
                Reason.node_lost,
                f"rank {rank} on {host} has not answered rank {ranks.rank()} on {self._hosts[ranks.rank()]} for "
                f"{PEER_TIMEOUT:.0f} s: {host} is down or suspended, or the link between them is cut",
            )

    def _end_process(self, reason: Reason, message: str) -> NoReturn:
        self._events.write(Failed(rank=ranks.rank(), reason=reason, message=message), durable=True)
        os._exit(1)
