"""OpenAI's calls that check a grader, and that grade one answer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from llama_stack_provider_trl.specs.grading.errors import GradingError
from llama_stack_provider_trl.specs.grading.graders import MultiGrader
from llama_stack_provider_trl.specs.grading.grading import graded_for_request
from llama_stack_provider_trl.system.offload import in_work_thread

from ..dependencies import SettingsDep
from ..http.errors import OPENAI_FORM, declared
from ..http.grader_bodies import (
    GraderErrors,
    GraderRunAnswer,
    GraderRunBody,
    GraderRunMetadata,
    GraderValidateAnswer,
    GraderValidateBody,
)
from ..security.access import USERS_JOB
from ..serving.graders import refuse_grader
from .openai import OpenAIRoute

router = APIRouter(
    route_class=OpenAIRoute, prefix="/openai/v1/fine_tuning/alpha/graders", tags=["graders, in OpenAI's form"]
)
_ANSWERS: dict[int | str, dict[str, Any]] = declared(form=OPENAI_FORM)


@router.post("/run", dependencies=[USERS_JOB], responses=_ANSWERS)
async def run_grader(settings: SettingsDep, body: GraderRunBody) -> GraderRunAnswer:
    """Grade an answer."""
    await in_work_thread(refuse_grader, body.grader, settings)
    began = time.monotonic()
    found = await in_work_thread(graded_for_request, body.grader, body.model_sample, body.item)
    errors = GraderErrors() if found.error is None else _errors(found.error)
    return GraderRunAnswer(
        reward=found.reward,
        metadata=GraderRunMetadata(
            name=body.grader.name,
            type=body.grader.type,
            errors=errors,
            execution_time=round(time.monotonic() - began, 6),
            scores=dict(found.scores),
        ),
        sub_rewards=dict(found.scores) if isinstance(body.grader, MultiGrader) else {},
        model_grader_token_usage_per_model={},
    )


@router.post("/validate", dependencies=[USERS_JOB], responses=_ANSWERS)
async def validate_grader(settings: SettingsDep, body: GraderValidateBody) -> GraderValidateAnswer:
    """Check a grader, and run nothing."""
    await in_work_thread(refuse_grader, body.grader, settings)
    return GraderValidateAnswer(grader=body.grader.model_dump(exclude_none=True))


def _errors(error: GradingError) -> GraderErrors:
    details = {
        "python_grader_runtime_error": "python_grader_runtime_error_details",
        "python_grader_server_error": "python_grader_server_error_type",
    }
    said = {details[error.kind]: error.sentence} if error.kind in details else {}
    return GraderErrors.model_validate({error.kind: True, **said})
