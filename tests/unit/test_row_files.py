"""Rows in files of users and of the service: one reader for both."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.specs.row_files import ROW_READERS, Row, read_ndjson

BOM = b"\xef\xbb\xbf"
ROWS = [{"a": "1", "b": "ä"}, {"a": "2"}]


def rows(ending: str, content: bytes) -> list[Row]:
    return list(ROW_READERS[ending](io.BytesIO(content)))


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        (".jsonl", '{"a": "1", "b": "ä"}\n\n{"a": "2"}\n'),
        (".ndjson", '{"a": "1", "b": "ä"}\r\n{"a": "2"}'),
        (".json", ' [{"a": "1", "b": "ä"},\n {"a": "2"}]'),
        (".json", '{"a": "1", "b": "ä"}\n{"a": "2"}\n'),
        (".csv", "a,b\r\n1,ä\r\n2,\r\n"),
    ],
)
@pytest.mark.parametrize("begin", [b"", BOM], ids=["plain", "byte order mark"])
def test_the_same_rows_are_read_from_every_kind_of_file(ending: str, content: str, begin: bytes) -> None:
    assert rows(ending, begin + content.encode()) == ROWS


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        (".jsonl", b'{"a": 1}\n\n{"a"\n', "row 1: is not JSON in line 3"),
        (".jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "row 1: is not UTF-8 text in line 2"),
        (".jsonl", b"[" * 100_000, "row 0: is nested too deeply in line 1: flatten it"),
        (".json", b"[" * 100_000, "the file is nested too deeply"),
        (".jsonl", b'[{"a": 1},{"a": 2}]', "the file is a JSON list, expected one object per line: give it a name"),
        (".json", b'[{"a": 1}', "the file is not JSON"),
        (".csv", b"a,b\n1,2\n1,2,3\n", "row 1: has more cells in line 3 than the header's 2 columns"),
        (".csv", b'a,b\n1,"2\n', "the file is not CSV after line"),
        (".csv", b"a,b\n1,\xff\n", "the file is not UTF-8 text"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(ending: str, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRows) as caught:
        rows(ending, content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "run `git lfs pull`"),
        (gzip.compress(b'{"a": 1}'), "compressed by gzip"),
        (bz2.compress(b'{"a": 1}'), "compressed by bzip2"),
        (lzma.compress(b'{"a": 1}'), "compressed by xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd"),
        (b"PK\x03\x04\x14\x00", "a zip archive or a spreadsheet"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"ARROW1\x00\x00", "an Arrow file"),
        (b"SQLite format 3\x00", "a SQLite database"),
        (b"\xef\xbb\xbf <!DOCTYPE html><title>404</title>", "a web page"),
        (b"<html lang='en'>", "a web page"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json", ".csv"])
def test_a_file_of_another_kind_is_named(ending: str, content: bytes, what: str) -> None:
    with pytest.raises(InvalidRows, match=f"the file is .*{re.escape(what)}"):
        rows(ending, content)


@pytest.mark.parametrize(("ending", "line"), [(".jsonl", b'"%s"\n'), (".csv", b"a\n%s\n")])
def test_a_row_that_is_too_long_is_refused_before_it_is_held(
    monkeypatch: pytest.MonkeyPatch, ending: str, line: bytes
) -> None:
    monkeypatch.setattr(row_files, "LINE_BYTES", 100)
    with pytest.raises(InvalidRows, match="a row may have at most that"):
        rows(ending, line % (b"x" * 101))


def test_a_blank_line_among_stored_rows_is_refused() -> None:
    with pytest.raises(InvalidRows, match="row 1: is not JSON in line 2"):
        list(read_ndjson(io.BytesIO(b'{"a": 1}\n\n{"a": 2}\n')))


def test_a_file_is_still_open_after_its_rows_were_read() -> None:
    file = io.BytesIO(b"a\n1\n")
    assert list(ROW_READERS[".csv"](file)) == [{"a": "1"}]
    assert not file.closed
