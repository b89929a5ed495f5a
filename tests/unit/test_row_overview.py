"""What the page of a dataset reads of its rows."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from llama_stack_provider_trl.errors import InvalidRows, LimitReached
from llama_stack_provider_trl.specs import row_overview
from llama_stack_provider_trl.specs.row_overview import (
    Overview,
    OverviewRow,
    RowPlaces,
    read_overview,
    read_rows_at,
    read_searched,
    rows_within,
    searched_within,
)
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl_remote.service.datasets import overviews
from llama_stack_provider_trl_remote.service.datasets.overviews import ListedDataset, Overviews, shape_of
from llama_stack_provider_trl_remote.service.pages import data_pages
from llama_stack_provider_trl_remote.service.security.access import CALLER, Caller


def lines(*rows: Any) -> io.BytesIO:
    return io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def test_rows_are_counted_by_length_and_by_source_and_equal_ones_are_found() -> None:
    turns = [{"role": "user", "content": "seven c"}]
    rows = [
        {"prompt": "abc", "completion": "d", "source": "web"},
        {"completion": "d", "source": "web", "prompt": "abc"},
        {"messages": turns, "source": "book", "score": None},
        {"text": "x" * 100},
    ]
    found = read_overview(lines(*rows))
    assert (found["num_rows"], found["matching"], found["is_cut"]) == (4, 4, False)
    assert found["lengths"] == [(8, 2), (16, 1), (128, 1)]
    assert (found["median"], found["longest"], found["longest_row"]) == (7, 100, 3)
    assert (found["duplicates"], found["duplicated"]) == (1, [(1, 0)]), "whatever the order of the columns is"
    assert (found["source_column"], found["sources"]) == ("source", [("web", 2), ("book", 1)])
    assert found["columns"] == {"source": 3, "prompt": 2, "completion": 2, "messages": 1, "text": 1}
    empty = read_overview(io.BytesIO())
    assert (empty["num_rows"], empty["rows"], empty["lengths"], empty["source_column"]) == (0, [], [], "")


def test_a_text_is_found_in_any_case_within_turns_and_shown_page_by_page() -> None:
    rows = [{"messages": [{"role": "user", "content": f"Straße {number}"}]} for number in range(30)]
    file = lines({"text": "other"}, *rows)
    found = read_searched(file, "STRASSE", wanted=99)
    assert (found["matching"], found["num_rows"], found["is_cut"]) == (30, 31, False)
    shown = read_rows_at(file, found["marks"][20:], "STRASSE", 20, 5)
    assert [row["number"] for row in shown] == [21, 22, 23, 24, 25]
    assert "Straße 20" in shown[0]["columns"]["messages"]
    assert read_searched(lines(*rows), "messages")["matching"] == 0, "a name of a column is no text"


@pytest.mark.parametrize(("name", "most", "step"), [("MOST_SEARCHED", 1, 1), ("MOST_SEARCHED_ROWS", 10, 10)])
def test_a_search_stops_at_a_limit_and_reads_on_from_there(
    name: str, most: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lines(*[{"text": f"{'ab'[number % 2]} {number}"} for number in range(40)])
    whole = read_searched(file, "A", wanted=99)
    monkeypatch.setattr(row_overview, name, most)
    known = None
    for end in range(step, 41, step):
        known = read_searched(file, "A", known, 99)
        assert (known["num_rows"], known["is_cut"]) == (end, end < 40)
    assert known == whole
    assert read_searched(file, "A", known, 99) == whole, "there is nothing behind the last row"
    few = read_searched(file, "A", None, 1)
    assert (few["num_rows"], few["matching"]) == (1, 1), "no further than to the wanted rows"


def test_a_long_row_is_cut_and_a_long_file_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"a": "x" * 10_000, "b": "y"}
    (shown,) = read_overview(lines(row))["rows"]
    assert shown["is_cut"]
    assert sum(map(len, shown["columns"].values())) == 4000
    monkeypatch.setattr(row_overview, "MOST_BYTES", 100)
    found = read_overview(lines(*[{"text": "x" * 40}] * 10))
    assert found["is_cut"]
    assert found["num_rows"] == 2
    many = read_overview(lines({f"column-{number}": 1 for number in range(1000)}))
    assert len(many["columns"]) == 50


def test_a_file_of_short_rows_is_read_to_a_number_of_rows_and_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": str(number)} for number in range(200)]
    monkeypatch.setattr(row_overview, "MOST_ROWS", 30)
    found = read_overview(lines(*rows))
    assert (found["num_rows"], found["matching"], found["is_cut"]) == (30, 30, True)
    monkeypatch.setattr(row_overview, "MOST_ROWS", 1000)
    monkeypatch.setattr(row_overview, "MOST_CPU_S", -1.0)
    found = read_overview(lines(*rows))
    assert (found["num_rows"], found["is_cut"]) == (64, True), "the time is looked at after 64 rows"


@pytest.mark.parametrize("search", ["", "a"])
def test_rows_of_a_further_page_are_read_from_a_mark_before_them(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_overview, "MOST_MARKS", 8)
    file = lines(*[{"text": f"{'ab'[number % 2]} {number}"} for number in range(101)])
    whole = read_overview(file, count=101)
    found: RowPlaces = read_searched(file, search, wanted=999) if search else whole
    assert len(found["marks"]) <= 8
    matching = [row for row in whole["rows"] if search in row["columns"]["text"]]
    for first in range(found["matching"]):
        assert read_rows_at(file, found["marks"], search, first, 3) == matching[first : first + 3]


class ReadHere:
    """Rows that are read in this process, and their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parsed = list[int]()
        self._parse = row_overview._parsed
        monkeypatch.setattr(row_overview, "_parsed", self._noted)
        monkeypatch.setattr(row_overview, "read_within", self._read_within)

    def _noted(self, line: bytes, number: int) -> dict[str, Any]:
        self.parsed.append(number)
        return self._parse(line, number)

    def _read_within(
        self, limits: Limited, read: Callable[..., Iterator[Any]], path: Path, *arguments: Any, **texts: str
    ) -> Any:
        self.parsed.clear()
        (found,) = read(path, *arguments)
        return found


