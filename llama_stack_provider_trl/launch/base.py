"""The interface between the supervisor and a launcher: a task goes in, observations come out.

A task is one training process tree on one node for one attempt. `start` is idempotent by `task_id`: a supervisor that
crashed between recording a task and starting it may call it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TaskSpec:
    """Everything that a launcher needs to run one task, beside `run_dir/spec.json`.

    A job over several machines has one task on each of them, with the same `nodes`, `ranks` and rendezvous address.
    """

    task_id: str
    run_dir: Path
    devices: tuple[str, ...]
    """Concrete devices to lock for as long as the task lives, such as ("cpu",), ("cuda:0",), or cores of the CPU,
    ("cpu:0", "cpu:1")."""
    python: str | None = None
    """Interpreter that trains; None: the launcher's own."""
    ranks: int = 1
    """Training processes on this node."""
    nodes: int = 1
    """Machines that train together, each with the same number of ranks."""
    node_rank: int = 0
    """Number of this node; rank 0, whose events and checkpoints count, is on node 0."""
    address: str = "127.0.0.1"
    """This node's own IP address: ranks use the network interface that has it."""
    master_addr: str = "127.0.0.1"
    """Node 0's address: the rendezvous of all ranks."""
    master_port: int = 0
    """Port of the rendezvous; no process listened on it when it was chosen."""
    last_port: int = 0
    """The last port of the range for ranks of one node: if a process listens on `master_port` by then, they use the
    first free port up to this one. Several nodes use `master_port` only."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the launcher's allow-listed environment."""
    accounts: tuple[str, ...] = ()
    """Variables of the launcher's environment that this task gets beyond the allow-list; a name that ends in `_` begins
    those of all that are meant. Their values are in no file, and in no process that another task is forked from."""
    time_limit: float | None = None
    """Seconds of training after which the task has to save, and is ended if it does not."""
    hang_timeout: float | None = None
    """Seconds without progress after which the task is ended; None: no limit."""
    serves: bool = False
    """The task answers chats (`recipes.serve`; its `spec.json` is a ServeSpec). It shares its devices with other tasks
    that serve, and ends as soon as a training wants one of them."""
    beside: bool = False
    """A task that serves, on the CPU: it locks no device, and stays beside trainings."""

    @property
    def world_size(self) -> int:
        """Training processes on all nodes."""
        return self.nodes * self.ranks


class TaskState(StrEnum):
    unknown = "unknown"
    """The launcher has never started this task, or its traces are gone."""
    waiting = "waiting"
    """A runner is alive and waits for a device that another process holds; `detail` names it."""
    running = "running"
    exited = "exited"
    """No process of the task is left, and none will ever be."""


class Ended(StrEnum):
    """The reason for which a runner itself ended its task."""

    hung = "hung"
    """No progress for `hang_timeout`."""
    timed_out = "timed_out"
    """`time_limit` was reached."""
    out_of_memory = "out_of_memory"
    """Its processes used more memory than the limit; `stacks` is empty, `detail` names both."""
    too_many_processes = "too_many_processes"
    """It started more processes than the limit; `detail` names both."""


@dataclass(frozen=True)
class Observation:
    """A launcher's observation of a task, from the processes themselves and never from memory."""

    state: TaskState
    exit_code: int | None = None
    """Exit status of the training process; negative: minus the signal that ended it; None: not known, or it never
    ran."""
    rank: int | None = None
    """The rank that has this exit code, if several ranks trained and torchrun reports which one ended first."""
    detail: str = ""
    launch_error: str = ""
    """The reason for which the training process could not be started; the task has exited then. Empty: it was
    started."""
    ended: Ended | None = None
    """The reason for which the runner ended the task; None: it did not, or on a request."""
    stacks: str = ""
    """The Python stacks of every rank when the task was found to hang."""


class MasterPorts(Protocol):
    """Chooses the rendezvous port for the ranks of a task on this machine."""

    def choose(self, run_dirs: Iterable[Path]) -> tuple[int, int]:
        """A free port that no task in `run_dirs` was given, and the last port that may replace it if another process
        listens on it by then. Raises OSError: no port of the range is free."""


class Launcher(Protocol):
    """Starts, observes and ends tasks on one node. Every call returns in well under a second."""

    def start(self, task: TaskSpec) -> None:
        """Start the task unless a task with this id was ever started here. Raises OSError: the task could not be
        started, and nothing runs."""

    def poll(self, task: TaskSpec) -> Observation:
        """Observe the task."""

    def pause(self, task: TaskSpec) -> None:
        """Request that rank 0 saves after the current step and ends, with a `paused` event. May be repeated. Raises
        OSError: the request cannot be written."""

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        """End every process of a task whose run directory is below `root` and not in `keep`. Returns the run
        directories of the tasks that were ended."""

    def cancel(self, task: TaskSpec) -> None:
        """Request the end of the task: SIGTERM, then SIGKILL 3 s later, for all its processes. Returns immediately.

        A task that was never started is recorded as exited, so that a later start has no effect.
        May be repeated.
        """
