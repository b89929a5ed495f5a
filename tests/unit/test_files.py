from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.system.files import (
    atomic_write_json,
    damage,
    fsync_tree,
    is_whole,
    point_latest,
    put_rows,
    remove_leftovers,
    resolve_under,
    sha256_of,
    tail,
    write_manifest,
)

NAN = float("nan")


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_stored_under_the_digest_of_their_bytes(tmp_path: Path) -> None:
    blob = put_rows(tmp_path, [{"prompt": "Grüße", "n": 1}, {"prompt": None}])
    data = blob.path.read_bytes()
    assert blob.path == tmp_path / f"{hashlib.sha256(data).hexdigest()}.jsonl"
    assert (blob.sha256, blob.num_rows, blob.num_bytes) == (hashlib.sha256(data).hexdigest(), 2, len(data))
    assert lines(blob.path) == [{"prompt": "Grüße", "n": 1}, {"prompt": None}]


def test_the_same_rows_are_stored_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    first = put_rows(tmp_path, [{"a": 1}])
    inode = first.path.stat().st_ino
    assert put_rows(tmp_path, iter([{"a": 1}])) == first
    assert first.path.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [first.path]


def test_a_column_that_is_nan_is_an_absent_column(tmp_path: Path) -> None:
    blob = put_rows(tmp_path, [{"chosen": "x", "score": NAN}])
    assert lines(blob.path) == [{"chosen": "x"}]


def test_a_row_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRows, match="row 0: found list, expected an object"):
        put_rows(tmp_path, [["not", "a", "row"]])  # type: ignore[list-item]


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    atomic_write_json(path, {"state": "running"}, mode=0o600)
    with pytest.raises(TypeError):
        atomic_write_json(path, {"state": object()})
    assert json.loads(path.read_text()) == {"state": "running"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_tree_is_forced_to_disk_from_its_files_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_text("x")
    synced: list[str] = []
    monkeypatch.setattr("llama_stack_provider_trl.system.files.fsync_path", lambda path: synced.append(path.name))
    fsync_tree(tmp_path)
    assert synced == ["weights", "a", tmp_path.name]


def test_a_relative_path_stays_under_its_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolve_under(tmp_path, "link/new/model") == tmp_path / "real" / "new" / "model"
    assert resolve_under(tmp_path, ".") == tmp_path


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", "a/..", "out/x", "nul\0byte"])
def test_a_path_that_leaves_its_root_is_refused_by_name(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        resolve_under(root, path, "checkpoint_dir")
    assert caught.value.field == "checkpoint_dir"


def test_a_tail_is_short_and_of_a_missing_file_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % number for number in range(10_000)))
    assert tail(log, lines=2) == "line 9998\nline 9999"
    assert len(tail(log, lines=1000, limit=100)) <= 100
    assert tail(tmp_path / "none") == ""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint-6"
    (path / "optimizer").mkdir(parents=True)
    names = ("weights", "optimizer/shard")
    for name in names:
        (path / name).write_bytes(name.encode() * 1000)
    write_manifest(path, {name: sha256_of(path / name) for name in names})
    assert damage(path) is None
    return path


def test_a_flipped_bit_is_found_by_its_digest_alone(checkpoint: Path) -> None:
    shard = checkpoint / "optimizer" / "shard"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    assert is_whole(checkpoint)
    assert damage(checkpoint, of=["weights"]) is None  # another rank's to read
    assert damage(checkpoint, of=["optimizer/shard"]) == damage(checkpoint)
    assert str(damage(checkpoint)).startswith("optimizer/shard does not have the sha256")


def test_a_file_that_is_cut_or_gone_is_found_without_reading_any(checkpoint: Path) -> None:
    (checkpoint / "weights").write_bytes(b"weights")
    assert not is_whole(checkpoint)
    assert damage(checkpoint, of=()) == "weights has 7 bytes, its manifest lists 7000"
    (checkpoint / "weights").unlink()
    assert "weights: No such file" in str(damage(checkpoint, of=()))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"sha256": {}}'])
def test_a_manifest_without_content_is_damage(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    assert not is_whole(checkpoint)
    assert "manifest.json" in str(damage(checkpoint))


def test_a_manifest_without_digests_is_taken_by_its_sizes(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    (checkpoint / "weights").write_bytes(b"x" * 7000)
    assert damage(checkpoint) is None


def test_latest_names_a_checkpoint_that_was_announced(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-12", "checkpoint-15"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path, name)
    assert (tmp_path / "latest").read_text() == "checkpoint-15\n"
    (tmp_path / "latest.tmp").write_text("check")
    remove_leftovers(tmp_path, {"checkpoint-3", "checkpoint-12", "final"})  # no event named 15
    assert (tmp_path / "latest").read_text() == "checkpoint-12\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-3", "latest"]
    remove_leftovers(tmp_path, set())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_beside_checkpoints_is_removed_and_no_listed_one(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-6", "checkpoint-9.old", "final.tmp", ".saving", "final", "notes"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path, {"checkpoint-6", "checkpoint-9", "final"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-9", "final", "notes"]
    remove_leftovers(tmp_path / "missing", set())
