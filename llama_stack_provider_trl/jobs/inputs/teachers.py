"""Finds the job whose result is the teacher of a distillation, and checks it when the distillation starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ...requests.bases import PREFIX, Base, is_adapter, resolve_base
from ...requests.bodies import SupervisedFineTuneRequest
from ...requests.distillation import TEACHER
from ...requests.options import ProviderOptions
from ...requests.settings import Settings
from ...specs.job import JobSpec
from ...specs.methods import OTHER_VOCABULARY, DistillationSpec
from ...specs.model_source import ReferenceSpec
from ...system.files import is_whole
from ..store.store import Store
from .bases import find_base
from .vocabularies import refuse_other_vocabularies


def with_teacher(
    fields: dict[str, Any], options: ProviderOptions, settings: Settings, store: Store | None
) -> dict[str, Any]:
    """The fields of a job with what its teacher is, after whose job it comes.

    Args:
        store: the jobs that there are; None: there are none.

    Raises:
        InvalidRequest: the teacher cannot be used, or has another vocabulary than the model.
    """
    method = fields["method"]
    if not isinstance(method, DistillationSpec):
        return fields
    value, reference = method.reference.model or "", method.reference
    found = Base(value, {"revision": reference.revision, "trust_remote_code": reference.trust_remote_code})
    if value.startswith(PREFIX):
        found = _of_job(value, fields["job_uuid"], options, settings, store)
        teacher = ReferenceSpec(model=found.model, **found.trust)
        names = [job.job_uuid for job in found.jobs]
        fields = {
            **fields,
            "method": method.model_copy(update={"reference": teacher, "teacher_jobs": found.jobs}),
            "after": tuple(dict.fromkeys([*names, *fields["after"]])),
        }
    if method.uld is None:
        own = Base(fields["model"], {"revision": fields.get("revision")})
        named = [("model", fields["model"]), (TEACHER, value)]
        refuse_other_vocabularies(named, [own, found], hint=OTHER_VOCABULARY)
    return fields


def check_teacher(spec: JobSpec) -> None:
    """Return if the teacher that another job has made is complete on disk. Raises InvalidRequest."""
    if not isinstance(spec.method, DistillationSpec) or not spec.method.teacher_jobs:
        return
    named, model = spec.method.teacher_jobs[0], spec.method.reference.model
    if model is None or not is_whole(Path(model)):
        hint = f"{model} is damaged or gone: train job {named.job_uuid!r} again, or name another teacher"
        raise InvalidRequest(TEACHER, f"{PREFIX}{named.job_uuid}/{named.checkpoint}", hint)


def _of_job(value: str, job_uuid: str, options: ProviderOptions, settings: Settings, store: Store | None) -> Base:
    training = {"n_epochs": 1, "data_config": {"dataset_id": "none", "batch_size": 1}}
    given = {"job_uuid": job_uuid, "model": value, "training_config": training}
    request = SupervisedFineTuneRequest.model_validate(given)
    try:
        named = None if store is None else find_base(request, store)
        if named is not None and is_adapter(request, settings, named):
            hint = (
                f"job {named.spec.job_uuid!r} trains an adapter, and a teacher is a whole model: name its checkpoint "
                "'merged', which the provider option merge_adapter writes, or a job that merges it"
            )
            raise InvalidRequest(TEACHER, value, hint)
        # Where it trains: a checkpoint of a job is on the service's machine only.
        return resolve_base(request, ProviderOptions(resources=options.resources), settings, named)
    except InvalidRequest as error:
        field = TEACHER if error.field == "model" else error.field
        raise InvalidRequest(field, error.value, error.hint) from error
