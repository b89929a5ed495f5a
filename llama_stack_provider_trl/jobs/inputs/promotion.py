"""The evaluations that decide whether a model is exported: found at POST, compared when the export starts."""

from __future__ import annotations

from ...errors import InvalidRequest, JobFailure, JobNotFound
from ...requests.promotion import Evaluation, Find, Model, checked, refuse_unusable, unmet
from ...requests.settings import Settings
from ...requests.work import WorkRequest
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ..store.store import Store
from .bases import find_read


def refuse_unusable_conditions(request: WorkRequest, settings: Settings, store: Store) -> None:
    """Refuse conditions that say nothing about what is exported. Raises InvalidRequest: names the field of a condition,
    or the model."""
    conditions = request.conditions()
    if not conditions:
        return
    base = find_read(request.reads().model, settings, store)
    exported = base.adapter or base.source
    model, age = Model(exported.model, exported.revision), _age(exported, store)
    refuse_unusable(conditions, model, _evaluations(store), age=age)


def with_found_measures(spec: JobSpec, store: Store) -> JobSpec:
    """The job, which starts now, with what the evaluations of its conditions have found. Raises JobFailure:
    not_promoted, with a sentence about each condition that does not hold."""
    conditions = spec.does.conditions
    if not conditions:
        return spec
    find, exported = _evaluations(store), spec.adapter or spec.source
    model, age = Model(exported.model, exported.revision), _age(exported, store)
    try:
        refuse_unusable(conditions, model, find, age=age, completed=True)
    except InvalidRequest as error:
        raise JobFailure(Reason.not_promoted, f"{error}. Nothing was written.") from error
    found = checked(conditions, find)
    if failed := unmet(found):
        raise JobFailure(Reason.not_promoted, f"{failed} Nothing was written.")
    return spec.changed(work=spec.does.model_copy(update={"gates": found}))


def _evaluations(store: Store) -> Find:
    def find(name: str) -> Evaluation:
        job = store.get(name)
        return Evaluation({**job.spec.flat(), "dtype": job.dtype}, job.status, job.result, job.age)

    return find


def _age(source: ModelSource, store: Store) -> int | None:
    """The age of the job whose checkpoint a model or adapter is, also where its directory is named; None: it is no
    job's."""
    name = store.at_directory(source.model) if source.made_by is None else source.made_by.job_uuid
    try:
        return None if name is None else store.get(name).age
    except JobNotFound:
        return None
