"""Training processes in a tenth of a second instead of five: forked from one process that has imported torch and trl.

`python -m tests.zygote` reads lines of JSON, the path of a spec file and the directory of faults, forks a training
process for each, and prints its pid. They end with it, and it with pytest. `ForkLauncher` is the Launcher on top of it:
no runner, no exit codes, but the real recipe in a real process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.runner import PAUSE
from llama_stack_provider_trl.system import fork
from llama_stack_provider_trl.system.files import RunDir, atomic_write_json
from llama_stack_provider_trl.system.process import ProcessId, alive, die_with_parent, identify, send_signal
from tests import forked
from tests.traces import shared_traces


class ForkLauncher:
    """See `Launcher`. One zygote serves many tests: `reset` between two of them, `close` after the last.

    A training process takes the faults that TRL_FAULTS arms at its start, as one of the real launcher does.
    """

    def __init__(self) -> None:
        self.zygote = forked.start_talking(forked.RECIPES, "tests.zygote", environment())
        self.processes: dict[str, ProcessId | None] = {}
        """Task id -> its process; None: it was gone before the poll."""
        assert self._ask("") == "ready\n"

    def start(self, task: TaskSpec) -> None:
        if task.task_id not in self.processes:
            order = [str(RunDir(task.run_dir).spec), os.environ.get(faults.VARIABLE, "")]
            self.processes[task.task_id] = identify(int(self._ask(json.dumps(order))))

    def poll(self, task: TaskSpec) -> Observation:
        if task.task_id not in self.processes:
            return Observation(TaskState.unknown)
        return Observation(TaskState.running if self.running(task.task_id) else TaskState.exited)

    def running(self, task_id: str) -> bool:
        process = self.processes[task_id]
        return process is not None and alive(process)

    def pause(self, task: TaskSpec) -> None:
        atomic_write_json(RunDir(task.run_dir).control, PAUSE)

    def cancel(self, task: TaskSpec) -> None:
        self.kill(task.task_id, signal.SIGKILL)

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        return []

    def kill(self, task_id: str, number: int) -> bool:
        process = self.processes.get(task_id)
        return process is not None and send_signal(process, number)

    def reset(self) -> None:
        """End every task and forget it: the next test may use its name."""
        for task_id in self.processes:
            self.kill(task_id, signal.SIGKILL)
        self.processes.clear()

    def close(self) -> None:
        self.reset()
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.close()
        self.zygote.wait(60)
        self.zygote.stdout.close()

    def _ask(self, line: str) -> str:
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.write(line + "\n")
        self.zygote.stdin.flush()
        return self.zygote.stdout.readline()


def environment() -> dict[str, str]:
    """Of programs that fork trainings, of one rank or of several: one process imports for all."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def main() -> None:
    begin()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the dead
    for line in sys.stdin:
        print(_fork(*json.loads(line)) if line.strip() else "ready", flush=True)


def begin() -> None:
    """Begin as a program that runs trainings of any kind, and shows no warnings."""
    import tests.imported_recipes  # noqa: F401 - which is there where this process is forked

    warnings.simplefilter("ignore")
    fork._prepared = None  # a training that it forks is no fork of a warm process: nothing is hidden from it


def _fork(spec: str, faults_dir: str) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ[faults.VARIABLE] = faults_dir
        train_and_exit(spec)
    finally:
        os._exit(3)


def train_and_exit(spec: str, rank: int = 0) -> NoReturn:
    """Continue as the training process of a spec file, in a process that was forked for it."""
    log = os.open(RunDir(Path(spec).parent).rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from llama_stack_provider_trl.recipes.train import main as train

    with shared_traces():
        os._exit(train(["train", spec]))


if __name__ == "__main__":
    main()
