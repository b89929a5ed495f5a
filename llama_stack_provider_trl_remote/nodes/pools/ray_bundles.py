"""The Ray job of an order: a placement group with a bundle on each of N machines, and an agent in each bundle.

    python -m llama_stack_provider_trl_remote.nodes.pools.ray_bundles '{"names": [...], "bundle": {"CPU": 8}, ...}'

It runs in Ray's cluster, in an environment that has ray and this package; beside it, only `ray_rows` imports ray. Ray
reserves the machines, and adds them where it scales; it starts no training and knows of none. The last line of its
output is what `ray_pool` shows. https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STARTED = "agents started"
_GUARD = "llama_stack_provider_trl_remote.nodes.pools.guard"
_WAIT = 5.0


class Bundle:
    """An actor that has a bundle, and runs an agent with it."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[str] | None = None

    def run(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        """Start an agent, and wait for its end. Returns what the guard reports."""
        home = Path(order["data_dir"]).expanduser() / name
        command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "agent", "--service", order["service_url"]]
        command += ["--token-file", order["token_file"], "--name", name, "--data-dir", str(home / "agent")]
        command += [part for label, value in order["labels"].items() for part in ("--label", f"{label}={value}")]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._guard = subprocess.Popen(
            [sys.executable, "-m", _GUARD, json.dumps({"home": str(home), "command": command})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        return json.loads(line) if line else {"status": 1, "message": f"{name}: the guard of the agent was killed"}

    def leave(self) -> None:
        """Have the agent leave: its jobs save, and continue on other nodes."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write("leave\n")
            self._guard.stdin.flush()


def main(arguments: list[str]) -> int:
    """Returns 0 once every agent has left."""
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    order = json.loads(arguments[0])
    names, bundle = order["names"], order["bundle"]
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    group = placement_group([bundle] * len(names), strategy="STRICT_SPREAD")
    what = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    _report(f"Ray has no {len(names)} machines with {what} each free yet")
    while not group.wait(_WAIT):
        pass
    counts = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    kind = ray.remote(Bundle)
    actors = [
        kind.options(
            **counts,
            resources=others,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        ).remote()
        for number in range(len(names))
    ]
    running = {actor.run.remote(name, order): (name, actor) for name, actor in zip(names, actors, strict=True)}
    _report(STARTED)
    message, failed = "", False
    while running:
        (ended,), _ = ray.wait(list(running), num_returns=1)
        name, _ = running.pop(ended)
        try:
            found = ray.get(ended)
        except RayError as error:
            message, failed = f"{name}: its machine or its process is gone ({type(error).__name__})", True
            # Ray reserves another machine for the lost bundle, which no agent will have: give all of them back.
            for _, other in running.values():
                other.leave.remote()
        else:
            if found["status"]:
                message, failed = f"{name}: the agent ended: {found['message']}", True
        if message:
            _report(message if running else "")
    _report(message or "every agent has left")
    return int(failed)


def _report(line: str) -> None:
    if line:
        print(f"trl: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
