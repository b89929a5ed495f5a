"""Which files of a model another machine gets, where they are, and what is kept of their digests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.model_files import NotSent, check_model_names, chosen_files, files_digest
from llama_stack_provider_trl.system.digests import KeptDigests
from llama_stack_provider_trl.system.files import sha256_of
from llama_stack_provider_trl.system.hub_cache import find_snapshot, is_offline
from llama_stack_provider_trl.system.model_directory import find_model
from tests.orders import write
from tests.unit.snapshots import COMMIT, snapshot

INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()


def chosen(*names: str) -> list[str]:
    return chosen_files(names, lambda: INDEX)


def test_another_machine_gets_data_and_the_weights_that_are_loaded() -> None:
    files = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors"]
    others = ["README.md", "pytorch_model.bin", "modeling.py", ".gitattributes", "consolidated.safetensors"]
    assert chosen(*files, *others) == sorted(files)
    parts = ["config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"]
    assert chosen(*parts, "other.safetensors") == sorted(parts)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["model.safetensors"], "it has neither config.json nor adapter_config.json with adapter_model.safetensors"),
        (["config.json"], "it has neither model.safetensors nor model.safetensors.index.json"),
        (["config.json", "pytorch_model.bin"], "its weights are in pytorch_model.bin, a format that can run code"),
        (["config.json", "model.safetensors.index.json", "model-1.safetensors"], "model-2.safetensors, which its"),
    ],
)
def test_a_model_without_safetensors_is_not_sent_and_the_file_is_named(names: list[str], reason: str) -> None:
    with pytest.raises(NotSent, match=reason):
        chosen(*names)


def test_an_index_cannot_name_a_file_elsewhere() -> None:
    index = json.dumps({"weight_map": {"a": "../../secret.safetensors"}}).encode()
    with pytest.raises(NotSent, match="no safetensors file"):
        chosen_files(["config.json", "model.safetensors.index.json"], lambda: index)
    with pytest.raises(NotSent, match="is no index of weights"):
        chosen_files(["config.json", "model.safetensors.index.json"], lambda: b"[]")


def test_an_index_that_nests_too_deeply_is_a_reason_and_no_fault() -> None:
    with pytest.raises(NotSent, match="is no index of weights"):
        chosen_files(["config.json", "model.safetensors.index.json"], lambda: b"[" * 200_000)


@pytest.mark.parametrize(
    "name", ["modeling.py", "pytorch_model.bin", "../config.json", "/etc/x.json", ".x.json", "a/b.json", "a\n.json"]
)
def test_a_node_refuses_other_names(name: str) -> None:
    with pytest.raises(InvalidRequest, match="models"):
        check_model_names(["config.json", name], "models")


def test_the_digest_is_of_names_sizes_and_contents_in_any_order() -> None:
    files = [("a.json", 1, "0" * 64), ("b.json", 2, "1" * 64)]
    assert files_digest(files) == files_digest(reversed(files))
    assert files_digest(files) != files_digest([("a.json", 1, "0" * 64)])
    assert files_digest(files) != files_digest([("a.json", 2, "0" * 64), ("b.json", 2, "1" * 64)])


def test_an_id_is_found_by_its_branch_or_its_commit(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(snapshot(tmp_path, {"config.json": b"{}"}))}
    for revision in (None, "main", COMMIT):
        found = find_model(environ, "org/tiny", revision)
        assert found is not None
        assert found.commit == COMMIT
        assert found.names() == ["config.json"]
        with found.open("config.json") as file:
            assert file.read() == b"{}"
    for model, revision in (("org/tiny", "dev"), ("org/other", None), ("org/tiny", "../main"), ("..", None)):
        assert find_snapshot(environ, model, revision) is None


def test_a_link_that_leads_out_of_the_cache_or_the_directory_is_not_opened(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", b"s")
    environ = {"HF_HUB_CACHE": str(snapshot(tmp_path, {"config.json": b"{}"}))}
    found = find_model(environ, "org/tiny")
    assert found is not None
    (found.path / "model.safetensors").symlink_to(secret)
    with pytest.raises(OSError, match="leads out of its directory"):
        found.open("model.safetensors")
    plain = write(tmp_path / "plain" / "config.json", b"{}").parent
    assert find_model({}, str(plain)) is not None
    (tmp_path / "link").symlink_to(plain)
    assert find_model({}, str(tmp_path / "link")) is None


def test_offline_is_what_the_hub_takes_for_it() -> None:
    assert is_offline({"HF_HUB_OFFLINE": "1"})
    assert is_offline({"TRANSFORMERS_OFFLINE": "true"})
    assert not is_offline({"HF_HUB_OFFLINE": "0"})


def test_a_digest_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    file, place = write(tmp_path / "file", b"one"), tmp_path / "digests.json"
    counted: list[int] = []

    def digest() -> str:
        """By another process."""
        with open(file, "rb") as opened:
            found = KeptDigests(place).of(opened, counted.append)
            counted.append(3 - len(opened.read()))
        return found

    assert digest() == sha256_of(file)
    assert digest() == sha256_of(file)
    assert counted == [3, 3, 3, 0]  # the second time it was not read
    os.utime(file, ns=(0, file.stat().st_mtime_ns))
    before = file.stat().st_mtime_ns
    file.write_bytes(b"two")
    os.utime(file, ns=(before, before))  # as before, but for the time that no program can set
    assert digest() == sha256_of(file)
    place.write_bytes(b"[damaged")
    assert digest() == sha256_of(file)
