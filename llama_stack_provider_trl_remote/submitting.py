"""Submits the request of one job to the call that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest

from .client import PREFERENCE_OPTIMIZE, SUPERVISED_FINE_TUNE, ServiceClient


async def submit_request(
    service: ServiceClient, job: Mapping[str, Any], algorithm: str | None = None
) -> dict[str, Any]:
    """POST a job to the call of its algorithm; None: the one that its fields are meant for. Imports the models of
    requests.

    Args:
        job: with a field `kind` where it does not train (`requests.work.KINDS`).

    Raises:
        InvalidRequest: there is no such kind.
    """
    if "kind" in job:
        from llama_stack_provider_trl.requests.work import KINDS, NO_SUCH_KIND

        body = dict(job)
        kind = body.pop("kind")
        if kind not in KINDS or algorithm is not None:
            raise InvalidRequest("kind", kind, NO_SUCH_KIND)
        return dict(await service.submit(f"/v1/post-training/{kind}", body))
    paths = {"sft": SUPERVISED_FINE_TUNE, "dpo": PREFERENCE_OPTIMIZE}
    return dict(await service.submit(paths[algorithm or call_of(job)], dict(job)))


def call_of(job: Mapping[str, Any]) -> str:
    """The algorithm that the fields of a job are meant for. Imports the models of requests."""
    from llama_stack_provider_trl.requests.bodies import algorithm_of

    return algorithm_of(job)
