"""What the models of a request for a merge, an ensemble or a judged evaluation are, and the jobs that make them."""

from __future__ import annotations

from pathlib import Path

from ...errors import StoreError
from ...requests.bases import Base, NamedModel
from ...requests.settings import Settings
from ...requests.work import NO_ROWS, WorkRequest
from ...specs.bases import BaseJob
from ...specs.job import DatasetRef
from ...specs.work import Work
from ...system.files import put_lines
from ..store.store import Store
from .bases import find_read
from .vocabularies import refuse_other_vocabularies


def bases_of(request: WorkRequest, settings: Settings, store: Store) -> list[Base]:
    """What each model is that a request names beside its own (`WorkRequest.named`); empty: there is no other. Raises
    InvalidRequest: one of them cannot be used; names its field."""
    names = request.named()
    found = [find_read(NamedModel(*name, request.job_uuid), settings, store) for name in names]
    if (hint := request.one_tokenizer(found)) is not None:
        refuse_other_vocabularies(names, [one.source for one in found], hint)
    return found


def jobs_of(work: Work, found: list[Base]) -> list[BaseJob]:
    """The jobs that make the models of a merge or an ensemble, each once per checkpoint."""
    read = 1 if work.merging else None  # it reads an adapter without the model below it
    return list(dict.fromkeys(job for base in found for job in base.jobs[:read]))


def no_rows(directory: Path) -> DatasetRef:
    """The dataset of a job that reads no rows. Raises StoreError."""
    try:
        blob = put_lines(directory, ())
    except OSError as error:
        raise StoreError(f"{directory} cannot be written: {error}") from error
    return DatasetRef(dataset_id=NO_ROWS, path=blob.path, sha256=blob.sha256, num_rows=0)
