"""A worker's agent on this machine, which joins a service on loopback: its address is one that other machines could not
reach, so jobs of one node only come to it.

    python -m tests.contract.local_agent NAME URL DATA_DIR HUB_CACHE [MIB_PER_SECOND]

The token is in TRL_SERVICE_NODE_TOKEN. HUB_CACHE is the node's own, as if it were another machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llama_stack_provider_trl.launch.isolation import NO_ISOLATION
from llama_stack_provider_trl_remote.nodes import start
from llama_stack_provider_trl_remote.nodes.start import NodeSettings, make_agent, serve


def main(name: str, url: str, data_dir: str, hub_cache: str, mib_per_second: str = "") -> int:
    environ = {
        **os.environ,
        "HF_HUB_CACHE": hub_cache,
        "HF_HUB_OFFLINE": "1",
        "TRL_NODE_MACHINE_ID": f"machine of {name}",
    }
    start.make_agent = lambda settings: make_agent(settings, environ)  # type: ignore[misc, assignment]
    settings = NodeSettings(
        url=url,
        token=os.environ["TRL_SERVICE_NODE_TOKEN"],
        name=name,
        data_dir=Path(data_dir),
        address="127.0.0.1",
        devices=("cpu",),
        labels={"kind": name},
        download_mb_per_s=float(mib_per_second) if mib_per_second else None,
        isolation=NO_ISOLATION,
        isolation_mode="off",
        warm_start="TESTS_FORKED" in os.environ,
        heartbeat_interval=0.5,
    )
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
