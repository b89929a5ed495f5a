"""The page of answers: what jobs have answered to rows, with the checks that each answer passes, beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request, Response

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.offload import in_work_thread
from llama_stack_provider_trl.system.ownership import Ownership

from ..dependencies import DigestsDep, SettingsDep, StoreDep
from ..http.declared_routes import Routes
from ..http.errors import Conflict, NotFound
from ..security.access import READERS
from ..views.answers import MOST_ANSWERS, MOST_BYTES, AnsweredRow, Wanted, find_answers, read_rows
from ..views.checkpoints import Digests, Opener
from .conversation_view import beside
from .rendering import address, page
from .route import PageRoute

router = Routes(PageRoute, prefix="/answers", include_in_schema=False)

_ROWS = 20
"""Rows of a page."""
_WANTED: dict[Wanted, str] = {"all": "all", "failed": "with a failed check", "differ": "where the jobs differ"}


@router.get("", dependencies=[READERS])
async def answers_page(
    request: Request,
    store: StoreDep,
    digests: DigestsDep,
    settings: SettingsDep,
    job: Annotated[list[str] | None, Query(max_length=20)] = None,
    first: Annotated[int, Query(ge=0, le=10**7)] = 0,
    show: Wanted = "all",
) -> Response:
    """Rows with the answers of one job, or of several beside each other."""
    names = [*dict.fromkeys(name.strip() for name in job or () if name.strip())]
    if len(names) > MOST_ANSWERS:
        raise InvalidRequest("job", len(names), f"the page shows the answers of at most {MOST_ANSWERS} jobs at a time")
    ownership = Ownership(settings.data_dir)
    files: list[tuple[Opener, int] | None] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            files.append(await asyncio.to_thread(_file_of, ownership, store, digests, name))
        except (NotFound, Conflict) as error:
            files.append(None)
            missing[name] = str(error)
    found = await in_work_thread(partial(read_rows, files, first, _ROWS, show))
    results = {name: await asyncio.to_thread(_result_of, store, name) for name in names}
    values: dict[str, Any] = {
        "jobs": names,
        "most": MOST_ANSWERS,
        "found": found,
        "missing": missing,
        "first": first,
        "show": show,
        "wanted": _WANTED,
        "results": results,
        "measures": [*dict.fromkeys(measure for one in results.values() for measure in one)],
        "mib": MOST_BYTES >> 20,
        "older": _address(names, max(0, first - _ROWS), show) if first else "",
        "newer": _address(names, first + _ROWS, show) if found.has_more else "",
        "address": partial(_address, names, 0),
    }
    # In a thread: 8 MiB of answers take a while, and other requests wait for what runs on the event loop.
    return await asyncio.to_thread(_rendered, request, found.rows, values)


def _rendered(request: Request, rows: Sequence[AnsweredRow], values: dict[str, Any]) -> Response:
    return page(request, "answers.html", rows=[beside(row) for row in rows], **values)


def _file_of(ownership: Ownership, store: Store, digests: Digests, name: str) -> tuple[Opener, int]:
    """Raises JobNotFound, NotFound, Conflict."""
    opener, size, _ = find_answers(ownership, store, digests, name)
    return opener, size


def _result_of(store: Store, name: str) -> dict[str, Any]:
    """The shares that the checks of a job have found, by name."""
    result = store.get(name).result or {}
    found = {"passed": result.get("passed"), **(result.get("checks") or {})}
    return {measure: share for measure, share in found.items() if isinstance(share, int | float)}


def _address(names: list[str], first: int, show: str) -> str:
    pairs = [*(("job", name) for name in names), ("first", str(first or "")), ("show", "" if show == "all" else show)]
    return address("/answers", pairs)
