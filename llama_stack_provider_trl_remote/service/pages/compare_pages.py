"""The page that compares jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse

from ..dependencies import StoreDep, StoredJobsDep
from ..http.declared_routes import Routes
from ..jobs.stored_jobs import StoredJobs
from ..security.access import READERS
from . import compare_view
from .compare_view import ComparedRun, answers_link, compared, in_order, measured
from .job_pages import last_eval_loss
from .job_view import settings_of
from .rendering import page
from .route import PageRoute
from .settings_view import in_groups

router = Routes(PageRoute, prefix="/compare", include_in_schema=False)

MOST = 8
"""Jobs at a time: charts have so many colours."""

_LONG = 12
"""Settings that differ from which on they are folded: the curves would be below the first screen."""


@router.get("", dependencies=[READERS])
async def compare_page(
    request: Request,
    stored: StoredJobsDep,
    store: StoreDep,
    job: Annotated[list[str] | None, Query(max_length=100)] = None,
    hide: Annotated[list[str] | None, Query(max_length=100)] = None,
    sort: Annotated[compare_view.Order, Query()] = "",
) -> Response:
    """Curves of several jobs over each other, and the difference of their configurations."""
    names = [*dict.fromkeys(name.strip() for name in job or () if name.strip())]
    if len(names) > MOST:
        raise InvalidRequest("job", len(names), f"compare at most {MOST} jobs at a time")
    jobs = await asyncio.to_thread(_statuses, stored, names)
    settings = compared([settings_of(one.resources_allocated["effective_config"]) for one in jobs])
    evaluated = await asyncio.to_thread(lambda: [last_eval_loss(store, name) for name in names])
    runs = [
        ComparedRun.of(one.job_uuid, one.resources_allocated, loss) for one, loss in zip(jobs, evaluated, strict=True)
    ]
    values: dict[str, Any] = {
        "jobs": jobs,
        "query": compare_view.ComparedQuery(tuple(names), frozenset(hide or ()), sort),
        "runs": in_order(runs, sort),
        "columns": compare_view.COLUMNS,
        "numbers": compare_view.NUMBERS,
        "has_curves": any(run.loss is not None or run.rate is not None for run in runs),
        "measured": measured([one.resources_allocated for one in jobs]),
        "answers": answers_link(
            [one.job_uuid for one in jobs if (one.resources_allocated.get("result") or {}).get("answers")]
        ),
        "most": MOST,
        "different": in_groups(differing := [one for one in settings if one.differs]),
        "folded": len(differing) > _LONG,
        "same": in_groups(one for one in settings if not one.differs),
        # Pairs: keys of an object have no order of their own, and colours follow that of the table.
        "followed": [[one.job_uuid, JobState(one.resources_allocated["state"]) not in TERMINAL] for one in jobs],
    }
    return page(request, "compare.html", **values)


def _statuses(stored: StoredJobs, names: list[str]) -> list[PostTrainingJobStatusResponse]:
    return [stored.status(name) for name in names]
