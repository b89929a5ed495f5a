"""Archives, compressed files and damaged ones as datasets: each is refused with a sentence, or bounded in bytes, rows,
memory and time, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, TrlError
from llama_stack_provider_trl.specs.row_files import ROW_READERS
from llama_stack_provider_trl_remote.service.http.errors import TooLarge
from tests.required import FULL, in_full
from tests.security.dataset_service import ROW, Service, put

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

TEXT = ROW.encode() * 20_000


def _zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", data)
    return file.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": _zipped,
    "zstd": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def with_settings(service: Service, **changes: Any) -> None:
    service.blobs._settings = service.settings.model_copy(update=changes)


def nothing_is_kept(service: Service) -> bool:
    return service.stored() == [] and not [*service.blobs.directory.glob(".*")]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", **options)
    return path


def repeated(text: str, times: int) -> Any:
    """A column that stores a text once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), pyarrow.array([text]))


def test_the_formats_are_those_that_these_tests_attack() -> None:
    text = {".csv", ".json", ".jsonl", ".ndjson"}
    assert {*ROW_READERS} == {".parquet", *(kind + packed for kind in text for packed in ("", ".gz", ".zst"))}


@pytest.mark.parametrize(
    "ending", ["gz", "zip", "zst", "npz", "arrow", "tar", "pkl", "safetensors", "jsonl.bz2", "parquet.gz", "tar.gz"]
)
def test_a_file_of_another_format_is_refused_by_its_ending(service: Service, ending: str) -> None:
    (service.files / f"rows.{ending}").write_bytes(gzip.compress(TEXT))
    with pytest.raises(InvalidRequest, match=r"expected a file name that ends in \.csv"):
        service.register(service.files / f"rows.{ending}")


@pytest.mark.parametrize("kind", PACKED)
def test_an_archive_is_not_unpacked_whatever_its_ending(service: Service, kind: str) -> None:
    data = PACKED[kind](TEXT)
    assert len(data) < len(TEXT) / 50
    for ending in ("jsonl", "parquet", *in_full("csv", "json")):
        path = service.files / f"rows.{ending}"
        path.write_bytes(data)
        with pytest.raises(InvalidRows, match=r"the file is (compressed by|a zip archive)") as caught:
            service.rows(path)
        assert "Traceback" not in str(caught.value)
    assert nothing_is_kept(service)
    sha256 = put(service, data)
    with pytest.raises(InvalidRows, match=r"the file is (compressed by|a zip archive)"):
        asyncio.run(service.blobs.checked("d", sha256, "sft", None))


LIMITS: dict[str, tuple[str, Callable[[], bytes], dict[str, Any], str]] = {
    "bytes": (
        "jsonl",
        lambda: ROW.encode() * 300_000,
        {"max_upload_mb": 8},
        r"take more than 8 MiB \(max_upload_mb\): split it",
    ),
    "rows": ("jsonl", lambda: ROW.encode() * 300_000, {"max_rows": 1000}, "more than 1000 rows"),
    "rows of csv": (
        "csv",
        lambda: b"prompt,completion\n" + b"a,b\n" * 3_000_000,
        {"max_rows": 1000},
        "more than 1000 rows",
    ),
    "line": ("jsonl", lambda: b"x" * (20 << 20), {}, "row 0: has more than 16 MiB"),
    "line of csv": ("csv", lambda: b"x" * (20 << 20), {}, "line 1 has more than 16 MiB"),
    "memory": (
        "json",
        lambda: b'[{"a": "' + b"x" * (300 << 20),
        {"reader_memory_mb": 512},
        "takes more than 512 MiB of memory",
    ),
    "time": ("ndjson", lambda: b"\n" * (128 << 20), {"convert_timeout": 2.0}, r"more than 2 s \(convert_timeout\)"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for number, name in enumerate(LIMITS)
        for kind in (("gzip", "zstd") if FULL else (("gzip", "zstd")[number % 2],))  # in CI one in turn
    ],
)
def test_limits_hold_for_what_a_compressed_file_has(service: Service, kind: str, name: str) -> None:
    ending, bomb, limits, sentence = LIMITS[name]
    path = service.files / f"rows.{ending}{'.gz' if kind == 'gzip' else '.zst'}"
    data = bomb()
    path.write_bytes(PACKED[kind](data))
    assert path.stat().st_size < len(data) / 50
    with_settings(service, **limits)
    with pytest.raises((TooLarge, InvalidRows), match=sentence):
        service.rows(path)
    assert nothing_is_kept(service)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_an_archive_that_is_cut_or_damaged_is_a_sentence(service: Service, kind: str) -> None:
    data = PACKED[kind](TEXT)
    path = service.files / f"rows.jsonl{'.gz' if kind == 'gzip' else '.zst'}"
    for damaged in (
        data[:-5],
        data[: len(data) // 2],
        data + b"more",
        data[:4],
        data[:-9] + b"\xff\xfe\xfd" + data[-6:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRows, match=rf"the file is damaged or cut \({kind}: .+\): copy or compress it again"):
            service.rows(path)
        assert nothing_is_kept(service)
    path.write_bytes(PACKED[kind](data))
    with pytest.raises(InvalidRows, match="compressed twice: compress it once"):
        service.rows(path)
    for other in (TEXT, b"", PACKED["zstd" if kind == "gzip" else "gzip"](TEXT), PACKED["zip"](TEXT)):
        path.write_bytes(other)
        with pytest.raises(InvalidRows, match=f"the file is not compressed by {kind}, as its name says"):
            service.rows(path)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("parts", [2, *in_full(1)])
def test_compressed_rows_are_those_of_the_plain_file(service: Service, kind: str, parts: int) -> None:
    for ending, text in {
        "jsonl": TEXT,
        "ndjson": TEXT,
        "json": b"[" + b",".join(TEXT.splitlines()) + b"]",
        "csv": b"prompt,completion\n" + b"a,b\n" * 20_000,
    }.items():
        path = service.files / f"rows.{ending}"
        path.write_bytes(text)
        packed = service.files / f"ROWS.{ending}{'.gz' if kind == 'gzip' else '.ZST'}"
        half = len(text) // parts  # several members, or frames, are one file
        packed.write_bytes(b"".join(PACKED[kind](text[at : at + half]) for at in range(0, len(text), half)))
        assert service.rows(packed) == service.rows(path)


def test_rows_that_take_more_than_the_limit_once_they_are_written_are_refused(service: Service) -> None:
    path = write_parquet(
        service.files / "wide.parquet", {"prompt": repeated("x" * 20_000, 4000), "completion": ["4"] * 4000}
    )
    assert path.stat().st_size < 10_000  # and 80 MB of rows
    with_settings(service, max_upload_mb=8)
    with pytest.raises(TooLarge, match=r"take more than 8 MiB \(max_upload_mb\): split it"):
        service.rows(path)
    assert nothing_is_kept(service)


def test_rows_beyond_their_number_are_not_read(service: Service) -> None:
    path = write_parquet(service.files / "many.parquet", {"prompt": ["a"] * 500_000, "completion": ["b"] * 500_000})
    assert path.stat().st_size < 10_000
    with_settings(service, max_rows=1000)
    with pytest.raises(TooLarge, match="more than 1000 rows"):
        service.rows(path)
    assert nothing_is_kept(service)


def test_reading_ends_at_its_time(service: Service) -> None:
    path = write_parquet(service.files / "slow.parquet", {"prompt": ["a"] * 5_000_000, "completion": ["b"] * 5_000_000})
    with_settings(service, convert_timeout=3.0)
    with pytest.raises(InvalidRows, match=r"more than 3 s \(convert_timeout\)"):
        service.rows(path)
    assert nothing_is_kept(service)


def _nested(levels: int) -> Any:
    kind = pyarrow.int32()
    for _ in range(levels):
        kind = pyarrow.list_(kind)
    return pyarrow.array([None], kind)


def _arrow() -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"prompt": ["a"]})
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write(table)
    return file.getvalue()


