"""The page of a new job: its form, the preflight's answer beside it, and the same job for other clients."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args

from fastapi import Depends, Query, Request, Response

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.reader import read_request
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.custom import custom_names
from llama_stack_provider_trl.specs.exports import ExportTarget
from llama_stack_provider_trl.specs.job import OptimizerSpec
from llama_stack_provider_trl.system.hub_cache import cached_models, is_offline
from llama_stack_provider_trl.system.offload import in_work_thread

from ..dependencies import DatasetsDep, JobChecksDep, SettingsDep, StoreDep, SubmissionsDep
from ..http.bodies import (
    WORK_BODIES,
    PreferenceOptimizeBody,
    PreflightBody,
    SupervisedFineTuneBody,
)
from ..http.declared_routes import Routes
from ..jobs.submissions import JobBody
from ..security.access import USERS, USERS_JOB_FORM, CurrentCaller
from .job_form import (
    CHECKS,
    FORM_KINDS,
    FORM_METHODS,
    LONGEST_SHOWN,
    LORA_RANK,
    PRESETS,
    TRAINING_CALLS,
    TUNINGS,
    field_of,
    fields_of,
    job_of,
    next_names,
    preset_of,
    rates_of,
    same_job,
    validated,
    work_of,
)
from .job_view import path_of
from .list_view import short_model
from .login import checked_form, see_other
from .rendering import address, page
from .route import PageRoute, problem_of

_SCHEDULES = get_args(OptimizerSpec.model_fields["scheduler"].annotation)
_MODELS = 100
"""Jobs whose models are suggested."""
router = Routes(PageRoute, prefix="/new", include_in_schema=False)


class FormParts(NamedTuple):
    """What the page of a form is made of."""

    request: Request
    registry: DatasetsDep
    store: StoreDep
    settings: SettingsDep

    async def page(
        self, fields: dict[str, str], code: int = 200, found: Any = None, problem: str = "", source: str = ""
    ) -> Response:
        """The form with some fields."""
        kind = fields.get("kind") if fields.get("kind") in FORM_KINDS else "train"
        fields = {**fields, "kind": str(kind)}
        datasets = await asyncio.to_thread(self.registry.names)
        installed = await asyncio.to_thread(custom_names)
        # In a thread: it writes YAML, which takes half a second of a core where the form has much.
        same = await asyncio.to_thread(_same, fields, str(self.request.base_url).rstrip("/"))
        kept = {name: fields.get(name, "") for name in ("model", "dataset")}
        return page(
            self.request,
            "new.html",
            code,
            fields=fields,
            datasets=datasets,
            models=await asyncio.to_thread(known_models, self.store),
            checks=[(name, one.text) for name, one in CHECKS.items()],
            defaults=self.settings,
            methods=[*FORM_METHODS.items(), *((name, f"{name} (installed)") for name in installed)],
            kind=kind,
            kinds=FORM_KINDS,
            needs=FORM_KINDS[str(kind)].needs,
            targets=[(target, target) for target in get_args(ExportTarget)],
            presets=PRESETS,
            preset=preset_of(fields),
            address=partial(_address, kept),
            schedules=[("", f"{_SCHEDULES[0]} (default)"), *((one, one) for one in _SCHEDULES[1:])],
            tunings=[*TUNINGS.items()],
            rank=LORA_RANK,
            rates=rates_of(fields.get("method")),
            source=source,
            posted=self.request.method == "POST",
            found=found,
            problem=problem,
            at=field_of(problem),
            field_of=field_of,
            same=same,
        )

    async def refused(self, fields: dict[str, str], error: Exception) -> Response:
        """The form, with what is wrong with its fields."""
        status, problem = await problem_of(self.request, error)
        return await self.page(fields, status, problem=problem)


async def _parts(request: Request, registry: DatasetsDep, store: StoreDep, settings: SettingsDep) -> FormParts:
    return FormParts(request, registry, store, settings)


FormDep = Annotated[FormParts, Depends(_parts)]


@router.get("", dependencies=[USERS])
async def new_job_page(
    form: FormDep,
    dataset: Annotated[str, Query(max_length=512)] = "",
    model: Annotated[str, Query(max_length=4096)] = "",
    method: Annotated[str, Query(max_length=20)] = "",
    options: Annotated[str, Query(max_length=4096)] = "",
    source: Annotated[str, Query(alias="from", max_length=128)] = "",
    preset: Annotated[str, Query(max_length=20)] = "",
    kind: Annotated[str, Query(max_length=20)] = "",
    checkpoint: Annotated[str, Query(max_length=128)] = "",
) -> Response:
    """The form: empty, or with the request of a job under a new name, which may continue from a checkpoint of it; and
    with what the address names."""
    given = {"kind": kind, "dataset": dataset, "model": model, "method": method, "options": options}
    if options:  # such as adapter: continue, beside which another adapter is refused
        given["tuning"] = "request"
    fields, problem = {**PRESETS.get(preset, next(iter(PRESETS.values()))).fields}, ""
    if source:
        fields, problem = await asyncio.to_thread(_again, form.store, source, checkpoint)
    fields |= {name: value for name, value in given.items() if value}
    fields["draft"] = f"{source} {checkpoint}".strip()
    if not source and _kind(fields) == "train":
        fields["model"] = model or await asyncio.to_thread(newest_model, form.store)
    return await form.page(fields, problem=problem, source=source)


def _again(store: Store, source: str, checkpoint: str = "") -> tuple[dict[str, str], str]:
    """The fields of a job's request under a name that is free, and why there are none.

    Args:
        checkpoint: of the job, from which the new one continues; empty: it begins anew.

    Raises:
        JobNotFound.
    """
    requested = read_request(store, source)
    if requested is None or requested.call not in TRAINING_CALLS:
        store.get(source)
        kept = "its request is no training" if requested else "its request is not kept, as of a trial of a search"
        return {}, f"The form cannot be filled in from job {source!r}: {kept}. Fill it in from the job's configuration."
    name = next(name for name in next_names(source) if store.state_of(name) is None)
    fields = {**fields_of(requested.body, requested.call == TRAINING_CALLS[0]), "job": name}
    if checkpoint:
        options = json.loads(fields.get("options") or "{}") | {"resume_from": f"{source}/{checkpoint}"}
        fields["options"] = json.dumps(options)
    return fields, ""


@router.post("/check", dependencies=[USERS_JOB_FORM])
async def check_job(form: FormDep, checks: JobChecksDep, caller: CurrentCaller) -> Response:
    """The form with the preflight's answer; without a model or a dataset there is none yet."""
    fields = await checked_form(form.request, caller)
    if _kind(fields) != "train":
        return await _check_work(form, fields)
    if not fields.get("model", "").strip() or not fields.get("dataset", "").strip():
        return await form.page(fields)
    try:
        fields = await asyncio.to_thread(with_known_model, fields, form.store, is_offline(os.environ))
        algorithm = "sft" if await _method(fields) == "sft" else "dpo"
        body = {**await in_work_thread(job_of, fields), "algorithm": algorithm}
        found = await checks.preflight(validated(PreflightBody, body))
    except Exception as error:
        return await form.refused(fields, error)
    return await form.page(fields, found=found)


