"""Text of users: the same key twice, encodings, and values that JSON lacks, in every kind of file and body."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.specs.row_files import ROW_READERS, parse_line, read_ndjson, refuse_fields_twice
from llama_stack_provider_trl.specs.row_verdicts import check_file
from llama_stack_provider_trl.specs.rows import check_rows
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl.system.texts import DuplicateKey, counted, decoded, parse_json
from llama_stack_provider_trl_remote.nodes.identity import read_token
from llama_stack_provider_trl_remote.request_files import read_request
from llama_stack_provider_trl_remote.service.loading import provider_block

NAN, INFINITY = float("nan"), float("inf")
CONFIG = "providers:\n  post_training:\n  - provider_type: remote::trl_remote\n    config:\n      port: 1\n"


@pytest.mark.parametrize(("number", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_what_is_counted_is_singular_where_there_is_one(number: int, text: str) -> None:
    assert counted(number, "row") == text


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"seed": 1, "seed": 1}', "seed"),
        ('{"a": [{"b": {"lr": 1, "x": 2, "lr": null}}]}', "lr"),
        ('[{}, {"": 1, "": 2}]', ""),
        ('{"\\u0061": 1, "b": 2, "a": 3}', "a"),
    ],
)
def test_a_key_that_an_object_has_twice_is_named(text: str, key: str) -> None:
    with pytest.raises(DuplicateKey) as caught:
        parse_json(text)
    assert caught.value.key == key
    assert repr(key) in str(caught.value)
    assert parse_json('{"a": {"k": 1}, "b": [{"k": 2}, {"k": 3}]}') == {"a": {"k": 1}, "b": [{"k": 2}, {"k": 3}]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.json", '{"model": "m", "training_config": {"n_epochs": 1, "n_epochs": 2}}'),
        ("job.yaml", "model: m\ntraining_config:\n  n_epochs: 1\n  n_epochs: 2\n"),
        ("job.yml", "{model: m, training_config: {n_epochs: 1, n_epochs: 1}}"),
        ("job.toml", 'model = "m"\n[training_config]\nn_epochs = 1\nn_epochs = 2\n'),
        ("job", '{"n_epochs": {}, "n_epochs": {}}'),
    ],
)
def test_a_request_with_a_key_twice_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"the key 'n_epochs' is there twice|Cannot overwrite a value"):
        read_request(str(path))


@pytest.mark.parametrize("twice", ["      port: 2\n", "    config: {}\n", "providers: {}\n"])
def test_a_setting_that_is_there_twice_is_refused_by_name(tmp_path: Path, twice: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG + twice)
    with pytest.raises(ValueError, match=f"the key '{twice.split(':')[0].strip()}' is there twice"):
        provider_block(path, {})


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        (".jsonl", b'{"text": "a"}\n{"text": "b", "id": 1, "text": "c"}\n', "row 1: in line 2 the key 'text'"),
        (".ndjson", b'{"messages": [{"role": "user", "role": "user"}]}\n', "row 0: in line 1 the key 'role'"),
        (".json", b'[{"text": "a"}, {"text": "b", "text": "b"}]', "in the file the key 'text'"),
        (".csv", b"answer,question,answer\n1,2,3\n", "the column answer is there twice"),
    ],
)
def test_a_column_that_is_there_twice_is_refused_by_name(ending: str, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRows) as caught:
        list(ROW_READERS[ending](io.BytesIO(content)))
    assert message in str(caught.value)


def test_columns_of_a_csv_file_that_have_no_name_are_no_duplicates() -> None:
    content = b"text,, ,\na,,,\nb,,1,2\n"
    expected = [{"text": "a"}, {"text": "b", "unnamed column 3": "1", "unnamed column 4": "2"}]
    assert list(ROW_READERS[".csv"](io.BytesIO(content))) == expected
    with pytest.raises(InvalidRows, match="the column unnamed column 2 is there twice"):
        list(ROW_READERS[".csv"](io.BytesIO(b"unnamed column 2,\na,b\n")))


def test_a_column_of_arrow_that_is_there_twice_is_refused_by_its_path() -> None:
    pa = pytest.importorskip("pyarrow")
    field, text = pa.field, pa.string()
    message = pa.struct([field("role", text), field("content", text), field("content", text)])
    for schema, path in (
        (pa.schema([field("prompt", text), field("x", text), field("prompt", text)]), "prompt"),
        (pa.schema([field("messages", pa.list_(message))]), "messages.content"),
        (pa.schema([field("a", pa.struct([field("b", pa.large_list(message))]))]), "a.b.content"),
        (pa.schema([field("a", pa.map_(text, pa.list_(message)))]), "a.content"),
        (pa.schema([field("a", pa.list_(pa.map_(text, message)))]), "a.content"),
    ):
        with pytest.raises(InvalidRows, match=f"the column {path} is there twice"):
            refuse_fields_twice(schema)
    refuse_fields_twice(pa.schema([field("a", pa.list_(pa.struct([field("a", text)]))), field("b", text)]))


def test_a_message_list_in_json_text_has_each_key_once() -> None:
    row = {"messages": '[{"role": "user", "content": "a", "content": "b"}]'}
    with pytest.raises(InvalidRows, match="row 0: column messages: found JSON text in which the key 'content'"):
        check_rows([row], "sft")


def _request(path: Path) -> Any:
    return read_request(str(path))


def _config(path: Path) -> Any:
    return provider_block(path, {})


def _rows(path: Path) -> Any:
    with open(path, "rb") as file:
        return list(ROW_READERS[path.suffix](file))


def _token(path: Path) -> Any:
    path.chmod(0o600)
    return read_token(str(path))


READERS: list[tuple[str, str, Callable[[Path], Any], Any]] = [
    ("job.json", '{"model": "ä"}', _request, {"model": "ä"}),
    ("job.yaml", "model: ä\n", _request, {"model": "ä"}),
    ("job.toml", 'model = "ä"\n', _request, {"model": "ä"}),
    ("run.yaml", CONFIG, _config, {"port": 1}),
    ("rows.jsonl", '{"text": "ä"}\n', _rows, [{"text": "ä"}]),
    ("rows.json", '[{"text": "ä"}]\n', _rows, [{"text": "ä"}]),
    ("rows.csv", "text\nä\n", _rows, [{"text": "ä"}]),
    ("token", "secret\n", _token, "secret"),
]


@pytest.mark.parametrize(("name", "text", "read", "found"), READERS, ids=[one[0] for one in READERS])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_every_file_is_utf_8_with_or_without_a_byte_order_mark(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any], found: Any, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding))
    if encoding.startswith("utf-8"):
        assert read(path) == found
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011 (each reader has its own, all of ours)
        read(path)
    assert "UTF-" in str(caught.value) or name == "token"  # whose content is not described
    assert type(caught.value).__module__.startswith("llama_stack") or type(caught.value) is ValueError


def test_bytes_that_are_no_utf_8_are_named() -> None:
    for data, message in (
        (b"a\xff", r"at byte 1\): save it as UTF-8"),
        (b"\xff\xfea\0", "UTF-16 text, expected UTF-8: save it as UTF-8"),
        (b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
        ("a: 1".encode("utf-16-le"), "UTF-16 text without a byte order mark, expected UTF-8"),
        ('{"a": "日本語日本語"}'.encode("utf-16-be"), "UTF-16 text without a byte order mark"),
        ("[1]".encode("utf-32-le"), "UTF-32 text without a byte order mark"),
    ):
        with pytest.raises(ValueError, match=message):
            decoded(data)


VALUES: list[tuple[Any, str]] = [
    (
        datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "a timestamp (2024-01-02T03:04:05+00:00), expected text: write the value as text",
    ),
    (datetime.date(2024, 1, 2), "a date (2024-01-02), expected text: write the value as text"),
    (datetime.time(1, 2), "a time (01:02:00), expected text: write the value as text"),
    (datetime.timedelta(days=2), "a duration (2 days, 0:00:00), expected text: write the value as text"),
    (decimal.Decimal("1.10"), "a decimal (1.10), expected text: write the value as text"),
    (b"\xff\0", "a binary (2 bytes), expected text: write the value as text"),
    (INFINITY, "a number (inf), expected text: write the value as text"),
    ({"x": -INFINITY}, "{'number': '-inf'}"),
    ([0.5, NAN, [INFINITY]], "turn 0: found a number 0.5"),
    ({1}, "turn 0: found a number 1"),
    (10**5000, "a number (16610 bits), expected text: write the value as text"),
    ("b \ud83d", "half of a UTF-16 surrogate pair"),
    (["\ud800"], "'\\ud800'"),
    (object, "{'type': \"<class 'object'>\"}"),
]


@pytest.mark.parametrize(("value", "shown"), VALUES, ids=range(len(VALUES)))
def test_a_column_that_no_shape_reads_may_have_any_type(tmp_path: Path, value: Any, shown: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    verdict = check_file(put_rows(tmp_path, [good, {**good, "extra": value}]).path, "sft", None)
    assert verdict == {"num_rows": 2, "warnings": ["columns never read: extra"], "error": None}
    read = check_file(put_rows(tmp_path, [good, {"prompt": "a", "completion": value}]).path, "sft", None)
    assert (read["error"] or "").startswith("row 1: column completion")
    assert shown in (read["error"] or "")


def test_numbers_that_are_none_and_names_that_are_no_text_pass_in_columns_that_no_shape_reads(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "a", "weight": 1e999, "e": [NaN, Infinity]}\n{"text": "b", "\\ud83d": 1}\n{"text": "c", "n": NaN}\n'
    )
    verdict = check_file(path, "sft", None)
    assert verdict["error"] is None
    assert verdict["warnings"] == ["columns never read: \\ud83d, e, weight"]
    with open(path, "rb") as file:
        stored = put_rows(tmp_path, read_ndjson(file)).path
    assert check_file(stored, "sft", None) == verdict
    json.dumps(verdict).encode()
    assert "Infinity" not in stored.read_text()


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_an_integer_of_any_number_of_digits_passes_in_a_column_that_no_shape_reads(tmp_path: Path, suffix: str) -> None:
    digits = "-" + "7" * 5000
    row = f'{{"text": "a", "big": [{digits}], "n": 12}}'
    path = tmp_path / f"rows{suffix}"
    path.write_text(f"[{row}]" if suffix == ".json" else f"{row}\n")
    with open(path, "rb") as file:
        stored = put_rows(tmp_path, ROW_READERS[suffix](file)).path
    assert json.loads(stored.read_text()) == {"text": "a", "big": [{"number": "5000 digits"}], "n": 12}
    raw = tmp_path / "blob"
    raw.write_text(f"{row}\n")
    assert parse_line(raw.read_text()) == json.loads(stored.read_text()), "as the training reads it"
    for one in (raw, stored):
        verdict = check_file(one, "sft", None)
        assert (verdict["error"], verdict["warnings"]) == (None, ["columns never read: big, n"])
    raw.write_text(f'{{"prompt": {digits}, "completion": "b"}}\n')
    assert "row 0: column prompt: found a number (5000 digits), expected text: write the value as text" in (
        check_file(raw, "sft", None)["error"] or ""
    )
    with pytest.raises(ValueError, match="4300 digits"):
        parse_json(f'{{"seed": {digits}}}')


def test_zeros_in_a_text_are_no_other_encoding() -> None:
    for data in (b'{"a": "\0"}', b"\0" * 100, b"a" * 100 + b"\0\0", b"ab\0cd\0\0"):
        assert decoded(data) == data.decode()


def test_a_line_may_have_the_byte_order_mark_of_its_file() -> None:
    assert parse_line('\ufeff{"text": "a"}\n') == {"text": "a"}


def test_scalars_of_data_frames_are_what_they_hold(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    row = {"text": "a", "i": np.int64(3), "f": np.float32(0.5), "nan": np.float32("nan"), "a": np.array([[1], [2]])}
    stored = put_rows(tmp_path, [row])
    assert json.loads(stored.path.read_text()) == {"text": "a", "i": 3, "f": 0.5, "nan": None, "a": [[1], [2]]}


def test_a_row_that_contains_itself_is_refused(tmp_path: Path) -> None:
    row: dict[str, Any] = {"text": "a"}
    row["self"] = [row]
    with pytest.raises(InvalidRows, match="row 0: cannot be written as JSON"):
        put_rows(tmp_path, [row])
    assert list(tmp_path.iterdir()) == []
