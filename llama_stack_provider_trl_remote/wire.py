"""The messages between a worker node and the service. Plain models; both ends import them and nothing else of the
other.

The node always calls. Only the service's port is open to it, and nothing listens on a node but the ranks themselves
and, for a moment, the probe. Events, logs and files of checkpoints are sent in pieces that name their offset. The
answer's header Upload-Offset has the size that the service has then, with 409 where a piece did not fit.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"
"""A node's name: what a host name may be."""
POLL_SECONDS = 5.0
"""How long the service keeps a poll for which it has nothing new."""
SILENCE = 15.0
"""Seconds without a call after which a node counts as absent, and its tasks start elsewhere."""
LEASE = 600.0
"""Seconds without an answer after which a node ends its tasks by itself and frees their devices."""
GIVEN = "resume-from"
"""Identifier, on the checkpoint routes, of a job's own copy of the other job's checkpoint that it begins with."""
VERSIONS = ("llama_stack_provider_trl", "torch", "trl", "transformers", "peft")
"""Packages that must be the same on every node of a job; of torch, the public part (2.13.0, not +cu126)."""
MOST_MODELS = 1000
"""Model ids of a report; a node with more in its cache names the first."""
MOST_KEPT = 20
"""Jobs that a poll names (`?kept=`): those of which the node has files and no task."""
MOST_TEXT = 8192
"""Characters of a sentence in a report."""
MOST_JSON = 1 << 18
"""Characters of an observation, or of a `failed` event, as JSON. A training reserves 20 KiB for its last ones."""
_MOST_BYTES = 2**53
"""What every JSON parser reads exactly."""

_Id = Annotated[str, StringConstraints(max_length=200)]
_Short = Annotated[str, StringConstraints(max_length=64)]


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > MOST_JSON:
        raise ValueError(f"it has {size} characters as JSON, at most {MOST_JSON} are taken")
    return value


