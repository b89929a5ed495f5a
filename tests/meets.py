"""`python -m tests.meets RUN_DIR SECONDS MOST`: a rank that meets the others and waits for the file `end` in its
directory.

Prints `met` and the link as measured, or the failure. It reports a peer that has not answered for SECONDS, and waits
for the others for MOST seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.distributed import peers
from llama_stack_provider_trl.specs.events import EventWriter
from llama_stack_provider_trl.system.files import RunDir


def main() -> None:
    run_dir = Path(sys.argv[1])
    writer = EventWriter(RunDir(run_dir).events)
    (run_dir / "began").touch()
    peers.EXCHANGE_INTERVAL, peers.EXIT_GRACE = 0.1, 1.0
    peers.PEER_TIMEOUT, peers.RENDEZVOUS_TIMEOUT = map(float, sys.argv[2:])
    try:
        with peers.connected_peers(torch.device("cpu"), run_dir, writer) as mbit_per_s:
            print("met", flush=True)
            print("link", mbit_per_s, flush=True)
            while not (run_dir / "end").exists():
                time.sleep(0.02)
    except JobFailure as failure:
        print(failure.reason, failure.message, flush=True)


if __name__ == "__main__":
    main()
