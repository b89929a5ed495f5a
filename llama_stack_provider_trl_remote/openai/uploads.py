"""Uploads of OpenAI's API: a file in parts, which is a file as any other once it is completed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from llama_stack_provider_trl import faults

from ..service.datasets.part_uploads import PartUploads, UploadRecord
from .bodies import CompleteUpload, CreateUpload
from .files import PURPOSE, OpenAIFiles
from .multipart import Form
from .names import file_of_upload

type Json = dict[str, Any]


class OpenAIUploads:
    """The uploads of a service. Each belongs to the token that has begun it."""

    def __init__(self, uploads: PartUploads, files: OpenAIFiles) -> None:
        self._uploads, self._files = uploads, files

    async def create(self, body: CreateUpload, caller: str) -> Json:
        """Begin an upload. Raises the errors of `PartUploads.create`."""
        return _object(await self._uploads.create(caller, body.filename, body.bytes))

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
        return {**_object(upload), "file": await asyncio.to_thread(self._files.get, file_of_upload(upload_id))}

    async def cancel(self, upload_id: str, caller: str) -> Json:
        """Cancel an upload. Raises the errors of `PartUploads.cancel`."""
        return _object(await self._uploads.cancel(upload_id, caller))


def _object(upload: UploadRecord) -> Json:
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
