"""A real Slurm cluster on machines of a bed: Debian's slurmctld on the service's machine, slurmd on others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster.bed import NODE_TOKEN, Bed, Machine
from tests.contract.stack import poll

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_CONF = """ClusterName=trl
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
SchedulerParameters=sched_interval=5,batch_sched_delay=1
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """What a cluster lacks here; empty: nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge" if missing else ""


class SlurmCluster:
    """Slurm's processes, and its commands. They end with the machines that they are on."""

    def __init__(self, bed: Bed, root: Path, head: Machine, workers: Sequence[Machine]) -> None:
        self.bed, self.root, self.head = bed, root, head
        self._started: list[subprocess.Popen[bytes]] = []
        (root / "state").mkdir(parents=True)
        root.chmod(0o755)
        self.conf = root / "slurm.conf"
        nodes = "\n".join(
            f"NodeName={one.name} NodeHostname={one.name} NodeAddr={one.address} CPUs=1 RealMemory=1000"
            for one in workers
        )
        names = ",".join(one.name for one in workers)
        self.conf.write_text(_CONF.format(head=head.name, address=head.address, root=root, nodes=nodes, names=names))
        # Not used; where nothing is named, slurmd looks for a file system of cgroups and ends without one.
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munged = ("munged", "--foreground", "--force", f"--socket={root}/munge.socket", f"--key-file={key}")
        files = [f"--{name}-file={root}/munge.{name}" for name in ("log", "pid", "seed")]
        self._start(head, *munged, *files)
        poll((root / "munge.socket").exists, "munged listens", timeout=10)
        self._start(head, "slurmctld", "-D", "-f", str(self.conf))
        for worker in workers:
            (root / f"spool-{worker.name}").mkdir()
            self._start(worker, "slurmd", "-D", "-N", worker.name, "-f", str(self.conf))
        poll(
            lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == [str(len(workers)), "idle"], "nodes are idle", 60
        )

    def _start(self, machine: Machine, *command: str) -> None:
        """On a machine, with its host name and locks of its own."""
        alone = f'mount --bind {machine.root}/machine-id /etc/machine-id && hostname {machine.name} && exec "$@"'
        enter = ["ip", "netns", "exec", machine.namespace, "unshare", "--mount", "--uts", "sh", "-c", alone, "sh"]
        with open(self.root / f"{machine.name}.log", "ab") as log:
            started = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf)},
                start_new_session=True,
            )
        self._started.append(started)

    @property
    def variables(self) -> dict[str, str]:
        """Of the service, for Slurm's commands."""
        return {"SLURM_CONF": str(self.conf)}

    def pool(self, **changes: object) -> dict[str, object]:
        """Its settings for a service on the head."""
        token = self.root / "token"
        token.write_text(f"{NODE_TOKEN}\n")
        token.chmod(0o600)
        sent = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRL_NODE_WARM_START": "off",
            "TRL_FAULTS": str(self.bed.faults),
        }
        wrapper = self.root / "trl-remote"
        exports = "".join(f"export {name}={value}\n" for name, value in sent.items())
        # Each machine has its own directory for locks, as machines have their own /tmp.
        locks = f'export TRL_LOCK_DIR={self.root}/locks-$(hostname); mkdir -p "$TRL_LOCK_DIR"\n'
        wrapper.write_text(
            f'#!/bin/sh\n{exports}{locks}exec {sys.executable} -m llama_stack_provider_trl_remote "$@"\n'
        )
        wrapper.chmod(0o755)
        return {
            **{"name": "slurm", "kind": "slurm", "max_nodes": 2, "idle_seconds": 5, "join_seconds": 120},
            **{"service_url": f"http://{self.head.address}:8322", "token_file": str(token), "command": str(wrapper)},
            **{
                "data_dir": str(self.root / "agents"),
                "warning_seconds": 30,
                "options": [f"--output={self.root}/job-%j.log"],
            },
            **{"node": {"cpus": 1, "memory_gb": 1, "labels": {"rack": "7"}}},
            **changes,
        }

    def run(self, *command: str) -> str:
        """The output of one of its commands, on the head."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.head.namespace, *command],
            env={"PATH": f"{self.root}:{os.environ['PATH']}", "SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout

    def jobs(self) -> list[str]:
        """Numbers of batch jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("*.log")))

    def stop(self) -> None:
        """End slurmctld, slurmd and munged."""
        for machine in self.bed.machines:
            for pid in machine.pids():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() in PROGRAMS:
                        os.kill(pid, signal.SIGKILL)
        for started in self._started:
            started.wait(10)
