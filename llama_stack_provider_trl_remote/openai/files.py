"""Files of OpenAI's API: an uploaded file is a dataset of the service, the metrics of a job are a file of their own. A
file that is uploaded in parts is one as any other once it is completed."""

from __future__ import annotations

import asyncio
import heapq
import io
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.names import problem_of_name
from llama_stack_provider_trl.system.files import open_regular

from ..service.datasets.blobs import Blobs
from ..service.datasets.part_uploads import PartUploads, UploadRecord
from ..service.datasets.registry import DatasetRegistry, Entry
from ..service.datasets.uploads import RowUploads
from ..service.http.dataset_bodies import BlobSource, RegisterDataset
from ..service.http.errors import NotFound, OpenAIRefused
from ..service.http.places import ListPlace
from .bodies import MARK, CompleteUpload, CreateUpload
from .multipart import FILE as FIELD
from .multipart import Form
from .names import FILE, JOB, Called, file_of_upload, job_of_result, new_file, result_file
from .shown import metrics_csv

type Json = dict[str, Any]
PURPOSE, RESULTS = "fine-tune", "fine-tune-results"
ID = "id"
"""The parameter that errors about a file name, as OpenAI's do."""
_MOST_NAME = 255
_PAGE_SECONDS = 1.0
"""After which a page ends: the bytes of a result are known once all of it was written."""
MOST_FILES = 1000
"""Files of a page: each is a document of the data directory."""
_SIZES = 4096
_INEXACT = 1e-5
"""Seconds by which the time of a record may differ from the stored one: more than a microsecond."""


