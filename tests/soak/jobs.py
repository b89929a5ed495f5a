"""What the soak submits, and what each job's history permits it to become."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.specs.events import Reason
from tests.contract.payloads import LORA, Json, sft
from tests.contract.stack import DPO, SFT
from tests.tiny import tiny_model

SFT_ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}."} for n in range(24)]
DPO_ROWS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": "I would rather not."}
    for n in range(24)
]
BAD_ROWS = [*SFT_ROWS[:5], {"prompt": "What is this?"}]
DATASETS = {"questions": SFT_ROWS, "pairs": DPO_ROWS, "few": SFT_ROWS[:4], "bad": BAD_ROWS, "empty": []}
BATCH_SIZE = 2


@dataclass(frozen=True)
class Recipe:
    """A training whose final weights depend on nothing else that the soak varies."""

    call: str
    epochs: int
    training: Json = field(default_factory=dict)
    data: Json = field(default_factory=dict)
    lora: bool = False
    options: Json = field(default_factory=dict)

    @property
    def steps(self) -> int:
        per_epoch = len(SFT_ROWS) // BATCH_SIZE // int(self.training.get("gradient_accumulation_steps", 1))
        return self.epochs * per_epoch

    def request(self, job_uuid: str) -> tuple[Json, Json]:
        """Body and provider options."""
        body = sft(job_uuid, "questions" if self.call == SFT else "pairs")
        training = {**body["training_config"], "n_epochs": self.epochs, "dtype": "fp32", **self.training}
        training["data_config"] = {**training["data_config"], "batch_size": BATCH_SIZE, **self.data}
        options = dict(self.options)
        if self.call == DPO:
            del training["data_config"]["data_format"]
            body |= {"finetuned_model": job_uuid, "algorithm_config": {"type": "dpo"}}
            options |= {"lora": LORA} if self.lora else {}
        elif self.lora:
            body["algorithm_config"] = LORA
        return {**body, "training_config": training}, options


RECIPES = {
    "sft-full": Recipe(SFT, 8),
    "sft-lora": Recipe(SFT, 6, lora=True, data={"validation_dataset_id": "few"}, options={"merge_adapter": True}),
    "sft-accumulated": Recipe(SFT, 10, {"gradient_accumulation_steps": 3}, options={"lr_scheduler": "cosine"}),
    "dpo-full": Recipe(DPO, 5),
    "dpo-lora": Recipe(DPO, 6, lora=True),
}


@dataclass
class History:
    """One job: what was requested, and what has been done to it since."""

    job_uuid: str
    recipe: str
    body: Json
    options: Json
    fails_with: Reason | None = None
    killed: set[int] = field(default_factory=set)
    """Attempts of which a process was sent SIGKILL."""
    cancelled: bool = False
    """A cancel was taken."""
    paused: bool = False
    """Of the pauses and resumes that were taken, the last was a pause."""

    @property
    def call(self) -> str:
        return RECIPES[self.recipe].call

    @property
    def retries(self) -> int:
        return int(self.options["retries"])

    def permitted(self) -> set[JobState]:
        """The states in which the job may be once it has come to rest."""
        if self.cancelled:  # what has finished before it reads the cancel is finished
            return {JobState.cancelled} | (set() if self.fails_with else {JobState.completed})
        ends = {JobState.failed} if self.fails_with else {JobState.completed}
        if len(self.killed) > self.retries:
            ends |= {JobState.failed}
        return ends | ({JobState.paused} if self.paused else set())

    def complaint(self, job: JobRecord) -> str:
        """What is wrong with the state that the job has come to rest in; empty where nothing is."""
        if job.state not in self.permitted():
            return f"is {job.state} ({job.message}), permitted: {sorted(self.permitted())}"
        if job.retries_used > len(self.killed):
            return f"was tried again {job.retries_used} times, but only attempts {self.killed} were killed"
        if job.state is not JobState.failed:
            return ""
        killed = {Reason.rank_failed, Reason.node_lost} if len(self.killed) > self.retries else set()
        if job.reason not in killed | {self.fails_with}:
            return f"failed with {job.reason}, expected {self.fails_with or sorted(killed)}: {job.message}"
        return "" if job.message.strip() else "failed without a message"


class Generator:
    """Requests, good and bad."""

    def __init__(self, rng: random.Random, root: Path) -> None:
        self.rng, self.root, self.count = rng, root, 0

    def reference(self, recipe: str) -> History:
        return History(f"reference-{recipe}", recipe, *self._request(f"reference-{recipe}", recipe, retries=0))

    def good(self) -> History:
        recipe = self.rng.choice(list(RECIPES))
        name = self._name(recipe)
        body, options = self._request(name, recipe, retries=self.rng.choice([0, 1, 4, 4, 4]))
        for option, values in (
            ("save_steps", [2, 5, 7, 20, None]),
            ("keep_last", [1, 2, None]),
            ("priority", ["low", "normal", "high", "critical", None]),
        ):
            value = self.rng.choice(values)
            options |= {} if value is None else {option: value}
        return History(name, recipe, body, options)

    def failing(self) -> History:
        """A job that is taken and must fail, for a reason that no retry can fix."""
        reason = self.rng.choice([Reason.invalid_model, Reason.invalid_request, Reason.timed_out])
        recipe = "sft-lora" if reason is Reason.invalid_request else "sft-full"
        name = self._name(f"fails-{reason}")
        body, options = self._request(name, recipe, retries=4)
        if reason is Reason.invalid_model:
            body["model"] = str(self._model_without_weights())
        elif reason is Reason.invalid_request:
            body["algorithm_config"] = {**LORA, "lora_attn_modules": ["no_such_proj"]}
        else:
            body["training_config"]["n_epochs"] = 2000
            options["max_duration"] = 1
        return History(name, recipe, body, options, fails_with=reason)

    def refused(self) -> tuple[str, History]:
        """A request that cannot be honoured, and in which way."""
        kind, spoil = self.rng.choice(list(_SPOILED.items()))
        job = self.good()
        spoil(job)
        return kind, job

    def other_body(self, job: History) -> Json:
        body = copy.deepcopy(job.body)
        body["training_config"]["n_epochs"] += 1
        return body

    def _model_without_weights(self) -> Path:
        ignored = shutil.ignore_patterns("*.safetensors")
        return Path(shutil.copytree(tiny_model(), self.root / "no-weights", ignore=ignored, dirs_exist_ok=True))

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{self.count:03}-{kind}"

    @staticmethod
    def _request(job_uuid: str, recipe: str, retries: int) -> tuple[Json, Json]:
        body, options = RECIPES[recipe].request(job_uuid)
        return body, {**options, "retries": retries}


def _training(**changes: Any) -> Callable[[History], None]:
    return lambda job: job.body["training_config"].update(changes)


def _data(**changes: Any) -> Callable[[History], None]:
    return lambda job: job.body["training_config"]["data_config"].update(changes)


_SPOILED: dict[str, Callable[[History], None]] = {
    "no epochs": _training(n_epochs=0),
    "unknown field": _training(n_epoch=3),
    "unknown dataset": _data(dataset_id="nobody"),
    "bad row": _data(dataset_id="bad"),
    "empty dataset": _data(dataset_id="empty"),
    "no such format": _data(data_format="parquet"),
    "unknown option": lambda job: job.options.update(save_step=3),
    "outside directory": lambda job: job.body.update(checkpoint_dir="../up"),
    "missing model": lambda job: job.body.update(model="/no/such/model"),
}
