"""The pages of one job, and the forms on them."""

from __future__ import annotations

import asyncio
import shlex
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.reader import read_request, read_warnings, read_watched
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.ownership import Ownership

from ..dependencies import DigestsDep, SettingsDep, StoreDep, StoredJobsDep
from ..http.declared_routes import Routes
from ..http.errors import NotFound
from ..security.access import ADMINS_FORM, READERS, USERS_FORM, CurrentCaller
from ..views.answers import answers_of, rollouts_of
from ..views.checkpoints import list_files
from ..views.exports import exports_of, files_of_export
from ..views.logs import LAUNCHER, read_log
from ..views.samples import side_by_side
from . import job_view
from .conversation_view import exchange_of, exchanges_of
from .list_view import wait_text
from .login import checked_form, see_other
from .rendering import page
from .route import PageRoute
from .settings_view import grouped
from .trial_view import LEAST_TRIALS, MOST_COMPARED
from .trial_view import shown as trials_shown

router = Routes(PageRoute, prefix="/jobs/{job_uuid}", include_in_schema=False)

JobName = Annotated[str, Path(description="The job's name")]
_LINES, _BYTES = 200, 64 << 10
"""The end of a log on the page of its job."""
_MORE_LINES, _MORE_BYTES = 5000, 1 << 20
"""The end of a log on a page of its own."""


@router.get("", dependencies=[READERS])
async def job_page(request: Request, jobs: StoredJobsDep, store: StoreDep, job_uuid: JobName) -> Response:
    """State, attempts, curves, checkpoints, log and configuration of a job."""
    status = await asyncio.to_thread(jobs.status, job_uuid)
    warnings = await asyncio.to_thread(read_warnings, store, job_uuid)
    log = await _log(store, job_uuid, "0", None, _LINES, _BYTES)
    detail = status.resources_allocated.get("detail") or ""
    if status.resources_allocated["state"] == JobState.scheduled:
        detail = wait_text(await asyncio.to_thread(jobs.start, job_uuid), detail, datetime.now(UTC))
    exports = await asyncio.to_thread(exports_of, store, status)
    files = await asyncio.to_thread(files_of_export, status)
    url = str(request.base_url).rstrip("/")
    requested = await asyncio.to_thread(read_request, store, job_uuid)
    eval_loss = await asyncio.to_thread(last_eval_loss, store, job_uuid)
    # In a thread: it writes YAML, which takes time.
    values = await asyncio.to_thread(job_view.values, status, warnings, exports, files, url, requested, eval_loss)
    chosen, default = grouped(job_view.settings_of(status.resources_allocated["effective_config"]))
    values["detail"] = job_view.linked(detail)
    return page(request, "job.html", log=log, settings=chosen, defaults=default, **values)


@router.get("/logs", dependencies=[READERS])
async def log_page(
    request: Request,
    jobs: StoredJobsDep,
    store: StoreDep,
    job_uuid: JobName,
    rank: Annotated[str, Query(pattern=rf"^(\d{{1,4}}|{LAUNCHER})$")] = "0",
    attempt: Annotated[int | None, Query(ge=1, le=10**6)] = None,
) -> Response:
    """The end of a log."""
    status = await asyncio.to_thread(jobs.status, job_uuid)
    log = await _log(store, job_uuid, rank, attempt, _MORE_LINES, _MORE_BYTES)
    attempts = [tried["attempt"] for tried in status.resources_allocated["attempts"]]
    ranks = job_view.logs_of(status)
    values: dict[str, Any] = {"job_uuid": job_uuid, "rank": rank, "attempt": attempt or max(attempts, default=1)}
    values |= {"state": status.resources_allocated["state"], "most": _MORE_BYTES}
    values["followed"] = not status.resources_allocated.get("search")
    return page(request, "log.html", log=log, attempts=attempts, ranks=ranks, **values)


@router.get("/samples", dependencies=[READERS])
async def samples_page(
    request: Request,
    store: StoreDep,
    settings: SettingsDep,
    job_uuid: JobName,
    skip: Annotated[int, Query(ge=0, le=2**53)] = 0,
    sets: Annotated[int, Query(ge=0, le=10**6)] = 0,
) -> Response:
    """The model's answers to the job's prompts, side by side, and those that train it or that it makes."""
    found = await asyncio.to_thread(side_by_side, store, job_uuid, sets)
    shown = await asyncio.to_thread(_conversations, store, Ownership(settings.data_dir), job_uuid, skip)
    return page(request, "samples.html", job_uuid=job_uuid, path=job_view.path_of(job_uuid), found=found, **shown)


