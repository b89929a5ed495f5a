"""Creates fine-tuning jobs: OpenAI's request becomes one of the engine's own."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store

from ..service.http.bodies import PreferenceOptimizeBody, SupervisedFineTuneBody
from ..service.http.errors import OpenAIRefused
from ..service.jobs.submissions import Submissions
from ..service.openai_settings import OpenAIModel
from ..service.security.access import Caller
from .bodies import (
    CreateFineTuningJob,
    DpoHyperparameters,
    DpoMethod,
    Hyperparameters,
    ReinforcementHyperparameters,
    ReinforcementMethod,
    SupervisedMethod,
)
from .files import OpenAIFiles
from .graders import with_local_models
from .models import find_tuned, has_files
from .names import Called, new_job, request_prefix

type Json = dict[str, Any]
_EQUAL = 16
"""Newest jobs of equal requests among which that of a repeated one is looked for."""
_KEPT_CHECKPOINTS = 3
"""As many as OpenAI keeps, beside the result."""
_RANDOM = 2**31
GRADED = "grader"
"""Name of the reward of a grader, in metrics."""
_PARAMS = {
    "model": "model",
    "training_config.n_epochs": "method.hyperparameters.n_epochs",
    "training_config.data_config.batch_size": "method.hyperparameters.batch_size",
    "algorithm_config.beta": "method.dpo.hyperparameters.beta",
    "provider_options.seed": "seed",
}
"""Field of the engine's request -> that of OpenAI's."""


class FineTuning:
    """Creates jobs.

    Args:
        models: by the names of `openai.models`.
    """

    def __init__(
        self, submissions: Submissions, store: Store, files: OpenAIFiles, models: Mapping[str, OpenAIModel]
    ) -> None:
        self._submissions, self._store, self._files, self._models = submissions, store, files, models
        self._repeats = Repeats(time.time())
        self._creating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(self, body: CreateFineTuningJob, caller: Caller, *, is_retry: bool) -> str:
        """Queue a job. Returns its name. Raises OpenAIRefused, InvalidRequest: it cannot be honoured; The other errors
        of `Submissions.submit`.

        Args:
            is_retry: the client has sent the same request before and has no answer, by its header
                `x-stainless-retry-count`. The job that this request has made is returned then, if its answer may have
                been lost. Other equal requests are jobs of their own.
        """
        begun = time.time()
        prefix = request_prefix(caller.name, body.model_dump(mode="json", exclude_unset=True))
        # The first request may still be under way: its client has not waited for it.
        lock = self._creating.setdefault(prefix, asyncio.Lock())
        async with lock:
            name = await asyncio.to_thread(self._made_by, prefix) if is_retry else None
            if name is None:
                name = new_job(prefix)
                await self._submit(body, caller, name)
        self._repeats.answer(name, begun, time.time())
        return name

    def see(self, job: JobRecord, caller: Caller) -> None:
        """Note that a caller names a job: a request that it repeats later has made another one."""
        if job.created_by == caller.name:
            self._repeats.see(job.job_uuid)

    def _made_by(self, prefix: str) -> str | None:
        """The newest job of equal requests whose answer may have been lost; None: there is none."""
        for name in self._store.named_alike(prefix, _EQUAL):
            job = self._store.get(name)
            ended = None if job.completed_at is None else job.completed_at.timestamp()
            if self._repeats.may_be(name, job.scheduled_at.timestamp(), ended, time.time()):
                return name
        return None

    async def _submit(self, body: CreateFineTuningJob, caller: Caller, name: str) -> None:
        await asyncio.to_thread(self._files.require, body.training_file, "training_file")
        if body.validation_file is not None:
            await asyncio.to_thread(self._files.require, body.validation_file, "validation_file")
        alias, base = await asyncio.to_thread(self._base, body.model)
        request, called = requested(body, name, alias, base, self._models)
        try:
            await self._submissions.submit(request, caller, called.text())
        except InvalidRows as error:
            is_other = body.validation_file is not None and body.validation_file in str(error)
            param = "validation_file" if is_other else "training_file"
            raise OpenAIRefused(_with_methods(str(error)), param, f"invalid_{param}") from error
        except InvalidRequest as error:
            named = InvalidRequest(_param_of(error.field), error.value, error.hint)
            raise OpenAIRefused(str(named), named.field, "invalid_value") from error

    def _base(self, model: str) -> tuple[str, str]:
        """The name of `openai.models`, and the model to train as the engine names it. Raises OpenAIRefused: 404."""
        if model in self._models:
            return model, self._models[model].model
        if (tuned := find_tuned(self._store, model)) is not None and tuned.called is not None:
            # The result of a job that goes on can be waited for.
            is_there = tuned.step is None or has_files(self._store, tuned)
            if is_there and tuned.called.alias in self._models:
                return tuned.called.alias, tuned.base
        known = ", ".join(self._models) or "none is configured (the setting openai.models)"
        raise OpenAIRefused(
            f"the model {model[:200]!r} does not exist here or cannot be fine-tuned: the models are {known}",
            "model",
            "model_not_found",
            404,
        )


def _param_of(field: str) -> str:
    """The field of OpenAI's request for one of the engine's."""
    grader = re.fullmatch(r"algorithm_config\.rewards(?:\.0|\[0\])\.check(?:\.grader)?(.*)", field)
    return f"method.reinforcement.grader{grader[1]}" if grader else _PARAMS.get(field, field)


def requested(
    body: CreateFineTuningJob, name: str, alias: str, base: str, models: Mapping[str, OpenAIModel]
) -> tuple[SupervisedFineTuneBody | PreferenceOptimizeBody, Called]:
    """The engine's request, and what it was called with. Pure, but for a seed that the caller did not send. Raises
    OpenAIRefused.

    Args:
        alias: the name of `openai.models` behind `model`.
        base: the model to train, as the engine names it.
        models: by the names of `openai.models`.
    """
    model, grading = models[alias], list[str]()
    kind = "supervised" if body.method is None else body.method.type
    given = _given(body)
    rate = {
        "supervised": model.learning_rate,
        "dpo": model.dpo_learning_rate,
        "reinforcement": model.reinforcement_learning_rate,
    }[kind]
    n_epochs = _value(given.n_epochs, model.n_epochs)
    batch_size = _value(given.batch_size, model.batch_size)
    multiplier = _value(given.learning_rate_multiplier, 1.0)
    honoured: Json = {"n_epochs": n_epochs, "batch_size": batch_size, "learning_rate_multiplier": multiplier}
    rank_batch, micro_batch = _batches(batch_size, model)
    options: Json = {
        "seed": secrets.randbelow(_RANDOM) if body.seed is None else body.seed,
        "nproc_per_node": model.nproc_per_node,
        "keep_last": _KEPT_CHECKPOINTS,
    }
    options |= {
        key: value
        for key, value in (("max_seq_length", model.max_seq_length), ("priority", model.priority))
        if value is not None
    }
    is_adapter = base.startswith("job:") and model.lora_rank is not None
    if is_adapter:
        options["adapter"] = "continue"
    lora = None if model.lora_rank is None or is_adapter else _lora(model.lora_rank, model.lora_alpha)
    request: Json = {
        "job_uuid": name,
        "model": base,
        "training_config": {
            "n_epochs": n_epochs,
            "gradient_accumulation_steps": rank_batch // micro_batch,
            "learning_rate": rate * multiplier,
            "data_config": {"dataset_id": body.training_file, "batch_size": micro_batch},
        },
    }
    if body.validation_file is not None:
        request["training_config"]["data_config"]["validation_dataset_id"] = body.validation_file
    if kind == "dpo":
        beta = _value(given.beta if isinstance(given, DpoHyperparameters) else None, model.beta)
        honoured["beta"] = beta
        request["algorithm_config"] = {"type": "dpo", "beta": beta}
    elif kind == "reinforcement":
        multiplier = _value(given.compute_multiplier if isinstance(given, ReinforcementHyperparameters) else None, 1.0)
        honoured["compute_multiplier"] = multiplier
        assert body.method is not None
        assert body.method.reinforcement is not None
        grader, grading = with_local_models(body.method.reinforcement.grader, models)
        request["algorithm_config"] = _reinforcement(grader, model, multiplier)
    elif lora is not None:
        request["algorithm_config"] = lora
    if kind != "supervised" and lora is not None:
        options["lora"] = lora
    called = Called(body.model, alias, body.suffix or "", {"type": kind, kind: {"hyperparameters": honoured}}, grading)
    options["metadata"] = body.metadata or {}
    request["provider_options"] = options
    if kind != "supervised":
        return PreferenceOptimizeBody.model_validate(request), called
    return SupervisedFineTuneBody.model_validate(request), called


def _reinforcement(grader: Json, model: OpenAIModel, multiplier: float) -> Json:
    """GRPO with the grader as its only reward."""
    check = {"type": "grader", "name": GRADED, "grader": grader}
    return {
        "type": "grpo",
        "rewards": [{"check": check}],
        "num_generations": max(2, round(model.num_generations * multiplier)),
        "max_completion_length": model.max_completion_length,
    }


def _given(body: CreateFineTuningJob) -> Hyperparameters:
    if body.method is None:
        return body.hyperparameters or Hyperparameters()
    block: SupervisedMethod | DpoMethod | ReinforcementMethod | None = getattr(body.method, body.method.type)
    return (block and block.hyperparameters) or Hyperparameters()


def _value[Number: (int, float)](given: Any, auto: Number) -> Number:
    return auto if given in (None, "auto") else given


def _batches(batch_size: int, model: OpenAIModel) -> tuple[int, int]:
    """Examples of a rank in an optimizer step, and of these in a micro step. Raises OpenAIRefused."""
    ranks = model.nproc_per_node
    if batch_size % ranks:
        raise OpenAIRefused(
            f"batch_size={batch_size} is not supported: {ranks} processes train together and take equal parts; send a "
            f"multiple of {ranks}",
            "method.hyperparameters.batch_size",
            "invalid_value",
        )
    of_rank = batch_size // ranks
    micro = max(n for n in range(1, min(of_rank, model.micro_batch_size) + 1) if of_rank % n == 0)
    return of_rank, micro


def _with_methods(text: str) -> str:
    """A sentence about rows, with the methods of this API in place of the engine's calls."""
    for call, method in (("supervised-fine-tune", "supervised"), ("preference-optimize", "dpo")):
        text = text.replace(f"was POST /v1/post-training/{call} meant", f'was the method {{"type": "{method}"}} meant')
    return text


