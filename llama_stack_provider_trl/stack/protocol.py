"""Shared parts of the two providers: the signatures of Llama Stack's submitting calls, and errors that it can show.

No `from __future__ import annotations` here: Llama Stack up to 0.4 builds its HTTP schema from these annotations, and
strings would turn every POST into a 500.
"""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequest, StoreError, TrlError, shortage_behind, shortage_of, trouble_of
from ..requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest, TrainingConfig
from ..requests.choices import problem_of
from .compat import NeedsRequestProviderData, answers_requests, to_http
from .responses import PostTrainingJob

log = logging.getLogger(__name__)


def answers_clearly[Answer](
    method: Callable[..., Coroutine[Any, Any, Answer]],
) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Turn our errors into those that Llama Stack maps to a status code and a readable text, in both of its styles of
    calls."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Answer:
        try:
            return await method(*args, **kwargs)
        except StoreError as error:
            raise to_http(StoreError(shortage_behind(error).described(error))) from error
        except TrlError as error:
            shown = to_http(error)
            if shown is error:
                raise  # `from` itself would replace its cause, by which its status is chosen
            raise shown from error
        except ValidationError as error:
            # Where Llama Stack checks a body against its own models only, our own models check it here.
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise to_http(InvalidRequest(field, first["input"], problem_of(first))) from error
        except Exception as error:
            # Other providers, which have the rows, call other programs.
            trouble = trouble_of(error, has_connections=True)
            if trouble is None:
                raise
            if shortage_of(error) is None:
                log.exception("storage, or the system, cannot be used")
            raise to_http(StoreError(trouble.described(error))) from error

    return answers_requests(call)


class SubmittingCalls(NeedsRequestProviderData, ABC):
    """The two calls that queue a job, as our own lenient models: unset fields stay unset and unknown ones reach us."""

    @answers_clearly
    async def supervised_fine_tune(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        hyperparam_search_config: dict[str, Any] | None = None,
        logger_config: dict[str, Any] | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
        algorithm_config: dict[str, Any] | None = None,
    ) -> PostTrainingJob:
        """Queue a supervised fine-tuning job; docs/reference/api.md describes every field."""
        request = SupervisedFineTuneRequest(
            job_uuid=job_uuid,
            training_config=training_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            model=model,
            checkpoint_dir=checkpoint_dir,
            algorithm_config=algorithm_config,
        )
        return await self._submit(request)

    @answers_clearly
    async def preference_optimize(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        finetuned_model: str | None = None,
        algorithm_config: dict[str, Any] | None = None,
        hyperparam_search_config: dict[str, Any] | None = None,
        logger_config: dict[str, Any] | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
    ) -> PostTrainingJob:
        """Queue a DPO job; docs/reference/api.md describes every field."""
        request = PreferenceOptimizeRequest(
            job_uuid=job_uuid,
            training_config=training_config,
            finetuned_model=finetuned_model,
            algorithm_config=algorithm_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            model=model,
            checkpoint_dir=checkpoint_dir,
        )
        return await self._submit(request)

    def _trl_options(self) -> Any:
        """The options that the caller put under `trl` in the provider-data header; None: none."""
        data = self.get_request_provider_data()
        return data.trl if data is not None else None

    @abstractmethod
    async def _submit(self, request: SupervisedFineTuneRequest | PreferenceOptimizeRequest) -> PostTrainingJob:
        """Queue the job; answer only when nothing can lose it any more."""
