"""The playground: two models beside each other, the same prompts to both, and votes for the better answer.

A browser's session may send forms only. A chat is a field of one, in the form that the API has, and the answer is the
API's stream.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query, Request, Response
from starlette.responses import JSONResponse

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound

from ..dependencies import ChatsDep, DatasetsDep, PromptsDep, StoreDep, VotesDep
from ..http.chat_bodies import ChatBody, VoteBody
from ..http.declared_routes import Routes
from ..http.received import parse
from ..routes.openai import ChatStream
from ..security.access import USERS, USERS_CHAT_FORM, CurrentCaller, GuardedRoute
from .job_form import validated
from .login import checked_form
from .playground_view import dataset_of, job_named, models_of, names_of, training_link
from .rendering import UNCACHED, page
from .route import PageRoute

router = Routes(PageRoute, prefix="/playground", include_in_schema=False)
calls = Routes(GuardedRoute, prefix="/playground", include_in_schema=False)

_MOST_VALUES = 20_000
"""JSON values of a chat or a vote."""
_MOST_MODELS = 200
"""Names of models that the page suggests."""
_NAME = 4096
Dataset = Annotated[str, Query(max_length=512)]
Model = Annotated[str, Query(max_length=_NAME)]
Job = Annotated[str, Query(max_length=200)]


@router.get("", dependencies=[USERS])
async def playground_page(
    request: Request,
    chats: ChatsDep,
    registry: DatasetsDep,
    store: StoreDep,
    job: Job = "",
    model_a: Model = "",
    model_b: Model = "",
    dataset: Dataset = "",
    votes: Dataset = "",
) -> Response:
    """The form of a chat with two models: those that the address names, or the base and the result of its job."""
    known = [str(row["id"]) for row in await asyncio.to_thread(chats.models)][:_MOST_MODELS]
    fields = {"model_a": model_a, "model_b": model_b, "dataset": dataset, "votes": votes}
    busy = await asyncio.to_thread(chats.busy)
    is_beside = False
    if job:
        record = await asyncio.to_thread(store.get, job)
        models = models_of(record, await asyncio.to_thread(store.checkpoints, job))
        own = dataset_of(record)
        is_known = bool(own) and await asyncio.to_thread(registry.holds, own)
        first = {"model_a": models.base, "model_b": models.tuned, "dataset": own if is_known else ""}
        is_beside = bool(models.tuned) and job in busy.values()
        if is_beside:  # the base cannot answer beside its training
            first |= {"model_a": models.tuned, "model_b": ""}
        fields |= {name: value for name, value in first.items() if not fields[name]}
        known = [*dict.fromkeys([models.base, *filter(None, [models.tuned]), *models.others, *known])]
    fields["votes"] = fields["votes"] or (f"votes-{job}" if job else "votes")
    datasets = await asyncio.to_thread(registry.names)
    return page(
        request,
        "playground.html",
        job=job,
        fields=fields,
        models=known,
        datasets=datasets,
        busy=busy,
        is_beside=is_beside,
    )


@calls.post("/answers", dependencies=[USERS_CHAT_FORM])
async def answer(request: Request, chats: ChatsDep, caller: CurrentCaller) -> Response:
    """The events of an answer, as `POST /openai/v1/chat/completions` has them: its body is the field `request`."""
    body = validated(ChatBody, await _given(request, caller, "request"))
    if not body.stream:
        raise InvalidRequest("stream", body.stream, "the playground reads streams: send true")
    # As the model writes it, calls of tools included: a vote is about this text.
    return ChatStream(await chats.begin(body, caller.name, reads_calls=False))


@calls.post("/votes", dependencies=[USERS_CHAT_FORM])
async def vote(request: Request, votes: VotesDep, caller: CurrentCaller) -> Response:
    """Store a vote, the JSON of the field `vote`, as a preference pair."""
    body = validated(VoteBody, await _given(request, caller, "vote"))
    return JSONResponse({"dataset_id": body.dataset_id, "votes": await votes.add(body, caller.name)}, headers=UNCACHED)


@calls.get("/votes", dependencies=[USERS])
async def vote_count(votes: VotesDep, store: StoreDep, dataset: Dataset = "", model: Model = "") -> Response:
    """The number of votes in a dataset, and the address of the form of a DPO job on them."""
    count = await votes.count(dataset)
    job = None
    if name := job_named(model):
        with suppress(JobNotFound):
            job = await asyncio.to_thread(store.get, name)
    link = training_link(dataset, model, job)
    return JSONResponse({"dataset_id": dataset, "votes": count, "train": link}, headers=UNCACHED)


@calls.get("/prompt", dependencies=[USERS])
async def prompt(
    prompts: PromptsDep,
    store: StoreDep,
    dataset: Dataset = "",
    row: Annotated[int, Query(ge=0, le=2**53)] = 0,
    job: Job = "",
) -> Response:
    """The prompt of a row of a dataset; columns and roles have the names by which a job reads them."""
    names = names_of(await asyncio.to_thread(store.get, job), dataset) if job else None
    found = await prompts.of_row(dataset, row, names)
    tools = next((turn["tools"] for turn in found["messages"] if "tools" in turn), None)
    messages = [{name: value for name, value in turn.items() if name != "tools"} for turn in found["messages"]]
    return JSONResponse({"row": row, "messages": messages, "tools": tools}, headers=UNCACHED)


async def _given(request: Request, caller: CurrentCaller, name: str) -> Any:
    """The JSON of a field of a form of this session."""
    fields = await checked_form(request, caller)
    text = fields.get(name, "")
    if not text:
        raise InvalidRequest(name, text, "expected a JSON object: send the form from the page of the playground")
    try:
        return await asyncio.to_thread(parse, text.encode("utf-8", "replace"), _MOST_VALUES)
    except ValueError as error:
        hint = f"it is no JSON ({error}): send the form from the page of the playground"
        raise InvalidRequest(name, text[:200], hint) from error
