"""The conditions of `--promote-if`: what evaluations must have found before a model is exported or registered."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, ServiceRefusal, TrlError

if TYPE_CHECKING:
    from ..client import ServiceClient

OPTION = "--promote-if"
FORM = "JOB:METRIC>=VALUE"
OWN_EVALUATION = "evaluation"
"""In a condition of `train`: the evaluation of its result."""
_JOB = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_CONDITION = re.compile(rf"(?P<evaluation>{_JOB}):(?P<metric>.+?)\s*(?P<way>>=|<=)\s*(?P<asked>.+)")
_CHANGE = re.compile(rf"(?P<against>{_JOB})(?:\s+(?P<sign>[+-])\s+(?P<change>{_NUMBER}))?")


class NotPromoted(TrlError, RuntimeError):
    """Raised when evaluations have not found what was asked for."""


def condition(text: str) -> dict[str, Any]:
    """A condition as a request has it. Raises ArgumentTypeError."""
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        raise ArgumentTypeError(f"expected {FORM}, JOB:METRIC<=VALUE, or 'JOB:METRIC<=BEFORE + CHANGE', found {text!r}")
    named, asked = {name: found[name] for name in ("evaluation", "metric")}, found["asked"].strip()
    bound = "at_least" if found["way"] == ">=" else "at_most"
    if re.fullmatch(rf"[+-]?{_NUMBER}", asked):
        return {**named, bound: float(asked)}
    change = _CHANGE.fullmatch(asked)
    if change is None:
        raise ArgumentTypeError(f"expected a number, an evaluation, or 'BEFORE + CHANGE' with spaces, found {asked!r}")
    value = float(f"{change['sign'] or ''}{change['change'] or 0}")
    return {**named, "against": change["against"], f"{bound}_change": value}


def evaluations_of(given: list[dict[str, Any]]) -> list[str]:
    """The evaluations that conditions name, each once."""
    named = [one.get(key) for one in given for key in ("evaluation", "against")]
    return list(dict.fromkeys(name for name in named if name is not None))


def refuse_unusable_with_training(options: Namespace) -> None:
    """Refuse conditions on a training's result that its evaluation could not decide. Raises InvalidRequest."""
    if not options.promote_if:
        return
    if options.register is None:
        raise InvalidRequest(OPTION, evaluations_of(options.promote_if), "it decides on --register: send that, too.")
    if options.eval_data is None:
        hint = "the result is evaluated on the rows of --eval-data: name them there."
        raise InvalidRequest(OPTION, evaluations_of(options.promote_if), hint)
    if options.merge:
        raise InvalidRequest(OPTION, "--merge", "the adapter is what is registered: leave one of the two out.")
    for given in options.promote_if:
        if given["evaluation"] != OWN_EVALUATION:
            hint = (
                f"only {OWN_EVALUATION!r}, of the result on the rows of --eval-data, is there when the training ends."
            )
            raise InvalidRequest(OPTION, given["evaluation"], hint)


def refuse_without_evaluation(method: str) -> None:
    """Raises InvalidRequest: no evaluation has the measures of a method."""
    if method not in ("sft", "dpo"):
        raise InvalidRequest(OPTION, method, "results of sft and dpo are evaluated: use `run`, and an evaluate job.")


def own_evaluation(method: str, model: str, dataset_id: str) -> dict[str, Any]:
    """The provider option `evaluate` of a training whose result is to be promoted."""
    return {"dataset_id": dataset_id} | ({"algorithm": "dpo", "reference_model": model} if method == "dpo" else {})


def of_job(given: list[dict[str, Any]], job_uuid: str) -> list[dict[str, Any]]:
    """Conditions with the name that the evaluation of a training has."""
    from llama_stack_provider_trl.requests.lifecycle import evaluation_name

    return [{**one, "evaluation": evaluation_name(job_uuid)} for one in given]


async def check_promotion(client: ServiceClient, model: str, given: list[dict[str, Any]]) -> None:
    """Return if conditions on a model of the service hold. Raises NotPromoted: a sentence about each condition that
    does not hold; InvalidRequest: a condition says nothing about the model; ServiceRefusal, ServiceUnreachable: there
    is no such job.

    Args:
        model: as the service lists it, such as `ft:JOB`.
    """
    from llama_stack_provider_trl.requests.promotion import Evaluation, Model, checked, refuse_unusable, unmet
    from llama_stack_provider_trl.specs.promotion import PromotionCondition

    statuses = {name: await client.status(name) for name in evaluations_of(given)}
    for name in [maker for status in statuses.values() if (maker := _maker_of_rows(status)) is not None]:
        with suppress(JobNotFound, ServiceRefusal):  # it may be deleted
            statuses[name] = await client.status(name)

    def find(name: str) -> Evaluation:
        if (status := statuses.get(name)) is None:
            raise JobNotFound(name)
        found = status["resources_allocated"]
        return Evaluation(found["effective_config"], status["status"], found.get("result"), found["age"])

    conditions = [PromotionCondition.model_validate(one) for one in given]
    directory, age = await _checkpoint(client, model)
    refuse_unusable(conditions, Model(directory), find, OPTION, age=age, completed=True)
    if failed := unmet(checked(conditions, find), OPTION):
        raise NotPromoted(f"{failed} {model} was not registered.")


def _maker_of_rows(status: Mapping[str, Any]) -> str | None:
    """The job that makes the rows of an evaluation."""
    return (status["resources_allocated"]["effective_config"].get("dataset") or {}).get("of_job")


async def _checkpoint(client: ServiceClient, model: str) -> tuple[str, int]:
    """Where the service has the checkpoint of a job that answers as `model`, and the age of that job. Raises
    InvalidRequest: it is no job's."""
    prefix, colon, name = model.partition(":")
    if not colon or prefix not in ("ft", "job"):
        hint = f"{model} is no result of a job, and conditions decide on results: leave it out"
        raise InvalidRequest(OPTION, model, hint)
    job_uuid, _, checkpoint = name.partition("/")
    status = await client.status(job_uuid)
    if (search := status["resources_allocated"].get("search")) and search.get("best"):  # its result is the best trial's
        status = await client.status(search["best"]["job_uuid"])
    directory = status["resources_allocated"]["effective_config"]["checkpoint_dir"]
    return f"{directory}/{checkpoint or 'final'}", status["resources_allocated"]["age"]
