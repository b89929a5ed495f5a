"""Jobs of a laboratory, written into a data directory without any training: every state, a search, a chain, losses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.related.searches import NewTrial
from llama_stack_provider_trl.jobs.store.store import NewJob, Store
from llama_stack_provider_trl.specs.events import Evaluated, Event, Prepared, Progress, Reason, Started
from llama_stack_provider_trl.specs.search import SearchSpec
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import RunDir
from tests.fakes import FakeClock, job_spec

MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M", "/models/llama-3.2-1b-instruct")
_STEPS = 40
_DAY = 86_400.0


def add_listed(data_dir: Path) -> None:
    """36 jobs: a search with 6 trials, one with 3 jobs after it, and 25 that stand alone."""
    clock = FakeClock(time.time() - 5 * _DAY)
    store = Store(data_dir / DATABASE, clock)
    lab = _Laboratory(store, data_dir, clock)
    for number in range(20):
        clock.advance(_DAY / 8)
        lab.completed(
            f"sft-{number:02}", MODELS[number % 3], 3.0 - number / 10, created_by=("ada", "grace")[number % 2]
        )
    clock.advance(_DAY / 8)
    lab.search("lr-search", 6)
    lab.completed("base", MODELS[0], 2.2, metadata={"paper": "v2"})
    for name, algorithm in (("base-dpo", "dpo"), ("base-kto", "kto")):
        lab.completed(name, MODELS[0], 0.5, algorithm=algorithm, after=["base"])
    clock.advance(3600)
    lab.failed(
        "too-large", "CUDA out of memory: 79.1 GiB of 79.6 GiB are in use; halve batch_size, or train an adapter"
    )
    store.add_job(lab.spec("stopped", MODELS[1]), "digest", created_by="ada")
    store.request_cancel("stopped")
    store.add_job(lab.spec("held", MODELS[1]), "digest", created_by="grace")
    store.request_pause("held")
    clock.now = time.time() - 300
    lab.begun("trains", MODELS[2], 1.9, 25)
    store.add_job(lab.spec("next-in-line", MODELS[2]), "digest", created_by="grace")
    store.add_job(lab.spec("base-eval", MODELS[0], after=["base"]), "digest", created_by="ada")
    store.close()


class _Laboratory:
    """Adds jobs."""

    def __init__(self, store: Store, data_dir: Path, clock: FakeClock) -> None:
        self._store, self._data_dir, self._clock = store, data_dir, clock

    def spec(self, name: str, model: str, **fields: Any) -> Any:
        return job_spec(name, model=model, checkpoint_dir=self._data_dir / "checkpoints" / name, **fields)

    def begun(self, name: str, model: str, loss: float, steps: int, created_by: str = "ada", **fields: Any) -> None:
        self._store.add_job(self.spec(name, model, **fields), "digest", created_by=created_by)
        self.train(name, loss, steps)

    def train(self, name: str, loss: float, steps: int) -> None:
        """Have a job do some of its steps, with an evaluation behind the last one."""
        run_dir = RunDir(self._data_dir / "jobs" / name / "attempts" / "1")
        run_dir.root.mkdir(parents=True)
        run_dir.events.touch()
        self._store.launch(name, 1, "cpu", run_dir.root)
        self._store.apply_events(name, 1, list(self._events(loss, steps)), 1)

    def completed(self, name: str, model: str, loss: float, **fields: Any) -> None:
        self.begun(name, model, loss, _STEPS, **fields)
        self.end(name)

    def end(self, name: str) -> None:
        assert self._store.transition(name, 1, JobState.in_progress, JobState.completed)

    def failed(self, name: str, message: str) -> None:
        self.begun(name, MODELS[2], 2.0, 7)
        assert self._store.transition(name, 1, JobState.in_progress, JobState.failed, Reason.out_of_memory, message)

    def search(self, name: str, trials: int) -> None:
        rates = [10.0 ** -(number + 2) for number in range(trials)]
        given = {"method": "grid", "parameters": {"optimizer.lr": rates}, "trials": trials, "objective": "eval_loss"}
        search = SearchSpec.model_validate({**given, "direction": "minimize"})
        jobs = [
            (
                NewTrial(number + 1, {"optimizer.lr": rate}),
                NewJob(self.spec(f"{name}-{number + 1}", MODELS[1]), "digest"),
            )
            for number, rate in enumerate(rates)
        ]
        self._store.add_search(NewJob(self.spec(name, MODELS[1], search=search), "digest"), jobs, created_by="ada")
        for number in range(trials):
            self.train(f"{name}-{number + 1}", 1.5 + abs(number - 2) / 10, _STEPS)
            self.end(f"{name}-{number + 1}")
        assert self._store.transition(name, 0, JobState.in_progress, JobState.completed)

    def _events(self, loss: float, steps: int) -> Iterator[Event]:
        yield Started(pid=1, device="cpu", versions={}, time=self._clock.now)
        begun = {"total_steps": _STEPS, "num_rows": 1, "trainable_parameters": 1, "total_parameters": 1}
        yield Prepared(**begun, time=self._clock.now)
        for step in range(1, steps + 1):
            self._clock.advance(9)
            value = loss * (0.4 + 0.6 * math.exp(-step / 12)) + math.sin(step * 7 + loss * 100) / 25
            yield Progress(
                step=step, epoch=step / _STEPS, metrics={"loss": value}, peak_memory_bytes=1, time=self._clock.now
            )
        yield Evaluated(step=steps, epoch=steps / _STEPS, metrics={"eval_loss": value + 0.1}, time=self._clock.now)
