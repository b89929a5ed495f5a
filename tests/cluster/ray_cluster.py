"""A real Ray cluster on machines of a bed: its head, with the Jobs API, on the service's machine; raylets elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster.bed import NODE_TOKEN, Bed, Machine
from tests.contract.stack import poll

PYTHON = os.environ.get("TRL_RAY_PYTHON", sys.executable)
REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef0123456789abcdef"
PORT, DASHBOARD = 6390, 8265


def why_not() -> str:
    """What a cluster lacks here; empty: nothing."""
    found = subprocess.run([PYTHON, "-c", "import ray"], capture_output=True, check=False).returncode == 0
    return (
        "" if found else f"{PYTHON} has no ray: TRL_RAY_PYTHON names an interpreter with ray[default] and this package"
    )


class RayCluster:
    """Ray's processes. Each machine has one CPU; the head has none, so that agents run on the others."""

    def __init__(self, bed: Bed, root: Path, head: Machine, workers: Sequence[Machine]) -> None:
        self.bed, self.root, self.head, self.workers = bed, root, head, workers
        self._started: list[subprocess.Popen[bytes]] = []
        root.mkdir()
        root.chmod(0o755)
        self.auth = root / "auth-token"
        self.auth.write_text(TOKEN)
        self.auth.chmod(0o600)
        try:
            self._start_all(head, workers)
        except BaseException:
            self.stop()
            raise

    def _start_all(self, head: Machine, workers: Sequence[Machine]) -> None:
        where = ["--include-dashboard=true", f"--dashboard-host={head.address}", f"--dashboard-port={DASHBOARD}"]
        self._start(head, "--head", f"--port={PORT}", "--num-cpus=0", *where)
        poll(lambda: self.nodes() is not None, "Ray's dashboard answers", timeout=240)
        for worker in workers:
            self._start(worker, f"--address={head.address}:{PORT}", "--num-cpus=1")
        poll(lambda: len(self.nodes() or []) == 1 + len(workers), "every raylet has joined", timeout=240)

    def _start(self, machine: Machine, *options: str) -> None:
        """On a machine, with its host name, machine id, and directory of Ray."""
        (machine.root / "ray").mkdir(exist_ok=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        mounts = {machine.root / "machine-id": "/etc/machine-id", machine.root / "ray": "/tmp/ray"}
        alone = "".join(f"mount --bind {source} {target} && " for source, target in mounts.items())
        alone += f'hostname {machine.name} && exec "$@"'
        enter = ["ip", "netns", "exec", machine.namespace, "unshare", "--mount", "--uts", "sh", "-c", alone, "sh"]
        command = [str(Path(PYTHON).parent / "ray"), "start", "--block", f"--node-ip-address={machine.address}"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats", *options]
        with open(self.root / f"{machine.name}.log", "ab") as log:
            started = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **{"PATH": os.environ["PATH"], "HOME": str(machine.root), "PYTHONPATH": str(REPOSITORY)},
                    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"},
                    **{"OMP_NUM_THREADS": "1", "TRL_NODE_WARM_START": "off", "TRL_FAULTS": str(self.bed.faults)},
                    "TRL_LOCK_DIR": str(self.root / f"locks-{machine.name}"),
                },
                start_new_session=True,
            )
        (self.root / f"locks-{machine.name}").mkdir(exist_ok=True)
        self._started.append(started)

    def get(self, path: str) -> object:
        """An answer of Ray's dashboard, from the head's namespace; None: it does not answer."""
        code = (
            "import sys, urllib.request as u; "
            "r = u.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]}); "
            "sys.stdout.write(u.urlopen(r, timeout=10).read().decode())"
        )
        done = subprocess.run(
            [
                *("ip", "netns", "exec", self.head.namespace, sys.executable, "-c", code),
                f"http://{self.head.address}:{DASHBOARD}{path}",
                TOKEN,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def nodes(self) -> list[str] | None:
        """Addresses of the raylets that are alive; None: the dashboard does not answer."""
        found = self.get("/nodes?view=summary")
        if not isinstance(found, dict):
            return None
        alive = (one for one in found["data"]["summary"] if one["raylet"].get("state") == "ALIVE")
        return [one["ip"] for one in alive if "ip" in one]  # one that joins at this moment has none yet

    def jobs(self) -> list[str]:
        """Ray jobs that have not ended."""
        found = self.get("/api/jobs/")
        assert isinstance(found, list)
        return [one["submission_id"] for one in found if one["status"] in ("PENDING", "RUNNING")]

    def pool(self, **changes: object) -> dict[str, object]:
        """Its settings for a service on the head."""
        token = self.root / "token"
        token.write_text(f"{NODE_TOKEN}\n")
        token.chmod(0o600)
        return {
            **{"name": "ray", "kind": "ray", "max_nodes": 3, "idle_seconds": 5, "join_seconds": 120},
            **{"address": f"http://{self.head.address}:{DASHBOARD}", "auth_token_file": str(self.auth)},
            **{"service_url": f"http://{self.head.address}:8322", "token_file": str(token), "python": PYTHON},
            **{"data_dir": str(self.root / "agents"), "node": {"cpus": 1, "memory_gb": 1, "labels": {"rack": "7"}}},
            **changes,
        }

    def kill(self, machine: Machine, name: str) -> None:
        """SIGKILL for one of Ray's own processes on a machine."""
        (pid,) = [pid for pid in machine.pids() if _name(pid) == name]
        os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.root.glob("*.log")))

    def stop(self) -> None:
        """End every process on the machines but the service's."""
        for machine in self.bed.machines:
            for pid in machine.pids():
                if "ray" in _command(pid):
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        for started in self._started:
            started.wait(10)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