_SmallJson = Annotated[dict[str, Any], AfterValidator(_small)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceReport(_Message):
    name: str = Field(pattern=r"^(cpu|mps|cuda:\d{1,3})$")
    """cpu, mps or cuda:N."""
    memory_bytes: int | None = Field(None, ge=0, le=_MOST_BYTES)
    """Of a GPU; None: unknown, or the machine's own memory."""
    model: str = Field("", max_length=200)
    """Such as `NVIDIA H100`."""


class NodeReport(_Message):
    """What a machine is, as it joins; sent anew when it changes."""

    name: str = Field(pattern=NAME)
    machine_id: _Id
    """Of the physical machine (TRL_NODE_MACHINE_ID, else /etc/machine-id): two agents with the same one share it."""
    boot_id: _Id
    agent_id: _Id = ""
    """Of the agent's data directory: two on one machine are not each other."""
    address: _Short
    """Literal IP address at which other nodes reach this one: that of its connection to the service, or
    TRL_NODE_ADDRESS. Never a loopback address."""
    cpus: int = Field(gt=0, le=2**20)
    memory_bytes: int = Field(gt=0, le=_MOST_BYTES)
    disk_free_bytes: int = Field(ge=0, le=_MOST_BYTES)
    devices: tuple[DeviceReport, ...] = Field(min_length=1, max_length=64)
    versions: dict[_Short, _Short] = Field(max_length=32)
    """Of VERSIONS and of python, trl, transformers, peft; "" where it is not installed."""
    models: tuple[_Id, ...] = Field((), max_length=MOST_MODELS)
    """Model ids in its local cache."""
    labels: dict[_Short, Annotated[str, StringConstraints(max_length=256)]] = Field({}, max_length=64)


class Joined(_Message):
    """The service's answer to a report."""

    node: str
    head: str
    """Name of the service's machine."""
    version: str
    credential: str = Field("", repr=False)
    """Sent as the bearer token of every call from now on, also to join anew. The one before it is valid until this one
    was used. Empty: the caller keeps what it has sent."""


class Peer(_Message):
    """Another node of the same attempt."""

    node: str
    address: str
    port: int
    """Where it listens for the probe; rank 0's node: where the ranks meet."""


class Stage(StrEnum):
    """How far the service wants a task to be. A node enters them in this order, and only when ordered to."""

    prepare = "prepare"
    """Fetch rows and the checkpoint to resume from, then listen at a port of the range."""
    probe = "probe"
    """Try to reach every peer (3 s each)."""
    run = "run"
    pause = "pause"
    stop = "stop"
    """End it and forget it. Every later call about it is answered with 410."""


class TaskOrder(_Message):
    """One task as the service wants it."""

    task_id: str
    job_uuid: str
    attempt: int
    stage: Stage
    node_rank: int = 0
    nodes: int = 1
    ranks: int = 1
    """On this node; as many on each of the others."""
    devices: tuple[str, ...]
    spec: dict[str, Any]
    """The AttemptSpec, with the service's paths: the node puts its own in their place."""
    ports: tuple[int, int] = (29500, 100)
    """The first port at which ranks may meet, and how many there are."""
    master: Peer | None = None
    """Rank 0's node; known from `probe` on."""
    peers: tuple[Peer, ...] = ()
    """The other nodes; known from `probe` on."""
    time_limit: float | None = None
    hang_timeout: float | None = None
    shared_mark: str = ""
    """Path of a file that the service has made in the job's checkpoint directory. A node that finds it there, with the
    task id as its text, sees the same file system: checkpoints go straight there."""


class StageProgress(StrEnum):
    """A node's progress in a stage."""

    working = "working"
    done = "done"
    failed = "failed"


class TaskReport(_Message):
    """One task as the node sees it."""

    task_id: _Id
    stage: Stage
    """The last one that was ordered."""
    progress: StageProgress
    detail: str = Field("", max_length=MOST_TEXT)
    """What it does at the moment: `fetches checkpoint-6 (120 of 512 MiB)`."""
    error: str = Field("", max_length=MOST_TEXT)
    """Why the stage failed, and what to do about it."""
    lasting: bool = False
    """The stage fails again for this job until something on the node is changed."""
    port: int | None = Field(None, ge=0, le=65535)
    """Where it listens, once prepared."""
    observation: _SmallJson | None = None
    """`launch.base.Observation` as a dict, once it was started."""
    failed: _SmallJson | None = None
    """A `failed` event that a rank of a node without rank 0 has written."""
    shipped: bool = False
    """All events, logs and checkpoints of the task are with the service; nothing more will come."""


class Poll(_Message):
    """`POST /v1/nodes/{name}/poll`: what the node has, and what it knows already."""

    boot_id: _Id
    agent_id: _Id = ""
    tasks: tuple[TaskReport, ...] = Field((), max_length=1000)
    seen: int = Field(0, ge=-1, le=_MOST_BYTES)
    """`Orders.revision` of the last answer: an answer comes at once if there is another, else after POLL_SECONDS."""


class Orders(_Message):
    """The answer: every task that the node is to know. A task that is missing has ended or belongs to another node."""

    revision: int
    tasks: tuple[TaskOrder, ...] = ()
    over: tuple[str, ...] = ()
    """Of the jobs that the poll named as kept, those that have ended. Sent only where there are any: an agent that
    names none may not know this field."""


class CheckpointFileReport(_Message):
    path: str
    """Relative to the checkpoint."""
    size: int = Field(ge=0)
    sha256: str


class CheckpointReport(_Message):
    """`POST /v1/nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}`: asks for it to be put in place. The service
    answers with the files that it lacks; when it lacks none, the checkpoint is complete there."""

    kind: Literal["step", "final", "merged"]
    files: tuple[CheckpointFileReport, ...]


class CheckpointAnswer(_Message):
    missing: tuple[str, ...]
    """Paths to upload; empty: it is in place."""
    path: str = ""
    """Where it is, once in place."""
