"""Maps a TaskSpec to the command line and environment of its training processes. Pure functions, except that they read
GPUs and network interfaces."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Mapping, Sequence

import psutil

from ..specs.exports import HUB_TOKEN, HUB_TOKEN_FILE
from ..system import malloc
from ..system.files import RunDir
from ..system.fork import THREADS
from ..system.process import RUN_DIR_MARK, TASK_MARK, VLLM_GPUS, child_environment, usable_cpus
from ..system.token_file import read_token
from .base import TaskSpec
from .devices import CORE
from .gpus import NO_GANG, PCI_ORDER, gpu_name, is_slice, visible_entry

TRAINER = "llama_stack_provider_trl.recipes.train"
SERVER = "llama_stack_provider_trl.recipes.serve"
TORCHRUN = "llama_stack_provider_trl.recipes.distributed.torchrun"
"""torch's own launcher with a store that listens on the loopback address only, instead of on every one."""
LOOPBACK = "127.0.0.1"
MASTER_PORT = "--master-port="
SHUTDOWN_SECONDS = 2
"""Seconds that torchrun gives its ranks between SIGTERM and SIGKILL: less than the runner gives torchrun."""
GATHERING_SECONDS = 180
"""Seconds that the nodes of a job wait for each other's torchrun, instead of torch's 600. All are started at the same
time, but one may import torch from a cold disk."""


def training_argv(task: TaskSpec) -> list[str]:
    """The command line of a task. One process is started directly: torchrun would add 1.0-1.7 s and an idle process.

    Several processes use a fixed rendezvous address and port (static rendezvous). torchrun never restarts them: a retry
    is a new attempt with its own directory.
    """
    python = task.python or sys.executable
    files = RunDir(task.run_dir)
    if task.serves:
        return [python, "-m", SERVER, str(files.spec)]
    trainer = ["-m", TRAINER, str(files.spec)]
    if task.world_size == 1:
        return [python, *trainer]
    one_node = task.nodes == 1
    return [
        *(python, "-m", TORCHRUN),
        *(f"--nnodes={task.nodes}", f"--node-rank={task.node_rank}", f"--nproc-per-node={task.ranks}"),
        "--max-restarts=0",
        *(f"--master-addr={task.master_addr}", f"{MASTER_PORT}{task.master_port}"),
        # Only the port that the other nodes know can be used.
        *([f"--last-port={task.last_port}"] if one_node else [f"--rdzv-conf=timeout={GATHERING_SECONDS}"]),
        *(f"--local-addr={task.address}", f"--log-dir={files.launcher_dir}"),
        *("--monitor-interval=0.2", f"--shutdown-timeout={SHUTDOWN_SECONDS}"),
        *trainer,
    ]


def first_failure(log: str) -> tuple[int, int] | None:
    """Rank and exit code (negative: the signal) of the rank that ended first, from torchrun's log; None: not in the
    log.

    torchrun itself always exits with 1.
    """
    _, found, cause = log.rpartition("Root Cause (first observed failure):")
    rank = re.search(r"^  rank +: (\d+)", cause, re.MULTILINE)
    exit_code = re.search(r"^  exitcode +: (-?\d+)", cause, re.MULTILINE)
    return (int(rank[1]), int(exit_code[1])) if found and rank and exit_code else None


_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Settings of torch's allocator, in which an operator's own choice stands alone; the second is the older name."""


def _is_named(name: str, account: str) -> bool:
    return name == account or (account.endswith("_") and name.startswith(account))


def _token_of_file(task: TaskSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The token by which a task uploads to a hub, where a file has it. Raises OSError: it cannot be used."""
    file = environ.get(HUB_TOKEN_FILE)
    if HUB_TOKEN not in task.accounts or environ.get(HUB_TOKEN) or not file:
        return {}
    try:
        return {HUB_TOKEN: read_token(file)}
    except ValueError as error:
        raise OSError(errno.EACCES, f"{HUB_TOKEN_FILE}: {error}") from error