def _lora(rank: int, alpha: int) -> Json:
    modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    return {
        "type": "LoRA",
        "lora_attn_modules": modules,
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "rank": rank,
        "alpha": alpha,
    }


BACK_OFF = 10.0
"""Seconds within which OpenAI's SDK tries again: it waits 8 s at most, and connects."""
_DOWN = 60.0
"""Seconds for which a service may be down between a lost answer and the try that reaches the next one."""
_MOST = 4096


class Repeats:
    """The answers that may have been lost. The record is lost with the process: the times of a job decide then.

    Args:
        started: of the service, as all times in seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._until: dict[str, float] = {}

    def answer(self, name: str, begun: float, now: float) -> None:
        """A job is the answer to a request that has begun then. A client that has stopped waiting tries again within
        what the request took."""
        self._note(name, max(self._until.get(name, 0.0), now + (now - begun) + BACK_OFF))

    def see(self, name: str) -> None:
        """Its caller names a job: the answer was not lost."""
        self._note(name, 0.0)

    def may_be(self, name: str, stored: float, ended: float | None, now: float) -> bool:
        """Whether the answer with this job may be the one that was lost.

        Args:
            ended: when the job ended; None: it has not.
        """
        if ended is not None and ended < now - BACK_OFF:
            return False
        if (until := self._until.get(name)) is not None:
            return now <= until
        is_of_before = self._started - _DOWN <= stored < self._started
        return now <= max(stored, self._started if is_of_before else 0.0) + BACK_OFF

    def _note(self, name: str, until: float) -> None:
        self._until.pop(name, None)
        self._until[name] = until
        if len(self._until) > _MOST:
            del self._until[next(iter(self._until))]
