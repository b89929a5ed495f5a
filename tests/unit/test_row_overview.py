"""What the page of a dataset reads of its rows."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_overview
from llama_stack_provider_trl.specs.row_overview import Overview, read_overview, read_rows_at
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl_remote.service.datasets import overviews
from llama_stack_provider_trl_remote.service.datasets.overviews import Overviews, shape_of


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
    found = read_overview(lines({"text": "other"}, *rows), "STRASSE", 20, 5)
    assert found["matching"] == 30
    assert [row["number"] for row in found["rows"]] == [21, 22, 23, 24, 25]
    assert "Straße 20" in found["rows"][0]["columns"]["messages"]
    assert read_overview(lines(*rows), "messages")["matching"] == 0, "a name of a column is no text"


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
    found = read_overview(file, search)
    assert len(found["marks"]) <= 8
    for first in range(found["matching"]):
        file.seek(0)
        expected = read_overview(file, search, first, 3)["rows"]
        mark = found["marks"][first // found["stride"]]
        file.seek(mark["offset"])
        assert read_rows_at(file, mark["number"], search, first % found["stride"], 3) == expected


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
    read: list[tuple[str, str]] = []

    def noted(limits: Limited, path: Path, search: str, first: int, count: int) -> Overview:
        read.append((path.name, search))
        with open(path, "rb") as file:
            return read_overview(file, search, first, count)

    monkeypatch.setattr(overviews, "overview_within", noted)
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(lines(*[{"text": f"{name} {number}"} for number in range(50)]).getvalue())
    pages = Overviews(OneDataset(), FilesByDigest(tmp_path), 512)  # type: ignore[arg-type]

    def numbers(name: str, search: str, first: int) -> tuple[list[int], int]:
        found = asyncio.run(pages.of(name, search, first, 20))
        return [row["number"] for row in found["rows"]], found["matching"]

    assert numbers("one", "", 0) == ([*range(20)], 50)
    assert numbers("one", "", 40) == ([*range(40, 50)], 50)
    assert numbers("one", "", 90) == ([], 50)
    assert numbers("one", "", 0) == ([*range(20)], 50)
    assert read == [("one", "")]
    assert numbers("one", "E 4", 0) == ([4, *range(40, 50)], 11)
    assert numbers("one", "E 4", 5) == ([*range(44, 50)], 11)
    assert numbers("two", "", 20) == ([*range(20, 40)], 50)
    assert read == [("one", ""), ("one", "E 4"), ("two", "")]
    monkeypatch.setattr(overviews, "_MOST_KEPT", 1)
    numbers("one", "x", 0)
    numbers("one", "", 0)
    assert read[3:] == [("one", "x"), ("one", "")], "the last one alone is kept"


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
