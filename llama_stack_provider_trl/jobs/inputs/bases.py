"""Finds the job that a request names as its base, and checks the checkpoints that a job reads when it starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...errors import InvalidRequest, JobNotFound
from ...requests.bases import (
    PREFIX,
    Base,
    NamedJob,
    NamedModel,
    base_job_of,
    resolve_read,
    resolve_served,
    served_job_of,
)
from ...requests.distillation import TEACHER
from ...requests.names import JOB_UUID_PATTERN
from ...requests.settings import Settings
from ...specs.bases import parts_of
from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ...system.files import is_whole
from ...system.hub_cache import find_snapshot, is_offline
from ..decisions.states import JobState
from ..store.store import Store

_REQUESTED = {
    "source": "model",
    "adapter": "model",
    "train.method.reference": TEACHER,
    "train.method.rewards": "algorithm_config.rewards",
    "work.merge.base": "base",
    "work.merge": "models",
    "work.members": "models",
    "work.answers.judges": "checks",
}
"""Beginning of a field of a JobSpec -> the field of a request that it is resolved from."""

NEWEST = "newest"
"""In place of a checkpoint's name, in chats: the newest one of the job."""
_WRITTEN = re.compile(r"final|checkpoint-\d+")


def find_base(model: NamedModel, store: Store, settings: Settings | None = None) -> NamedJob | None:
    """The job that a model names as `job:NAME`; None: it names none, or there is no such job. Raises InvalidRequest:
    that is no name of a job, or of a search that has not completed; or a name without a slash of no model.

    Args:
        settings: None: a name that is nothing here is taken.
    """
    job_uuid = base_job_of(model)
    if job_uuid is None:
        _refuse_unknown_name(model, store, settings)
        return None
    try:
        return named_job(model.field, model.value, job_uuid, store)
    except JobNotFound:
        return None


def _refuse_unknown_name(model: NamedModel, store: Store, settings: Settings | None) -> None:
    """Raises InvalidRequest: a name without a slash is that of a job, or of nothing that can be found. Few models of
    the hub have one, such as gpt2."""
    name, value, own = model
    if not value or value == own or not re.fullmatch(JOB_UUID_PATTERN, value):
        return
    if Path(value).is_dir() or find_snapshot(os.environ, value, None) is not None:
        return
    here = "there is no such directory, and no such model in the cache here"
    if store.state_of(value) is not None:
        raise InvalidRequest(name, value, f"{here}; was {PREFIX}{value} meant?")
    if settings is None or settings.max_nodes > 1 or not is_offline(os.environ):
        return  # it may be in the cache of a node, or at the hub
    hint = f"name a directory, {PREFIX}NAME, or a model id such as org/name"
    raise InvalidRequest(name, value, f"{here}, no such job, and the hub is not used (HF_HUB_OFFLINE): {hint}")


def find_read(model: NamedModel, settings: Settings, store: Store) -> Base:
    """What a model is that a job reads and does not train. Raises InvalidRequest: it cannot be used."""
    return resolve_read(model, settings, find_base(model, store, settings))


def find_served(name: str, value: str, settings: Settings, store: Store) -> Base:
    """The model and the adapter that a chat names, whose files are on this machine. Raises JobNotFound; InvalidRequest:
    it names something else, or a checkpoint that is not there."""
    served = served_job_of(name, value)
    if served is None:
        return resolve_served(name, value, settings)
    job_uuid, text = served
    named = named_job(name, value, job_uuid, store)
    if text.endswith(f"/{NEWEST}"):
        text = f"{text.removesuffix(NEWEST)}{_newest(name, value, job_uuid, named)}"
    try:
        base = resolve_served(name, text, settings, named)
    except InvalidRequest as error:
        raise InvalidRequest(name, value, error.hint) from error
    for source in filter(None, (base.adapter, base.source)):
        if source.made_by is not None and not is_whole(Path(source.model)):
            made_by = source.made_by
            found = f"job {made_by.job_uuid!r} has no whole checkpoint {made_by.checkpoint!r}"
            newest = f"; {PREFIX}{job_uuid}/{NEWEST} is the newest" if named.checkpoints else ""
            raise InvalidRequest(name, value, f"{found}: it has {', '.join(named.checkpoints) or 'none yet'}{newest}")
    return base


def _newest(name: str, value: str, job_uuid: str, named: NamedJob) -> str:
    """The checkpoint that a job has written last: of one that has completed its result. Raises InvalidRequest."""
    written = [one for one in named.checkpoints if _WRITTEN.fullmatch(one)]
    if not written:
        hint = f"job {job_uuid!r} has no checkpoint yet: send this again when it has saved one (save_steps)"
        raise InvalidRequest(name, value, hint)
    return "final" if "final" in written else written[-1]


def named_job(name: str, value: str | None, job_uuid: str, store: Store) -> NamedJob:
    """The job that a request names, or the best trial of a search. Raises JobNotFound; InvalidRequest: it is a search
    that has not completed."""
    job = store.get(job_uuid)
    if job.spec.search is not None:
        best = store.searches.best(job_uuid, job.spec.search) if job.state is JobState.completed else None
        if best is None:
            hint = f"job {job_uuid!r} is a search and is {job.state}: its best trial is known once it has completed"
            raise InvalidRequest(name, value, hint)
        job_uuid, job = best, store.get(best)
    names = tuple(checkpoint.path.name for checkpoint in store.checkpoints(job_uuid))
    return NamedJob(job.spec, job.state is JobState.completed, names)


def check_checkpoints(spec: JobSpec) -> None:
    """Return if the checkpoints of other jobs that a job reads are complete on disk. Raises InvalidRequest: names the
    field of the request, the job and the checkpoint."""
    for field, source in parts_of(spec, ModelSource):
        if (made := source.made_by) is not None and not is_whole(Path(source.model)):
            name = next((name for begin, name in _REQUESTED.items() if field.startswith(begin)), field)
            hint = f"{source.model} is damaged or gone: train job {made.job_uuid!r} again, or name another checkpoint"
            raise InvalidRequest(name, f"{PREFIX}{made.job_uuid}/{made.checkpoint}", hint)
