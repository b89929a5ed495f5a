"""torchrun with a store that listens at the master address only.

    python -m llama_stack_provider_trl.recipes.distributed.torchrun --last-port=PORT ARGUMENTS OF torchrun

torch's store listens at every address of the machine, and has no authentication. torchrun has no option to change that,
but the store accepts a listening socket.

Of several nodes only the first one's store listens; the others connect to it.

In a fork of the warm process the ranks are forks, too: torchrun polls, signals and reports them as it does others.

The supervisor has found --master-port free. Importing torch takes seconds, in which another service of this machine may
take the port. Then the ports after it are tried, up to --last-port. Several nodes use one port, or fail.
"""

from __future__ import annotations

import argparse
import errno
import socket
import sys
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed import DistError, Store, TCPStore, run
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous

from ...specs.events import EventWriter, Failed, Reason
from ...system import fork
from ...system.files import RunDir


class RendezvousFailed(Exception):
    """Raised when the torchrun of another node has not connected in time."""


class ConfinedRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """The static rendezvous, with a store in torchrun itself; the ranks are its clients."""

    listener: ClassVar[socket.socket]
    _store: Store | None

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            if self._store is None and self.rank == 0:
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    is_master=True,
                    timeout=self.timeout,
                    multi_tenant=True,
                    master_listen_fd=self.listener.detach(),
                )
            return super().next_rendezvous()
        except DistError as error:
            raise RendezvousFailed(
                f"the torchruns of {self.world_size} nodes did not meet at {self.master_addr} port {self.master_port} "
                f"within {self.timeout.total_seconds():.0f} s ({str(error).partition(chr(10))[0]}): see torchrun's log "
                "on each of them, and open that TCP port between them"
            ) from error


class ForkedRank(SubprocessHandler):
    """A rank that torchrun forks: it has imported torch and trl already."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return fork.start(args, environ=env) if fork.can_become(args) else super()._popen(args, env)


def listener(address: str, port: int, last_port: int) -> socket.socket:
    """A socket that listens at the first free port from `port` to `last_port`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port >= last_port:
                raise
        port += 1


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--last-port", type=int, default=0)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--shutdown-timeout", type=int)
    ours, others = parser.parse_known_args(argv)
    if ours.shutdown_timeout is not None and "--shutdown-timeout" in run.get_args_parser().format_help():
        others.insert(0, f"--shutdown-timeout={ours.shutdown_timeout}")  # torch 2.11 has no such option
    port = ours.master_port
    if ours.node_rank == 0:
        ConfinedRendezvous.listener = listener(ours.master_addr, port, ours.last_port)
        port = ConfinedRendezvous.listener.getsockname()[1]
    static_tcp_rendezvous.StaticTCPRendezvous = ConfinedRendezvous
    if fork.is_prepared():
        api.get_subprocess_handler = ForkedRank
    endpoint = [f"--master-addr={ours.master_addr}", f"--master-port={port}", f"--node-rank={ours.node_rank}"]
    try:
        run.main([*endpoint, *others])
    except RendezvousFailed as error:
        _write_failure(Path(others[-1]), str(error))
        sys.exit(str(error))


def _write_failure(spec: Path, message: str) -> None:
    """Report the failure in place of the ranks, which were never started."""
    events = EventWriter(RunDir(spec.parent).events)
    events.write(Failed(reason=Reason.launch_failed, message=message), durable=True)
    events.close()


if __name__ == "__main__":
    main(sys.argv[1:])
