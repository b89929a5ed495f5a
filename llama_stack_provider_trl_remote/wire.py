"""Messages between a worker node and the service. Plain models, the only module that both ends share.

The node always calls. Only the service's port has to be open to it. On a node only the ranks listen and, before them,
the probe. Events, logs and files of checkpoints are sent in parts with their offset. The answer's header Upload-Offset
has the size of the service's file then, with 409 where a part did not fit.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from llama_stack_provider_trl.specs.names import CheckedNames, FreeText

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"
"""A node's name: any host name."""
POLL_SECONDS = 5.0
"""Seconds for which the service keeps a poll open without news."""
SILENCE = 15.0
"""Seconds without a call after which a node counts as absent; its tasks start elsewhere if other nodes call."""
GIVEN = "resume-from"
"""Identifier, on the checkpoint routes, of a job's own copy of the checkpoint of another job that it resumes from."""
VERSIONS = ("llama_stack_provider_trl", "torch", "trl", "transformers", "peft")
"""Packages whose versions must be equal on every node of a job; for torch, the public part (2.13.0, not +cu126)."""
SPECS = "specs"
"""Key, among the versions of a report, of the digest of the job specifications that the agent's build parses."""
MOST_DEVICES = 64
"""Devices of a report, and of a load."""
MOST_MODELS = 1000
"""Model ids of a report; a node with more in its cache names the first."""
MOST_OLLAMA_MODELS = 200
MOST_KEPT = 20
"""Jobs that a poll names (`?kept=`): those with files on the node and no task."""
MOST_TEXT = 8192
"""Characters of a text in a report."""
MOST_JSON = 1 << 18
"""Characters of an observation, or of a `failed` event, as JSON. A training reserves 20 KiB for its final events."""
MOST_LOG_LINES, MOST_LOG_TEXT = 100, 10_000
"""Entries of an agent's log in a poll, and characters of one."""
_MOST_BYTES = 2**53
"""The largest integer that every JSON parser reads exactly."""

_Id = Annotated[str, StringConstraints(max_length=200)]
_Short = Annotated[str, StringConstraints(max_length=64)]


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > MOST_JSON:
        raise ValueError(f"it has {size} characters as JSON, expected at most {MOST_JSON}")
    return value


_SmallJson = Annotated[dict[str, Any], AfterValidator(_small)]


class _Message(CheckedNames):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceReport(_Message):
    name: str = Field(pattern=r"^(cpu|mps|cuda:\d{1,3})$")
    """cpu, mps or cuda:N."""
    memory_bytes: int | None = Field(None, ge=0, le=_MOST_BYTES)
    """Memory of a GPU; None: unknown, or the machine's own memory."""
    model: str = Field("", max_length=200)
    """Model, such as `NVIDIA H100`."""
    is_slice: bool = False
    """A MIG slice, which trains one process."""
    uuid: str = Field("", max_length=100)
    """Of a GPU or slice, as the driver has it; empty: unknown, or another device."""


class NodeReport(_Message):
    """Description of a machine, sent when it joins and when it changes."""

    name: str = Field(pattern=NAME)
    machine_id: _Id
    """Identifier of the system that has the agent (TRL_NODE_MACHINE_ID, else /etc/machine-id): a name belongs to it."""
    host_id: _Id | None = None
    """Identifier of the physical machine (TRL_NODE_HOST_ID), which agents with the same one share; null: machine_id."""
    boot_id: _Id
    agent_id: _Id = ""
    """Identifier of the agent's data directory: it distinguishes two agents on one machine."""
    address: _Short
    """Literal IP address at which other nodes reach this one: the local address of its connection to the service, or
    TRL_NODE_ADDRESS. Never a loopback address."""
    cpus: int = Field(gt=0, le=2**20)
    threads: int | None = Field(None, gt=0, le=2**20)
    """Threads of each training process by the agent's OMP_NUM_THREADS; null: the cores divided by the processes."""
    memory_bytes: int = Field(gt=0, le=_MOST_BYTES)
    disk_free_bytes: int = Field(ge=0, le=_MOST_BYTES)
    devices: tuple[DeviceReport, ...] = Field(min_length=1, max_length=MOST_DEVICES)
    versions: dict[_Short, _Short] = Field(max_length=32)
    """Versions of VERSIONS and of python, "" where one is not installed; and under SPECS the digest of the job
    specifications."""
    models: tuple[_Id, ...] = Field((), max_length=MOST_MODELS)
    """Models that it can train: ids in its local cache, and names of those that it has fetched from the service."""
    ollama_models: tuple[_Id, ...] = Field((), max_length=MOST_OLLAMA_MODELS)
    """Models of the Ollama of its machine, which cannot be trained."""
    labels: dict[_Short, Annotated[str, StringConstraints(max_length=256)]] = Field({}, max_length=64)
    loaned: bool = False
    """Whether it takes jobs only while its owner's load is low."""


