"""Where an entry stands in a list: what a page's `next` names, and what the next page begins behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

from fastapi import Query

from llama_stack_provider_trl.errors import InvalidRequest


class ListPlace(NamedTuple):
    """The place of an entry in a list: by a number, then by name."""

    order: float
    name: str

    @property
    def cursor(self) -> str:
        """The place as text. It leads to what follows the entry, even if that is deleted meanwhile."""
        return f"{self.order!r}~{self.name}"

    @classmethod
    def of_cursor(cls, text: str) -> ListPlace:
        """Raises InvalidRequest: it is no cursor."""
        order, separator, name = text.partition("~")
        try:
            if separator:
                return cls(float(order), name)
        except ValueError:
            pass
        raise InvalidRequest("after", text, "expected `next` of the page before, or nothing for the first page")


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
