"""The page of a new job: its form, the preflight's answer beside it, and the same job for other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from llama_stack_provider_trl.errors import InvalidRequest

from ..dependencies import DatasetsDep, JobChecksDep, SubmissionsDep
from ..http.bodies import PreferenceOptimizeBody, PreflightBody, SupervisedFineTuneBody
from ..security.access import USERS, USERS_FORM, CurrentCaller
from .job_form import job_of, same_job, validated
from .job_view import path_of
from .login import checked_form, see_other
from .rendering import page
from .route import PageRoute, problem_of

router = APIRouter(route_class=PageRoute, prefix="/new", include_in_schema=False)


@router.get("", dependencies=[USERS])
async def new_job_page(
    request: Request,
    registry: DatasetsDep,
    dataset: Annotated[str, Query(max_length=512)] = "",
    model: Annotated[str, Query(max_length=4096)] = "",
    method: Annotated[str, Query(max_length=20)] = "",
    options: Annotated[str, Query(max_length=4096)] = "",
) -> Response:
    """The form, empty but for what the address names."""
    given = {"dataset": dataset, "model": model, "method": method, "options": options}
    return await _page(request, registry, {name: value for name, value in given.items() if value})


@router.post("/check", dependencies=[USERS_FORM])
async def check_job(request: Request, checks: JobChecksDep, registry: DatasetsDep, caller: CurrentCaller) -> Response:
    """The form with the preflight's answer; without a model or a dataset there is none yet."""
    fields = await checked_form(request, caller)
    if not fields.get("model", "").strip() or not fields.get("dataset", "").strip():
        return await _page(request, registry, fields)
    try:
        body = {**job_of(fields), "algorithm": _method(fields)}
        found = await checks.preflight(validated(PreflightBody, body))
    except Exception as error:
        status, problem = await problem_of(request, error)
        return await _page(request, registry, fields, status, problem=problem)
    return await _page(request, registry, fields, found=found)


@router.post("", dependencies=[USERS_FORM])
async def submit_job(
    request: Request, submissions: SubmissionsDep, registry: DatasetsDep, caller: CurrentCaller
) -> Response:
    """Queue the job, and lead to its page. The same form again is the same job."""
    fields = await checked_form(request, caller)
    try:
        body: PreferenceOptimizeBody | SupervisedFineTuneBody
        if _method(fields) == "dpo":
            body = validated(PreferenceOptimizeBody, job_of(fields))
        else:
            body = validated(SupervisedFineTuneBody, job_of(fields))
        await submissions.submit(body, caller)
    except Exception as error:
        status, problem = await problem_of(request, error)
        return await _page(request, registry, fields, status, problem=problem)
    return see_other(path_of(body.job_uuid))


def _method(fields: Mapping[str, str]) -> str:
    """Raises InvalidRequest: it is none of the form's."""
    method = fields.get("method") or "sft"
    if method not in ("sft", "dpo"):
        raise InvalidRequest("method", method, "expected sft or dpo")
    return method


async def _page(
    request: Request,
    registry: DatasetsDep,
    fields: dict[str, str],
    code: int = 200,
    found: Any = None,
    problem: str = "",
) -> Response:
    datasets = await asyncio.to_thread(registry.names)
    return page(
        request,
        "new.html",
        code,
        fields=fields,
        datasets=datasets,
        found=found,
        problem=problem,
        same=same_job(_shown(fields), str(request.base_url).rstrip("/")),
    )


def _shown(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of the form, without further options that are no object."""
    try:
        return job_of(fields)
    except InvalidRequest:
        return job_of({**fields, "options": ""})