class OwnerUse(StrEnum):
    """How much of a loaned machine its owner uses."""

    unknown = "unknown"
    """It has not been measured for long enough: no new jobs, and those that are there continue."""
    low = "low"
    high = "high"
    """Its jobs are to save, and to continue elsewhere."""


class Joined(_Message):
    """The service's answer to a report."""

    node: str
    head: str
    """Name of the service's machine."""
    version: str
    credential: str = Field("", repr=False)
    """Bearer token of every call from now on, also to join again. The one before it is valid until this one was used.
    Empty: the caller keeps its token."""


class Peer(_Message):
    """Another node of the same attempt."""

    node: str
    address: str
    port: int
    """Port at which it listens for the probe; for rank 0's node: the rendezvous port of the ranks."""


class Stage(StrEnum):
    """Stages of a task. A node enters them in this order, and only when ordered to."""

    prepare = "prepare"
    """Fetch the model, rows and the checkpoint to resume from, then listen at a port of the range."""
    probe = "probe"
    """Try to reach every peer (3 s each)."""
    run = "run"
    pause = "pause"
    stop = "stop"
    """End the task and delete it. Every later call about it is answered with 410."""


class ModelFile(_Message):
    path: str = Field(max_length=300)
    """Path relative to the model's directory."""
    size: int = Field(ge=0, le=_MOST_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ModelFiles(_Message):
    """The files of a model on the service's machine: every node of an attempt trains on exactly these bytes."""

    model: str
    """As the job names it."""
    sha256: str = ""
    """Identifies these files (`specs.model_files.files_digest`); empty: the service does not send the model."""
    commit: str = ""
    """Of an id, in the service's cache."""
    files: tuple[ModelFile, ...] = ()
    why_not: Annotated[str, FreeText()] = ""
    """Why the service does not send it."""


class TaskOrder(_Message):
    """An order for one task."""

    task_id: str
    job_uuid: str
    attempt: int
    stage: Stage
    node_rank: int = 0
    nodes: int = 1
    ranks: int = 1
    """Ranks on this node, and on each of the others."""
    threads: int | None = None
    """Threads of each rank, the same on every node; null, for a task of one node: by the node's own cores."""
    devices: tuple[str, ...]
    spec: Annotated[dict[str, Any], FreeText()]
    """The AttemptSpec, with the service's paths: the node replaces them by its own."""
    ports: tuple[int, int] = (29500, 100)
    """The first port for a rendezvous, and the number of ports."""
    master: Peer | None = None
    """Rank 0's node; known from `probe` on."""
    peers: tuple[Peer, ...] = ()
    """The other nodes; known from `probe` on."""
    time_limit: float | None = None
    hang_timeout: float | None = None
    shared_mark: str = ""
    """Path of a file that the service has created in the job's checkpoint directory. A node that finds it there, with
    the task id as its text, shares the file system: it writes checkpoints there directly."""
    awaits_models: bool = False
    """The service still computes the digests of the job's models: an order with `models` follows in the same stage."""
    models: tuple[ModelFiles, ...] = ()
    """The job's base model, and the reference where it is another one."""


class StageProgress(StrEnum):
    """A node's progress in a stage."""

    working = "working"
    done = "done"
    failed = "failed"


class TaskReport(_Message):
    """A node's report of one task."""

    task_id: _Id
    stage: Stage
    """The last stage that was ordered."""
    progress: StageProgress
    detail: Annotated[str, FreeText()] = Field("", max_length=MOST_TEXT)
    """Current work: `fetches checkpoint-6 (120 of 512 MiB)`."""
    error: Annotated[str, FreeText()] = Field("", max_length=MOST_TEXT)
    """Why the stage failed, and the remedy."""
    lasting: bool = False
    """The stage fails again for this job until something on the node is changed."""
    port: int | None = Field(None, ge=0, le=65535)
    """Port at which it listens, once prepared."""
    observation: Annotated[_SmallJson | None, FreeText()] = None
    """`launch.base.Observation` as a dict, once the task was started."""
    failed: Annotated[_SmallJson | None, FreeText()] = None
    """A `failed` event that a rank of a node without rank 0 has written."""
    shipped: bool = False
    """Whether the service has all events, logs and checkpoints of the task."""


class DeviceLoad(_Message):
    """The load of a GPU or slice; None: the driver does not report it."""

    name: str = Field(max_length=64)
    utilization_percent: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Share of the time in which a kernel ran."""
    memory_used_bytes: int | None = Field(None, ge=0, le=_MOST_BYTES)
    power_watts: float | None = Field(None, ge=0, le=1e6, allow_inf_nan=False)


class Load(_Message):
    """The load of a machine, of everything that runs on it."""

    cpu_percent: float = Field(ge=0, le=100, allow_inf_nan=False)
    """Of all its cores, since the report before."""
    memory_used_bytes: int = Field(ge=0, le=_MOST_BYTES)
    disk_free_bytes: int = Field(ge=0, le=_MOST_BYTES)
    """On the disk of the data directory."""
    devices: tuple[DeviceLoad, ...] = Field((), max_length=MOST_DEVICES)
    """Its GPUs, where the driver answers."""


class LogEntries(_Message):
    """Entries of the agent's log that were not sent before, as far as it knows."""

    run: _Id
    """Identifies the process of the agent: its entries are numbered from 1."""
    number: int = Field(ge=1, le=_MOST_BYTES)
    """Of the first one."""
    lines: Annotated[tuple[Annotated[str, StringConstraints(max_length=MOST_LOG_TEXT)], ...], FreeText()] = Field(
        max_length=MOST_LOG_LINES
    )


class Poll(_Message):
    """`POST /v1/nodes/{name}/poll`: the node's reports, and the orders that it has."""

    boot_id: _Id
    agent_id: _Id = ""
    run: _Id = ""
    """Identifies the process of the agent."""
    number: int = Field(0, ge=0, le=_MOST_BYTES)
    """Of the poll, in the order in which that process has sent them. What an earlier one reports does not count."""
    tasks: tuple[TaskReport, ...] = Field((), max_length=1000)
    load: Load | None = None
    """None: it cannot be measured."""
    log: LogEntries | None = None
    """None: there is nothing new."""
    leaving: bool = False
    """Whether its machine is about to be taken away: its jobs are to save, and to continue elsewhere."""
    owner: OwnerUse | None = None
    """None: the machine is not loaned."""
    seen: int = Field(0, ge=-1, le=_MOST_BYTES)
    """`Orders.revision` of the last answer. The service answers at once if it has another, else after POLL_SECONDS."""


class Orders(_Message):
    """The answer: every current task of the node. A task that is missing has ended or belongs to another node."""

    revision: int
    tasks: tuple[TaskOrder, ...] = ()
    over: tuple[str, ...] = ()
    """Jobs that have ended, among those that the poll named as kept. Left out where there are none: an agent that names
    none may not know this field."""


class AnswersBegin(_Message):
    """The answer to `POST /v1/nodes/{name}/tasks/{task_id}/answers`: the answers with which an attempt begins."""

    size: int = Field(ge=0, le=_MOST_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointFileReport(_Message):
    path: str
    """Path relative to the checkpoint."""
    size: int = Field(ge=0)
    sha256: str


class CheckpointReport(_Message):
    """`POST /v1/nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}`: announces a checkpoint. The service answers
    with the files that it lacks; where it lacks none, the checkpoint is complete there."""

    kind: Literal["step", "final", "merged"]
    files: tuple[CheckpointFileReport, ...]


class CheckpointAnswer(_Message):
    missing: tuple[str, ...]
    """Paths to upload; empty: the checkpoint is complete."""
    path: str = ""
    """Its path, once complete."""