@router.post("", dependencies=[USERS_JOB_FORM])
async def submit_job(form: FormDep, submissions: SubmissionsDep, caller: CurrentCaller) -> Response:
    """Queue the job, and lead to its page. The same form again is the same job."""
    fields = await checked_form(form.request, caller)
    try:
        fields = await asyncio.to_thread(with_known_model, fields, form.store)
        body = await _body(fields)
        await submissions.submit(body, caller)
    except Exception as error:
        return await form.refused(fields, error)
    return see_other(path_of(body.job_uuid))


async def _check_work(form: FormParts, fields: dict[str, str]) -> Response:
    """The form of a job of another kind, with what is wrong with its fields; nothing yet where one is empty."""
    if not all(fields.get(name, "").strip() for name in ("job", *FORM_KINDS[fields["kind"]].needs) if name != "checks"):
        return await form.page(fields)
    try:
        fields = await asyncio.to_thread(with_known_model, fields, form.store)
        await _body(fields)
    except Exception as error:
        return await form.refused(fields, error)
    return await form.page(fields, found=True)


async def _body(fields: Mapping[str, str]) -> JobBody:
    """The request of a form. Raises InvalidRequest, RequestValidationError."""
    if (kind := _kind(fields)) != "train":
        return validated(WORK_BODIES[kind], await in_work_thread(work_of, fields))
    if await _method(fields) != "sft":
        return validated(PreferenceOptimizeBody, await in_work_thread(job_of, fields))
    return validated(SupervisedFineTuneBody, await in_work_thread(job_of, fields))


