"""Resolves requests for jobs that do not train (`work`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequest
from ..specs.exports import allows, destination_of
from ..specs.job import DpoSpec, OptimizerSpec, ReferenceSpec
from ..specs.methods import METHODS, MethodSpec, SftSpec
from ..specs.work import OF_JOB, Answering, Work
from ..system.data_dir import DataDir
from .bases import Base, NamedJob, resolve_read
from .choices import no_such_field, problem_of
from .engines import is_answered_by_vllm
from .lifecycle import evaluation_name, resolve_after, resolve_tries
from .method import reference_source
from .mixture import NamedDataset
from .options import ProviderOptions
from .paths import resolve_checkpoint_dir, resolve_job_uuid
from .placement import on_reserved_cores, resolve_single_node
from .resolve import Resolution
from .settings import Settings
from .trackers import resolve_trackers
from .training import device_of, resolve_dtype
from .work import RANKS, RESOURCES, EvaluateRequest, Reads, WorkRequest

EVALUATE = "provider_options.evaluate"
_MOST_ANSWERS = 10**6


def check_options(options: ProviderOptions, kind: type[WorkRequest]) -> None:
    """Refuse the options of training. Raises InvalidRequest."""
    if others := sorted(options.model_fields_set - set(kind.options)):
        hint = f"it is an option of training; a job of this kind has {', '.join(kind.options)}"
        raise InvalidRequest(f"provider_options.{others[0]}", getattr(options, others[0]), hint)


def evaluation_after(job_uuid: str, given: dict[str, Any]) -> EvaluateRequest:
    """The request for the evaluation of a job's result. Raises InvalidRequest: names a field of `given`, from
    `provider_options.evaluate`."""
    own = {"job_uuid": evaluation_name(job_uuid), "model": f"{OF_JOB}{job_uuid}"}
    if taken := [name for name in (*own, "models") if name in given]:
        hint = f"it is {own.get(taken[0], 'one model')!r}, since this job is evaluated: leave it out"
        raise InvalidRequest(f"{EVALUATE}.{taken[0]}", given[taken[0]], hint)
    try:
        return EvaluateRequest.model_validate({**own, **given})
    except ValidationError as error:
        first = error.errors()[0]
        hint = f"{problem_of(first)}; the fields are those of POST /v1/post-training/evaluate (docs/how-to/evaluate.md)"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            hint = no_such_field(str(first["loc"][0]), list(EvaluateRequest.model_fields))
        raise InvalidRequest(".".join([EVALUATE, *map(str, first["loc"])]), first["input"], hint) from error


def resolve_work(
    body: WorkRequest,
    work: Work,
    options: ProviderOptions,
    settings: Settings,
    named: NamedJob | None = None,
    makers: Sequence[str] = (),
) -> Resolution:
    """Decide everything about a job that does not train and that does not depend on its rows.

    Its processes, one where it sets no other number, hold the whole model each. It runs on the service's machine where
    it requests no resources. An adapter that it names is read as it is, but by vLLM, which reads whole models. Raises
    InvalidRequest: names the field of the request, its value and the nearest supported one.

    Args:
        named: the job that the request names as its model (`bases.base_job_of`).
        makers: jobs that make its other models.
    """
    _check_place(work, options, settings)
    options = on_reserved_cores(options, settings)
    trackers = resolve_trackers(None, settings.trackers, body.job_uuid)
    reads, warnings, of_vllm = body.reads(), list[str](), is_answered_by_vllm(work)
    base = resolve_read(reads.model, settings, named, "merge" if of_vllm else "continue")
    method = _method(reads, base, settings)
    device, hint = device_of(options, settings, may_leave=options.resources is not None and settings.max_nodes > 1)
    has_choice = not of_vllm and work.tasks is None  # of a machine
    fields = {
        **_model(work, base),
        "work": work,
        "method": method,
        "job_uuid": resolve_job_uuid(body.job_uuid),
        "output_name": body.job_uuid,
        "checkpoint_dir": resolve_checkpoint_dir(body, settings),
        "batch_size": reads.batch_size,
        "max_seq_length": reads.max_seq_length or settings.max_seq_length,
        "max_seq_length_is_default": reads.max_seq_length is None,
        "token_cache": DataDir(settings.data_dir).tokens if work.measures_rows else None,
        "dtype": resolve_dtype("dtype", reads.dtype, device, hint),
        # No step is taken: the rows are read once.
        "n_epochs": 1,
        "optimizer": OptimizerSpec(learning_rate=METHODS[method.algorithm].learning_rates[base.lora is not None]),
        "lifecycle": resolve_tries(options, settings, in_smaller_parts=False),
        "preflight": "off",
        "metadata": options.metadata,
        **resolve_after(body.job_uuid, reads.dataset_id, options, base, makers),
        **resolve_single_node(options, settings, base, reads.dtype, warnings if has_choice else None),
    }
    fields["after"] = tuple(dict.fromkeys([*work.evaluations, *fields["after"]]))
    datasets = (NamedDataset(reads.dataset_id),)
    return Resolution(datasets, None, fields, warnings, trackers, rows_field="dataset_id")


def _check_place(work: Work, options: ProviderOptions, settings: Settings) -> None:
    """Refuse places where a job cannot run, or may not send its export."""
    if work.exporting is not None:
        refuse_destination(work.exporting.upload_to, settings.export_destinations)
    given = None if options.resources is None else options.resources.model_dump(exclude_unset=True)
    if given is not None and is_answered_by_vllm(work):
        hint = "vLLM answers on the service's machine only: leave it out, or leave engine out"
        raise InvalidRequest(f"provider_options.{RESOURCES}", given, hint)
    if given is not None and work.tasks:
        hint = "the tasks of a harness are on the service's machine only: leave it out"
        raise InvalidRequest(f"provider_options.{RESOURCES}", given, hint)
    if options.resources is not None and options.resources.nodes not in (None, 1):
        hint = "a job that does not train runs on one node: use 1"
        raise InvalidRequest(f"provider_options.{RESOURCES}.nodes", options.resources.nodes, hint)
    if work.tasks is not None and options.nproc_per_node not in (None, 1):
        hint = "the tasks of a harness are measured by one process: leave it out, or send several jobs"
        raise InvalidRequest(f"provider_options.{RANKS}", options.nproc_per_node, hint)


def refuse_destination(place: str | None, allowed: Sequence[str]) -> None:
    """Raises InvalidRequest: an export may not be sent to a place."""
    if place is None:
        return
    try:
        destination = destination_of(place)
    except ValueError as error:
        raise InvalidRequest("upload_to", place, str(error)) from error
    if not any(allows(one, destination) for one in allowed):
        known = ", ".join(allowed) or "none is configured"
        hint = f"it must lie below one of the configured export_destinations ({known}); or download the export"
        raise InvalidRequest("upload_to", place, hint)


def _method(reads: Reads, base: Base, settings: Settings) -> MethodSpec:
    """The method whose measures an evaluation has; of other jobs, that of plain text."""
    if reads.reference_model is None:
        return SftSpec()
    reference = reference_source("reference_model", reads.reference_model, base, settings)
    return DpoSpec(reference=ReferenceSpec(source=reference))


def _model(work: Work, base: Base) -> dict[str, Any]:
    """The fields of the job's own model."""
    if work.merging is not None:
        # The first of its inputs is what it reads, and of an adapter not the model below.
        return {"source": base.source.model_copy(update={"made_by": None}), "adapter": None}
    upload_to = None if work.exporting is None else work.exporting.upload_to
    if upload_to is not None and base.source.trust_remote_code:
        hint = "the model has code of its own, which would see the account: leave it out, and upload it yourself"
        raise InvalidRequest("upload_to", upload_to, hint)
    if work.answering is not None or base.lora is None:
        return base.fields
    return {**base.fields, "lora": base.lora.model_copy(update={"dropout": 0.0})}


def refuse_too_many_answers(answering: Answering, num_rows: int) -> None:
    """Return if a job's answers to the prompts of a dataset can be kept. Raises InvalidRequest."""
    answers = num_rows * answering.samples_per_prompt
    if answers > _MOST_ANSWERS:
        hint = (
            f"with {num_rows} prompts that are {answers} answers, at most {_MOST_ANSWERS} are made: divide the dataset"
        )
        raise InvalidRequest("samples_per_prompt", answering.samples_per_prompt, hint)
