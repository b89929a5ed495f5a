"""What the page of a dataset reads of its rows."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_overview
from llama_stack_provider_trl.specs.row_overview import read_overview
from llama_stack_provider_trl_remote.service.datasets.overviews import shape_of


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
