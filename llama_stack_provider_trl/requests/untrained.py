"""How requests for jobs that do not train (`kinds`) are resolved, as ones that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequest, InvalidRows
from ..specs.answer_files import answering_of
from ..specs.exports import allows, destination_of
from ..specs.harness import HarnessSpec
from ..specs.job import JobSpec, ShardingSpec
from ..specs.work import OF_JOB, EvaluateSpec, ExportWork, MergeWork, Work
from .bases import NamedJob, is_adapter
from .choices import no_such_field, problem_of
from .engines import is_answered_by_vllm
from .lifecycle import evaluation_name
from .options import ProviderOptions
from .settings import Request, Settings
from .work import EvaluateRequest, ExportRequest, GenerateRequest, MergeRequest

OPTIONS = ("after", "cancel_with", "device", "max_duration", "priority", "retries")
"""Provider options of all jobs that do not train."""
_RANKS, _RESOURCES = "nproc_per_node", "resources"
"""Options of those that compute with a model."""
EVALUATE = "provider_options.evaluate"
_DATA = "training_config.data_config."
_MOST_ANSWERS = 10**6


type Kind = type[GenerateRequest | EvaluateRequest | MergeRequest | ExportRequest]


def options_of(kind: Kind) -> list[str]:
    """The provider options of a kind of jobs, sorted. A merge is one process, and so is an export, here."""
    if issubclass(kind, ExportRequest):
        return sorted(OPTIONS)
    if issubclass(kind, MergeRequest):
        return sorted([*OPTIONS, _RESOURCES])
    return sorted([*OPTIONS, _RANKS, _RESOURCES])


def check_options(options: ProviderOptions, kind: Kind) -> None:
    """Refuse the options of training. Raises InvalidRequest."""
    known = options_of(kind)
    if others := sorted(options.model_fields_set - set(known)):
        hint = f"it is an option of training; a job of this kind has {', '.join(known)}"
        raise InvalidRequest(f"provider_options.{others[0]}", getattr(options, others[0]), hint)


def evaluation_after(job_uuid: str, given: dict[str, Any]) -> EvaluateRequest:
    """The request for the evaluation of a job's result.

    Args:
        given: the provider option `evaluate`.

    Raises:
        InvalidRequest: names a field of `given`, from `provider_options.evaluate`.
    """
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


def for_work(
    request: Request, options: ProviderOptions, settings: Settings, named: NamedJob | None, work: Work | None = None
) -> tuple[ProviderOptions, Settings]:
    """Options and settings with which a job that does not train is resolved: one process where it sets no other number,
    each with the whole model, on the service's machine where it sets no resources, with the adapter that `model` names.

    Raises:
        InvalidRequest: `model` cannot be read, the job cannot run on a node, or its export may not be sent there.
    """
    if isinstance(work, ExportWork):
        refuse_destination(work.export.upload_to, settings.export_destinations)
    use = "merge" if is_answered_by_vllm(work) else "continue"  # vLLM reads whole models
    chosen = {"adapter": use} if is_adapter(request, settings, named) else {}
    here: dict[str, Any] = {"ranks": 1, "nodes": 1, "max_nodes": 1}
    if work is None or is_answered_by_vllm(work) or harness_of(work):  # it has no choice that a warning could name
        here["gpus_elsewhere"] = tuple
    if (resources := options.resources) is not None:
        given = resources.model_dump(exclude_unset=True)
        if is_answered_by_vllm(work):
            hint = "vLLM answers on the service's machine only: leave it out, or leave engine out"
            raise InvalidRequest(f"provider_options.{_RESOURCES}", given, hint)
        if harness_of(work):
            hint = "the tasks of a harness are on the service's machine only: leave it out"
            raise InvalidRequest(f"provider_options.{_RESOURCES}", given, hint)
        if resources.nodes not in (None, 1):
            hint = "a job that does not train runs on one node: use 1"
            raise InvalidRequest(f"provider_options.{_RESOURCES}.nodes", resources.nodes, hint)
        here["max_nodes"] = settings.max_nodes
    if harness_of(work) is not None and options.nproc_per_node not in (None, 1):
        hint = "the tasks of a harness are measured by one process: leave it out, or send several jobs"
        raise InvalidRequest(f"provider_options.{_RANKS}", options.nproc_per_node, hint)
    if settings.sharding is not None:
        here["sharding"] = ShardingSpec(strategy="NO_SHARD")
    return options.model_copy(update=chosen), settings.model_copy(update=here)


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


def with_work(spec: JobSpec, work: Work) -> JobSpec:
    """The job, which does this in place of training. Raises InvalidRequest: it is too much."""
    untrained: dict[str, Any] = {
        "preflight": "off",
        "oom_retry": False,
    }
    if (answering := answering_of(work)) is not None:
        answers = spec.data.dataset.num_rows * answering.samples_per_prompt
        if answers > _MOST_ANSWERS:
            rows = spec.data.dataset.num_rows
            hint = (
                f"with {rows} prompts that are {answers} answers, at most {_MOST_ANSWERS} are made: divide the dataset"
            )
            raise InvalidRequest("samples_per_prompt", answering.samples_per_prompt, hint)
        untrained |= {"lora": None, "token_cache": None}
    if harness_of(work) is not None:
        untrained["token_cache"] = None
    if isinstance(work, ExportWork):
        untrained["token_cache"] = None
        if work.export.upload_to is not None and spec.source.trust_remote_code:
            hint = "the model has code of its own, which would see the account: leave it out, and upload it yourself"
            raise InvalidRequest("upload_to", work.export.upload_to, hint)
        evaluations = [name for one in work.promote_if for name in (one.evaluation, one.against) if name is not None]
        untrained["after"] = tuple(dict.fromkeys([*evaluations, *spec.after]))
    if isinstance(work, MergeWork):
        # The first of its inputs is what it reads, and of an adapter not the model below.
        source = spec.source.model_copy(update={"made_by": None})
        untrained |= {"lora": None, "adapter": None, "token_cache": None, "source": source}
    return spec.changed(**untrained, work=work)


def harness_of(work: Work | None) -> HarnessSpec | None:
    """The tasks that a job measures its model on; None: it reads the rows of a dataset."""
    return work.harness if isinstance(work, EvaluateSpec) else None


def in_its_terms(error: InvalidRequest) -> InvalidRequest:
    """An error about a field of training, with the name that a request of another kind has for it."""
    if isinstance(error, InvalidRows):
        return error
    name = error.field.removeprefix(_DATA).removeprefix("training_config.")
    if name.removeprefix("provider_options.") in EvaluateRequest.model_fields:
        name = name.removeprefix("provider_options.")
    return InvalidRequest(name, error.value, error.hint)
