"""Votes: of two answers to the same messages the better one, as rows of a dataset that preference methods train on."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs.images import count_images
from llama_stack_provider_trl.specs.rows import PreferenceExample, parse_row
from llama_stack_provider_trl.system.offload import in_work_thread
from llama_stack_provider_trl.system.texts import counted

from ..http.chat_bodies import VoteBody, refuse_unknown_keys
from .registry import DatasetRegistry, Growth

_GROWTH = Growth(mark="votes", most_rows=20_000, most_bytes=16 << 20)


class Votes:
    """Adds votes to datasets, one for each name that a caller chooses."""

    def __init__(self, registry: DatasetRegistry) -> None:
        self._registry = registry

    async def add(self, body: VoteBody, caller: str) -> int:
        """Store a vote, which is on the disk when this returns; the same vote again changes nothing. Returns the number
        of votes in its dataset. Raises InvalidRequest: it is no pair that can be trained on; Conflict, QuotaReached,
        StoreError, OSError: see `DatasetRegistry.add_row`."""
        row = await in_work_thread(row_of, body)
        return await self._registry.add_row(body.dataset_id, row, _GROWTH, caller)

    async def count(self, dataset_id: str) -> int:
        """The number of votes in a dataset: none, too, where nobody has voted under this name."""
        return await asyncio.to_thread(self._registry.count, dataset_id, _GROWTH)


def row_of(body: VoteBody) -> dict[str, Any]:
    """A vote as a preference pair. Raises InvalidRequest: names what cannot be trained on."""
    if body.chosen == body.rejected:
        raise InvalidRequest("rejected", body.rejected, "it is the same as chosen: no answer is better")
    refuse_unknown_keys(body.messages)
    row: dict[str, Any] = {
        "prompt": body.messages,
        "chosen": [{"role": "assistant", "content": body.chosen}],
        "rejected": [{"role": "assistant", "content": body.rejected}],
    }
    if body.tools:
        row["tools"] = body.tools
    try:
        example = parse_row(row, 0, "dpo")
    except InvalidRows as error:
        text = error.hint.removeprefix("row 0: ").replace("column prompt", "messages", 1)
        for name, value in (("chosen", body.chosen), ("rejected", body.rejected)):
            if text.startswith(f"column {name}"):
                raise InvalidRequest(name, value, text.removeprefix(f"column {name}, ")) from error
        raise InvalidRequest("messages", counted(len(body.messages), "message"), text) from error
    if count_images(example.prompt if isinstance(example, PreferenceExample) else None):
        found = counted(len(body.messages), "message")
        raise InvalidRequest("messages", found, "they have images, expected text alone")
    return row
