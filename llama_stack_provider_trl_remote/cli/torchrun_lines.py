"""`nodes commands --torchrun`: a job without a service. Writes its specification and rows, and prints what to run."""

from __future__ import annotations

import asyncio
import ipaddress
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.submission import ResolvedJob, keep_rows, resolved
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.torchrun import GATHERING_SECONDS, training_argv
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest, algorithm_of
from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import (
    AttemptSpec,
    DataFormat,
    DatasetRef,
    RowNames,
    RowUse,
    ShardingSpec,
    derive,
)
from llama_stack_provider_trl.system.files import RunDir, atomic_write
from llama_stack_provider_trl.system.process import usable_cpus

from ..request_files import read_request
from ..row_files import read_row_file
from .terminal import emit

if TYPE_CHECKING:
    from ..client import ServiceClient

MOST_MACHINES = 1024
INTERFACE = "llama_stack_provider_trl.launch.interface"
RUN = "run"
"""The run directory of the job, in its directory."""
_OF_A_SERVICE = (
    "resources",
    "resume_from",
    "retries",
    "oom_retry",
    "failover",
    "max_duration",
    "priority",
    "after",
    "cancel_with",
    "keep_last",
)
"""Provider options that a service acts on: without one they would have no effect."""


_DEVICES = ("cpu", "cuda", "mps")


