"""Pages of lists that fit into memory: of nodes and tokens, whose number the service limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Query

from ..http.places import ListPlace

MOST = 1000
Limit = Annotated[int, Query(ge=1, le=MOST, description="Entries per page")]
After = Annotated[str | None, Query(max_length=1024, description="`next` of the page before")]


def page_of[Row](
    rows: Sequence[Row], place: Callable[[Row], ListPlace], limit: int, after: str | None
) -> tuple[Sequence[Row], str | None]:
    """The rows behind the place that `after` names, by place, and the cursor to continue with; None: these are the last
    ones. The row that had the place may be deleted meanwhile. Raises InvalidRequest: `after` is no cursor."""
    begin = None if after is None else ListPlace.of_cursor(after)
    rows = sorted((row for row in rows if begin is None or place(row) > begin), key=place)
    page = rows[:limit]
    return page, place(page[-1]).cursor if limit < len(rows) else None
