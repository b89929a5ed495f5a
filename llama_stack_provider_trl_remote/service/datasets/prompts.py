"""The prompts of registered rows, one at a time."""

from __future__ import annotations

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs.job import RowNames
from llama_stack_provider_trl.specs.row_prompts import RowPrompt, prompt_within
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl.system.offload import in_work_thread

from ..http.errors import NotFound
from .blobs import Blobs
from .registry import DatasetRegistry

_SECONDS = 10
"""CPU time that reading a row may take: a file of 10 GB is skipped in it."""


class RowPrompts:
    """Reads prompts.

    Args:
        memory_mb: MiB that reading a row may take.
    """

    def __init__(self, registry: DatasetRegistry, blobs: Blobs, memory_mb: int) -> None:
        self._registry, self._blobs = registry, blobs
        self._limits = Limited(_SECONDS, memory_mb << 20)

    async def of_row(self, dataset_id: str, number: int, names: RowNames | None = None) -> RowPrompt:
        """The prompt of a row. Raises InvalidRequest: there is no such dataset, or it cannot be read any more;
        InvalidRows: the row has no prompt, or takes more than the limits allow; NotFound: the dataset has fewer rows;
        LimitReached, OSError: it cannot be read now.

        Args:
            names: of columns and roles, where they are not those of shapes.
        """
        # A look at a row does not wait for the hub or a bucket, which a job asks.
        sha256 = await self._registry.rows_of(dataset_id, "dataset", is_current=False)
        try:
            found = await in_work_thread(prompt_within, self._limits, self._blobs.path(sha256), number, names)
        except FileNotFoundError as error:
            raise InvalidRequest("dataset", dataset_id, "its rows are gone: register it again") from error
        if found["error"] is not None:
            raise InvalidRows(f"dataset {dataset_id!r}, {found['error']}")
        if not found["messages"]:
            raise NotFound(f"dataset {dataset_id!r} has {found['num_rows']} rows: take one below that number")
        return found