def _kind(fields: Mapping[str, str]) -> str:
    """The kind of a form's job. Raises InvalidRequest: there is no such kind."""
    kind = fields.get("kind") or "train"
    if kind not in FORM_KINDS:
        raise InvalidRequest("kind", kind, f"expected one of {', '.join(FORM_KINDS)}")
    return kind


async def _method(fields: Mapping[str, str]) -> str:
    """Raises InvalidRequest: it is none of the form's, and no installed package adds it."""
    method = fields.get("method") or "sft"
    if method not in FORM_METHODS:
        installed = await asyncio.to_thread(custom_names)
        if method not in installed:
            raise InvalidRequest("method", method, f"expected one of {', '.join([*FORM_METHODS, *installed])}")
    return method


def known_models(store: Store) -> list[str]:
    """Models that forms suggest: those of earlier jobs, the newest first, then those in this machine's cache."""
    jobs, _ = store.queue_page(None, None, _MODELS, order="created", descending=True)
    return [*dict.fromkeys([*(job.model for job in jobs if job.model), *cached_models(os.environ)])][: 2 * _MODELS]


def newest_model(store: Store) -> str:
    """The model of the newest training; empty: there is none."""
    jobs, _ = store.queue_page(None, None, _MODELS, order="created", descending=True)
    return next((job.model for job in jobs if job.model and job.algorithm in FORM_METHODS), "")


def with_known_model(fields: dict[str, str], store: Store, needs_files: bool = False) -> dict[str, str]:
    """The fields of a form with the known model that is meant by the short name by which lists show it: a model of the
    hub has this name only by chance.

    Args:
        needs_files: refuse every model that is not on this machine.

    Raises:
        InvalidRequest: several models have this short name, or it is none of this machine.
    """
    model = fields.get("model", "").strip()
    # Of paths nothing is said here: the resolver asks first whether they are below `model_roots`.
    if not model or model.startswith(("job:", "/", ".", "~")) or ".." in model or os.path.isdir(model):
        return fields
    known = known_models(store)
    meant = [] if model in known else [one for one in known if short_model(one) == model]
    if len(meant) > 1:
        raise InvalidRequest("model", model, f"lists show several models by this name: expected {' or '.join(meant)}")
    if meant:
        return {**fields, "model": meant[0]}
    if needs_files and model not in cached_models(os.environ):
        hint = "it is not on this machine, which is offline: expected the directory of a model, or an id of its cache"
        raise InvalidRequest("model", model, hint)
    return fields


def _address(kept: Mapping[str, str], **more: str) -> str:
    """The address of an empty form with some fields."""
    return address("/new", ((name, value) for name, value in {**kept, **more}.items() if value != "train"))


def _same(fields: Mapping[str, str], url: str) -> dict[str, str] | None:
    """The job of the form for other clients; None: it is too long."""
    body, kind = _shown(fields), fields["kind"]
    if len(json.dumps(body)) > LONGEST_SHOWN:
        return None
    return same_job(body, url, None if kind == "train" else kind)


def _shown(fields: Mapping[str, str]) -> dict[str, Any]:
    """The body of the form, without what it refuses."""
    made = job_of if fields["kind"] == "train" else work_of
    try:
        return made(fields)
    except InvalidRequest:
        return made({**fields, "options": "", "request": "", "tuning": ""})