def training_environment(task: TaskSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed part of `environ`, the task's own variables, and the marks by which its processes are found.
    Raises OSError: of a task of several nodes: no network interface of this machine has its address; of one that
    uploads: the file with its token cannot be used."""
    added = {
        "PYTHONUNBUFFERED": "1",
        **malloc.environment(environ),
        **visible_gpus(task, environ),
        **task.env,
        **{name: value for name, value in environ.items() if any(_is_named(name, one) for one in task.accounts)},
        **_token_of_file(task, environ),
        **task_marks(task),
    }
    if any(device.startswith("cuda") for device in task.devices) and not _ALLOCATOR & environ.keys():
        # Without it sequences of changing length leave 5 to 15 % of a GPU's memory in fragments.
        added.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if cores := sum(device.startswith(CORE) for device in task.devices):
        here = [(cores, configured_threads(environ))]
        added.setdefault(THREADS, str(common_threads(here, task.ranks, reserved=True)))
    if task.world_size > 1:
        # Without a name gloo resolves the host's name, which may give an address that does not answer.
        interface = interface_of(task.address)
        added.setdefault("GLOO_SOCKET_IFNAME", environ.get("GLOO_SOCKET_IFNAME") or interface)
        if task.nodes > 1:
            # NCCL uses any interface that is up, docker0 too, and takes a name for a prefix of several unless `=` is
            # before it. A machine with another network for gradients names it itself.
            added.setdefault("NCCL_SOCKET_IFNAME", environ.get("NCCL_SOCKET_IFNAME") or f"={interface}")
        # torchrun would always set 1.
        added.setdefault(THREADS, environ.get(THREADS) or str(_threads(task.ranks)))
    return child_environment(environ, added)


def interface_of(address: str) -> str:
    """The network interface that has an IP address, such as `eth0`. Raises OSError: none has it."""
    wanted = ipaddress.ip_address(address)
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(one.address.partition("%")[0])
                # Linux answers at all of 127.0.0.0/8 and lists one address of them.
                if own == wanted or (own.is_loopback and wanted.is_loopback and own.version == wanted.version):
                    return name
                found[str(own)] = name
    there = ", ".join(f"{own} ({name})" for own, name in found.items())
    raise OSError(
        f"no network interface of this machine has the address {address}: it has {there}. Set the address at which "
        "the other nodes reach this machine"
    )


def configured_threads(environ: Mapping[str, str]) -> int | None:
    """Threads of each rank that OMP_NUM_THREADS sets; None: it sets no single number."""
    text = environ.get(THREADS, "")
    return int(text) if re.fullmatch("[0-9]{1,6}", text) and int(text) else None


def common_threads(nodes: Sequence[tuple[int, int | None]], ranks: int, *, reserved: bool) -> int:
    """Threads of each rank of a job over several nodes, the same on all: threads divide sums, and gradients of equal
    rows would differ in their last bits from node to node.

    Args:
        nodes: cores, and what OMP_NUM_THREADS sets, on each node.
        ranks: on each node.
        reserved: whether the cores are the job's own, so that more threads would only wait for each other.
    """
    found = []
    for cores, configured in nodes:
        most = max(1, cores // ranks)
        found.append(most if configured is None else min(configured, most) if reserved else configured)
    return min(found)


def _threads(ranks: int) -> int:
    return max(1, usable_cpus() // ranks)


def visible_gpus(task: TaskSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the GPUs of the task's ranks the only visible ones: Trainer would use all that it sees, and FSDP2 would
    shard the model of a CPU task over them. Those beyond one for each rank are its vLLM's. Raises OSError: the task has
    several MIG slices."""
    own = [device for device in task.devices if device.startswith("cuda:")]
    gpus = [visible_entry(device, environ) for device in own]
    if len(own) > 1 and any(is_slice(device, environ) for device in own):
        raise OSError(f"{', '.join(gpus)}: {NO_GANG}; submit the job with nproc_per_node 1")
    # Numbered as the driver does it: the GPU that trains is then the one whose UUID is locked.
    order = environ.get("CUDA_DEVICE_ORDER", PCI_ORDER)
    of_vllm = gpus[task.ranks :]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[: task.ranks]),
        **({"CUDA_DEVICE_ORDER": order} if gpus else {}),
        **({VLLM_GPUS: ",".join(of_vllm)} if of_vllm else {}),
    }


def lock_name(device: str, environ: Mapping[str, str]) -> str:
    """The name under which a device is locked: programs that see different GPUs use the same name for one."""
    return f"cuda-{gpu_name(device, environ)}" if device.startswith("cuda:") else device


def core_lock(number: int) -> str:
    """The name under which a core is locked, beside the lock of the CPU that all tasks with cores share."""
    return f"cpu-{number}"


def task_marks(task: TaskSpec) -> dict[str, str]:
    return {TASK_MARK: task.task_id, RUN_DIR_MARK: str(task.run_dir)}
