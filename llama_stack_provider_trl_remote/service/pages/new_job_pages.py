"""The page of a new job: its form, the preflight's answer beside it, and the same job for other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.reader import read_request
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.custom import custom_names

from ..dependencies import DatasetsDep, JobChecksDep, StoreDep, SubmissionsDep
from ..http.bodies import PreferenceOptimizeBody, PreflightBody, SupervisedFineTuneBody
from ..security.access import USERS, USERS_FORM, CurrentCaller
from .job_form import (
    FORM_METHODS,
    LORA_RANK,
    TRAINING_CALLS,
    TUNINGS,
    fields_of,
    job_of,
    next_names,
    rates_of,
    same_job,
    validated,
)
from .job_view import path_of
from .login import checked_form, see_other
from .rendering import page
from .route import PageRoute, problem_of

_MODELS = 100
"""Jobs whose models are suggested."""
router = APIRouter(route_class=PageRoute, prefix="/new", include_in_schema=False)


@router.get("", dependencies=[USERS])
async def new_job_page(
    request: Request,
    registry: DatasetsDep,
    store: StoreDep,
    dataset: Annotated[str, Query(max_length=512)] = "",
    model: Annotated[str, Query(max_length=4096)] = "",
    method: Annotated[str, Query(max_length=20)] = "",
    options: Annotated[str, Query(max_length=4096)] = "",
    source: Annotated[str, Query(alias="from", max_length=128)] = "",
) -> Response:
    """The form: empty, or with the request of a job under a new name; and with what the address names."""
    given = {"dataset": dataset, "model": model, "method": method, "options": options}
    if options:  # such as adapter: continue, beside which another adapter is refused
        given["tuning"] = "request"
    fields, problem = {"tuning": next(iter(TUNINGS)), "lora_rank": str(LORA_RANK)}, ""
    if source:
        fields, problem = await asyncio.to_thread(_again, store, source)
    fields |= {name: value for name, value in given.items() if value}
    return await _page(request, registry, store, fields, problem=problem, source=source)


def _again(store: Store, source: str) -> tuple[dict[str, str], str]:
    """The fields of a job's request under a name that is free, and why there are none.

    Raises:
        JobNotFound.
    """
    requested = read_request(store, source)
    if requested is None or requested.call not in TRAINING_CALLS:
        store.get(source)
        kept = "its request is no training" if requested else "its request is not kept, as of a trial of a search"
        return {}, f"The form cannot be filled in from job {source!r}: {kept}. Fill it in from the job's configuration."
    name = next(name for name in next_names(source) if store.state_of(name) is None)
    return {**fields_of(requested.body, requested.call == TRAINING_CALLS[0]), "job": name}, ""


@router.post("/check", dependencies=[USERS_FORM])
async def check_job(
    request: Request, checks: JobChecksDep, registry: DatasetsDep, store: StoreDep, caller: CurrentCaller
) -> Response:
    """The form with the preflight's answer; without a model or a dataset there is none yet."""
    fields = await checked_form(request, caller)
    if not fields.get("model", "").strip() or not fields.get("dataset", "").strip():
        return await _page(request, registry, store, fields)
    try:
        body = {**job_of(fields), "algorithm": "sft" if await _method(fields) == "sft" else "dpo"}
        found = await checks.preflight(validated(PreflightBody, body))
    except Exception as error:
        status, problem = await problem_of(request, error)
        return await _page(request, registry, store, fields, status, problem=problem)
    return await _page(request, registry, store, fields, found=found)


@router.post("", dependencies=[USERS_FORM])
async def submit_job(
    request: Request, submissions: SubmissionsDep, registry: DatasetsDep, store: StoreDep, caller: CurrentCaller
) -> Response:
    """Queue the job, and lead to its page. The same form again is the same job."""
    fields = await checked_form(request, caller)
    try:
        body: PreferenceOptimizeBody | SupervisedFineTuneBody
        if await _method(fields) != "sft":
            body = validated(PreferenceOptimizeBody, job_of(fields))
        else:
            body = validated(SupervisedFineTuneBody, job_of(fields))
        await submissions.submit(body, caller)
    except Exception as error:
        status, problem = await problem_of(request, error)
        return await _page(request, registry, store, fields, status, problem=problem)
    return see_other(path_of(body.job_uuid))


async def _method(fields: Mapping[str, str]) -> str:
    """Raises InvalidRequest: it is none of the form's, and no installed package adds it."""
    method = fields.get("method") or "sft"
    if method not in FORM_METHODS:
        installed = await asyncio.to_thread(custom_names)
        if method not in installed:
            raise InvalidRequest("method", method, f"expected one of {', '.join([*FORM_METHODS, *installed])}")
    return method


async def _page(
    request: Request,
    registry: DatasetsDep,
    store: Store,
    fields: dict[str, str],
    code: int = 200,
    found: Any = None,
    problem: str = "",
    source: str = "",
) -> Response:
    datasets = await asyncio.to_thread(registry.names)
    jobs, _ = await asyncio.to_thread(store.queue_page, None, None, _MODELS)
    # In a thread: it writes YAML, which takes half a second of a core where the form has much.
    same = await asyncio.to_thread(lambda: same_job(_shown(fields), str(request.base_url).rstrip("/")))
    return page(
        request,
        "new.html",
        code,
        fields=fields,
        datasets=datasets,
        models=[*dict.fromkeys(job.model for job in jobs if job.model)],
        methods=[*FORM_METHODS.items()],
        tunings=[*TUNINGS.items()],
        rank=LORA_RANK,
        rates=rates_of(fields.get("method")),
        source=source,
        found=found,
        problem=problem,
        same=same,
    )


def _shown(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of the form, without what it refuses."""
    try:
        return job_of(fields)
    except InvalidRequest:
        return job_of({**fields, "options": "", "request": "", "tuning": ""})
