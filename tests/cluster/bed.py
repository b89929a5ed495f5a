"""Machines out of network namespaces: each has an address of its own on a switch whose links can be cut, a host name,
a machine id, and a data directory that no other one sees.

    with Bed(tmp_path) as bed:
        head, a = bed.machine("head"), bed.machine("a")

Everything is in namespaces that carry this process's pid in their names, and goes with them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests
import yaml

from llama_stack_provider_trl.system.files import tail
from tests import forked
from tests.contract.stack import Json, poll
from tests.tiny import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "run-remote-fsdp-server.sh"
TOKEN, NODE_TOKEN = "operator", "token-of-nodes"
PORT = 8322
MOST = 4
"""Machines of a bed."""
FORKED = "TESTS_FORKED_SERVER"
"""See tests/site. A service imports for 1.4 s of CPU time, an agent for 0.8."""
_READ_LATER = ("NODE_RANK", "MASTER_ADDR", "PYTHONPATH")
"""Variables of services and agents that the script reads, or tests/site; no import does."""


def why_not() -> str:
    """What a bed lacks here; empty: nothing."""
    if os.getuid():
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    if not Path("/etc/machine-id").exists():
        return "there is no /etc/machine-id to put another one over"
    name = f"trl{os.getpid()}-0"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Machine:
    """One of a bed: its address, its directory, and what was started on it."""

    def __init__(self, bed: Bed, name: str, number: int) -> None:
        self.bed, self.name = bed, name
        self.address = f"{bed.network}.{number}"
        self.namespace, self.port = f"{bed.prefix}-{number}", f"{bed.prefix}p{number}"
        self.root = bed.root / name
        self.root.mkdir(parents=True)
        (self.root / "machine-id").write_text(f"{uuid4().hex}\n")
        self.log = self.root / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.disk_mb = 0
        """Of a disk of its own for `data_dir`, which is as old as the process; 0: it has none."""

    @property
    def data_dir(self) -> Path:
        return self.root / "data"

    def start(self, *arguments: str, **environ: str) -> None:
        """Run the shipped script there."""
        self.run(str(SCRIPT), *arguments, **environ)

    def run(self, *program: str, **environ: str) -> None:
        """Run a program there, without access to other directories."""
        alone = (
            f"mount --bind {self.root} /mnt && mount -t tmpfs none {self.bed.root} && mkdir {self.root} && "
            f"mount --move /mnt {self.root} && mount --bind {self.root}/machine-id /etc/machine-id && "
            f"hostname {self.name} && "
        )
        if self.disk_mb:
            options = f"size={self.disk_mb}m,mode=0700"
            alone += f"mkdir -p {self.data_dir} && mount -t tmpfs -o {options} none {self.data_dir} && "
        alone += 'exec "$@"'
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TRL_")},
            "TRL_LOCK_DIR": str(self.root / "locks"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRL_FAULTS": str(self.bed.faults),
            **forked.environment(with_site=True),
            **environ,
        }
        variables |= _forked_server(variables)
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "sh", "-c", alone, "sh"]
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [*command, *program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=variables,
                start_new_session=True,
            )

    def serve(self, settings: Json | None = None, **environ: str) -> None:
        """As the service's machine."""
        ranks = {"torch_run_config": {"nproc_per_node": 1}}
        block = {"device": "cpu", "hang_timeout": 900, "model_roots": ["/"]}
        block |= {**ranks, **(settings or {})}
        provider = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": block}
        config = self.root / "run_fsdp.yaml"
        config.write_text(yaml.safe_dump({"providers": {"post_training": [provider]}}))
        self.start(
            *(() if "tls_cert" in block else ("--insecure",)),
            **{
                "TRL_SERVICE_CONFIG": str(config),
                "TRL_SERVICE_HOST": self.address,
                "TRL_SERVICE_DATA_DIR": str(self.data_dir),
                "TRL_SERVICE_TOKEN": TOKEN,
                "TRL_SERVICE_NODE_TOKEN": NODE_TOKEN,
                **environ,
            },
        )

    def join(self, head: Machine, *arguments: str, **environ: str) -> None:
        """As a worker node."""
        given = {"NODE_RANK": "1", "MASTER_ADDR": head.address, "TRL_SERVICE_NODE_TOKEN": NODE_TOKEN, **environ}
        self.start("--data-dir", str(self.data_dir), "--device", "cpu", *arguments, **given)

    def serve_ssh(self, keys: Path) -> str:
        """As a machine that is reached over SSH: root logs in with the public key `keys`. Returns its host key."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        host_key = self.root / "host_key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(host_key))
        lines = (
            f"ListenAddress {self.address}",
            f"HostKey {host_key}",
            f"AuthorizedKeysFile {keys}",
            f"PidFile {self.root}/sshd.pid",
            f"SetEnv TRL_LOCK_DIR={self.root}/locks",
            "PasswordAuthentication no",
            "PermitRootLogin yes",
            "StrictModes no",
            "UsePAM no",
        )
        (self.root / "sshd_config").write_text("".join(f"{line}\n" for line in lines))
        self.run("/usr/sbin/sshd", "-D", "-e", "-f", str(self.root / "sshd_config"))
        deadline = time.monotonic() + 10
        while not (self.root / "sshd.pid").exists():
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.05)
        return host_key.with_suffix(".pub").read_text().strip()

    def connections(self) -> list[str]:
        """Established TCP connections there, as lines of /proc/net/tcp."""
        listed = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
        )
        return [line for line in listed.stdout.splitlines()[1:] if line.split()[3] == "01"]

    def pids(self) -> list[int]:
        """Every process there."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def trainings(self) -> list[int]:
        """Those that belong to a task."""
        return [pid for pid in self.pids() if b"TRL_TASK_ID=" in _environment(pid)]

    def kill_agent(self) -> None:
        """The process that the script became, and nothing else."""
        self.signal_agent(signal.SIGKILL)
        self.reap()

    def signal_agent(self, number: int) -> None:
        """As `kill_agent`, with another signal."""
        for pid in self.pids():
            environ = _environment(pid)
            is_forked = (
                f"{FORKED}=".encode() in environ
            )  # what waits there for the fork that is the service or the agent
            if b"llama_stack_provider_trl_remote" in command_of(pid) and not (is_forked or b"TRL_TASK_ID=" in environ):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def signal_all(self, number: int) -> None:
        """Every process there."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn_off(self) -> None:
        """Every process at once, as when the power fails."""
        for _ in range(50):
            pids = self.pids()
            self.signal_all(signal.SIGKILL)
            self.reap()
            if not pids:
                return
            time.sleep(0.1)

    def reap(self) -> None:
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)

    def add_address(self, number: int) -> str:
        """Give it one more address on the switch."""
        address = f"{self.bed.network}.{number}"
        _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        return address

    def link(self, up: bool) -> None:
        """Cut its cable, or restore it."""
        _ip("-n", self.bed.switch, "link", "set", self.port, "up" if up else "down")

    def limit(self, kbit_per_s: int) -> None:
        """Have its cable carry so much, each way, and drop what waits for longer."""
        burst = max(16_384, kbit_per_s * 1000 // 8 // 100)  # what 10 ms carry: the kernel's clock ticks every 4
        queue = ("root", "tbf", "rate", f"{kbit_per_s}kbit", "burst", str(burst), "latency", "300ms")
        _run("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", *queue)
        _run("tc", "-n", self.bed.switch, "qdisc", "add", "dev", self.port, *queue)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Nothing can be written to its disk (`disk_mb`) while this is open."""
        filler = Path(f"/proc/{self.pids()[0]}/root{self.data_dir}/filler")
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield
        filler.unlink()

    @contextmanager
    def ports_in_use(self, first: int, last: int) -> Iterator[None]:
        """Another program listens at all of these."""
        code = (
            "import socket, sys, time\n"
            f"taken = [socket.create_server(({self.address!r}, port)) for port in range({first}, {last + 1})]\n"
            "print('', flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline(), "it listens"
            yield
            other.stdin.close()

    def block(self, port: str, *, blocked: bool = True) -> None:
        """Have packets to a port of other machines (`29500-29599`) vanish, as a firewall does."""
        rule = ("to", f"{self.bed.network}.0/24", "ipproto", "tcp", "dport", port, "blackhole")
        _ip("-n", self.namespace, "rule", "add" if blocked else "del", *rule)

    def log_tail(self) -> str:
        return f"--- {self.name}\n{tail(self.log, 60, 1 << 16)}"


class Bed:
    """A switch and its machines. This process is connected to it too.

    Args:
        root: where the machines' directories go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root / "bed"
        self.prefix = f"trl{os.getpid()}"
        self.switch = f"{self.prefix}-sw"
        self.network = _free_network()
        self.machines: list[Machine] = []
        self.faults = root / "faults"
        self.faults.mkdir(parents=True)
        self.scheme = "http"
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {TOKEN}"

    def __enter__(self) -> Bed:
        _remove_left_ones()
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            _ip(
                "link",
                "add",
                f"{self.prefix}h",
                "type",
                "veth",
                "peer",
                "name",
                f"{self.prefix}p0",
                "netns",
                self.switch,
            )
            _ip("-n", self.switch, "link", "set", f"{self.prefix}p0", "master", "br0", "up")
            _ip("addr", "add", f"{self.network}.254/24", "dev", f"{self.prefix}h")
            _ip("link", "set", f"{self.prefix}h", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()
        for machine in self.machines:
            machine.turn_off()
        # Its other end goes with its namespace, but some time later, and the next bed has one of the same name.
        subprocess.run(["ip", "link", "del", f"{self.prefix}h"], capture_output=True, check=False)
        _remove([*(machine.namespace for machine in self.machines), self.switch])

    def machine(self, name: str) -> Machine:
        """One more, connected to all others."""
        assert len(self.machines) < MOST
        machine = Machine(self, name, len(self.machines) + 1)
        self.machines.append(machine)
        namespace, port = machine.namespace, machine.port
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch)
        _ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return machine

    def certificate(self) -> tuple[Path, Json]:
        """A certificate of the service, which this process trusts from then on, and the settings that name it."""
        head = self.machines[0] if self.machines else self.machine("head")
        certificate, key = self.root.parent / "cert.pem", self.root.parent / "key.pem"
        subject = ("-subj", "/CN=head", "-addext", f"subjectAltName=IP:{head.address}")
        made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
        subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
        self.scheme, self.session.verify, self.session.trust_env = "https", str(certificate), False
        return certificate, {"tls_cert": str(certificate), "tls_key": str(key)}

    @property
    def url(self) -> str:
        """Of the service: the first machine's."""
        return f"{self.scheme}://{self.machines[0].address}:{PORT}/v1"

    def get(self, path: str, **params: Any) -> Any:
        answer = self.session.get(f"{self.url}{path}", params=params, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Json) -> requests.Response:
        return self.session.post(f"{self.url}{path}", json=body, timeout=60)

    def wait(self, probe: Any, what: str, timeout: float) -> Any:
        """As `poll`, with every machine's log in the error, and a service that may be away."""

        def checked() -> Any:
            with suppress(requests.RequestException):
                return probe()

        try:
            return poll(checked, what, timeout, pause=0.2)
        except AssertionError as error:
            logs = "\n".join(machine.log_tail() for machine in self.machines)
            raise AssertionError(f"{error}\n{logs}") from None

    def wait_for_nodes(self, *names: str) -> None:
        """Until these machines take jobs."""

        def there() -> bool:
            nodes = self.get("/nodes")["data"]
            return set(names) <= {node["node"] for node in nodes if node["agent"] and node["state"] == "open"}

        self.wait(there, f"nodes {', '.join(names)} have joined", 240)

    def status(self, job_uuid: str) -> Json:
        return dict(self.get("/post-training/job/status", job_uuid=job_uuid, config="true"))

    def wait_for_end(self, job_uuid: str, timeout: float = 420) -> Json:
        ended = ("completed", "failed", "cancelled")
        return dict(
            self.wait(
                lambda: (status := self.status(job_uuid))["status"] in ended and status, f"{job_uuid} ends", timeout
            )
        )

    def events(self, job_uuid: str) -> list[Json]:
        return [line["event"] for line in self.get(f"/post-training/jobs/{job_uuid}/events", limit=10_000)["data"]]

    def losses(self, job_uuid: str) -> dict[int, float]:
        """Step -> loss, of the job's metric points; each step must be there once."""
        points = [
            point
            for point in self.get(f"/post-training/jobs/{job_uuid}/metrics")["data"]
            if point["kind"] == "train" and "loss" in point["metrics"]
        ]
        assert len({point["step"] for point in points}) == len(points)
        return {point["step"]: point["metrics"]["loss"] for point in points}

    def hold(self, point: str) -> Callable[[], None]:
        """Have a training wait at a point of `llama_stack_provider_trl.faults`; what comes back lets it continue."""
        (self.faults / point).write_text("hold")
        return (self.faults / f"{point}.go").touch

    def nothing_is_left(self) -> None:
        """No process of any task is left on any machine, within seconds; and no process at all once the agents and the
        service received SIGTERM."""
        self.wait(lambda: not [pid for one in self.machines for pid in one.trainings()], "no training is left", 60)
        for machine in self.machines:
            machine.signal_agent(signal.SIGTERM)
        self.wait(lambda: not [pid for one in self.machines for pid in one.pids()], "no process is left", 60)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    if reason := why_not():
        pytest.skip(reason)
    with Bed(tmp_path) as bed:
        yield bed


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def _free_network() -> str:
    """The first three numbers of addresses that are unused on this machine."""
    taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    found = (f"10.98.{(os.getpid() + number) % 256}" for number in range(256))
    return next(network for network in found if f" {network}." not in taken)


def _remove_left_ones() -> None:
    """Beds of processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = re.findall(r"^(trl(\d+)-(?:\d+|sw))\b", listed, re.MULTILINE)
    left = [name for name, pid in names if not Path("/proc", pid).exists()]
    for name in left:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in pids.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    _remove(left)


def _remove(namespaces: list[str]) -> None:
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _forked_server(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with which tests/site has a service or an agent forked. Empty: it imports with another environment
    than those of other tests."""
    outside = forked._outside({name: value for name, value in environ.items() if name not in _READ_LATER})
    usual = forked._outside({**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    if environ.get("PYTHONPATH") != forked.environment(with_site=True)["PYTHONPATH"] or outside != usual:
        return {}
    return {FORKED: json.dumps([forked._serving(forked.SERVICE, tuple(outside.items())), outside])}


def _environment(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
