"""The page of data: a dataset's rows as they are trained."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from llama_stack_provider_trl.specs.previewed import inference_sentence

from ..dependencies import DatasetsDep, JobChecksDep
from ..http.preview import PreviewBody
from ..security.access import USERS, USERS_FORM, CurrentCaller
from .job_form import job_of, validated
from .login import checked_form
from .preview_view import left_out, parts_of, sentences_of
from .rendering import page
from .route import PageRoute, problem_of

router = APIRouter(route_class=PageRoute, prefix="/data", include_in_schema=False)


@router.get("", dependencies=[USERS])
async def data_page(
    request: Request, registry: DatasetsDep, dataset: Annotated[str, Query(max_length=512)] = ""
) -> Response:
    """The form that asks for a preview."""
    return page(request, "data.html", result=None, problem="", **await _form(registry, {"dataset": dataset}))


@router.post("", dependencies=[USERS_FORM])
async def preview_page(
    request: Request, checks: JobChecksDep, registry: DatasetsDep, caller: CurrentCaller
) -> Response:
    """Rows as they are trained, below the form that requested them."""
    fields = await checked_form(request, caller)
    values: dict[str, Any] = {"result": None, "problem": ""}
    status = 200
    try:
        window = {"first_row": fields.get("first_row") or 0, "rows": fields.get("rows") or 10}
        method = fields.get("method") or "sft"
        # KTO pairs the rows of a step, and is a method of DPO's call.
        algorithm, batch_size = ("dpo", "2") if method == "kto" else (method, "1")
        body = {**job_of({**fields, "batch_size": batch_size}), "algorithm": algorithm, **window}
        found = await checks.preview(validated(PreviewBody, body))
        shown = [(row, parts_of(row), *sentences_of(row)) for row in found.rows]
        inference = inference_sentence(found.inference.model_dump())
        values |= {"result": found, "shown": shown, "left_out": left_out(found.rows), "inference": inference}
    except Exception as error:
        status, values["problem"] = await problem_of(request, error)
    return page(request, "data.html", status, **values, **await _form(registry, fields))


async def _form(registry: DatasetsDep, fields: dict[str, str]) -> dict[str, Any]:
    return {"fields": fields, "datasets": await asyncio.to_thread(registry.names)}
