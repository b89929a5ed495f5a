"""torchrun whose store listens at the master address only.

    python -m llama_stack_provider_trl.recipes.torchrun ARGUMENTS OF torchrun

torch's own takes every address of the machine, and asks nobody who reads and writes there for a password. torchrun has
no option for that, but the store takes a socket that listens already.
"""

from __future__ import annotations

import socket

from torch.distributed import Store, TCPStore, run
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous


class ConfinedRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """The static rendezvous; the ranks are clients of the store that torchrun itself holds."""

    _store: Store | None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            family = socket.AF_INET6 if ":" in self.master_addr else socket.AF_INET
            listener = socket.create_server((self.master_addr, self.master_port), family=family)
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


if __name__ == "__main__":
    static_tcp_rendezvous.StaticTCPRendezvous = ConfinedRendezvous
    run.main()
