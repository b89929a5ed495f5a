"""What the operator of a node has agreed to: an order that asks for more is refused.

The service decides about its own machine only. Another machine runs the code of a model where its own operator has
named that model, and the source of graders where that operator allows it, and starts as many processes as it has cores
or GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.bases import parts_of
from llama_stack_provider_trl.specs.grading.graders import uses_python
from llama_stack_provider_trl.specs.model_source import ModelName

from ..wire import TaskOrder
from .localize import attempt_of

OPTION = "--trust-remote-code, TRL_NODE_TRUST_REMOTE_CODE"
GRADERS = "--python-graders, TRL_NODE_PYTHON_GRADERS=on"


class NoConsent(TrlError):
    """Raised when an order asks for what this node's operator has not agreed to."""


def check_consent(order: TaskOrder, trusted: Sequence[str], cpus: int, *, python_graders: bool = False) -> None:
    """Check an order before anything of it is followed. Raises NoConsent: states what is missing; InvalidRequest: as
    `attempt_of`.

    Args:
        trusted: models whose own code may run here, as `JobSettings.trust_remote_code` has them.
        python_graders: whether the source of graders may run here, as `JobSettings.python_graders` has it.
    """
    attempt = attempt_of(order)
    for _, named in parts_of(attempt, ModelName) if attempt else ():
        model, revision = named.model, named.revision or ""
        if named.trust_remote_code and not any(_names(entry, model, revision) for entry in trusted):
            name = f"{model}@{revision}" if revision and not model.startswith("/") else model
            raise NoConsent(
                f"the job runs code that comes with the model {name[:200]}, and this node's operator has not agreed to "
                f"that: start its agent with the model, as a directory or ORG/NAME@REVISION, in {OPTION}, or have the "
                "job on another node (`labels`)"
            )
    for _, check in parts_of(attempt, AnswerCheck) if attempt else ():
        if check.grader is not None and uses_python(check.grader) and not python_graders:
            raise NoConsent(
                f"the job runs the source of the grader {check.grader.name[:200]!r}, and this node's operator has not "
                f"agreed to that: start its agent with {GRADERS}, or have the job on another node (`labels`)"
            )
    kinds = {device.partition(":")[0] for device in order.devices}
    most, what = (len(order.devices), "GPUs of the order") if kinds == {"cuda"} else (cpus, "CPU cores")
    if not 0 < order.ranks <= max(1, most):
        raise NoConsent(
            f"the job starts {order.ranks} processes here, and this node has {most} {what}: set `nproc_per_node` to at "
            f"most {most}"
        )


def _names(entry: str, model: str, revision: str) -> bool:
    """Whether an entry of the operator's list names a model."""
    if entry.startswith(("/", "~")):
        return model.startswith("/") and Path(entry).expanduser().resolve() == Path(model).resolve()
    return entry == f"{model}@{revision}"
