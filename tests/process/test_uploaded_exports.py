"""Exports are sent to a hub, and read back there (tests/hub_server.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.specs.events import Event, Failed, Finished
from llama_stack_provider_trl.specs.exports import HUB_TOKEN, ExportSpec
from llama_stack_provider_trl.specs.work import ExportWork
from tests.hub_server import Hub, serve
from tests.tiny import tiny_decoder
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
TOKEN = "hf_the-writer-of-exports"
PLACE = "hf://team/sft-1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as hub:
        hub.writer = TOKEN
        for name, value in {"HF_ENDPOINT": hub.url, HUB_TOKEN: TOKEN}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def exported(root: Path, place: str) -> list[Event]:
    """The events of an attempt to export a tiny model, whose files hold no token."""
    work = ExportWork(export=ExportSpec(target="safetensors", upload_to=place))
    _, events = run(root, job_spec(root, tiny_decoder("llama"), work=work, token_cache=None))
    for path in root.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
    return events


def upload(events: list[Event]) -> dict[str, Any]:
    assert not of_kind(events, Failed), of_kind(events, Failed)[0].message
    (finished,) = of_kind(events, Finished)
    assert finished.result is not None
    found: dict[str, Any] = finished.result["upload"]
    return found


def failure(root: Path, events: list[Event]) -> str:
    (failed,) = of_kind(events, Failed)
    assert not list((root / "checkpoints").iterdir())
    return f"{failed.reason}: {failed.message}"


def test_an_export_is_one_commit_in_a_private_repository(tmp_path: Path, hub: Hub) -> None:
    found = upload(exported(tmp_path / "one", PLACE))
    repository = hub.repositories["team/sft-1"]
    files = repository.commits[found["commit"]]
    final = tmp_path / "one" / "checkpoints" / "final"
    assert files == {path.name: path.read_bytes() for path in final.iterdir() if path.name in files}
    assert {"model.safetensors", "export.json", "README.md"} <= files.keys()
    assert (found["to"], found["files"], found["bytes"]) == (PLACE, len(files), sum(map(len, files.values())))
    assert "upload" not in json.loads(files["export.json"])
    assert hub.private == {"team/sft-1": True}
    assert any(asked.startswith("PUT /objects/") for asked in hub.asked)
    hub.asked.clear()
    upload(exported(tmp_path / "again", PLACE))
    assert not any(asked.startswith("PUT /objects/") for asked in hub.asked)


def test_nothing_is_uploaded_over_other_files_or_without_an_account(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("team/other", {"notes.txt": b"mine"}, kind="models")
    found = failure(tmp_path / "one", exported(tmp_path / "one", "hf://team/other"))
    assert "invalid_request: the export is proven and was not uploaded to hf://team/other: it has other files" in found
    assert "'notes.txt': name a new one" in found
    monkeypatch.setenv(HUB_TOKEN, "hf_of-nobody")
    found = failure(tmp_path / "two", exported(tmp_path / "two", PLACE))
    assert f"invalid_request: the export is proven and was not uploaded to {PLACE}: {hub.url} refuses" in found
    assert list(hub.repositories) == ["team/other"]


def test_a_commit_with_other_bytes_and_a_hub_that_is_none_are_failures(tmp_path: Path, hub: Hub) -> None:
    hub.damages = "model.safetensors"
    found = failure(tmp_path / "one", exported(tmp_path / "one", PLACE))
    assert "has other bytes of 'model.safetensors' than were sent" in found
    assert found.startswith("export_failed: the export is proven and could not be uploaded")
    hub.status = 502
    found = failure(tmp_path / "two", exported(tmp_path / "two", "hf://team/sft-2"))
    assert f"{hub.url} answers with 502, expected the API of a hub: check HF_ENDPOINT" in found


def test_a_killed_upload_leaves_no_commit_and_the_next_attempt_makes_it(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Takes the place of SIGKILL."""

    def die(point: str) -> None:
        if point == "uploading":
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reach", die)
        with pytest.raises(Killed):
            exported(tmp_path, PLACE)
    assert hub.repositories["team/sft-1"].commits == {}
    (tmp_path / "checkpoints" / "exporting").mkdir()
    assert upload(exported(tmp_path / "next", PLACE))["commit"] in hub.repositories["team/sft-1"].commits