LIMITS = Limited(20, 512 << 20)


def searched(path: Path, text: str, *numbers: int) -> RowPlaces:
    """A file of 1,000 rows, and where those with these numbers are, which have a text."""
    with open(path, "w+b") as file:
        file.write(lines(*[{"text": text if number in numbers else "-"} for number in range(1000)]).getvalue())
        file.seek(0)
        return read_searched(file, text, wanted=1000)


@pytest.mark.parametrize("most", [1024, 16])
def test_of_rare_rows_a_page_reads_its_own_alone_also_behind_many_that_are_close(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_overview, "MOST_MARKS", most)
    rare = [*range(100, 1000, 100)]
    places = searched(tmp_path / "rows", "needle", *range(20), *rare)
    assert (places["matching"], len(places["marks"]) <= most) == (29, True)
    here = ReadHere(monkeypatch)
    for first in range(9):
        found = rows_within(LIMITS, tmp_path / "rows", places, "needle", 20 + first, 5)
        assert [row["number"] for row in found] == here.parsed == rare[first : first + 5]


def test_a_page_of_rows_that_lie_far_apart_ends_early_and_the_next_one_begins_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_overview, "MOST_MARKS", 4)
    numbers = [*range(5, 1000, 45)]
    places = searched(tmp_path / "rows", "needle", *numbers)
    monkeypatch.setattr(row_overview, "MOST_SEARCHED", 60 * 100)
    here, pages = ReadHere(monkeypatch), list[list[int]]()
    while sum(map(len, pages)) < len(numbers):
        found = rows_within(LIMITS, tmp_path / "rows", places, "needle", sum(map(len, pages)), 9)
        pages.append([row["number"] for row in found])
        assert pages[-1], "each page has a row"
        assert len(here.parsed) < 1000 / 2
    assert [number for shown in pages for number in shown] == numbers
    assert len(pages[0]) < 9


class OneDataset:
    async def rows_of(self, dataset_id: str, field: str, *, is_current: bool) -> str:
        return dataset_id


class FilesByDigest:
    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        return self.root / sha256


