"""OpenAI's calls that check a grader, and that grade one answer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response

from llama_stack_provider_trl.specs.grading.errors import GradingError
from llama_stack_provider_trl.specs.grading.graders import LabelModel, MultiGrader, ScoreModel
from llama_stack_provider_trl.specs.grading.grading import graded_for_request
from llama_stack_provider_trl.system.offload import in_work_thread

from ..dependencies import ChatsDep, SettingsDep
from ..http.declared_routes import Routes
from ..http.errors import OPENAI_FORM, declared
from ..http.grader_bodies import (
    GraderErrors,
    GraderRunAnswer,
    GraderRunBody,
    GraderRunMetadata,
    GraderValidateAnswer,
    GraderValidateBody,
)
from ..security.access import USERS_JOB, CurrentCaller
from ..serving.chats import unless_left
from ..serving.graders import ask, refuse_grader, refuse_models
from .openai import OpenAIRoute, client_left

router = Routes(OpenAIRoute, prefix="/openai/v1/fine_tuning/alpha/graders", tags=["graders, in OpenAI's form"])
_ANSWERS: dict[int | str, dict[str, Any]] = declared(form=OPENAI_FORM)


@router.post("/run", response_model=GraderRunAnswer, dependencies=[USERS_JOB], responses=_ANSWERS)
async def run_grader(
    settings: SettingsDep, chats: ChatsDep, body: GraderRunBody, caller: CurrentCaller, request: Request
) -> GraderRunAnswer | Response:
    """Grade an answer. The models of graders are those that answer chats."""
    # All of it: a request that waits for a thread leaves the queue with its client, and not when its turn comes.
    answer = await unless_left(_run(settings, chats, body, caller.name), client_left(request))
    return Response(status_code=499) if answer is None else answer


@router.post("/validate", dependencies=[USERS_JOB], responses=_ANSWERS)
async def validate_grader(settings: SettingsDep, chats: ChatsDep, body: GraderValidateBody) -> GraderValidateAnswer:
    """Check a grader, and run nothing."""
    await in_work_thread(refuse_grader, body.grader, settings)
    await refuse_models(body.grader, chats, settings.openai.models)
    return GraderValidateAnswer(grader=body.grader.model_dump(exclude_none=True))


async def _run(settings: SettingsDep, chats: ChatsDep, body: GraderRunBody, caller: str) -> GraderRunAnswer:
    names, grader = settings.openai.models, body.grader
    await in_work_thread(refuse_grader, grader, settings)
    await refuse_models(grader, chats, names)
    began = time.monotonic()
    replied, used = await ask(grader, body.model_sample, body.item, chats, names, caller, settings.chat_timeout)
    found = await in_work_thread(graded_for_request, grader, body.model_sample, body.item, replied)
    errors = GraderErrors() if found.error is None else _errors(found.error)
    return GraderRunAnswer(
        reward=found.reward,
        metadata=GraderRunMetadata(
            name=body.grader.name,
            type=body.grader.type,
            errors=errors,
            execution_time=round(time.monotonic() - began, 6),
            scores=dict(found.scores),
            token_usage=used.total() if used else None,
            sampled_model_name=grader.model if isinstance(grader, ScoreModel | LabelModel) else None,
        ),
        sub_rewards=dict(found.scores) if isinstance(body.grader, MultiGrader) else {},
        model_grader_token_usage_per_model=dict(used),
    )


def _errors(error: GradingError) -> GraderErrors:
    details = {
        "python_grader_runtime_error": "python_grader_runtime_error_details",
        "python_grader_server_error": "python_grader_server_error_type",
        "model_grader_server_error": "model_grader_server_error_details",
    }
    said = {details[error.kind]: error.sentence} if error.kind in details else {}
    return GraderErrors.model_validate({error.kind: True, **said})