async def print_torchrun(client: ServiceClient, options: Namespace) -> int:
    """Write the job into its directory, and print the command of each machine. Calls no service."""
    addresses = _checked(options)
    directory = Path(options.directory).expanduser().absolute()
    job = await _job(options, directory, len(addresses))
    attempt = derive(job.spec, 1, job.spec.device, directory / RUN)
    run = RunDir(attempt.run_dir)
    run.root.mkdir(parents=True)
    atomic_write(run.spec, attempt.model_dump_json().encode())
    threads = options.threads or max(1, usable_cpus() // attempt.job.ranks_per_node)
    lines = torchrun_lines(attempt, addresses, options.port, options.python, threads)
    rows = [
        {"node_rank": rank, "address": address, "command": line}
        for rank, (address, line) in enumerate(zip(addresses, lines, strict=True))
    ]
    answer = {
        "spec": str(run.spec),
        "checkpoint_dir": str(job.spec.checkpoint_dir),
        "warnings": job.warnings,
        "commands": rows,
    }
    emit(options, answer, *(f"# note: {note}" for note in job.warnings), *_text(directory, job, rows, threads))
    return 0


def _text(directory: Path, job: ResolvedJob, rows: list[dict[str, Any]], threads: int) -> list[str]:
    text = []
    if len(rows) > 1:
        text.append(
            f"# {directory} must be at this path on every machine: copy it, or have it on a disk that all share. "
            f"Start the lines within {GATHERING_SECONDS} s."
        )
        text.append(
            f"# Each rank has {threads} threads (OMP_NUM_THREADS), as this machine's cores permit: with one number on "
            "all machines equal rows give equal bits. --threads sets another one."
        )
    for row in rows:
        text += [f"# machine {row['node_rank']} ({row['address']})", row["command"]]
    return [*text, f"# checkpoints, on machine 0: {job.spec.checkpoint_dir}"]


def torchrun_lines(attempt: AttemptSpec, addresses: Sequence[str], port: int, python: str, threads: int) -> list[str]:
    """The command of each machine, rank 0's first.

    Args:
        threads: of each rank, the same on all machines: threads divide sums, and with them the last bits.
    """
    on_cuda = attempt.job.device.startswith("cuda")
    lines = []
    for rank, address in enumerate(addresses):
        task = TaskSpec(
            attempt.task_id,
            attempt.run_dir,
            (attempt.job.device,) * attempt.job.ranks_per_node,
            python=python,
            ranks=attempt.job.ranks_per_node,
            nodes=len(addresses),
            node_rank=rank,
            address=address,
            master_addr=addresses[0],
            master_port=port,
            last_port=port,
        )
        # FSDP2 would shard the model of a job on CPUs over the GPUs that it sees.
        given = [] if on_cuda else ["CUDA_VISIBLE_DEVICES="]
        found = ""
        if task.world_size > 1:
            # Without a name gloo uses the interface of the host name, often loopback, and NCCL any that is up.
            found = f"i=$({shlex.join([python, '-m', INTERFACE, address])}) && "
            given += ["GLOO_SOCKET_IFNAME=$i", *(["NCCL_SOCKET_IFNAME==$i"] if on_cuda else [])]
            given.append(f"OMP_NUM_THREADS={threads}")  # torchrun would set 1 where a machine has several ranks
        lines.append(found + " ".join([*given, shlex.join(training_argv(task))]))
    return lines


def _checked(options: Namespace) -> list[str]:
    """The addresses of the machines. Raises InvalidRequest: an option is missing, has no effect, or cannot be right."""
    given = {"--discover": options.discover, "--nodes": options.nodes, "--certificate": options.certificate}
    for name, value in given.items():
        if value:
            raise InvalidRequest(name, value, "with --torchrun the machines are named by --address.")
    for name in ("data", "directory"):
        if not getattr(options, name):
            raise InvalidRequest(f"--{name}", None, "--torchrun needs it: trl-remote nodes commands --help.")
    addresses = [_address(text) for text in options.address or ["127.0.0.1"]]
    if len(set(addresses)) < len(addresses):
        raise InvalidRequest("--address", ",".join(addresses), "name each machine once.")
    if len(addresses) > MOST_MACHINES:
        raise InvalidRequest("--address", f"{len(addresses)} addresses", f"name {MOST_MACHINES} at most.")
    loopback = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    if 0 < len(loopback) < len(addresses):
        raise InvalidRequest("--address", loopback[0], "other machines cannot reach this address: name another one.")
    directory = Path(options.directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest("--directory", options.directory, "it is there, and not empty: name a new directory.")
    return addresses


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise InvalidRequest("--address", text, "expected a literal address, such as 10.0.0.1.") from error
    if address.is_unspecified or address.is_multicast:
        raise InvalidRequest("--address", text, "expected the address of one machine.")
    return str(address)


async def _job(options: Namespace, directory: Path, nodes: int) -> ResolvedJob:
    """The job of the request's file, with its rows checked and stored in its directory."""
    given = {"job_uuid": "job", **read_request(options.torchrun)}
    chosen = ProviderOptions.parse(given.pop("provider_options", None))
    for name in _OF_A_SERVICE:
        if name in chosen.model_fields_set:
            raise InvalidRequest(f"provider_options.{name}", getattr(chosen, name), "only a service acts on it.")
    if chosen.mixture is not None and len(chosen.mixture) > 1:
        names = [one.dataset_id for one in chosen.mixture]
        raise InvalidRequest("provider_options.mixture", names, "--data names the rows of one dataset: name one.")
    kind = PreferenceOptimizeRequest if algorithm_of(given) == "dpo" else SupervisedFineTuneRequest
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        problem = problem_of(first, kind)
        raise InvalidRequest(".".join(map(str, first["loc"])), first.get("input"), f"{problem}.") from error
    if chosen.device not in (None, *_DEVICES):
        hint = f"expected {', '.join(_DEVICES)}: each rank takes a device of its machine."
        raise InvalidRequest("provider_options.device", chosen.device, hint)
    device = chosen.device or usable_devices("auto")[0].partition(":")[0]
    settings = Settings(
        data_dir=directory,
        devices=(device,),
        nodes=nodes,
        max_nodes=MOST_MACHINES,
        max_ranks=1024,
        sharding=ShardingSpec(strategy=options.sharding),
    )
    files = {"training": options.data, "validation": options.validation}
    ids = request.training_config.data_config

    async def rows(
        dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        is_validation = ids is not None and dataset_id == ids.validation_dataset_id != ids.dataset_id
        file = files["validation" if is_validation else "training"]
        if file is None:
            raise InvalidRequest("--validation", None, f"name the rows of validation_dataset_id {dataset_id!r}.")
        found = await asyncio.to_thread(lambda: list(read_row_file(Path(file))))
        return await asyncio.to_thread(keep_rows, directory / "datasets", dataset_id, found, use, data_format, names)

    if options.validation and (ids is None or not ids.validation_dataset_id):
        raise InvalidRequest("--validation", options.validation, "the request names no validation_dataset_id.")
    job = await resolved(request, chosen.model_copy(update={"device": device}), settings, rows, None)
    return job._replace(spec=job.spec.on(device))
