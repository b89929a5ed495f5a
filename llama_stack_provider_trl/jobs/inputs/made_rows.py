"""Rows that another job makes: named as `job:NAME` when a job is submitted, known when it starts."""

from __future__ import annotations

from pathlib import Path

from ...errors import InvalidRequest, InvalidRows, JobNotFound, StoreError
from ...requests.data import DATASET_ID, TRAIN_SHARE, rows_job_of
from ...specs.job import DatasetRef, JobSpec, RowUse, ShardSpec
from ...specs.methods import METHODS
from ...specs.work import ROWS
from ...system.data_dir import DataDir
from ...system.files import put_lines, touched
from ..store.store import Store
from .row_parts import Put, refuse_more_shards, stored_shard


def promised_rows(dataset_id: str, use: RowUse, store: Store) -> DatasetRef | None:
    """The rows that the job in `job:NAME` makes; None: the id names no job. Raises InvalidRequest: that job does not
    exist or makes no rows, or these cannot be used so."""
    name = rows_job_of(dataset_id)
    if name is None:
        return None
    try:
        spec = store.get(name).spec
    except JobNotFound as error:
        hint = f"there is no job {name!r} here: submit it first, or correct its name"
        raise InvalidRequest(DATASET_ID, dataset_id, hint) from error
    if spec.does.made_dataset is None:
        hint = f"job {name!r} makes no dataset: name a job of POST /v1/post-training/generate, or a registered dataset"
        raise InvalidRequest(DATASET_ID, dataset_id, hint)
    if use == "prompts" or METHODS[use].rows == "prompts":
        hint = "its rows are answered prompts, and not there yet: once it has completed, name the dataset it registers"
        raise InvalidRequest(DATASET_ID, dataset_id, hint)
    if METHODS[use].rows != "sft":
        needed = "chosen and rejected ones" if METHODS[use].has_pairs else "a label for each"
        hint = f"its rows are prompts with one answer each, and {METHODS[use].title} needs {needed}: name another"
        raise InvalidRequest(DATASET_ID, dataset_id, hint)
    rows = spec.checkpoint_dir / ROWS
    return DatasetRef(dataset_id=spec.does.made_dataset, path=rows, sha256="", num_rows=0, of_job=name)


def shard_of(dataset: DatasetRef, shard: ShardSpec, store: Store | None, put: Put = put_lines) -> DatasetRef:
    """The part of a dataset that a job has. Rows that another job makes are divided when an attempt starts. Raises
    InvalidRequest: there are more parts than rows; StoreError: the part cannot be stored."""
    if dataset.of_job is not None:
        assert store is not None
        maker = store.get(dataset.of_job).spec
        assert maker.does.answering is not None
        answers = maker.data.dataset.num_rows * maker.does.answering.samples_per_prompt
        refuse_more_shards(dataset.dataset_id, shard, answers)
        return dataset.model_copy(update={"shard": shard})
    try:
        return stored_shard(dataset, shard, put)
    except OSError as error:
        raise StoreError(f"a part of dataset {dataset.dataset_id!r} cannot be stored: {error}") from error


def with_known_rows(spec: JobSpec, store: Store, data_dir: Path, put: Put) -> JobSpec:
    """The specification with the rows that another job has made. Raises InvalidRows: they are gone; InvalidRequest:
    they are fewer than the parts into which they are divided; OSError: their part cannot be written."""
    name = spec.data.dataset.of_job
    if name is None:
        return spec
    made = (store.get(name).result or {}).get("dataset") or {}
    path = DataDir(data_dir).datasets / f"{made.get('sha256')}.jsonl"
    if not touched(path):
        raise InvalidRows(
            f"dataset {spec.data.dataset.dataset_id!r}: the rows that job {name!r} has made are gone ({path}): submit "
            "that job again under another job_uuid"
        )
    known = spec.data.dataset.model_copy(update={"path": path, **made})
    known = stored_shard(known, known.shard, put) if known.shard is not None else known
    return spec.changed(dataset=known)


def refuse_split(dataset: DatasetRef, share: float) -> None:
    """Refuse to hold out some of the rows that another job makes. Raises InvalidRequest."""
    if dataset.of_job is not None:
        hint = f"the rows of job {dataset.of_job!r} are not known yet: send validation_dataset_id, or leave it out"
        raise InvalidRequest(TRAIN_SHARE, share, hint)


def refuse_promised(spec: JobSpec) -> None:
    """Refuse a preflight, or a preview, of rows that another job makes. Raises InvalidRequest."""
    if spec.data.dataset.of_job is not None:
        hint = "its rows are made by that job: once it has completed, name the dataset that it registers"
        raise InvalidRequest(DATASET_ID, f"job:{spec.data.dataset.of_job}", hint)


def refuse_unknown_rows(spec: JobSpec) -> None:
    """Refuse what needs to know the rows that another job makes. Raises InvalidRequest."""
    if spec.data.validation is not None and spec.data.validation.of_job is not None:
        hint = "rows to evaluate on are known when the job is submitted: name a registered dataset"
        raise InvalidRequest(
            "training_config.data_config.validation_dataset_id", f"job:{spec.data.validation.of_job}", hint
        )
    if spec.data.dataset.of_job is not None and spec.resume_from is not None:
        hint = f"the rows of job {spec.data.dataset.of_job!r} are not known yet: name the dataset that it registers"
        raise InvalidRequest(DATASET_ID, f"job:{spec.data.dataset.of_job}", hint)
