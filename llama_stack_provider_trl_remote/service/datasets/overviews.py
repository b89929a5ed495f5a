"""What registered datasets have: their rows, lengths, duplicates and sources, and the lines of their list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, LimitReached, StoreError
from llama_stack_provider_trl.specs.row_files import parse_line
from llama_stack_provider_trl.specs.row_overview import (
    Overview,
    OverviewRow,
    RowPlaces,
    overview_within,
    rows_within,
    searched_within,
)
from llama_stack_provider_trl.specs.rows import ROW_SHAPES
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl.system.offload import in_work_thread

from ..http.dataset_bodies import UriSource
from ..http.errors import NotFound
from .blobs import Blobs
from .registry import DatasetRegistry, Entry

_SECONDS = 20
"""CPU time that reading the beginning of a file may take: it stops by itself before, at `row_overview.MOST_CPU_S`."""
_MOST_KEPT = 16
"""Overviews that are kept, and searches: each has up to 1,024 places in its file, 0.3 MiB."""
_FIRST_LINE = 256 << 10
"""Bytes of a file whose first row has its shape."""


class ListedDataset(NamedTuple):
    """A line of the list of datasets."""

    dataset_id: str
    num_rows: int | None
    """None: a uri that no job has needed yet."""
    size: int | None
    """Bytes; None: its rows are not stored here."""
    shape: str
    """Columns by which its first row is read; empty: not known."""
    uri: str
    """Empty: its rows were uploaded."""
    created_by: str
    registered_at: datetime
    job_uuid: str
    """The job that has made it; empty: none has."""


class SeenRows(NamedTuple):
    """Some rows of a dataset, and what it has."""

    overview: Overview
    """Without rows."""
    places: RowPlaces
    """Of all rows, or of those with the text that was looked for, as far as was looked."""
    rows: list[OverviewRow]
    problem: LimitReached | OSError | InvalidRows | None = None
    """Why there are none, though it is known where they are."""


class Overviews:
    """Reads datasets for pages. What a file has is kept for further pages, and so is where it has a text: rows do not
    change under a digest, and to read 64 MiB for each page takes the CPU time of a token after a few.

    Args:
        memory_mb: MiB that reading a file may take.
    """

    def __init__(self, registry: DatasetRegistry, blobs: Blobs, memory_mb: int) -> None:
        self._registry, self._blobs = registry, blobs
        self._limits = Limited(_SECONDS, memory_mb << 20)
        self._kept: OrderedDict[str, Overview] = OrderedDict()
        """By the digest of rows, without rows; here and below the one that was used last is last. The event loop alone
        changes them."""
        self._searched: OrderedDict[tuple[str, str], RowPlaces] = OrderedDict()
        """By the digest of rows and the text."""

    def listed(self, first: int, count: int, search: str = "") -> tuple[list[ListedDataset], int]:
        """A part of the datasets, the newest ones first, and how many there are. Raises StoreError.

        Args:
            search: only those with this text in their names, in any case; empty: all.
        """
        wanted = search.casefold()
        places = [one for one in reversed(self._registry.places("")) if wanted in one.name.casefold()]
        found = []
        for place in places[first : first + count]:
            try:
                found.append(self.line(place.name))
            except NotFound:  # deleted meanwhile
                continue
        return found, len(places)

    def line(self, dataset_id: str) -> ListedDataset:
        """The line of a dataset. Raises NotFound, StoreError."""
        return self._line(self._registry.entry(dataset_id))

    def _line(self, entry: Entry) -> ListedDataset:
        size, shape = None, ""
        if entry.sha256 is not None:
            try:
                path = self._blobs.path(entry.sha256)
                size = path.stat().st_size
                with open(path, "rb") as file:
                    shape = shape_of(file.readline(_FIRST_LINE))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(f"the rows of dataset {entry.dataset.identifier!r} cannot be read: {error}") from error
        source = entry.dataset.source
        return ListedDataset(
            entry.dataset.identifier,
            entry.num_rows,
            size,
            shape,
            source.uri if isinstance(source, UriSource) else "",
            entry.created_by,
            datetime.fromtimestamp(entry.registered_at, UTC),
            str(entry.dataset.metadata.get("job_uuid") or ""),
        )

    async def of(self, dataset_id: str, search: str, first: int, count: int) -> SeenRows:
        """What a dataset has, and some of its rows: see `overview_within`. A search reads on from where the last one
        for the same text has stopped, as far as the wanted rows, and at most `MOST_SEARCHED`.

        Args:
            search: only rows with this text, in any case, are shown; empty: all.
            first: of them, from 0.

        Raises:
            InvalidRequest: there is no such dataset, or it cannot be read any more.
            InvalidRows, LimitReached, OSError: see `overview_within`. Where these come from the shown rows alone, they
                are their problem.
        """
        sha256 = await self._registry.rows_of(dataset_id, "dataset", is_current=False)
        path, limits = self._blobs.path(sha256), self._limits
        try:
            overview = _found(self._kept, sha256)
            if overview is None:
                read: Overview = await in_work_thread(overview_within, limits, path, 0 if search else first, count)
                overview = {**read, "rows": []}
                overview = _keep(self._kept, sha256, overview)
                if not search:
                    return SeenRows(overview, overview, read["rows"])
            places: RowPlaces = overview
            if search:
                known, wanted = _found(self._searched, (sha256, search)), first + count
                if known is None or (known["is_cut"] and known["matching"] < wanted):
                    places = await in_work_thread(searched_within, limits, path, search, known, wanted)
                    places = _keep(self._searched, (sha256, search), places)
                else:
                    places = known
            try:
                rows = await in_work_thread(rows_within, limits, path, places, search, first, count)
            except FileNotFoundError:
                raise
            except InvalidRows as error:
                return SeenRows(overview, places, [], _named(dataset_id, error))
            except (LimitReached, OSError) as error:
                return SeenRows(overview, places, [], error)
            return SeenRows(overview, places, rows)
        except FileNotFoundError as error:
            raise InvalidRequest("dataset", dataset_id, "its rows are gone: register it again") from error
        except InvalidRows as error:
            raise _named(dataset_id, error) from error


def _named(dataset_id: str, error: InvalidRows) -> InvalidRows:
    return InvalidRows(f"dataset {dataset_id!r}, {error}")


def _found[Key, Value](kept: OrderedDict[Key, Value], key: Key) -> Value | None:
    """What is kept under a key, which is then the last one."""
    if key not in kept:
        return None
    kept.move_to_end(key)
    return kept[key]


def _keep[Key, Value: RowPlaces](kept: OrderedDict[Key, Value], key: Key, value: Value) -> Value:
    """Keeps what was read, or what another reader has kept meanwhile where it reaches further. Returns what is kept."""
    before = kept.pop(key, None)
    found = value if before is None or before["num_bytes"] <= value["num_bytes"] else before
    kept[key] = found
    while len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
    return found


def shape_of(line: bytes) -> str:
    """The columns by which a row is read, such as `prompt + chosen + rejected`; of another row all of its columns.
    Empty: it is very long, or no row."""
    try:
        row = parse_line(line.decode())
    except (ValueError, RecursionError):
        return ""
    if not isinstance(row, dict):
        return ""
    columns = {name for name, value in row.items() if value is not None}
    return _shape(sorted(columns))


def _shape(columns: Sequence[str]) -> str:
    # Pairs first: they have columns that shapes of single answers have, too.
    uses = ("dpo", "kto", "sft", "prompts")
    shapes = sorted(ROW_SHAPES, key=lambda shape: uses.index(shape.use) if shape.use in uses else len(uses))
    fitting = next((shape for shape in shapes if {*shape.columns} <= {*columns}), None)
    return fitting.name if fitting is not None else ", ".join(columns)[:200]
