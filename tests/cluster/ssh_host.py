"""A host with sshd in a network namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cluster.bed import Bed, Machine
from tests.contract.stack import Json


def host(directory: Path, machine: Machine) -> Json:
    """A machine as the inventory has it."""
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_FAULTS": str(machine.bed.faults)}
    return {
        "host": machine.address,
        "name": machine.name,
        "user": "root",
        "key_file": "id",
        "host_key": (machine.root / "host_key.pub").read_text().strip(),
        "python": sys.executable,
        "data_dir": str(machine.data_dir),
        "device": "cpu",
        "environment": variables,
    }


def nothing_but_sshd(bed: Bed, machine: Machine) -> None:
    """No process and no connection is left, but for the SSH server itself."""
    server = int((machine.root / "sshd.pid").read_text())

    def quiet() -> bool:
        return machine.pids() == [server] and not machine.connections()

    bed.wait(quiet, f"nothing but its SSH server is left on {machine.name}", 10)


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
