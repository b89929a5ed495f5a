"""The operations of the soak, on a real server, real runners and real trainings, and what must hold when they rest."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import requests

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import ProcessId, send_signal, tasks_below
from tests.census import assert_clean
from tests.contract.stack import LlamaStack
from tests.soak.checks import Result, complaint, complaint_of_answer, load_finals, result
from tests.soak.jobs import DATASETS, RECIPES, Generator, History
from tests.soak.watch import Violation, Watch
from tests.tiny import REPOSITORY

MOST_WAITING = 4
"""Jobs that run or wait, beyond which none is added: they have to come to rest in time."""
MOST_KILLS = 4
"""Attempts of one job that are killed: the wait before a retry doubles with each."""
AT_ONCE = 0.15
"""Share of the kills that are not kept for a moment at which a training does its steps."""
STILL = 120.0
"""Seconds for which nothing may move while a job that is not paused has not ended: on a slow machine a training
process takes half a minute to import torch, and the longest wait before a retry is 16 s."""
SETTLE = 600.0
"""Seconds within which all jobs must have come to rest."""


class World:
    """One data directory and all that happens to it."""

    def __init__(self, root: Path, seed: int, keep_going: bool) -> None:
        self.root, self.keep_going = root, keep_going
        self.rng = random.Random(seed)
        self.stack = LlamaStack(root)
        self.stack.data_dir.mkdir()
        self.store = Store(self.stack.data_dir / DATABASE)
        self.watch = Watch(self.stack)
        self.generator = Generator(self.rng, root)
        self.jobs: dict[str, History] = {}
        self.references: dict[str, Result] = {}
        self.operations: Counter[str] = Counter()
        self.log: list[str] = []
        self.violations: list[str] = []
        self.loaded = 0
        self.may_restart = True
        self.restart_at = 0.0
        """When a server that was ended is started again; it is away until then."""
        self.stopped: dict[ProcessId, float] = {}
        """Trainers that were sent SIGSTOP, and when they continue."""
        self.first_steps: dict[tuple[str, int], float] = {}
        self.planned: tuple[str, Callable[[], str], float] | None = None
        """What is to happen so many seconds after the first step of an attempt."""
        self._began = time.monotonic()

    # From start to end

    def start(self) -> None:
        self._start_server()
        for name, rows in DATASETS.items():
            self.stack.register(name, rows)
        self.watch.start()

    def compute_references(self) -> None:
        """The weights and losses of every recipe when nothing happens to it."""
        for recipe in RECIPES:
            self._take(self.generator.reference(recipe))
        self.settle()
        self.references = {job.recipe: result(self.store, name) for name, job in self.jobs.items()}

    def operate(self, seconds: float) -> None:
        """One operation after the other, drawn by weight from those that are possible."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            names = [name for name in WEIGHTS if self._up or name in WITHOUT_SERVER]
            if not self.may_restart:
                names = [name for name in names if name not in RESTARTS]
            (name,) = self.rng.choices(names, [WEIGHTS[name] for name in names])
            operation: Callable[[], str] = getattr(self, name)
            self.rest(self.rng.uniform(0, 3.0) if self._done(name, operation()) else 0.1)

    def settle(self) -> None:
        """Let every job come to rest, and check all that must hold then."""
        self.stopped = dict.fromkeys(self.stopped, 0.0)
        self.restart_at, self.planned = 0.0, None
        deadline = time.monotonic() + SETTLE
        while not self._up or self._restless():
            seen = self._standing()
            if not self.until(partial(self._has_moved_from, seen), STILL) or time.monotonic() > deadline:
                raise Violation(f"jobs do not come to rest: {seen}")
        try:
            assert_clean(self.stack.data_dir)
        except AssertionError as error:
            raise Violation(str(error)) from error
        self._all_are_listed()
        for job in self.jobs.values():
            self._check(job)
        self.note(f"settled: {dict(Counter(job.state.value for job in self.store.list()))}")

    def finish(self) -> None:
        """End the server in order; nothing may be left, and every final model loads."""
        self.watch.close()
        self.watch.ends()
        self.stack.stop()
        assert_clean(self.stack.data_dir)
        for line in re.findall(r"^(?:ERROR|CRITICAL) .*llama_stack_provider_trl.*", self.stack.log.read_text(), re.M):
            self._violated(f"the server's log reports: {line.strip()}")
        self.loaded = load_finals(self.store)

    def abandon(self) -> None:
        """End whatever still runs."""
        self.watch.ends()
        with suppress(Violation):
            self.watch.close()
        if self.stack.runs():
            self._kill_server()
        for processes in tasks_below(self.stack.data_dir.resolve() / "jobs").values():
            for process in processes:
                send_signal(process, signal.SIGKILL)
        self.store.close()

    # Operations: each reports what came of it; nothing where there was nothing to do

    def submit(self) -> str:
        return self._take(self.generator.good()) if self._has_room() else ""

    def submit_failing(self) -> str:
        return self._take(self.generator.failing()) if self._has_room() else ""

    def submit_refused(self) -> str:
        kind, job = self.generator.refused()
        self._expect(self._post(job), 400, f"a request with {kind}")
        return kind

    def repeat_same(self) -> str:
        job = self._any_job()
        self._expect(self._post(job), 200, f"the same request for {job.job_uuid}")
        return job.job_uuid

    def repeat_other(self) -> str:
        job = self._any_job()
        answer = self.stack.post(job.call, self.generator.other_body(job), options=job.options)
        self._expect(answer, 409, f"another request for {job.job_uuid}")
        return job.job_uuid

    def submit_into_kill(self) -> str:
        """A client whose answer never comes sends its request again."""
        if not self._has_room():
            return ""
        job = self.generator.good()
        killer = threading.Timer(self.rng.uniform(0, 0.1), self._kill_server)
        self.watch.ends()
        killer.start()
        answered = False
        with suppress(requests.RequestException):
            answered = self._post(job).status_code == 200
        killer.join()
        self._start_server()
        return f"{self._take(job)}, answered before: {answered}"

    def cancel(self) -> str:
        if not (job := self._restless_job()):
            return ""
        answer = self.stack.cancel(job.job_uuid)
        if answer.status_code == 200:
            job.cancelled = True
        elif answer.status_code != 409 or self._state(job) not in TERMINAL:
            raise Violation(f"cancel of {job.job_uuid} answered {answer.status_code}: {answer.text}")
        return f"{job.job_uuid}: {answer.status_code}"

    def cancel_by_command(self) -> str:
        return self._command("cancel", self._restless_job())

    def pause(self) -> str:
        return self._command("pause", self._restless_job())

    def resume(self) -> str:
        paused = [job for job in self.jobs.values() if job.paused and self._state(job) not in TERMINAL]
        return self._command("resume", self.rng.choice(paused) if paused and self._has_room() else None)

    def kill_server(self) -> str:
        return self._away(self._kill_server)

    def terminate_server(self) -> str:
        return self._away(self.stack.stop)

    def kill_trainer(self) -> str:
        return self._now_or_in_mid_training("kill_trainer", lambda: self._kill_some("trainer"))

    def kill_runner(self) -> str:
        return self._now_or_in_mid_training("kill_runner", lambda: self._kill_some("runner"))

    def kill_both(self) -> str:
        both = self.rng.sample(["runner", "trainer"], 2)
        return self._now_or_in_mid_training("kill_both", lambda: self._kill_some(*both))

    def stop_trainer(self) -> str:
        return self._now_or_in_mid_training("stop_trainer", self._stop_some)

    def _now_or_in_mid_training(self, name: str, act: Callable[[], str]) -> str:
        """Attempts of tiny models spend most of their time on imports, but what a kill costs shows at their steps."""
        if self.rng.random() < AT_ONCE:
            return act()
        self.planned = self.planned or (name, act, self.rng.uniform(0, 2.0))
        return ""

    # Time

    def rest(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, doing what becomes due meanwhile; whether it was done within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self._do_what_is_due()
            if done():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)

    def _done(self, name: str, outcome: str) -> bool:
        if outcome:
            self.operations[name] += 1
            self.note(f"{name}: {outcome}")
        return bool(outcome)

    def note(self, line: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} {line}"
        self.log.append(line)
        print(line, flush=True)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for process in [process for process, moment in self.stopped.items() if moment <= now]:
            del self.stopped[process]
            send_signal(process, signal.SIGCONT)
        if self.planned and any(self._trains_for(job) > self.planned[2] for job in self.store.active()):
            (name, act, _), self.planned = self.planned, None
            self._done(name, act())
        if not self._up and self.restart_at <= now:
            self._start_server()
        if not self.stack.runs() and self._up:
            raise Violation(f"Llama Stack ended by itself\n{self.stack.log_tail()}")
        self.watch.check()

    # Server

    @property
    def _up(self) -> bool:
        return self.watch.life is not None

    def _start_server(self) -> None:
        self.stack.start()
        self.watch.begins()

    def _kill_server(self) -> None:
        """SIGKILL to the server's process group; every training has its own."""
        os.killpg(self.stack.pid, signal.SIGKILL)
        assert self.stack.process is not None
        self.stack.process.wait(10)

    def _away(self, end: Callable[[], None]) -> str:
        self.watch.ends()
        end()
        seconds = self.rng.uniform(0, 8.0)
        self.restart_at = time.monotonic() + seconds
        return f"back in {seconds:.1f} s"

    # Jobs

    def _take(self, job: History) -> str:
        """A request that must be taken."""
        self._expect(self._post(job), 200, f"request for {job.job_uuid}")
        self.jobs[job.job_uuid] = job
        message = {name: value for name, value in job.options.items() if name != "lora"}
        return f"{job.job_uuid} {message}"

    def _post(self, job: History) -> requests.Response:
        return self.stack.post(job.call, job.body, options=job.options)

    def _expect(self, answer: requests.Response, status_code: int, what: str) -> None:
        if answer.status_code != status_code:
            raise Violation(f"{what} was answered with {answer.status_code}: {answer.text}")

    def _command(self, name: str, job: History | None) -> str:
        """`python -m llama_stack_provider_trl NAME`, which works whether or not the server runs."""
        if job is None:
            return ""
        data_dir = str(self.stack.data_dir)
        argv = [sys.executable, "-m", "llama_stack_provider_trl", name, "--data-dir", data_dir, job.job_uuid]
        run = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        if run.returncode not in (0, 1) or "Traceback" in run.stderr:
            raise Violation(f"{argv} exited with {run.returncode}: {run.stderr}")
        if run.returncode == 0 and name == "cancel":
            job.cancelled = True
        elif run.returncode == 0:
            job.paused = name == "pause"
        return (run.stdout + run.stderr).strip().partition("\n")[0]

    def _any_job(self) -> History:
        return self.rng.choice(list(self.jobs.values()))

    def _restless_job(self) -> History | None:
        restless = self._restless()
        return self.jobs[self.rng.choice(restless).job_uuid] if restless else None

    def _restless(self) -> list[JobRecord]:
        """Jobs that should still move by themselves."""
        return [job for job in self.store.list() if job.state not in TERMINAL | {JobState.paused}]

    def _standing(self) -> list[tuple[str, str, int, int]]:
        return [(job.job_uuid, job.state.value, job.attempt, job.progress.step) for job in self._restless()]

    def _has_moved_from(self, seen: list[tuple[str, str, int, int]]) -> bool:
        return self._standing() != seen or not seen

    def _has_room(self) -> bool:
        return len(self._restless()) < MOST_WAITING

    def _state(self, job: History) -> JobState:
        return self.store.get(job.job_uuid).state

    # Processes

    def _trains_for(self, job: JobRecord) -> float:
        """Seconds since the first step that this attempt reported, as far as we have looked."""
        if job.progress.loss is None:
            return 0.0
        first = self.first_steps.setdefault((job.job_uuid, job.attempt), time.monotonic())
        return time.monotonic() - first

    def _victim(self) -> tuple[JobRecord, RunnerStatus] | None:
        """The job that has the device, and its processes."""
        for job in self.store.active():
            if len(self.jobs[job.job_uuid].killed) < MOST_KILLS and job.run_dir is not None:
                status = RunnerStatus.read(RunDir(job.run_dir).runner_status)
                return None if status is None else (job, status)
        return None

    def _stop_some(self) -> str:
        job, status = self._victim() or (None, None)
        if job is None or status is None or status.trainer is None or not send_signal(status.trainer, signal.SIGSTOP):
            return ""
        seconds = self.rng.uniform(0.5, 8.0)
        self.stopped[status.trainer] = time.monotonic() + seconds
        return f"{_place(job)}, for {seconds:.1f} s"

    def _kill_some(self, *names: str) -> str:
        job, status = self._victim() or (None, None)
        if job is None or status is None:
            return ""
        victims: list[ProcessId | None] = [getattr(status, name) for name in names]
        sent = [victim is not None and send_signal(victim, signal.SIGKILL) for victim in victims]
        if not any(sent):
            return ""
        self.jobs[job.job_uuid].killed.add(job.attempt)
        return _place(job)

    # What must hold

    def _all_are_listed(self) -> None:
        listed = self.watch.get("/post-training/jobs")
        if listed is None or sorted(job["job_uuid"] for job in listed["data"]) != sorted(self.jobs):
            raise Violation(f"jobs listed: {listed}\nsubmitted: {sorted(self.jobs)}")

    def _check(self, job: History) -> None:
        record, checkpoints = self.store.get(job.job_uuid), list(self.store.checkpoints(job.job_uuid))
        status = self.watch.get("/post-training/job/status", job_uuid=job.job_uuid)
        assert status is not None, "the server is up"
        message = complaint_of_answer(record, checkpoints, status)
        if wrong := complaint(self.store, job, self.references.get(job.recipe)) or message:
            self._violated(f"job {job.job_uuid} {wrong}")

    def _violated(self, complaint: str) -> None:
        """Ends the soak, or is printed once and counted."""
        if not self.keep_going:
            raise Violation(complaint)
        if complaint not in self.violations:
            self.violations.append(complaint)
            self.note(f"VIOLATION: {complaint}")


def _place(job: JobRecord) -> str:
    return f"{job.job_uuid} attempt {job.attempt}, {job.state}, step {job.progress.step}"


WEIGHTS = {
    **{"submit": 34, "submit_failing": 3, "submit_refused": 5, "repeat_same": 4, "repeat_other": 3},
    **{"cancel": 2, "cancel_by_command": 2, "pause": 4, "resume": 9},
    **{"kill_server": 4, "terminate_server": 3, "submit_into_kill": 3},
    **{"kill_trainer": 8, "kill_runner": 5, "kill_both": 5, "stop_trainer": 5},
}
"""Operation -> how often it is drawn."""
WITHOUT_SERVER = {
    *("cancel_by_command", "pause", "resume", "kill_trainer", "kill_runner", "kill_both", "stop_trainer"),
}
RESTARTS = {"kill_server", "terminate_server", "submit_into_kill"}
