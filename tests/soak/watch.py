"""Polls everything all the time: answers, device, listed checkpoints, memory and descriptors of the server."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.torchrun import TRAINER
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import is_whole
from llama_stack_provider_trl.system.process import ProcessId, alive, tasks_below
from tests.contract.payloads import Json
from tests.contract.stack import LlamaStack

SLOWEST = 2.0
"""Seconds that a GET may take."""
WARM_UP = 10.0
"""Seconds of a server's life after which its memory and descriptors are first counted."""
RSS_GROWTH, FD_GROWTH = 96 << 20, 20
"""Growth that is allowed beyond that in one process."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Life:
    """One server process, from its first answer until it is signalled to end."""

    began: float = field(default_factory=time.monotonic)
    lasted: float = 0.0
    rss: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self, process: psutil.Process) -> None:
        self.lasted = time.monotonic() - self.began
        if self.lasted < WARM_UP:
            return
        now = process.memory_info().rss, process.num_fds()
        self.rss = [*self.rss[:1], now[0]]
        self.fds = [*self.fds[:1], now[1]]
        for name, (first, last), bound in (
            ("resident bytes", (self.rss[0], self.rss[-1]), RSS_GROWTH),
            ("file descriptors", (self.fds[0], self.fds[-1]), FD_GROWTH),
        ):
            if last - first > bound:
                raise Violation(f"the server grew from {first} to {last} {name} in {self.lasted:.0f} s")


class Watch(threading.Thread):
    """Reads through its own connections, so that the soak may do what it likes meanwhile.

    `life` is None while the server may be away; the thread that ends the server takes it away first.
    """

    def __init__(self, stack: LlamaStack) -> None:
        super().__init__(name="watch", daemon=True)
        self.stack = stack
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.trouble: BaseException | None = None
        self.requests, self.slowest = 0, 0.0
        self.suspects: set[tuple[str, str]] = set()
        self._over = threading.Event()

    def begins(self) -> None:
        self.life = Life()
        self.lives.append(self.life)

    def ends(self) -> None:
        self.life = None

    def close(self) -> None:
        self._over.set()
        self.join()
        self.check()

    def check(self) -> None:
        """Raise here what went wrong there."""
        if self.trouble is not None:
            raise Violation(f"{type(self.trouble).__name__}: {self.trouble}") from self.trouble

    def run(self) -> None:
        store = Store(self.stack.data_dir / DATABASE)
        try:
            for turn in itertools.count():
                if self._over.wait(0.2):
                    break
                self._one_trains()
                self._ask(turn)
                if turn % 10 == 0:
                    self._checkpoints_stand(store)
        except BaseException as error:  # raised again by `check`: the end of a thread goes unnoticed
            self.trouble = error
        finally:
            store.close()

    def get(self, path: str, **params: str) -> Json | None:
        """The answer; None where the server went away meanwhile."""
        life, began = self.life, time.monotonic()
        if life is None:
            return None
        try:
            answer = self.stack.get(path, **params)
        except requests.RequestException as error:
            if self.life is life:
                raise Violation(f"GET {path} {params}: {error}") from error
            return None
        seconds = time.monotonic() - began
        if self.life is not life:
            return None
        self.requests, self.slowest = self.requests + 1, max(self.slowest, seconds)
        if answer.status_code != 200:
            raise Violation(f"GET {path} {params}: {answer.status_code} {answer.text}")
        if seconds > SLOWEST:
            raise Violation(f"GET {path} {params}: answered after {seconds:.2f} s")
        return dict(answer.json())

    def _ask(self, turn: int) -> None:
        life = self.life
        listed = self.get("/post-training/jobs")
        if life is None or listed is None:
            return
        names = [job["job_uuid"] for job in listed["data"]]
        for path in ("/post-training/job/status", "/post-training/job/artifacts"):
            for name in {names[turn % len(names)], names[-1]} if names else ():
                self.get(path, job_uuid=name)
        try:
            life.sample(psutil.Process(self.stack.pid))
        except psutil.Error:
            if self.life is life:
                raise

    def _one_trains(self) -> None:
        """Two polls: a process that one scan met in its last moment is gone in the next."""
        if len(self._trainers()) > 1 and len(twice := self._trainers()) > 1:
            raise Violation(f"several jobs train on one device: {twice}")

    def _trainers(self) -> set[Path]:
        """Run directories in which a training process lives."""
        below = tasks_below(self.stack.data_dir.resolve() / "jobs")
        return {run_dir for run_dir, found in below.items() if any(map(_trains, found))}

    def _checkpoints_stand(self, store: Store) -> None:
        """Every listed checkpoint is whole; one is checked twice, since it may be replaced by its better at the
        very moment of the first poll."""
        broken = {
            (name, str(checkpoint.path))
            for name in store.names()
            for checkpoint in store.checkpoints(name)
            if not is_whole(checkpoint.path)
        }
        if still := broken & self.suspects:
            raise Violation(f"listed checkpoints are not whole: {sorted(still)}")
        self.suspects = broken


def _trains(process: ProcessId) -> bool:
    try:
        return TRAINER in psutil.Process(process.pid).cmdline() and alive(process)
    except psutil.Error:
        return False
