"""Finds the job whose result is the teacher of a distillation."""

from __future__ import annotations

from typing import Any

from ....errors import InvalidRequest
from ....requests.bases import PREFIX, NamedModel, is_adapter, resolve_base
from ....requests.distillation import TEACHER
from ....requests.settings import Settings
from ....specs.methods import OTHER_VOCABULARY, MethodSpec
from ....specs.model_source import ModelSource
from ...store.store import Store
from ..bases import find_base
from ..vocabularies import refuse_other_vocabularies


def with_teacher(fields: dict[str, Any], settings: Settings, store: Store | None) -> dict[str, Any]:
    """The fields of a job with what its teacher is.

    Args:
        store: the jobs that there are; None: there are none.

    Raises:
        InvalidRequest: the teacher cannot be used, or has another vocabulary than the model.
    """
    method: MethodSpec = fields["method"]
    teacher, own = method.teacher_source, fields["source"]
    if teacher is None:
        return fields
    named = [("model", own.model), (TEACHER, teacher.model)]
    if teacher.model.startswith(PREFIX):
        teacher = _of_job(teacher.model, fields["job_uuid"], settings, store)
        fields = {**fields, "method": method.with_reference(source=teacher)}
    if method.other_vocabulary is None:
        refuse_other_vocabularies(named, [own, teacher], OTHER_VOCABULARY)
    return fields


def _of_job(value: str, job_uuid: str, settings: Settings, store: Store | None) -> ModelSource:
    model = NamedModel(TEACHER, value, job_uuid)
    named = None if store is None else find_base(model, store)
    if named is not None and is_adapter(model, settings, named):
        hint = (
            f"job {named.spec.job_uuid!r} trains an adapter, and a teacher is a whole model: name its checkpoint "
            "'merged', which the provider option merge_adapter writes, or a job that merges it"
        )
        raise InvalidRequest(TEACHER, value, hint)
    return resolve_base(model, settings, named).source
