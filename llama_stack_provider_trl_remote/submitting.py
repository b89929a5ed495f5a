"""Submits the request of one job to the call that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest

from .client import EVALUATE, EXPORT, GENERATE, MERGE, PREFERENCE_OPTIMIZE, SUPERVISED_FINE_TUNE, ServiceClient

KINDS = {"generate": GENERATE, "evaluate": EVALUATE, "merge": MERGE, "export": EXPORT}
"""Kind of a job that does not train -> its call."""


async def submit_request(
    service: ServiceClient, job: Mapping[str, Any], algorithm: str | None = None
) -> dict[str, Any]:
    """POST a job to the call of its algorithm; None: the one that its fields are meant for.

    Args:
        job: with a field `kind` where it does not train: `generate`, `evaluate`, `merge`, `export`.

    Raises:
        InvalidRequest: there is no such kind.
    """
    if "kind" in job:
        body = dict(job)
        kind = body.pop("kind")
        if kind not in KINDS or algorithm is not None:
            hint = "a job that trains has no kind; others are: " + ", ".join(KINDS)
            raise InvalidRequest("kind", kind, hint)
        return dict(await service.submit(KINDS[kind], body))
    paths = {"sft": SUPERVISED_FINE_TUNE, "dpo": PREFERENCE_OPTIMIZE}
    return dict(await service.submit(paths[algorithm or call_of(job)], dict(job)))


def call_of(job: Mapping[str, Any]) -> str:
    """The algorithm that the fields of a job are meant for. Imports the models of requests."""
    from llama_stack_provider_trl.requests.bodies import algorithm_of

    return algorithm_of(job)