class OpenAIFiles:
    """The files of a service. `store` has the jobs whose metrics are files."""

    def __init__(self, registry: DatasetRegistry, uploads: RowUploads, blobs: Blobs, store: Store) -> None:
        self._registry, self._uploads, self._blobs, self._store = registry, uploads, blobs, store
        self._size_of_result = lru_cache(_SIZES)(self._count_result)

    async def upload(self, form: Form, stream: AsyncIterator[bytes], announced: int, caller: str) -> Json:
        """Store a file. It is listed once all of it is on the disk; nothing of a body that breaks off is kept. Raises
        OpenAIRefused: the form cannot be honoured; TooLarge, QuotaReached, LimitReached, OSError: the file cannot be
        stored."""
        counted = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal counted
            async for piece in form.file(stream, partial(_check, form)):
                counted += len(piece)
                yield piece
            if not counted:
                raise OpenAIRefused("the file is empty: send one with rows", FIELD, "empty_file")
            if "purpose" not in form.fields:
                raise OpenAIRefused("purpose is missing: send fine-tune", "purpose", "missing_required")

        sha256 = await self._uploads.add(pieces(), announced, caller)
        file_id = new_file()
        await self.register(file_id, form.filename or file_id, counted, sha256, caller)
        return await asyncio.to_thread(self.get, file_id)

    async def register(self, file_id: str, filename: str, size: int, sha256: str, caller: str) -> None:
        """Make a file of stored rows. The same again changes nothing. Raises Conflict, StoreError, OSError: it cannot
        be stored."""
        mark = {"filename": filename, "bytes": size, "purpose": PURPOSE}
        body = RegisterDataset(dataset_id=file_id, source=BlobSource(type="blob", sha256=sha256))
        await self._registry.register(body, created_by=caller, reserved={MARK: mark})

    def get(self, file_id: str) -> Json:
        """A file. Raises OpenAIRefused."""
        if (job_uuid := job_of_result(file_id)) is not None:
            return self._result(self._job_of(file_id, job_uuid))
        return _file_object(self._entry(file_id))

    def page(
        self, after: str | None, limit: int, purpose: str | None, *, newest_first: bool
    ) -> tuple[list[Json], bool]:
        """Files by the time at which they were made, and whether there are more. Raises OpenAIRefused: there is no file
        `after`."""
        limit = min(limit, MOST_FILES)
        beyond = None if after is None else self._place(after)
        files: list[Json] = []
        until = time.monotonic() + _PAGE_SECONDS
        for place in self._places(purpose, beyond, newest_first=newest_first):
            if len(files) > limit:
                break
            if 0 < len(files) <= limit and time.monotonic() > until:
                return files, True
            try:
                files.append(self.get(place.name))
            except OpenAIRefused:  # deleted meanwhile, or a dataset that is no file
                continue
        return files[:limit], len(files) > limit

    def content(self, file_id: str) -> tuple[Any, int, str]:
        """What opens a file, its bytes, and a text that changes with its content. Raises OpenAIRefused."""
        if (job_uuid := job_of_result(file_id)) is not None:
            job = self._job_of(file_id, job_uuid)
            return (
                partial(_opened, self._store, job.job_uuid),
                self._size_of_result(job.job_uuid, job.attempt),
                f"{job.job_uuid}-{job.attempt}",
            )
        entry = self._entry(file_id)
        assert entry.sha256 is not None
        path = self._blobs.path(entry.sha256)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            text = f"the content of file {file_id!r} is gone: delete the file, and upload it again"
            raise OpenAIRefused(text, ID, "not_found", 404) from error
        return partial(open_regular, path), size, entry.sha256

    def delete(self, file_id: str) -> Json:
        """Delete an uploaded file. Jobs that were made with it keep their rows. Raises OpenAIRefused."""
        if job_of_result(file_id) is not None:
            raise OpenAIRefused(
                f"file {file_id!r} has the metrics of a job and is deleted with it: DELETE /v1/post-training/jobs/NAME",
                ID,
                "not_deletable",
            )
        self._entry(file_id)
        try:
            self._registry.delete(file_id)
        except NotFound as error:
            raise _no_file(file_id, ID) from error
        return {"id": file_id, "object": "file", "deleted": True}

    def require(self, file_id: str, param: str) -> None:
        """Return if a file was uploaded. Raises OpenAIRefused."""
        try:
            self._entry(file_id)
        except OpenAIRefused as error:
            hint = "upload it with POST /openai/v1/files, purpose fine-tune, and send the id of the answer"
            raise OpenAIRefused(f"{param}: no file {file_id!r} is here: {hint}", param, "file_not_found") from error

    def _entry(self, file_id: str, param: str = ID) -> Entry:
        try:
            entry = self._registry.entry(file_id)
        except NotFound as error:
            raise _no_file(file_id, param) from error
        if not file_id.startswith(FILE) or entry.sha256 is None or _mark(entry) is None:
            raise _no_file(file_id, param)
        return entry

    def _place(self, file_id: str) -> ListPlace:
        """Where a file is among all, by the time at which it was made. Raises OpenAIRefused."""
        if (job_uuid := job_of_result(file_id)) is not None:
            completed_at = self._job_of(file_id, job_uuid, "after").completed_at
            assert completed_at is not None
            return ListPlace(completed_at.timestamp(), file_id)
        return ListPlace(self._entry(file_id, "after").registered_at, file_id)

    def _places(self, purpose: str | None, beyond: ListPlace | None, *, newest_first: bool) -> Iterator[ListPlace]:
        """Places of the files beyond one, and of the datasets whose names are alike."""
        sources: list[Iterable[ListPlace]] = []
        if purpose in (None, PURPOSE):
            uploaded = self._registry.places(FILE)
            sources.append(reversed(uploaded) if newest_first else uploaded)
        if purpose in (None, RESULTS):
            at = None if beyond is None else beyond.order + (_INEXACT if newest_first else -_INEXACT)
            ended = self._store.completed(JOB, at, newest_first=newest_first)
            sources.append(ListPlace(_in_microseconds(at), result_file(job_uuid)) for at, job_uuid in ended)
        for place in heapq.merge(*sources, reverse=newest_first):
            if beyond is None or (place < beyond if newest_first else place > beyond):
                yield place

    def _job_of(self, file_id: str, job_uuid: str, param: str = ID) -> JobRecord:
        """The completed job whose metrics a file has. Raises OpenAIRefused, which names the parameter."""
        try:
            job = self._store.get(job_uuid)
        except JobNotFound as error:
            raise _no_file(file_id, param) from error
        if job.state is not JobState.completed or Called.of(job.spec.metadata) is None:
            raise _no_file(file_id, param)
        return job

    def _result(self, job: JobRecord) -> Json:
        assert job.completed_at is not None
        size = self._size_of_result(job.job_uuid, job.attempt)
        return _object(
            result_file(job.job_uuid), size, job.completed_at.timestamp(), f"{job.job_uuid}_metrics.csv", RESULTS
        )

    def _count_result(self, job_uuid: str, attempt: int) -> int:
        return sum(map(len, metrics_csv(self._store, job_uuid)))


