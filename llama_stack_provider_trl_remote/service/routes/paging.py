"""Pages of lists that fit into memory: of nodes and tokens, whose number the service limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Query

from llama_stack_provider_trl.errors import InvalidRequest

MOST = 1000
Limit = Annotated[int, Query(ge=1, le=MOST, description="Entries per page")]
After = Annotated[str | None, Query(max_length=1024, description="`next` of the page before")]


def page_of[Row](
    rows: Sequence[Row], name: Callable[[Row], str], limit: int, after: str | None
) -> tuple[Sequence[Row], str | None]:
    """The rows behind the one of the name `after`, and the name to continue with; None: these are the last ones.

    Raises:
        InvalidRequest: there is no row of that name.
    """
    begin = 0
    if after is not None:
        begin = next((number for number, row in enumerate(rows, 1) if name(row) == after), 0)
        if not begin:
            raise InvalidRequest("after", after, "there is no such entry any more: begin with the first page again")
    page = rows[begin : begin + limit]
    return page, name(page[-1]) if begin + limit < len(rows) else None
