"""Machines of a Slurm cluster: `sbatch` asks for them, `squeue` shows what was given, `scancel` gives them back.

A batch job of N nodes runs an agent on each. Its name has the id of the order, by which it is found again: the service
stores no number of Slurm's. https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

from . import commands
from .base import AgentStart, Given, PoolOrder, PoolRefusal, PoolUnavailable, Seen
from .commands import Ran, Run

_LEAVE = 30.0
"""Seconds within which the agents of a batch job end; then it is cancelled."""
_AWAY = ("unable to contact", "connection refused", "socket timed out", "connection timed out", "communication")
"""Parts of messages of Slurm's commands while its controller does not answer."""
_WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED"})
_RUNS = frozenset({"RUNNING", "SIGNALING"})


def run_command(argv: Sequence[str], text: str) -> Ran:
    """See `Run`. sbatch sends its environment along; `--export=ALL,NAME=VALUE` among the options adds others."""
    return commands.run_command(argv, text, "install Slurm's commands on the service's machine", (), ("SLURM_",))


class SlurmPool:
    """A partition of a Slurm cluster, through the commands on the service's machine.

    Args:
        options: of `sbatch`, such as `--partition=gpu`.
        warning_seconds: before the time limit of the batch job, at which the agents have their jobs saved.
    """

    def __init__(
        self,
        agent: AgentStart,
        options: Sequence[str] = (),
        warning_seconds: int = 120,
        run: Run = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent, self._options, self._warning, self._run = agent, tuple(options), warning_seconds, run
        self._clock = clock
        self._ending: dict[str, float] = {}
        """Batch job -> time since which its agents are to leave."""

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"trl-{request_id}"

    def request(self, order: PoolOrder) -> None:
        if self._jobs(order):
            return
        self._call("sbatch", "--parsable", *self._options, text=self.script(order))

    def observe(self, order: PoolOrder) -> Seen:
        jobs = self._jobs(order)
        for number, state, reason in jobs:
            if state in _RUNS:
                return Seen(Given.all, f"Slurm job {number}")
            if state in _WAITS:
                return Seen(Given.pending, f"Slurm job {number} is {state} ({reason})")
        if any(state == "COMPLETING" for _, state, _ in jobs):
            return Seen(Given.pending, "Slurm ends its processes")
        return Seen(Given.nothing, "; ".join(f"Slurm job {number}: {state}" for number, state, _ in jobs))

    def release(self, order: PoolOrder) -> None:
        for number, state, _ in self._jobs(order):
            if state in _RUNS and number not in self._ending:
                # The agents leave, and remove their files; so a cancelled batch job could not.
                self._ending[number] = self._clock()
                self._call("scancel", "--batch", "--signal=USR1", number)
            elif state in _WAITS or (state in _RUNS and self._clock() - self._ending[number] > _LEAVE):
                self._call("scancel", number)
            elif state not in _RUNS:
                self._ending.pop(number, None)

    def _jobs(self, order: PoolOrder) -> list[tuple[str, str, str]]:
        """Number, state and reason of the batch jobs of an order; those that ended some minutes ago among them."""
        listed = self._call("squeue", "--noheader", "--states=all", f"--name={order.handle}", "--format=%i|%T|%r")
        rows = [line.strip().split("|", 2) for line in listed.splitlines() if line.count("|") >= 2]
        return [(number, state, reason) for number, state, reason in rows]

    def _call(self, *argv: str, text: str = "") -> str:
        """The output of a command. Raises PoolUnavailable, PoolRefusal."""
        ran = self._run(argv, text)
        if ran.status == 0:
            return ran.output
        lines = [line.strip().removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in ran.errors.splitlines()]
        reason = "; ".join(line for line in lines if line)[:500] or f"exit status {ran.status}"
        if any(part in reason.lower() for part in _AWAY):
            raise PoolUnavailable(f"{argv[0]}: {reason}")
        raise PoolRefusal(f"{argv[0]}: {reason}")

    def script(self, order: PoolOrder) -> str:
        """The batch job of an order.

        Slurm sends a signal to every process of a step, trainings included. So the batch shell gets it, and starts
        another step that signals the agents alone.
        """
        agent = self._agent
        prefix = order.names[0].rpartition("-")[0]
        root = _expanded(agent.data_dir)
        home = f"{root}/{prefix}-$SLURM_PROCID"
        # A batch job that another program has cancelled leaves its agents' files, on a disk that others may share.
        clean = (
            f"for old in {root}/*/pid; do "
            '[ -f "$old" ] && read -r host pid < "$old" && [ "$host" = "$(hostname)" ] && '
            '! kill -0 "$pid" 2>/dev/null && rm -rf "${old%/pid}"; done; '
        )
        start = (
            f"umask 077; mkdir -p {root}; "
            f"[ -O {root} ] && [ ! -L {root} ] || "
            f'{{ echo {root} "is a link, or belongs to another user: set data_dir of the pool" >&2; exit 1; }}; '
            f'{clean}mkdir -p {home}; echo "$(hostname) $$" > {home}/pid; '
            f"exec {shlex.quote(agent.command)} agent --service {shlex.quote(agent.service_url)} "
            f"--token-file {shlex.quote(agent.token_file)} --name {prefix}-$SLURM_PROCID --data-dir {home}/agent"
            + "".join(f" --label {shlex.quote(f'{name}={value}')}" for name, value in agent.labels.items())
        )
        leave = f"read -r host pid < {home}/pid && kill -USR1 $pid"
        remove = f"rm -rf {home}"
        each = "srun --overlap --ntasks-per-node=1"
        return f"""#!/bin/bash
#SBATCH --job-name={order.handle}
#SBATCH --nodes={len(order.names)}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@{self._warning}
leave() {{
    {each} bash -c {shlex.quote(leave)}
}}
trap leave USR1
srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c {shlex.quote(start)} &
agents=$!
# A signal ends the wait, not the agents.
while kill -0 "$agents" 2>/dev/null; do wait "$agents"; done
{each} bash -c {shlex.quote(remove)}
"""


def _expanded(directory: str) -> str:
    """A directory as a word of the shell, `~` as the home directory there."""
    below = directory.removeprefix("~/")
    return shlex.quote(directory) if below == directory else f'"$HOME"/{shlex.quote(below)}'
