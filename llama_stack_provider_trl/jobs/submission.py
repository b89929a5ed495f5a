"""Turns a request into a stored job: new or repeated, resolved, with its rows checked and stored. No HTTP here.

The caller (the provider inside Llama Stack, the service) supplies the rows of a dataset id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from ..errors import InvalidRequest, InvalidRows, MethodUnavailable, StoreError
from ..requests.bases import Base, NamedJob, model_of
from ..requests.data import DATASET_ID
from ..requests.engines import with_engine
from ..requests.graders import refuse_python_graders
from ..requests.mixture import FIELD as MIXTURE
from ..requests.options import ProviderOptions
from ..requests.resolve import Resolution, resolve
from ..requests.search import RequestedSearch, RequestedTrial, in_trial, resolve_search
from ..requests.settings import Request, Settings
from ..requests.trackers import TrackerChoice
from ..requests.untrained import EVALUATE, evaluation_after, refuse_too_many_answers, resolve_work
from ..requests.work import WorkRequest
from ..specs.answer_rows import refuse_unchecked_rows
from ..specs.bases import parts_of
from ..specs.custom_limits import refuse_custom_rows
from ..specs.job import DataFormat, DatasetRef, JobSpec, RowNames, RowUse
from ..specs.methods import METHODS, MethodSpec
from ..specs.rewards import checks_of
from ..specs.row_verdicts import check_within
from ..specs.rows import UNREAD
from ..specs.work import TRAINS, Kind, Work
from ..system.data_dir import DataDir
from ..system.files import put_lines, put_rows
from ..system.limited import Limited
from ..system.offload import caller_name, in_work_thread
from ..system.ownership import refuse_foreign
from .inputs.bases import find_base
from .inputs.damaged_models import refuse_damaged, refuse_unknown_modules
from .inputs.exported_models import refuse_unmapped
from .inputs.harness import with_task_files
from .inputs.made_rows import refuse_split, refuse_unknown_rows, shard_of
from .inputs.merges import bases_of, jobs_of, no_rows
from .inputs.of_methods import with_models
from .inputs.resume_from import copy_checkpoint, discard_checkpoint
from .inputs.row_parts import UNLIMITED, Allowance, NewRows, PlannedParts, Put, split_parts
from .store.reader import digest_conflict
from .store.related.searches import NewTrial
from .store.store import NewJob, Store

_ROW_CHECKS = Limited(seconds=120, memory=1 << 30)
"""For the rows of a dataset of Llama Stack."""
_copying: WeakValueDictionary[tuple[Path, str, str], asyncio.Lock] = WeakValueDictionary()


class Submitter(NamedTuple):
    """The caller that submits a job."""

    name: str = ""
    max_waiting: int | None = None
    """Jobs of this name that may wait; None: any number."""
    allowance: Allowance = UNLIMITED
    """What its request may write for its jobs."""


class ResolvedJob(NamedTuple):
    """A job that can be stored."""

    spec: JobSpec
    warnings: list[str]
    trackers: tuple[TrackerChoice, ...]
    """They get its points."""
    parts: tuple[PlannedParts, ...] = ()
    """Of each of its datasets the parts, which are not stored yet; empty: its rows are stored."""


class Split(NamedTuple):
    """How the rows of a dataset are split."""

    sha256: str
    """Of the dataset."""
    share: float
    seed: int


class Datasets(Protocol):
    """Finds the rows of a dataset id, checked for their use and stored under their digest, with warnings."""

    def __call__(
        self, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None, /
    ) -> Awaitable[tuple[DatasetRef, list[str]]]: ...


async def submit(
    request: Request | WorkRequest,
    options: ProviderOptions,
    digest: str,
    settings: Settings,
    store: Store,
    datasets: Datasets,
    owner: Submitter | None = None,
    work: Work | None = None,
    models: list[Base] | None = None,
    admit: Callable[[], object] = lambda: None,
) -> bool:
    """Submit a job. Returns only when the job is stored: nothing can lose it afterwards. Returns whether the job is
    new. Raises InvalidRequest: a field, a value or a row that cannot be honoured; JobConflict: the job_uuid is taken by
    another request, or its checkpoint directory has content that is not ours; LimitReached: the owner has too many
    waiting jobs; StoreError: the job or its rows cannot be stored.

    Args:
        digest: digest of the caller's request: an equal digest is the same job.
        owner: None: not known, and not limited.
        models: of a merge or an ensemble: what its models are.
    """
    # Checked first: a repeated POST returns its job even if its model or dataset is gone by now.
    if store.holds(request.job_uuid, digest):
        return False
    rows, is_new = NewRows((owner or Submitter()).allowance), False
    try:
        is_new = await _submit(request, options, digest, settings, store, datasets, rows, owner, work, models, admit)
    finally:
        if not is_new:
            await in_work_thread(rows.discard)
    return is_new


async def _submit(
    request: Request | WorkRequest,
    options: ProviderOptions,
    digest: str,
    settings: Settings,
    store: Store,
    datasets: Datasets,
    rows: NewRows,
    owner: Submitter | None,
    work: Work | None,
    models: list[Base] | None,
    admit: Callable[[], object],
) -> bool:
    """As `submit`, for a request that was not stored before. `rows` stores parts of the dataset."""
    wants_search = isinstance(request, Request) and request.hyperparam_search_config
    if wants_search and (search := await in_work_thread(resolve_search, request, options)):
        if options.evaluate is not None:
            hint = "a search is no model: leave it out, and evaluate the result with a job of its own, model job:NAME"
            raise InvalidRequest(EVALUATE, options.evaluate, hint)
        return await submit_search(request.job_uuid, search, digest, settings, store, datasets, owner, rows)
    job = await resolved(request, options, settings, datasets, store, work, models=models, put=rows.put)
    evaluation = await _resolved_evaluation(job.spec, options, settings, datasets, store)
    if job.spec.resume_from is None:
        return await in_work_thread(_stored, job, digest, store, settings.data_dir, owner, evaluation, admit)
    # One at a time: a POST that is repeated after a timeout of its client finds what the first one has stored, and does
    # not copy a large checkpoint again.
    async with _copying.setdefault((store.path, job.spec.job_uuid, caller_name()), asyncio.Lock()):
        if store.holds(job.spec.job_uuid, digest):
            return False
        return await in_work_thread(_stored, job, digest, store, settings.data_dir, owner, evaluation, admit)


async def submit_search(
    job_uuid: str,
    search: RequestedSearch,
    digest: str,
    settings: Settings,
    store: Store,
    datasets: Datasets,
    owner: Submitter | None,
    new_rows: NewRows,
) -> bool:
    """Submit a search, and its trials as jobs. As `_submit`: each trial is checked as a request of its own."""
    known: dict[tuple[str, RowUse, DataFormat | None, str], tuple[DatasetRef, list[str]]] = {}

    async def rows(
        dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None = None
    ) -> tuple[DatasetRef, list[str]]:
        key = dataset_id, use, data_format, "" if names is None else names.model_dump_json()
        if key not in known:
            known[key] = await _rows_of(datasets, dataset_id, use, data_format, names)
        return known[key]

    splits: dict[Split, tuple[DatasetRef, DatasetRef]] = {}

    async def job_of(trial: RequestedTrial) -> ResolvedJob:
        try:
            return await resolved(trial.request, trial.options, settings, rows, store, splits=splits, put=new_rows.put)
        except InvalidRequest as error:
            raise in_trial(trial, error) from error

    jobs = [await job_of(search.trials[0])]
    first = search.trial_spec(search.trials[0], jobs[0].spec, jobs[0].spec)
    probed = [(await job_of(probe.trial)).spec for probe in search.probes]
    for probe, spec in zip(search.probes, probed, strict=True):
        probe.refuse_other_rows(spec, first)
    trials: list[tuple[NewTrial, NewJob]] = []
    for trial in search.trials:
        job = jobs.pop() if jobs else await job_of(trial)
        spec = search.trial_spec(trial, job.spec, first)
        trials.append((NewTrial(trial.number, trial.values), _new(job._replace(spec=spec), f"{digest}:{trial.number}")))
    if search.probes and (taken := set(search.names(job_uuid)) & set(await in_work_thread(store.names))):
        if await in_work_thread(store.holds, job_uuid, digest):
            return False  # the same POST, sent again meanwhile, has stored them
        raise digest_conflict(min(taken))
    own = search.own_spec(job_uuid, first, [*(job.spec for _, job in trials), *probed])
    warnings = list(dict.fromkeys(message for _, job in trials for message in job.warnings))
    by = owner or Submitter()
    counted = await in_work_thread(by.allowance.counted, [job.spec for _, job in trials])
    new = NewJob(own, digest, warnings)
    return await in_work_thread(store.add_search, new, trials, by.name, by.max_waiting, counted)


def _new(job: ResolvedJob, digest: str) -> NewJob:
    needed = [ref.path for _, ref in parts_of(job.spec, DatasetRef) if ref.of_job is None]
    if job.spec.resume_from is not None and job.spec.resume_from.path is not None:
        needed.append(job.spec.resume_from.path)
    return NewJob(job.spec, digest, job.warnings, needed, job.trackers)


def _stored(
    job: ResolvedJob,
    digest: str,
    store: Store,
    data_dir: Path,
    owner: Submitter | None = None,
    evaluation: ResolvedJob | None = None,
    admit: Callable[[], object] = lambda: None,
) -> bool:
    by = owner or Submitter()
    spec = copy_checkpoint(job.spec, store, data_dir, by.allowance)
    new = _new(job._replace(spec=spec), digest)
    then = evaluation and _new(evaluation, f"{digest}:evaluation")
    counted = by.allowance.counted([job.spec for job in (new, then) if job is not None])
    created = False
    try:
        created = store.add_job(
            spec, digest, new.warnings, new.needed, by.name, by.max_waiting, new.trackers, then, admit, counted
        )
    finally:
        if not created:
            discard_checkpoint(spec)
    return created


async def resolved(
    request: Request | WorkRequest,
    options: ProviderOptions,
    settings: Settings,
    datasets: Datasets,
    store: Store | None,
    work: Work | None = None,
    splits: dict[Split, tuple[DatasetRef, DatasetRef]] | None = None,
    models: list[Base] | None = None,
    named: NamedJob | None = None,
    put: Put | None = put_lines,
) -> ResolvedJob:
    """Resolve a request to a job with its rows. Raises InvalidRequest: a field, a value or a row that cannot be
    honoured; StoreError: the rows cannot be stored.

    Args:
        store: the jobs that the request may name as its base; None: there are none.
        splits: those that were made for the same submission.
        models: of a merge, an ensemble or judges: what these models are.
        named: the job that the request names as its base, in place of one that is stored.
        put: stores parts of the dataset; None: they are planned only.
    """
    # Models, adapters and installed packages are read: none of that may hold up other requests. One call of a thread,
    # since each waits for its turn beside the supervisor.
    resolution = await in_work_thread(_resolution, request, options, settings, store, work, models or [], named)
    kind: Kind = resolution.fields.get("work") or TRAINS
    answering = kind.answering
    use: RowUse = "prompts" if answering is not None else resolution.fields["method"].algorithm
    data_format: DataFormat | None = resolution.fields.get("data_format")
    if kind.tasks is None:
        refs, warnings = await _rows_of_all(datasets, resolution, use, data_format)
    else:
        refs, warnings = [await in_work_thread(no_rows, DataDir(settings.data_dir).datasets)], []
    if kind.checks:
        await in_work_thread(refuse_unchecked_rows, refs[0], kind.checks)
        warnings = [message for message in warnings if not message.startswith(UNREAD)]  # which checks may read
    if answering is not None:
        refuse_too_many_answers(answering, refs[0].num_rows)
    for ref, of in zip(refs, resolution.datasets, strict=True):
        await _check_custom(resolution, ref, of.names, use)
    method = resolution.fields["method"]
    if method.rewards_of_answers and refs[0].of_job is None:  # the training reads rows that another job makes
        named_rows = refs[0].model_copy(update={"names": resolution.names})
        await in_work_thread(refuse_unchecked_rows, named_rows, checks_of(method.rewards_of_answers))
    held_out: DatasetRef | None = None
    if resolution.validation_dataset_id is not None:
        held_out, more = await _rows_of(datasets, resolution.validation_dataset_id, use, data_format, resolution.names)
        await _check_custom(resolution, held_out, resolution.names, use)
        warnings = [*warnings, *(f"validation dataset: {warning}" for warning in more)]
    parts, planned = await _parts_of(refs, resolution, store, {} if splits is None else splits, put)
    if held_out is not None:
        parts[0] = parts[0][0], held_out
    spec = resolution.spec(*parts[0], *parts[1:])
    read = [job.job_uuid for job in spec.jobs_read]
    spec = spec.model_copy(update={"after": tuple(dict.fromkeys([*read, *spec.after]))})
    refuse_unknown_rows(spec)
    return ResolvedJob(spec, [*resolution.warnings, *warnings], resolution.trackers, planned)


async def _rows_of_all(
    datasets: Datasets, resolution: Resolution, use: RowUse, data_format: DataFormat | None
) -> tuple[list[DatasetRef], list[str]]:
    """The rows of each dataset of a job, and warnings about them."""
    refs, warnings, named = list[DatasetRef](), list[str](), resolution.datasets
    for number, one in enumerate(named):
        try:
            ref, more = await _rows_of(datasets, one.dataset_id, use, data_format, one.names)
        except InvalidRows:
            raise
        except InvalidRequest as error:
            if error.field != DATASET_ID:
                raise
            field = resolution.rows_field if number == 0 else f"{MIXTURE}.{number}.dataset_id"
            raise InvalidRequest(field, error.value, error.hint) from error
        refs.append(ref)
        warnings += [f"dataset {one.dataset_id!r}: {message}" if len(named) > 1 else message for message in more]
    return refs, warnings


async def _parts_of(
    refs: Sequence[DatasetRef],
    resolution: Resolution,
    store: Store | None,
    splits: dict[Split, tuple[DatasetRef, DatasetRef]],
    put: Put | None,
) -> tuple[list[tuple[DatasetRef, DatasetRef | None]], tuple[PlannedParts, ...]]:
    """Of each dataset what is trained on and what is held out, and these parts where they are not stored yet."""
    share = resolution.train_share if resolution.validation_dataset_id is None else 1.0
    shard = resolution.shard
    if shard is None and share == 1.0:
        return [(ref, None) for ref in refs], ()
    seed = resolution.fields["seed"]
    if put is None and refs[0].of_job is None:
        planned = tuple(PlannedParts(ref, shard, share, seed) for ref in refs)
        return [one.counted() for one in planned], planned
    parts: list[tuple[DatasetRef, DatasetRef | None]] = []
    for ref in refs:
        if shard is not None:
            ref = await in_work_thread(shard_of, ref, shard, store, put or put_lines)
        if share == 1.0:
            parts.append((ref, None))
            continue
        refuse_split(ref, share)
        split = Split(ref.sha256, share, seed)
        if split not in splits:
            splits[split] = await in_work_thread(split_rows, ref, share, seed, put or put_lines)
        one, other = splits[split]
        own = {"dataset_id": ref.dataset_id}
        parts.append((one.model_copy(update=own), other.model_copy(update=own)))
    return parts, ()


def _resolution(
    request: Request | WorkRequest,
    options: ProviderOptions,
    settings: Settings,
    store: Store | None,
    work: Work | None,
    models: list[Base],
    named: NamedJob | None,
) -> Resolution:
    """What `resolved` does before it reads rows."""
    model = model_of(request) if isinstance(request, Request) else request.reads().model
    if store is not None:
        named = find_base(model, store, settings)
    if isinstance(request, Request):
        resolution = resolve(request, options, settings, named)
    else:
        assert work is not None
        refuse_python_graders(((f"checks.{n}", one) for n, one in enumerate(work.checks)), settings)
        work = with_task_files(with_engine(work, settings), settings)
        makers = [job.job_uuid for job in jobs_of(work, models)]
        resolution = resolve_work(request, work, options, settings, named, makers)
    own = models[0] if work and work.merging else Base(resolution.fields["source"], resolution.fields["adapter"])
    refuse_damaged(model.field, model.value, own, needs_tokenizer=not (work and work.merging))
    lora, adapter = resolution.fields.get("lora"), resolution.fields["adapter"]
    if lora is not None and work is None and adapter is None:  # a continued one has its own modules
        field = METHODS[resolution.fields["method"].algorithm].lora_field
        refuse_unknown_modules(f"{field}.lora_attn_modules", own.source, lora.target_modules)
    if work is not None and work.exporting is not None:
        refuse_unmapped(model.field, model.value, work.exporting.target, own.source, store)
    resolution = replace(resolution, fields=with_models(resolution.fields, settings, store))
    refuse_foreign(settings.data_dir, resolution.fields["checkpoint_dir"])
    return resolution


async def _rows_of(
    datasets: Datasets, dataset_id: str, use: RowUse, data_format: DataFormat | None, names: RowNames | None
) -> tuple[DatasetRef, list[str]]:
    if names is None:
        return await datasets(dataset_id, use, data_format)
    return await datasets(dataset_id, use, data_format, names)


async def _check_custom(resolution: Resolution, dataset: DatasetRef, names: RowNames | None, use: RowUse) -> None:
    """Have a custom method check the rows that are known. Raises InvalidRequest."""
    method: MethodSpec = resolution.fields["method"]
    if method.installed is None or dataset.of_job is not None:
        return  # the training checks rows that another job makes
    try:
        named = dataset.model_copy(update={"names": names})
        await in_work_thread(refuse_custom_rows, method, named, use, resolution.fields["data_format"])
    except MethodUnavailable as error:
        raise InvalidRequest("algorithm_config.type", method.installed.type, str(error)) from error


async def _resolved_evaluation(
    job: JobSpec, options: ProviderOptions, settings: Settings, datasets: Datasets, store: Store
) -> ResolvedJob | None:
    """The job that evaluates the result of another one, which is not stored yet; None: none does. Raises
    InvalidRequest, StoreError: as `resolved`."""
    if options.evaluate is None:
        return None
    own = {name: getattr(options, name) for name in ("priority", "device", "retries")}
    given = ProviderOptions(cancel_with=True, **{name: value for name, value in own.items() if value is not None})
    try:
        body = evaluation_after(job.job_uuid, options.evaluate)
        models = await in_work_thread(bases_of, body, settings, store)
        work = await in_work_thread(body.work, models)
        named = NamedJob(job, False, ())
        return await resolved(body, given, settings, datasets, None, work, models=models, named=named)
    except InvalidRows:
        raise
    except InvalidRequest as error:
        if error.field.startswith(EVALUATE):
            raise
        raise InvalidRequest(f"{EVALUATE}.{error.field}", error.value, error.hint) from error


def split_rows(dataset: DatasetRef, share: float, seed: int, put: Put = put_lines) -> tuple[DatasetRef, DatasetRef]:
    """As `split_parts`. Raises InvalidRequest; StoreError: the rows cannot be stored."""
    try:
        return split_parts(dataset, share, seed, put)
    except OSError as error:
        raise StoreError(f"the split of dataset {dataset.dataset_id!r} cannot be stored: {error}") from error


def keep_rows(
    directory: Path,
    dataset_id: str,
    rows: Sequence[dict[str, Any]],
    use: RowUse,
    data_format: DataFormat | None,
    names: RowNames | None = None,
) -> tuple[DatasetRef, list[str]]:
    """Check rows, and store them under their digest: what a job trains on cannot change under it.

    They are written to a file, which is checked in a process with limits. Raises InvalidRows: naming the dataset and
    its first bad row; LimitReached: too many datasets are checked; StoreError: they cannot be written.
    """
    warnings: list[str] = []

    def check(path: Path) -> None:
        verdict = check_within(_ROW_CHECKS, path, use, data_format, names)
        if verdict["error"] is not None:
            raise InvalidRows(verdict["error"])
        warnings.extend(verdict["warnings"])

    try:
        blob = put_rows(directory, rows, check)
    except InvalidRows as error:
        raise InvalidRows(f"dataset {dataset_id!r}, {error}") from error
    except OSError as error:
        raise StoreError(f"dataset {dataset_id!r} cannot be stored: {error}") from error
    ref = DatasetRef(dataset_id=dataset_id, path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows, names=names)
    return ref, warnings
