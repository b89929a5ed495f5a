"""The pages of datasets: their list, with uploads; what one of them has; and its rows as they are trained."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.previewed import inference_sentence
from llama_stack_provider_trl.specs.row_files import ENDINGS, ROW_READERS, ending_of
from llama_stack_provider_trl.system.hub_cache import is_offline

from ..dependencies import DatasetsDep, JobChecksDep, OverviewsDep, RowUploadsDep
from ..http.bodies import PreviewBody
from ..http.dataset_bodies import BlobSource, RegisterDataset
from ..http.declared_routes import Routes
from ..security.access import BODY, READERS, USERS, USERS_FILE, USERS_FORM, CurrentCaller, GuardedRoute
from .job_form import job_of, validated
from .list_view import ago
from .login import check_sent_file, checked_form, see_other
from .new_job_pages import FormDep, FormParts, known_models, newest_model, with_known_model
from .preview_view import left_out, parts_of, sentences_of
from .rendering import HEADERS, address, page
from .route import PageRoute, problem_of

router = Routes(PageRoute, prefix="/data", include_in_schema=False)
calls = Routes(GuardedRoute, prefix="/data", include_in_schema=False)

_DATASETS, _ROWS = 50, 20
"""Of a page."""
_NAME = 512
Search = Annotated[str, Query(max_length=200)]
Dataset = Annotated[str, Query(max_length=_NAME)]


@router.get("", dependencies=[READERS])
async def datasets_page(
    request: Request,
    overviews: OverviewsDep,
    search: Search = "",
    number: Annotated[int, Query(alias="page", ge=1, le=10**6)] = 1,
) -> Response:
    """The list of datasets, the newest ones first, and the form of an upload."""
    found, matching = await asyncio.to_thread(overviews.listed, (number - 1) * _DATASETS, _DATASETS, search)
    now = datetime.now(UTC)
    return page(
        request,
        "datasets.html",
        datasets=found,
        uses={one.dataset_id: _uses(one.dataset_id, one.shape) for one in found},
        ages={one.dataset_id: ago(one.registered_at, now) for one in found},
        matching=matching,
        search=search,
        number=number,
        pages=-(-matching // _DATASETS),
        endings=ENDINGS,
        link=_link,
        address=lambda to: address("/data", [("search", search), ("page", str(to) if to > 1 else "")]),
    )


@router.get("/rows", dependencies=[READERS])
async def dataset_page(
    request: Request,
    overviews: OverviewsDep,
    dataset: Dataset,
    search: Search = "",
    first: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Response:
    """What a dataset has: its rows, their lengths, duplicates and sources."""
    line = await asyncio.to_thread(overviews.line, dataset)
    values: dict[str, Any] = {"found": None, "places": None, "rows": [], "problem": ""}
    further = ""
    status = 200
    if line.size is not None or not line.uri:
        try:
            seen = await overviews.of(dataset, search, first, _ROWS)
            values |= {"found": seen.overview, "places": seen.places, "rows": seen.rows}
            if search and seen.places["is_cut"]:
                further = _link(dataset, search, first)
            if seen.problem is not None:  # who looks further may get past it: the links remain
                status, values["problem"] = await problem_of(request, seen.problem)
        except Exception as error:
            status, values["problem"] = await problem_of(request, error)
    shown, matching = len(values["rows"]), values["places"]["matching"] if values["places"] else 0
    # Rows that lie far apart are fewer than a page has: the next page begins behind those that are shown.
    older, newer = max(0, first - _ROWS), first + (shown or _ROWS)
    return page(
        request,
        "dataset.html",
        status,
        dataset=line,
        age=ago(line.registered_at, datetime.now(UTC)),
        search=search,
        first=first,
        last=first + shown,
        older=_link(dataset, search, older) if first else "",
        newer=_link(dataset, search, newer)
        if newer < matching or (further and newer == matching == first + _ROWS)
        else "",
        further=further,
        link=_link,
        **_uses(dataset, line.shape),
        **values,
    )


@router.post("/delete", dependencies=[USERS_FORM])
async def delete_dataset(request: Request, registry: DatasetsDep, caller: CurrentCaller) -> Response:
    """Forget a dataset. Jobs that were queued with it keep their rows."""
    fields = await checked_form(request, caller)
    await asyncio.to_thread(registry.delete, fields.get("dataset", ""))
    return see_other("/data")


@calls.post("/upload", dependencies=[USERS_FILE])
async def upload_rows(
    request: Request,
    registry: DatasetsDep,
    uploads: RowUploadsDep,
    caller: CurrentCaller,
    dataset: Annotated[str, Query(max_length=_NAME)],
    file: Annotated[str, Query(max_length=_NAME, description="Name of the file, whose ending names its format")],
) -> Response:
    """Register the rows of a file under a name."""
    check_sent_file(request, caller)
    ending = ending_of(file)
    if ending not in ROW_READERS:
        raise InvalidRequest("file", file, f"expected a file name that ends in {ENDINGS}")
    # Before the rows are sent: the name may be one that no dataset can have.
    validated(RegisterDataset, {"dataset_id": dataset, "source": {"type": "blob", "sha256": "0" * 64}})
    rows = await uploads.add_file(ending, request.stream(), request.scope[BODY].announced, caller.name)
    body = RegisterDataset(dataset_id=dataset, source=BlobSource(type="blob", sha256=rows.sha256))
    await registry.register(body, created_by=caller.name)
    return JSONResponse(
        {"dataset_id": dataset, "num_rows": rows.num_rows, "page": _link(dataset)}, status_code=201, headers=HEADERS
    )


@router.get("/tokens", dependencies=[USERS])
async def tokens_page(
    form: FormDep, dataset: Dataset = "", method: Annotated[str, Query(max_length=20)] = ""
) -> Response:
    """The form that asks for rows as they are trained."""
    given = {"dataset": dataset, "method": method if method in ("sft", "dpo", "kto") else ""}
    given["model"] = await asyncio.to_thread(newest_model, form.store)
    return page(form.request, "tokens.html", result=None, problem="", **await _form(form, given))


@router.post("/tokens", dependencies=[USERS_FORM])
async def preview_page(form: FormDep, checks: JobChecksDep, caller: CurrentCaller) -> Response:
    """Rows as they are trained, below the form that requested them."""
    fields = await checked_form(form.request, caller)
    values: dict[str, Any] = {"result": None, "problem": ""}
    status = 200
    try:
        fields = await asyncio.to_thread(with_known_model, fields, form.store, is_offline(os.environ))
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
        status, values["problem"] = await problem_of(form.request, error)
    return page(form.request, "tokens.html", status, **values, **await _form(form, fields))


async def _form(form: FormParts, fields: dict[str, str]) -> dict[str, Any]:
    return {
        "fields": fields,
        "datasets": await asyncio.to_thread(form.registry.names),
        "models": await asyncio.to_thread(known_models, form.store),
        "defaults": form.settings,
    }


def _link(dataset: str, search: str = "", first: int = 0) -> str:
    """The address of a dataset's page."""
    return address("/data/rows", [("dataset", dataset), ("search", search), ("first", str(first or ""))])


def _uses(dataset: str, shape: str) -> dict[str, str]:
    """The addresses of a job on a dataset, and of its rows as tokens."""
    fields = [("dataset", dataset), ("method", _method_of(shape))]
    return {"train": address("/new", fields), "tokens": address("/data/tokens", fields)}


def _method_of(shape: str) -> str:
    """The method that rows of a shape are meant for; empty: none more than another."""
    columns = {*shape.split(" + ")}
    if columns & {"chosen", "preferred_output"}:
        return "dpo"
    return "kto" if "label" in columns else ""
