"""Files of rows that commands and `TrlClient` take: compressed ones, and Parquet."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.row_files import ROW_READERS, ending_of, stem_of
from llama_stack_provider_trl_remote.row_files import name_by_content, read_row_file, stored_rows

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROWS = [{"prompt": f"{number} + 1 =", "completion": f"{number + 1}"} for number in range(700)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    packed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    return packed


def parquet_file(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


FILES = {"rows.jsonl": TEXT, "rows.jsonl.gz": gzip.compress(TEXT), "rows.ndjson.zst": zstd(TEXT)} | {
    "rows.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "Rows.PARQUET": parquet_file(ROWS),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_rows_have_one_digest_and_name_whatever_their_file(tmp_path: Path, name: str) -> None:
    path, plain = tmp_path / name, tmp_path / "plain.jsonl"
    path.write_bytes(FILES[name])
    plain.write_bytes(TEXT)
    with stored_rows(path) as blob, stored_rows(plain) as expected:
        assert blob.path.read_bytes() == expected.path.read_bytes()
        assert (blob.sha256, blob.num_rows) == (expected.sha256, len(ROWS))
        assert name_by_content(stem_of(name), blob).lower() == f"rows-{expected.sha256[:12]}"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "rows.jsonl.gz",
            gzip.compress(TEXT)[:-9],
            r"rows.jsonl.gz: the file is damaged or cut \(gzip: it ends before",
        ),
        ("rows.jsonl.zst", zstd(TEXT)[:-9], r"rows.jsonl.zst: the file is damaged or cut \(zstd: Truncated"),
        ("rows.jsonl.gz", TEXT, "the file is not compressed by gzip, as its name says: give it a name with its own"),
        (
            "rows.csv.gz",
            zstd(TEXT),
            "not compressed by gzip, as its name says: give it a name with .zst in place of .gz",
        ),
        ("rows.jsonl", zstd(TEXT), "compressed by zstd: decompress it, or give it a name such as rows.jsonl.zst"),
        ("rows.parquet", parquet_file(ROWS)[:-300], "rows.parquet: it cannot be read: ArrowInvalid: "),
        ("rows.parquet", TEXT, "rows.parquet: it cannot be read: ArrowInvalid: "),
        ("rows.parquet.gz", gzip.compress(parquet_file(ROWS)), "expected a name that ends in .csv"),
        ("rows.gz", gzip.compress(TEXT), "expected a name that ends in .csv"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        list(read_row_file(path))
    assert "\n" not in str(caught.value)


def test_without_pyarrow_gzip_is_read_and_a_sentence_states_what_the_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert list(read_row_file(tmp_path / "rows.jsonl.gz")) == ROWS
    with pytest.raises(
        InvalidRequest, match=r"compressed by zstd, which Python reads from 3\.14 on.*pip install pyarrow"
    ):
        list(read_row_file(tmp_path / "rows.ndjson.zst"))
    with pytest.raises(InvalidRequest, match=r"a Parquet file is read with pyarrow.*write the rows as \.jsonl"):
        list(read_row_file(tmp_path / "Rows.PARQUET"))


def test_zstd_of_the_standard_library_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def ZstdFile(file: Any) -> Any:
            return pyarrow.CompressedInputStream(pyarrow.py_buffer(file.read()), "zstd")

    monkeypatch.setitem(sys.modules, "compression", Library())
    monkeypatch.setitem(sys.modules, "compression.zstd", Library())
    assert list(ROW_READERS[".jsonl.zst"](io.BytesIO(zstd(TEXT)))) == ROWS


@pytest.mark.parametrize(
    ("name", "ending", "stem"),
    [
        ("a.jsonl", ".jsonl", "a"),
        ("/data/a.b.CSV.GZ", ".csv.gz", "a.b"),
        ("a.gz", ".gz", "a"),
        ("a.tar.parquet", ".parquet", "a.tar"),
        ("rows", "", "rows"),
        (".jsonl", "", ".jsonl"),
    ],
)
def test_the_ending_of_a_name_includes_what_it_is_compressed_by(name: str, ending: str, stem: str) -> None:
    assert (ending_of(name), stem_of(name)) == (ending, stem)
