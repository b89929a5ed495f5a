"""`inline::trl` behind the external API: the unchanged provider, with datasets of its own where the server has none.

No `from __future__ import annotations` here: routes are built from these annotations.
"""

import asyncio
from typing import Any

from pydantic import Field

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.post_training import TrlPostTraining
from llama_stack_provider_trl.specs.exact import AbsolutePath
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowNames, RowUse
from llama_stack_provider_trl.system.offload import serving

from ..service.datasets.blobs import Blobs
from ..service.datasets.registry import DatasetRegistry
from ..service.http.dataset_bodies import BlobSource, Dataset, ListDatasetsResponse, RegisterDataset
from ..service.settings import BucketPath, ServiceSettings

_MOST_LISTED = 10_000
"""Datasets of a list, which has no pages here; as many as `max_datasets` allows."""


class ExternalTrlConfig(TrlConfig):
    """The settings of `inline::trl`, and one for its datasets."""

    dataset_roots: list[AbsolutePath] = Field(default_factory=list)
    """Directories whose files may be named as a dataset's uri (POST /v1/datasets); none: no files."""
    dataset_buckets: list[BucketPath] = Field(default_factory=list)
    """Paths in buckets, such as s3://BUCKET/PATH, whose files may be named as a dataset's uri; none: no bucket."""


class ExternalTrl(TrlPostTraining):
    """The provider object."""

    def __init__(self, config: ExternalTrlConfig, deps: dict[Any, Any]) -> None:
        super().__init__(config, deps)
        settings = ServiceSettings(
            data_dir=config.data_dir,
            dataset_roots=tuple(config.dataset_roots),
            dataset_buckets=tuple(config.dataset_buckets),
            train_python=config.train_python,
            min_free_disk_mb=config.min_free_disk_mb,
        )
        self.blobs = Blobs(settings, self.isolation)
        self.registered = DatasetRegistry(settings, self.blobs)

    async def initialize(self) -> None:
        """Create the directories, then start to supervise."""
        self.blobs.prepare()
        self.registered.prepare()
        await super().initialize()

    async def register_dataset(self, body: RegisterDataset) -> Dataset:
        """Register rows or a uri under a name. Repeating the same registration changes nothing."""
        if isinstance(body.source, BlobSource):
            raise InvalidRequest("source.type", "blob", "blobs are not accepted here: use rows, or a uri")
        with serving(self.work, ""):
            return await self.registered.register(body)

    async def list_datasets(self) -> ListDatasetsResponse:
        """Every registered dataset, oldest first."""
        page = await asyncio.to_thread(self.registered.page, _MOST_LISTED)
        return await asyncio.to_thread(ListDatasetsResponse.model_validate_json, page)

    async def get_dataset(self, dataset_id: str) -> Dataset:
        """One dataset, without its rows."""
        return await asyncio.to_thread(self.registered.get, dataset_id)

    async def delete_dataset(self, dataset_id: str) -> None:
        """Delete a dataset. Jobs that were queued with it keep their rows."""
        await asyncio.to_thread(self.registered.delete, dataset_id)

    async def _dataset(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        # Our registry comes first. Datasets that are not in it are looked up in the server's own registry, if any.
        if await asyncio.to_thread(self.registered.holds, dataset_id):
            return await self.registered.fetch(dataset_id, use, data_format, names)
        return await super()._dataset(dataset_id, use, data_format, names)