def test_what_a_file_has_is_read_once_for_all_pages_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, str, int]] = []

    def noted(limits: Limited, path: Path, first: int, count: int) -> Overview:
        read.append((path.name, "", 0))
        with open(path, "rb") as file:
            return read_overview(file, first, count)

    def searched(limits: Limited, path: Path, search: str, known: RowPlaces | None, wanted: int) -> RowPlaces:
        read.append((path.name, search, known["num_rows"] if known else 0))
        with open(path, "rb") as file:
            return read_searched(file, search, known, wanted)

    monkeypatch.setattr(overviews, "overview_within", noted)
    monkeypatch.setattr(overviews, "searched_within", searched)
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(lines(*[{"text": f"{name} {number}"} for number in range(50)]).getvalue())
    pages = Overviews(OneDataset(), FilesByDigest(tmp_path), 512)  # type: ignore[arg-type]

    def numbers(name: str, search: str, first: int) -> tuple[list[int], int]:
        found = asyncio.run(pages.of(name, search, first, 20))
        return [row["number"] for row in found.rows], found.places["matching"]

    assert numbers("one", "", 0) == ([*range(20)], 50)
    assert numbers("one", "", 40) == ([*range(40, 50)], 50)
    assert numbers("one", "", 90) == ([], 50)
    assert numbers("one", "", 0) == ([*range(20)], 50)
    assert read == [("one", "", 0)]
    assert numbers("one", "E 4", 0) == ([4, *range(40, 50)], 11)
    assert numbers("one", "E 4", 5) == ([*range(44, 50)], 11)
    assert read[1:] == [("one", "E 4", 0)], "the whole file is known"
    assert numbers("one", "ONE", 0) == ([*range(20)], 20)
    assert numbers("one", "ONE", 20) == ([*range(20, 40)], 40)
    assert read[2:] == [("one", "ONE", 0), ("one", "ONE", 20)], "a page reads as far as its rows"
    assert numbers("two", "TWO 49", 0) == ([49], 1)
    assert read[4:] == [("two", "", 0), ("two", "TWO 49", 0)]
    monkeypatch.setattr(row_overview, "MOST_SEARCHED_ROWS", 30)
    assert numbers("two", "4", 0) == ([4, 14, 24], 3)
    assert numbers("two", "4", 0) == ([4, 14, 24, 34, *range(40, 50)], 14), "it looks further"
    monkeypatch.setattr(overviews, "_MOST_KEPT", 1)
    numbers("one", "x", 0)
    read.clear()
    numbers("two", "4", 0)
    numbers("one", "x", 0)
    assert read == [("two", "4", 0), ("one", "x", 0)], "the last one alone is kept"


class Listed(Overviews):
    """A dataset of a file, read in this process."""

    def line(self, dataset_id: str) -> ListedDataset:
        return ListedDataset(dataset_id, 60, 1000, "text", "", "", datetime.now(UTC), "")


def read_here(monkeypatch: pytest.MonkeyPatch, root: Path) -> Listed:
    ReadHere(monkeypatch)
    (root / "one").write_bytes(lines(*[{"text": f"one {number}"} for number in range(60)]).getvalue())
    return Listed(OneDataset(), FilesByDigest(root), 512)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRows("reading its rows takes more than 20 s"), 400), (LimitReached("too busy"), 429)]
)
def test_who_cannot_be_shown_rows_can_look_further_all_the_same(
    error: Exception, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> list[OverviewRow]:
        raise error

    pages = read_here(monkeypatch, tmp_path)
    monkeypatch.setattr(row_overview, "MOST_SEARCHED_ROWS", 30)
    monkeypatch.setattr(overviews, "rows_within", failing)
    app = SimpleNamespace(routes=[])
    scope = {"type": "http", "method": "GET", "path": "/data/rows", "headers": [], "app": app, CALLER: Caller(None)}
    for known, has_further in ((3, True), (15, False)):
        answer = asyncio.run(data_pages.dataset_page(Request(scope), pages, "one", "5", 0))
        text = bytes(answer.body).decode()
        assert answer.status_code == status
        assert str(error) in text.partition('role="alert"')[2].partition("</p>")[0]
        assert f"{known} rows have “5”" in text
        assert ('<a href="/data/rows?dataset=one&amp;search=5">look further</a>' in text) == has_further
        assert "There is none" not in text


def test_of_two_readers_the_one_that_has_looked_further_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, ended = read_here(monkeypatch, tmp_path), asyncio.Event()
    searches = list[int]()

    async def worked(function: Callable[..., Any], *arguments: Any) -> Any:
        found = function(*arguments)
        if function is searched_within:
            searches.append(arguments[-1])
            if len(searches) == 1:
                await ended.wait()
        return found

    monkeypatch.setattr(overviews, "in_work_thread", worked)

    async def read() -> tuple[int, int]:
        first = asyncio.create_task(pages.of("one", "one", 0, 20))
        while not searches:
            await asyncio.sleep(0)
        further = await pages.of("one", "one", 20, 20)
        ended.set()
        return (await first).places["matching"], further.places["matching"]

    assert asyncio.run(read()) == (40, 40)
    asyncio.run(pages.of("one", "one", 20, 20))
    assert searches == [20, 40], "what the second one has found is not looked for again"


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_line_that_is_no_row_is_named(line: bytes) -> None:
    with pytest.raises(InvalidRows, match="row 1"):
        read_overview(io.BytesIO(b'{"a": "b"}\n' + line))


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}, "prompt + chosen + rejected"),
        ({"prompt": "a", "completion": "b", "label": True}, "prompt + completion + label"),
        ({"messages": [], "source": "x"}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt + completion"),
        ({"prompt": "a", "completion": None}, "prompt"),
        ({"b": 1, "a": 2}, "a, b"),
        ([1], ""),
    ],
)
def test_the_shape_of_rows_is_that_of_the_first_one(row: Any, shape: str) -> None:
    assert shape_of(json.dumps(row).encode()) == shape
    assert shape_of(b'{"prompt": "cut of') == ""
