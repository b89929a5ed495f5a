"""`remote::trl_remote` behind the external API: the unchanged adapter; datasets are registered with the service.

No `from __future__ import annotations` here: routes are built from these annotations.
"""

from urllib.parse import quote

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl.stack.external import OWN_DATASETS, STACK_DATASETS

from ..adapter import TrlRemotePostTraining
from ..service.http.dataset_bodies import Dataset, ListDatasetsResponse, RegisterDataset

DATASETS = "/v1/datasets"


class ExternalTrlRemote(TrlRemotePostTraining):
    """The provider object."""

    async def register_dataset(self, body: RegisterDataset) -> Dataset:
        """Register rows, a uri of the service's machine, or an uploaded blob. A repeated registration changes
        nothing."""
        requested = body.model_dump(mode="json", exclude_unset=True)
        return self._parsed(Dataset, await self.client.post(DATASETS, requested))

    async def list_datasets(self) -> ListDatasetsResponse:
        """Every dataset that is registered with the service, oldest first."""
        return self._parsed(ListDatasetsResponse, await self.client.get_all(DATASETS))

    async def get_dataset(self, dataset_id: str) -> Dataset:
        """One dataset, without its rows."""
        return self._parsed(Dataset, await self.client.get(_path(dataset_id)))

    async def delete_dataset(self, dataset_id: str) -> None:
        """Delete a dataset. Jobs that were queued with it keep their rows."""
        await self.client.delete(_path(dataset_id))

    async def _is_ours(self, dataset_id: str) -> bool:
        if not OWN_DATASETS:
            return True
        try:
            await self.get_dataset(dataset_id)
        except ServiceRefusal as refusal:
            if refusal.status != 404:
                raise
            return STACK_DATASETS
        return False


def _path(dataset_id: str) -> str:
    return f"{DATASETS}/{quote(dataset_id, safe='')}"