@pytest.mark.parametrize("damage", ["empty", "magic", "footer", "truncated", "zeros", "arrow", "deep", "flipped"])
def test_a_damaged_parquet_file_is_a_sentence(service: Service, damage: str) -> None:
    path = write_parquet(service.files / "rows.parquet", {"prompt": ["a"] * 1000, "completion": ["b"] * 1000})
    data = bytearray(path.read_bytes())
    match damage:
        case "empty":
            data = bytearray()
        case "magic":
            data = bytearray(b"PAR1PAR1")
        case "footer":
            data[-8:-4] = (2**31 - 1).to_bytes(4, "little")
        case "truncated":
            del data[len(data) // 2 :]
        case "zeros":
            data[4:-8] = bytes(len(data) - 12)
        case "arrow":
            data = bytearray(_arrow())
        case "deep":
            write_parquet(path, {"prompt": ["a"], "completion": ["b"], "deep": _nested(500)})
            data = bytearray(path.read_bytes())
        case "flipped":
            for at in range(4, len(data) // 2, 3):
                data[at] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(
        TrlError, match=r"it cannot be read: |takes more than|its reader ended with|is an Arrow file"
    ) as caught:
        service.rows(path)
    assert len(str(caught.value)) < 2000
    assert nothing_is_kept(service)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("deep.jsonl", '{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "is nested too deeply in line 1"),
        ("deep.json", "[" * 200_000, "the file is nested too deeply"),
        (
            "digits.jsonl",
            '{"prompt": ' + "9" * 5000 + ', "completion": "4"}',
            r"found a number \(5000 digits\), expected text",
        ),
        ("digits.json", '[{"messages": "[' + "9" * 5000 + ']"}]', "column messages: found text that is not JSON"),
        ("zeros.jsonl", "\0" * 1000, "is not JSON in line 1"),
        ("keys.csv", ",".join(["a"] * 100_000) + "\n1\n", "the column a is there twice"),
        ("quote.csv", 'prompt,completion\n"' + "x" * 1000, "row 0: is not CSV in the line 2 where it begins"),
    ],
)
def test_text_that_is_deep_or_long_is_a_sentence(service: Service, name: str, text: str, sentence: str) -> None:
    path = service.files / name
    path.write_text(text)
    with pytest.raises(InvalidRows, match=sentence):
        service.rows(path)


def test_a_usual_file_is_read_beside_all_this(service: Service) -> None:
    path = write_parquet(service.files / "rows.parquet", {"prompt": ["a"], "completion": ["b"]})
    assert json.loads(service.rows(path)) == {"prompt": "a", "completion": "b"}
