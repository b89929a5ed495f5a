"""Refuses graders that cannot be used here, before one grades an answer, and asks the models of the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, NotServed
from llama_stack_provider_trl.requests.graders import NOT_ALLOWED
from llama_stack_provider_trl.specs.grading.asking import Question, Reply, replying_of
from llama_stack_provider_trl.specs.grading.errors import GradingError
from llama_stack_provider_trl.specs.grading.graders import Grader, asking_of, field_of, problem_of, uses_python
from llama_stack_provider_trl.specs.grading.grading import questions_of, unusable_here
from llama_stack_provider_trl.specs.serving import ServeRequest
from llama_stack_provider_trl.system.offload import in_work_thread

from ..openai_settings import OpenAIModel
from ..settings import ServiceSettings
from .chats import ChatRefused, Chats


def refuse_grader(grader: Grader, settings: ServiceSettings) -> None:
    """Raises InvalidRequest: the operator has not allowed its source, or something that it needs is not here."""
    if uses_python(grader) and not settings.python_graders:
        raise InvalidRequest("grader.type", "python", NOT_ALLOWED)
    if (problem := problem_of(grader) or unusable_here(grader)) is not None:
        name, hint = problem
        raise InvalidRequest(f"grader.{name}", getattr(grader, name, grader.name), hint)


async def refuse_models(grader: Grader, chats: Chats, names: Mapping[str, OpenAIModel]) -> None:
    """Refuse models that cannot answer. Raises InvalidRequest: names the field.

    Args:
        names: of `openai.models`, with what they stand for.
    """
    for name, leaf in asking_of(grader).items():
        field = f"grader.{field_of(grader, name)}model"
        try:
            await chats.check_model(_local(leaf.model, names))
        except JobNotFound as error:
            raise InvalidRequest(field, leaf.model, str(error)) from error
        except InvalidRequest as error:
            known = f"; names of openai.models: {', '.join(names)}" if names else ""
            raise InvalidRequest(field, leaf.model, f"{error.hint}{known}") from error


async def ask(
    grader: Grader,
    text: str,
    item: Mapping[str, Any],
    chats: Chats,
    names: Mapping[str, OpenAIModel],
    caller: str,
    seconds: float,
) -> tuple[dict[str, Reply | GradingError], Counter[str]]:
    """What the models of a grader reply about an answer, by the processes that answer chats, and their tokens. Raises
    LimitReached, NotServed, OSError: nothing can answer now, or not in time. Returns replies by the names of graders,
    and tokens by those of models.

    Args:
        names: as of `refuse_models`, which has let the grader pass.
        seconds: that all replies together may take.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _asked(grader, await in_work_thread(questions_of, grader, text, item), chats, names, caller)
    except TimeoutError as error:
        raise NotServed(
            f"the models of this grader took more than {seconds:g} s (chat_timeout of the service): ask for fewer "
            "tokens, or of fewer graders at once"
        ) from error


async def _asked(
    grader: Grader,
    questions: Mapping[str, Question | GradingError],
    chats: Chats,
    names: Mapping[str, OpenAIModel],
    caller: str,
) -> tuple[dict[str, Reply | GradingError], Counter[str]]:
    replied: dict[str, Reply | GradingError] = {}
    used = Counter[str]()
    leaves = asking_of(grader)
    for name, question in questions.items():
        if isinstance(question, GradingError):
            replied[name] = question
            continue
        leaf, replying = leaves[name], replying_of(leaves[name])
        request = ServeRequest(
            messages=question.messages,
            max_tokens=replying.most,
            temperature=replying.temperature,
            top_p=replying.top_p,
            seed=question.seed,
        )
        try:
            replied[name], tokens = await chats.reply(_local(leaf.model, names), request, caller)
            used[leaf.model] += tokens
        except ChatRefused as error:
            replied[name] = GradingError("model_grader_server_error", str(error))
    return replied, used


def _local(model: str, names: Mapping[str, OpenAIModel]) -> str:
    return names[model].model if model in names else model
