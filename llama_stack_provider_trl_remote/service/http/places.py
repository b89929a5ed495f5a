"""Where an entry stands in a list: what a page's `next` names, and what the next page begins behind."""

from __future__ import annotations

from typing import NamedTuple

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
