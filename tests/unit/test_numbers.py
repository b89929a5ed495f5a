"""The public API as it is recorded, and how `python -m tests.numbers` compares what jobs make."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.contract.stack import Json
from tests.numbers import api
from tests.numbers.content import Reader, leaves, tensors_digest
from tests.numbers.differences import differences, table


def test_the_recorded_api_is_that_of_the_service() -> None:
    assert api.RECORDED.read_text() == api.text(), "if the change is meant: python -m tests.numbers api"


def test_tensors_have_one_digest_whatever_their_order_and_metadata(tmp_path: Path) -> None:
    def written(name: str, tensors: dict[str, bytes], **metadata: str) -> str:
        header, data = {"__metadata__": metadata}, b""
        for tensor, values in tensors.items():
            offsets = [len(data), len(data) + len(values)]
            header[tensor] = {"dtype": "F32", "shape": [len(values) // 4], "data_offsets": offsets}
            data += values
        text = json.dumps(header).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
        return tensors_digest(tmp_path / name)

    first = written("first", {"a": b"1111", "b": b"22223333"}, format="pt")
    assert written("again", {"b": b"22223333", "a": b"1111"}) == first
    assert written("values", {"a": b"1111", "b": b"22223334"}) != first
    assert written("names", {"b": b"1111", "a": b"22223333"}) != first
    assert written("shapes", {"a": b"11112222", "b": b"3333"}) != first


def test_paths_times_and_versions_do_not_count_and_everything_else_does(tmp_path: Path) -> None:
    def digest(root: str, **content: object) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"model": f"{root}/model", **content}))
        return Reader({Path(root): "ROOT"}).digest(file)

    first = digest("/one", rate=0.1, created_at="noon", transformers_version="5", layers=[{"time": 1, "size": 2}])
    assert digest("/other", layers=[{"time": 9, "size": 2}], rate=0.1, created_at="night") == first
    assert digest("/other", layers=[{"time": 9, "size": 2}], rate=0.1 + 2**-54) != first
    assert digest("/other", layers=[{"time": 9, "size": 3}], rate=0.1) != first
    assert digest("/one", target_modules=["q", "v"]) == digest("/one", target_modules=["v", "q"])
    kept = [digest("/one", at=f"/one/resume/{digit * 32}/checkpoint-3") for digit in "ab"]
    assert kept[0] == kept[1]
    assert digest("/one", layers=["q", "v"]) != digest("/one", layers=["v", "q"])


def test_every_difference_is_shown_with_both_values_and_those_of_json_by_field() -> None:
    contents: Json = {"one": {"r": 4, "modules": ["q", "v"]}, "two": {"r": 8, "modules": ["q", "v"], "dora": False}}
    before: Json = {
        "jobs": {"sft": {"state": "completed", "step 1 loss": "6.25", "file a.json": "one"}, "gone": {}},
        "contents": contents,
    }
    after: Json = {
        "jobs": {"sft": {"state": "completed", "step 1 loss": "6.5", "file a.json": "two", "file b": "0"}},
        "contents": contents,
    }
    rows = list(differences(before, after, ["sft", "gone"]))
    assert [tuple(row) for row in rows] == [
        ("sft", "step 1 loss", "6.25", "6.5"),
        ("sft", "file a.json: r", "4", "8"),
        ("sft", "file a.json: dora", "missing", "False"),
        ("sft", "file b", "missing", "0"),
        ("gone", "the job", "there", "missing"),
    ]
    assert list(differences(before, before, ["sft", "gone"])) == []
    assert "sft: 4 differences" in table(rows)
    assert all(word in table(rows) for word in ("6.25", "6.5", "dora"))


def test_values_are_compared_exactly_and_by_their_place() -> None:
    assert dict(leaves({"a": [0.1, {"b": None}], "c": {}, "d": []})) == {
        **{"a.0": "0.1", "a.1.b": "None"},
        **{"c": "{}", "d": "[]"},
    }
