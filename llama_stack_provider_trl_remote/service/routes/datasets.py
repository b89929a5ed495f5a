"""Datasets (as Llama Stack's clients register them) and the blobs that hold their rows."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Request, Response

from llama_stack_provider_trl.system.files import open_regular

from ..dependencies import BlobsDep, DatasetsDep, RayDatasetsDep, RowUploadsDep
from ..http.dataset_bodies import Dataset, ListDatasetsResponse, RegisterDataset, Sha256
from ..http.declared_routes import Routes
from ..http.errors import NotFound, declared
from ..http.places import MOST, After, Limit
from ..security.access import (
    BODY,
    READERS,
    READING_UPLOAD,
    TASK_ROWS,
    USERS,
    USERS_ROWS,
    USERS_UPLOAD,
    CurrentCaller,
    GuardedRoute,
)
from .files import OCTETS, RangeHeader, file_answers, file_response
from .jobs import as_json

router = Routes(GuardedRoute, prefix="/datasets", tags=["datasets"])
blobs = Routes(GuardedRoute, prefix="/blobs", tags=["datasets"])
readings = Routes(GuardedRoute, prefix="/readings", tags=["datasets"])

DatasetId = Annotated[str, Path(description="The dataset's name")]
Digest = Annotated[Sha256, Path(description="sha256 of the whole body, in hexadecimal")]
_NDJSON: dict[str, Any] = {
    "requestBody": {"required": True, "description": "One JSON object per line", "content": OCTETS}
}


@router.post("", dependencies=[USERS_ROWS], response_model=Dataset, responses=declared(409, 507))
async def register_dataset(
    registry: DatasetsDep, body: RegisterDataset, caller: CurrentCaller, request: Request
) -> Response:
    """Register rows, a uri, or an uploaded blob under a name. The same again changes nothing."""
    return as_json(await registry.register(body, getattr(request.state, "rows", None), caller.name))


@router.get("", dependencies=[READERS], response_model=ListDatasetsResponse, responses=declared())
async def list_datasets(registry: DatasetsDep, limit: Limit = MOST, after: After = None) -> Response:
    """Registered datasets, oldest first."""
    return Response(await asyncio.to_thread(registry.page, limit, after), media_type="application/json")


@router.get("/{dataset_id:path}", dependencies=[READERS], response_model=Dataset, responses=declared(404))
async def get_dataset(registry: DatasetsDep, dataset_id: DatasetId) -> Response:
    """One dataset, without its rows."""
    return as_json(await asyncio.to_thread(registry.get, dataset_id))


@router.delete("/{dataset_id:path}", dependencies=[USERS], status_code=204, responses=declared(404))
async def delete_dataset(registry: DatasetsDep, dataset_id: DatasetId) -> Response:
    """Forget a dataset, and its rows, unless another token has them. Jobs that were queued with it keep their rows."""
    await asyncio.to_thread(registry.delete, dataset_id)
    return Response(status_code=204)


@blobs.head("/{sha256}", dependencies=[READERS], response_class=Response, responses=declared(404))
async def has_blob(stored: BlobsDep, sha256: Digest) -> Response:
    """Whether these rows are stored here."""
    if not await stored.holds(sha256):
        raise NotFound(f"no rows with the digest {sha256} are stored here")
    return Response()


@blobs.get(
    "/{sha256}",
    dependencies=[TASK_ROWS],
    response_class=Response,
    responses={**declared(404, 416), **file_answers(whole="One JSON object per line")},
)
async def get_blob(
    stored: BlobsDep,
    sha256: Digest,
    wanted: RangeHeader = None,
) -> Response:
    """The rows, for a node that trains on them."""
    if not await stored.holds(sha256):
        raise NotFound(f"no rows with the digest {sha256} are stored here")
    path = stored.path(sha256)
    size = (await asyncio.to_thread(path.stat)).st_size
    return file_response(partial(open_regular, path), size, sha256, wanted)


@blobs.put(
    "/{sha256}",
    dependencies=[USERS_UPLOAD],
    status_code=201,
    response_class=Response,
    responses={**declared(507), 200: {"description": "Known already"}, 201: {"description": "Stored"}},
    openapi_extra=_NDJSON,
)
async def put_blob(uploads: RowUploadsDep, sha256: Digest, request: Request, caller: CurrentCaller) -> Response:
    """Upload rows. Nothing is kept of a body that breaks off or has another digest."""
    return await _store(uploads, sha256, request, caller.name)


@readings.put(
    "/{reading}/{sha256}",
    dependencies=[READING_UPLOAD],
    status_code=201,
    response_class=Response,
    responses={**declared(404, 409, 507), 200: {"description": "Known already"}, 201: {"description": "Stored"}},
    openapi_extra=_NDJSON,
)
async def put_reading(
    awaited: RayDatasetsDep,
    uploads: RowUploadsDep,
    reading: Annotated[str, Path(description="Id that the Ray job was given")],
    sha256: Digest,
    request: Request,
) -> Response:
    """Upload the rows that a Ray job has read, while a request waits for them."""
    async with awaited.receiving(reading, sha256):
        return await _store(uploads, sha256, request, None)


async def _store(uploads: RowUploadsDep, sha256: str, request: Request, owner: str | None) -> Response:
    """Store a body of rows. See `RowUploads.store`."""
    if await uploads.store(sha256, request.stream, request.scope[BODY].announced, owner):
        return Response(status_code=201)
    await _discard(request)
    return Response(status_code=200)


async def _discard(request: Request) -> None:
    """Let a client that sends without waiting (Expect: 100-continue) finish: it may not read our answer before."""
    if request.headers.get("expect", "").lower() != "100-continue":
        async for _ in request.stream():
            pass
