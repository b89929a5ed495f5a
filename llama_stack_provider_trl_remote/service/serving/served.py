"""What a name in a chat stands for: files of a base model, and of an adapter of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, is_exhausted
from llama_stack_provider_trl.jobs.decisions.states import ACTIVE
from llama_stack_provider_trl.jobs.inputs.bases import find_served
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.checkpoint_files import is_data_name
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system.model_directory import ModelDirectory

from ..space import Space, Use

FIELD = "model"
"""The field of a request that has the name."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WEIGHTS = (".safetensors", ".bin")
_PIECE = 1 << 20
_PROCESS = 1 << 30
"""Bytes of a process with torch and transformers."""


@dataclass(frozen=True)
class Files:
    """A directory with files of a model or an adapter, as they are now."""

    directory: Path
    digest: str
    """Of the names, sizes and times of the files: another one where a job has written them again."""

    @classmethod
    def of(cls, directory: Path) -> Files:
        """Raises OSError."""
        found = hashlib.sha256(str(directory).encode())
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_file():
                    stat = entry.stat()
                    found.update(f"\0{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        return cls(directory, found.hexdigest()[:32])


@dataclass(frozen=True)
class Served:
    """A model that can answer."""

    name: str
    """As a request has it."""
    source: ModelSource
    files: Files | None
    """Those of `source`; None: it is a model id."""
    adapter: Files | None
    training: str | None = None
    """The job that makes it, and trains now; None: none does."""
    parameters: int | None = None
    """Of the base model, as that job has counted them; None: it has not, or there is none."""

    @classmethod
    def find(cls, name: str, settings: Settings, store: Store) -> Served:
        """Look a name up. Raises JobNotFound; InvalidRequest: it cannot answer."""
        base = find_served(FIELD, name, settings, store)
        source = ModelSource(
            model=base.source.model, revision=base.source.revision, trust_remote_code=base.source.trust_remote_code
        )
        try:
            path = Path(source.model)
            files = Files.of(path) if path.is_absolute() and path.is_dir() else None
            adapter = None if base.adapter is None else Files.of(base.adapter.directory)
        except OSError as error:
            raise InvalidRequest(FIELD, name, f"its files cannot be read: {error.strerror or error}") from error
        made = (base.adapter or base.source).made_by
        job = None if made is None else _active(made.job_uuid, store)
        if job is None:
            return cls(name, source, files, adapter)
        return cls(name, source, files, adapter, job.job_uuid, (job.effective or {}).get("total_parameters"))

    def memory(self) -> int | None:
        """Bytes that a process with it needs on the CPU: its weights as they are stored, with a third for what an
        answer takes, and those of the adapter; None: they are not known. Raises OSError."""
        adapter = 0 if self.adapter is None else _weights(self.adapter.directory)
        if self.files is not None:
            return _PROCESS + 4 * (_weights(self.files.directory) + adapter) // 3
        return None if self.parameters is None else _PROCESS + 4 * (4 * self.parameters + adapter) // 3

    @property
    def key(self) -> tuple[ModelSource, str]:
        """What one process serves."""
        return self.source, "" if self.files is None else self.files.digest


def _active(job_uuid: str, store: Store) -> JobRecord | None:
    """A job, if processes of it may exist."""
    try:
        job = store.get(job_uuid)
    except JobNotFound:
        return None
    return job if job.state in ACTIVE else None


def _weights(directory: Path) -> int:
    """Bytes of the weights in a directory. Raises OSError."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)


def copy_adapter(adapter: Files, directory: Path, space: Space) -> None:
    """Copy the files of an adapter to where the process that serves it sees them: nothing else of the data directory is
    in its view. A part of a copy is removed. Raises OSError: also ENOSPC, where the disk has no space for what clients
    order; InvalidRequest: a file of it cannot be read, or is a symbolic link out of its directory."""
    if directory.is_dir():
        return
    sizes = {}
    for name in _names(adapter.directory):
        with _opened(adapter.directory, name) as file:
            sizes[name] = os.fstat(file.fileno()).st_size
    space.require(Use.ordered, directory.parent, sum(sizes.values()))
    staged = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        for name, size in sizes.items():
            (staged / name).parent.mkdir(exist_ok=True)
            with _opened(adapter.directory, name) as file, open(staged / name, "xb") as copy:
                _copy(file, copy, size)
        staged.rename(directory)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _opened(directory: Path, name: str) -> BufferedReader:
    """A file of an adapter. The job that trained it has chosen what is there. Raises InvalidRequest; OSError: this
    process has no descriptor or no memory left."""
    try:
        return ModelDirectory.at(directory).open(name)
    except OSError as error:
        if is_exhausted(error):
            raise
        hint = f"its file {name} cannot be read ({error.strerror}): train it again, or name another one"
        raise InvalidRequest(FIELD, str(directory), hint) from error


def _copy(file: BufferedReader, copy: BufferedWriter, size: int) -> None:
    """Copy so many bytes at most: a training may still write the file."""
    while size > 0 and (piece := file.read(min(_PIECE, size))):
        copy.write(piece)
        size -= len(piece)


def _names(directory: Path) -> Iterator[str]:
    """Names of the adapter's weights, its configuration, and the tokenizer: not of the state of an optimizer."""
    for name in ModelDirectory.at(directory).names():
        is_weights = name.endswith(".safetensors")
        if is_data_name(name) and (not is_weights or name == _ADAPTER_WEIGHTS):
            yield name
