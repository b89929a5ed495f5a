"""A service that reads files of datasets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

ROW = json.dumps({"prompt": "2 + 2 =", "completion": "4"}) + "\n"


class Service:
    """The datasets of a service with one root."""

    def __init__(self, root: Path) -> None:
        self.files, self.outside = root / "files", root / "outside"
        self.files.mkdir()
        self.outside.mkdir()
        self.settings = ServiceSettings.model_validate(
            {"data_dir": root / "data", "dataset_roots": [self.files], "reader_memory_mb": 512, "device": "cpu"}
        )
        self.blobs = Blobs(self.settings)
        self.blobs.prepare()
        self.datasets = DatasetRegistry(self.settings, self.blobs)
        self.datasets.prepare()

    def register(self, path: Path | str) -> str:
        body = {"purpose": "post-training/messages", "source": {"type": "uri", "uri": str(path)}}
        return asyncio.run(self.datasets.register(RegisterDataset.model_validate(body))).identifier

    def rows(self, path: Path | str) -> str:
        """What a job on the file would train on."""
        ref, _ = asyncio.run(self.datasets.fetch(self.register(path), "sft", None))
        return ref.path.read_text()

    def stored(self) -> list[str]:
        """Everything that is kept of any rows."""
        return [path.read_text() for path in self.blobs.directory.glob("*.jsonl")]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def put(service: Service, data: bytes) -> str:
    import hashlib

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    digest = hashlib.sha256(data).hexdigest()
    asyncio.run(service.blobs.receive(digest, pieces(), len(data)))
    return digest