def _in_microseconds(at: float) -> float:
    """A time as the record of a job has it."""
    return datetime.fromtimestamp(at, UTC).timestamp()


def _opened(store: Store, job_uuid: str) -> BinaryIO:
    return io.BytesIO(b"".join(metrics_csv(store, job_uuid)))


def _check(form: Form) -> None:
    purpose = form.fields.get("purpose")
    if purpose not in (None, PURPOSE):
        raise OpenAIRefused(
            f"purpose={purpose[:100]!r} is not supported: send {PURPOSE}, the only one here", "purpose", "invalid_value"
        )
    for name in form.fields:
        if name.startswith("expires_after"):
            raise OpenAIRefused(
                "expires_after is not supported: leave it out, files stay until they are deleted", name, "invalid_value"
            )
    name = form.filename or ""
    if problem := f"it has more than {_MOST_NAME} characters" if len(name) > _MOST_NAME else problem_of_name(name):
        raise OpenAIRefused(f"the name of the file: {problem}", FIELD, "invalid_file_name")


def _mark(entry: Entry) -> Json | None:
    mark = entry.dataset.metadata.get(MARK)
    if (
        not isinstance(mark, dict)
        or not isinstance(mark.get("filename"), str)
        or not isinstance(mark.get("bytes"), int)
    ):
        return None
    return mark


def _file_object(entry: Entry) -> Json:
    mark = _mark(entry) or {}
    return _object(entry.dataset.identifier, mark["bytes"], entry.registered_at, mark["filename"], PURPOSE)


def _object(file_id: str, size: int, created_at: float, filename: str, purpose: str) -> Json:
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(created_at),
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _no_file(file_id: str, param: str) -> OpenAIRefused:
    text = f"no file {file_id[:200]!r} is here ({param}): GET /openai/v1/files lists those that are"
    return OpenAIRefused(text, param, "not_found", 404)


class OpenAIUploads:
    """The uploads of a service. Each belongs to the token that has begun it."""

    def __init__(self, uploads: PartUploads, files: OpenAIFiles) -> None:
        self._uploads, self._files = uploads, files

    async def create(self, body: CreateUpload, caller: str) -> Json:
        """Begin an upload. Raises the errors of `PartUploads.create`."""
        return _upload_object(await self._uploads.create(caller, body.filename, body.bytes))

    async def add_part(
        self, upload_id: str, form: Form, stream: AsyncIterator[bytes], announced: int, caller: str
    ) -> Json:
        """Store a part. Raises OpenAIRefused: the form cannot be honoured; The errors of `PartUploads.add_part`."""
        pieces = form.file(stream, lambda: None)
        part = await self._uploads.add_part(upload_id, caller, pieces, announced)
        return {
            "id": part.part_id,
            "object": "upload.part",
            "created_at": int(part.created_at),
            "upload_id": upload_id,
        }

    async def complete(self, upload_id: str, body: CompleteUpload, caller: str) -> Json:
        """Make a file of the parts. Raises the errors of `PartUploads.complete`."""

        async def register(upload: UploadRecord, sha256: str) -> None:
            faults.reach("upload-counted")
            file_id = file_of_upload(upload.upload_id)
            await self._files.register(file_id, upload.filename, upload.num_bytes, sha256, caller)

        upload = await self._uploads.complete(upload_id, caller, body.part_ids, body.md5, register)
        return {**_upload_object(upload), "file": await asyncio.to_thread(self._files.get, file_of_upload(upload_id))}

    async def cancel(self, upload_id: str, caller: str) -> Json:
        """Cancel an upload. Raises the errors of `PartUploads.cancel`."""
        return _upload_object(await self._uploads.cancel(upload_id, caller))


def _upload_object(upload: UploadRecord) -> Json:
    return {
        "id": upload.upload_id,
        "object": "upload",
        "bytes": upload.num_bytes,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.expires_at),
        "filename": upload.filename,
        "purpose": PURPOSE,
        "status": upload.status,
        "file": None,
    }
