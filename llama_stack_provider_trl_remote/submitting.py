"""Submits the request of one job to the call that takes it, and a file of several to the service as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest

from .client import PIPELINE, PREFERENCE_OPTIMIZE, SUPERVISED_FINE_TUNE, ServiceClient


async def submit_request(
    service: ServiceClient, job: Mapping[str, Any], algorithm: str | None = None
) -> dict[str, Any]:
    """POST a job to the call of its algorithm; None: the one that its fields are meant for. Imports the models of
    requests. Raises InvalidRequest: there is no such kind.

    Args:
        job: with a field `kind` where it does not train (`requests.work.KINDS`).
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


KEYS = ("jobs", "teacher_student")
"""Each of them makes a file a pipeline (docs/how-to/chains.md)."""


def is_pipeline(body: Mapping[str, Any]) -> bool:
    return any(key in body for key in KEYS)


async def place(client: ServiceClient, pipeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Submit the jobs of a pipeline that the service does not have, all or none of them; its answer about each
    (`PipelineJobRow`). Raises ServiceRefusal: names the job and the field."""
    return [*(await client.submit(PIPELINE, dict(pipeline)))["data"]]