@router.get("/trials", dependencies=[READERS])
async def trials_page(
    request: Request,
    jobs: StoredJobsDep,
    job_uuid: JobName,
    sort: Annotated[str, Query(max_length=300)] = "",
) -> Response:
    """The trials of a search."""
    status = await asyncio.to_thread(jobs.status, job_uuid)
    search = status.resources_allocated.get("search")
    if not search:
        raise NotFound(f"job {job_uuid!r} is no search: its page has its curves and its result")
    return page(
        request,
        "trials.html",
        job_uuid=job_uuid,
        path=job_view.path_of(job_uuid),
        state=status.resources_allocated["state"],
        search=search,
        shown=await asyncio.to_thread(trials_shown, job_uuid, search, sort),
        least=LEAST_TRIALS,
        most=MOST_COMPARED,
    )


@router.get("/checkpoints/{identifier:path}", dependencies=[READERS])
async def checkpoint_page(
    request: Request, store: StoreDep, digests: DigestsDep, job_uuid: JobName, identifier: str
) -> Response:
    """The files of a checkpoint. As with the API, the first call computes their digests."""
    loop = asyncio.get_running_loop()
    arguments = (store, digests, job_uuid, identifier)
    found = await loop.run_in_executor(digests.threads, list_files, *arguments)
    pull = job_view.pull_command(job_uuid, found.identifier, str(request.base_url).rstrip("/"))
    return page(request, "checkpoint.html", job_uuid=job_uuid, checkpoint=found, pull=pull)


@router.post("/cancel", dependencies=[USERS_FORM])
async def cancel(request: Request, jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobName) -> Response:
    """End the job."""
    await checked_form(request, caller)
    await jobs.cancel(job_uuid, caller.name)
    return see_other(job_view.path_of(job_uuid))


@router.post("/pause", dependencies=[USERS_FORM])
async def pause(request: Request, jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobName) -> Response:
    """Have the job save and free its device."""
    await checked_form(request, caller)
    await jobs.pause(job_uuid, caller.name)
    return see_other(job_view.path_of(job_uuid))


@router.post("/resume", dependencies=[USERS_FORM])
async def resume(request: Request, jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobName) -> Response:
    """Queue the paused job again."""
    await checked_form(request, caller)
    await jobs.resume(job_uuid)
    return see_other(job_view.path_of(job_uuid))


@router.post("/delete", dependencies=[ADMINS_FORM])
async def delete(request: Request, jobs: StoredJobsDep, caller: CurrentCaller, job_uuid: JobName) -> Response:
    """Delete the job, and its checkpoints where the box is ticked."""
    fields = await checked_form(request, caller)
    await asyncio.to_thread(jobs.delete, job_uuid, fields.get("checkpoints") == "yes")
    return see_other("/")


def last_eval_loss(store: Store, job_uuid: str) -> float | None:
    """Of the last evaluation; None: there is none."""
    found = read_watched(store, job_uuid).evaluations
    return found[-1].metrics.get("eval_loss") if found else None


def _conversations(store: Store, ownership: Ownership, job_uuid: str, skip: int) -> dict[str, Any]:
    """Answers under their prompts: of a generate job or an evaluation those that it makes, else those that train the
    model."""
    job = store.get(job_uuid)
    answers = answers_of(ownership, job, skip)
    values: dict[str, Any] = {"answers": answers, "rollouts": None, "skip": skip, "exchanges": []}
    values["makes_answers"] = job.spec.does.answering is not None
    values["command"] = shlex.join(("trl-remote", "jobs", "answers", "--", job_uuid))
    if answers is not None:
        return values | {"exchanges": exchanges_of(answers.data)}
    rollouts = rollouts_of(store, job_uuid, skip)
    return values | {"rollouts": rollouts, "exchanges": [exchange_of(one) for one in rollouts.data]}


async def _log(store: Store, job_uuid: str, rank: str, attempt: int | None, lines: int, size: int) -> str:
    """The end of a log; where there is none, the reason."""
    try:
        text = await asyncio.to_thread(read_log, store, job_uuid, rank, lines, attempt, size)
    except NotFound as error:
        return f"({error})"
    return job_view.shortened(text) or "(it is empty)"
