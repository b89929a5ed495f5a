"""Rows in files of users and of the service: one reader for both."""

from __future__ import annotations

import bz2
import gzip
import io
import json
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
        (".jsonl", '\n \n{"a": "1", "b": "ä"}\n\ufeff{"a": "2"}\n'),
        (".json", '{"data": [{"a": "1", "b": "ä"}, {"a": "2"}]}'),
        (".json", '{\n "train": [\n  {"a": "1", "b": "ä"},\n  {"a": "2"}\n ]\n}\n'),
        (".json", '\n\n{"a": "1", "b": "ä"}\n\n{"a": "2"}'),
        (".csv", "\n  \n,,\na,b\n1,ä\n\n , \n2,\n"),
        (".csv", "sep=,\na,b\n1,ä\n2\n"),
        (".csv", '"SEP=;"\r\n\r\na;b\r\n1;"ä"\r\n2;;\r\n'),
        (".csv", "sep=\t\na\tb\n1\tä\n2\t\n"),
        (".csv", "a,b\r1,ä\r2,\r"),
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
        (
            ".csv",
            b'a,b\n1,2\n"1,2\n3,4\n',
            "row 1: is not CSV in the line 3 where it begins (unexpected end of data): close",
        ),
        (".csv", b'a,b\n\n1,2\n"1" x,2\n', "row 1: is not CSV in the line 4 where it begins (',' expected after '\"')"),
        (".csv", b'a,"b\n1,2\n', "the header is not CSV in the line 1 where it begins"),
        (".csv", b"a,b\n1,2\n1,\xff\n", "the file is not UTF-8 text in line 3: save it as UTF-8"),
        (
            ".csv",
            b"sep=;\na;b\n1;2;3\n",
            "row 0: has more cells in line 3 than the header's 2 columns: put a cell that c",
        ),
        (
            ".csv",
            b"a;b\n1,5;2\n",
            "the header's 1 columns, whose cells are separated by ';': separate all by ',', or beg",
        ),
        (
            ".jsonl",
            b'{"a": 1},\n{"a": 2}\n',
            "row 0: is not JSON in line 1 (Extra data (a comma follows the last value",
        ),
        (
            ".jsonl",
            b'{"a": 1,}\n',
            "(a comma follows the last value: leave it out) at character …); expected one object",
        ),
        (".jsonl", b'{"a": 1}{"a": 2}\n', "(further values follow: write one per line, or a list of them)"),
        (".jsonl", b"{'a': 1}\n", '(other quotes than ": write it with json.dumps)'),
        (".jsonl", b'{"a": True}\n', "(True is not JSON: write true, false or null, or text in quotes)"),
        (".jsonl", b'{"a": 1} // one\n', "is not JSON in line 1 (Extra data (JSON has no comments)"),
        (".jsonl", b'{"a": /* one */ 1}\n', "(JSON has no comments)"),
        (".jsonl", b'{"a": "b\tc"}\n', "(a line end or tab within text: write it as \\n or \\t)"),
        (".jsonl", b'{"a": "C:\\data"}\n', "(write a backslash within text twice)"),
        (
            ".jsonl",
            b'{\n "a": 1\n}\n',
            "row 0: is not JSON in line 1 (Expecting property name enclosed in double quotes (it is c",
        ),
        (
            ".jsonl",
            b'{"a": 1}\n{"a": "b\n',
            "row 1: is not JSON in line 2 (Unterminated string starting at (it is cut off, or",
        ),
        (
            ".jsonl",
            b'[\n{"a": 1},\n{"a": 2}\n]',
            "the file is a JSON list, expected one object per line: give it a name",
        ),
        (
            ".json",
            b'[{"a": 1}, {"a": 2},]',
            "the file is not JSON (…(a comma follows the last value: leave it",
        ),
        (
            ".json",
            b'{"data": [{"a": 1},]}',
            "row 0: is not JSON in line 1 (…(a comma follows the last value",
        ),
        (
            ".json",
            b'{\n"data": [\n{"a": 1},\n]}',
            "the file is not JSON (…(a comma follows the last value",
        ),
        (".json", b'{"data": [{"a": 1}], "data": []}', "row 0: in line 1 the key 'data' is there twice"),
        (".json", b'{\n"data": [], "data": []}', "in the file the key 'data' is there twice"),
        (
            ".json",
            b'{"train": [{"a": 1}], "test": [{"a": 2}]}',
            "the file has lists of rows under 'train', 'test': wri",
        ),
        (
            ".json",
            b'{"prompt": {"0": "a"}, "completion": {"0": "b"}}',
            "the file is a table by its columns, expected a",
        ),
        (".json", b'{"prompt": ["a", "b"], "id": [1, 2]}', "write it with to_json(orient='records', lines=True)"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(ending: str, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRows) as caught:
        rows(ending, content)
    for part in message.split("…"):  # Python 3.13 has other words and another place for a comma behind the last value
        assert part in str(caught.value)


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


@pytest.mark.parametrize(
    "document",
    [
        {"messages": [{"content": "a"}]},
        {"prompt": "a", "tags": [{"name": "b"}]},
        {"id": "a", "scores": [1, 2]},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"data": []},
        {},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_file_with_one_object_is_one_row(document: Row, indent: int | None) -> None:
    assert rows(".json", json.dumps(document, indent=indent).encode()) == [document]


def test_a_json_file_with_a_long_line_of_rows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LINE_BYTES", 40)
    assert rows(".json", json.dumps({"data": [{"a": "1"}] * 9}).encode()) == [{"a": "1"}] * 9


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json", ".csv"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_an_encoding_without_a_mark_is_named(ending: str, encoding: str) -> None:
    text = "prompt,completion\n日本,ä\n" if ending == ".csv" else '{"prompt": "日本", "completion": "ä"}\n'
    if ending == ".json" and encoding.endswith("be"):
        text = f"[{text}]"
    message = f"the file cannot be read: it is {encoding[:6].upper()} text without a byte order mark, expected UTF-8"
    with pytest.raises(InvalidRows, match=message):
        rows(ending, text.encode(encoding))


def test_a_batch_of_arrow_with_values_that_python_lacks_keeps_its_rows() -> None:
    pa = pytest.importorskip("pyarrow")
    late = pa.array([1, 10**14], type=pa.int64()).cast(pa.timestamp("s"))
    bytes_of_text = pa.array([b"ok", b"\xff"], type=pa.binary()).cast(pa.string(), safe=False)
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), late, bytes_of_text], names=["text", "at", "raw"])
    first, second = row_files.rows_of_batch(batch)
    assert (first["text"], first["at"].year, first["raw"]) == ("a", 1970, "ok")
    assert second["text"] == "b"
    assert [*second["at"]] == ["timestamp"]
    assert [*second["raw"]] == ["binary"]


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
