"""`remote::trl_remote`: forwards Llama Stack's six post-training calls to the training service.

No `from __future__ import annotations` here: Llama Stack up to 0.4 builds its HTTP schema from these annotations, and
strings would turn every POST into a 500.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from llama_stack_provider_trl.errors import InvalidRows, ServiceUnreachable, StoreError
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.stack.compat import read_rows, request_user
from llama_stack_provider_trl.stack.protocol import SubmittingCalls, answers_clearly
from llama_stack_provider_trl.stack.responses import (
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
)
from llama_stack_provider_trl.system.files import Blob, put_rows

from .client import JOBS, PREFERENCE_OPTIMIZE, SUPERVISED_FINE_TUNE, ServiceClient, Timeouts
from .config import TrlRemoteConfig


class TrlRemotePostTraining(SubmittingCalls):
    """The provider object inside Llama Stack. It has no state: the service has the jobs."""

    def __init__(self, config: TrlRemoteConfig, deps: dict[Any, Any]) -> None:
        self.deps = deps
        token = config.api_token.get_secret_value() if config.api_token else None
        timeouts = Timeouts(config.connect_timeout, config.read_timeout, config.total_timeout, config.submit_timeout)
        self.client = ServiceClient(config.url, token, timeouts, user=request_user)

    async def shutdown(self) -> None:
        """Nothing to do: no connection is kept, and the service continues."""

    @answers_clearly
    async def get_training_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job of the service, oldest first."""
        return self._parsed(ListPostTrainingJobsResponse, await self.client.get_all(JOBS))

    @answers_clearly
    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """The status of a job; `resources_allocated` holds progress, effective configuration, warnings and errors."""
        return self._parsed(PostTrainingJobStatusResponse, await self.client.status(job_uuid))

    @answers_clearly
    async def cancel_training_job(self, job_uuid: str) -> None:
        """End a job: its processes are gone within seconds, its checkpoints stay."""
        await self.client.cancel(job_uuid)

    @answers_clearly
    async def get_training_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """Every complete checkpoint of a job; its paths are valid on the service's machine."""
        return self._parsed(PostTrainingJobArtifactsResponse, await self.client.artifacts(job_uuid))

    async def _submit(self, request: SupervisedFineTuneRequest | PreferenceOptimizeRequest) -> PostTrainingJob:
        # The nulls that this call's own signature adds are left out: the same body sent to 8322 is then the same job.
        fields = request.model_dump(mode="json", exclude_unset=True)
        body = {name: value for name, value in fields.items() if value is not None}
        if (options := self._trl_options()) is not None:
            body["provider_options"] = options
        # A repeated POST returns its job or its conflict, even when its dataset has been deleted since.
        if not await self.client.holds(request.job_uuid):
            body["dataset_digests"] = await self._upload_datasets(request)
        path = SUPERVISED_FINE_TUNE if isinstance(request, SupervisedFineTuneRequest) else PREFERENCE_OPTIMIZE
        return self._parsed(PostTrainingJob, await self.client.submit(path, body))

    async def _upload_datasets(self, request: SupervisedFineTuneRequest | PreferenceOptimizeRequest) -> dict[str, str]:
        """Upload the rows of a request that the service lacks. Returns dataset id -> digest."""
        data = request.training_config.data_config
        named = (data.dataset_id, data.validation_dataset_id) if data is not None else ()
        mixture = ProviderOptions.parse(self._trl_options()).mixture or []
        names = [name for name in dict.fromkeys([*named, *(one.dataset_id for one in mixture)]) if name is not None]
        return {name: await self._upload(name) for name in names if await self._is_ours(name)}

    async def _is_ours(self, dataset_id: str) -> bool:
        """Whether this Llama Stack has the rows; the service has those of other datasets."""
        return True

    async def _upload(self, dataset_id: str) -> str:
        rows = await read_rows(self.deps, dataset_id)
        with tempfile.TemporaryDirectory(prefix="trl-remote-") as directory:
            # In a thread: writing 10,000 rows takes a third of a second, and other requests should not wait for them.
            blob = await asyncio.to_thread(_write, Path(directory), dataset_id, rows)
            await self.client.upload_rows(blob)
        return blob.sha256

    def _parsed[Answer: BaseModel](self, model: type[Answer], answer: Any) -> Answer:
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            found = f"returned an invalid {model.__name__} ({where}: {first['msg']})"
            raise ServiceUnreachable(self.client.url, found, "install the same release on both sides") from error


def _write(directory: Path, dataset_id: str, rows: list[dict[str, Any]]) -> Blob:
    try:
        return put_rows(directory, rows)
    except InvalidRows as error:
        raise InvalidRows(f"dataset {dataset_id!r}, {error}") from error
    except OSError as error:
        raise StoreError(f"dataset {dataset_id!r} cannot be written for its upload: {error}") from error
