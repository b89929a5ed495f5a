"""A job that names its evaluation: both are stored together, or neither is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobConflict, LimitReached
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Submitter, keep_rows, submit
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowUse
from llama_stack_provider_trl.specs.work import EvaluateSpec
from tests.fakes import FakeClock, FakeLauncher

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "expected": f"{n}"} for n in range(3)]
CHECKED: dict[str, Any] = {"dataset_id": "held-out", "checks": [{"type": "json", "column": "expected"}]}
LORA = {"type": "LoRA", "rank": 4, "alpha": 8, "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False}


def request(**changes: Any) -> SupervisedFineTuneRequest:
    data = {"dataset_id": "rows", "batch_size": 2}
    body = {"job_uuid": "tune", "model": "org/base", "training_config": {"n_epochs": 1, "data_config": data}}
    return SupervisedFineTuneRequest.model_validate({**body, **changes})


class Submissions:
    """A store with its supervisor, and rows of every dataset id."""

    def __init__(self, root: Path) -> None:
        self.root, self.launcher, self.clock = root, FakeLauncher(), FakeClock()
        self.store = Store(root / "jobs.sqlite3", self.clock)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], root)

    async def rows(self, dataset_id: str, use: RowUse, data_format: DataFormat | None) -> tuple[DatasetRef, list[str]]:
        return keep_rows(self.root / "datasets", dataset_id, ROWS, use, data_format)

    def post(self, evaluate: Any, owner: Submitter | None = None, options: Any = None, **changes: Any) -> bool:
        sent = request(**changes)
        parsed = ProviderOptions.parse({"evaluate": evaluate, **(options or {})})
        settings = Settings(data_dir=self.root, devices=("cpu",))
        return asyncio.run(submit(sent, parsed, sent.digest(parsed), settings, self.store, self.rows, owner))

    def state(self, name: str) -> JobState:
        return self.store.get(name).state

    def tick(self) -> None:
        self.clock.advance(5)
        self.supervisor.tick()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submissions]:
    """Requests are checked in the thread of the tests, which may have trained in it: a fork that another thread makes
    frees what is local to this one, and what torch has there waits for its own threads."""

    async def at_once[Value](work: Callable[..., Value], *arguments: Any) -> Value:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    made = Submissions(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize(
    ("changes", "options", "checkpoint"),
    [
        ({}, {}, "final"),
        ({"algorithm_config": LORA}, {}, "final"),
        ({"algorithm_config": LORA}, {"merge_adapter": True}, "merged"),
    ],
    ids=["full", "adapter", "merged"],
)
def test_the_evaluation_is_a_job_after_it_on_its_result(
    jobs: Submissions, changes: dict[str, Any], options: dict[str, Any], checkpoint: str
) -> None:
    options = {"priority": "high", **options}
    assert jobs.post(CHECKED, options=options, **changes)
    assert not jobs.post(CHECKED, options=options, **changes)
    assert [*jobs.store.names()] == ["tune", "tune-evaluation"]
    tune, found = jobs.store.get("tune").spec, jobs.store.get("tune-evaluation").spec
    assert (tune.evaluation, tune.work) == ("tune-evaluation", None)
    assert isinstance(found.work, EvaluateSpec)
    assert found.work.answers is not None
    assert found.work.answers.checks[0].column == "expected"
    result = tune.checkpoint_dir / checkpoint
    assert (found.adapter.directory if found.adapter else Path(found.source.model)) == result
    assert (found.after, found.cancel_with, found.lifecycle.priority) == (("tune",), True, tune.lifecycle.priority)
    assert [one.job_uuid for one in jobs.store.chains.of_job("tune").before] == ["tune-evaluation"]


def test_it_starts_when_the_job_has_completed_and_is_cancelled_with_it(jobs: Submissions) -> None:
    jobs.post(CHECKED)
    jobs.tick()
    assert (jobs.state("tune"), jobs.state("tune-evaluation")) == (JobState.launching, JobState.scheduled)
    jobs.store.request_cancel("tune")
    jobs.tick()
    jobs.launcher.exit("tune-1", 0)
    for _ in range(2):
        jobs.tick()
    assert (jobs.state("tune"), jobs.state("tune-evaluation")) == (JobState.cancelled, JobState.cancelled)


def test_its_judge_may_be_the_result_of_another_job_and_not_of_the_job_itself(jobs: Submissions) -> None:
    judge = {"type": "judge", "model": "job:tune"}
    with pytest.raises(InvalidRequest, match="there is no such job here") as caught:
        jobs.post({**CHECKED, "checks": [judge]})
    assert (caught.value.field, [*jobs.store.names()]) == ("provider_options.evaluate.checks.0.model", [])
    jobs.post(None)
    jobs.post({**CHECKED, "checks": [judge]}, job_uuid="next")
    first, second, found = (jobs.store.get(name).spec for name in ("tune", "next", "next-evaluation"))
    assert found.after == ("next", "tune")
    assert isinstance(found.work, EvaluateSpec)
    assert [job.job_uuid for job in found.jobs_read] == [second.job_uuid, first.job_uuid]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({**CHECKED, "model": "other"}, "provider_options.evaluate.model"),
        ({**CHECKED, "metric": "bleu"}, "provider_options.evaluate.metric"),
        ({"checks": CHECKED["checks"]}, "provider_options.evaluate.dataset_id"),
        ({**CHECKED, "checks": [{"type": "regex", "pattern": "("}]}, "provider_options.evaluate.checks.0.pattern"),
        ({**CHECKED, "dtype": "int3"}, "provider_options.evaluate.dtype"),
        ({"dataset_id": "held-out", "algorithm": "dpo"}, "provider_options.evaluate.reference_model"),
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused_and_no_job_is_stored(
    jobs: Submissions, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        jobs.post(given)
    assert caught.value.field == field
    assert [*jobs.store.names()] == []


def test_without_its_evaluation_a_job_is_not_stored(jobs: Submissions) -> None:
    with pytest.raises(InvalidRows, match="no column 'gone'"):
        jobs.post({**CHECKED, "checks": [{"type": "exact", "column": "gone"}]})
    data = {"dataset_id": "rows", "batch_size": 2, "validation_dataset_id": "held-out"}
    search = {"method": "grid", "parameters": {"training_config.optimizer_config.lr": [1e-4, 1e-3]}}
    training = {"n_epochs": 1, "data_config": data}
    with pytest.raises(InvalidRequest, match="a search is no model"):
        jobs.post(CHECKED, training_config=training, hyperparam_search_config=search)
    with pytest.raises(LimitReached):
        jobs.post(CHECKED, Submitter("one", max_waiting=1))
    assert [*jobs.store.names()] == []
    jobs.post(None, job_uuid="tune-evaluation")
    with pytest.raises(JobConflict, match="'tune-evaluation' exists already"):
        jobs.post(CHECKED)
    assert [*jobs.store.names()] == ["tune-evaluation"]
