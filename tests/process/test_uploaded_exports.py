"""Exports are sent to a hub (tests/hub_server.py) or a bucket (tests/bucket_store.py), and read back there."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.exports import unfinished_parts
from llama_stack_provider_trl.recipes.exports import upload as upload_module
from llama_stack_provider_trl.recipes.exports.upload import uploaded
from llama_stack_provider_trl.specs.events import Event, Failed, Finished
from llama_stack_provider_trl.specs.exports import HUB_TOKEN, ExportSpec, destination_of
from llama_stack_provider_trl.specs.job import AttemptSpec
from llama_stack_provider_trl.specs.work import ExportWork
from llama_stack_provider_trl.system.files import RunDir
from tests import bucket_store, forked
from tests.bucket_store import Store
from tests.hub_server import Hub, serve
from tests.tiny import REPOSITORY, tiny_decoder
from tests.training import job_spec, of_kind, run

pytestmark = [
    *(pytest.mark.process, pytest.mark.timeout(120)),
    # huggingface_hub 2.4 hands a file to httpx as `data`.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]
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


def test_an_export_is_one_commit_in_a_private_repository(tmp_path: Path, hub: Hub) -> None:
    found = upload(exported(tmp_path / "one", PLACE))
    repository = hub.repositories["team/sft-1"]
    assert repository.branches == {"main": found["commit"]}
    files = {name: data for name, data in repository.commits[found["commit"]].items() if name != ".gitattributes"}
    final = tmp_path / "one" / "checkpoints" / "final"
    assert files == {path.name: path.read_bytes() for path in final.iterdir() if path.name in files}
    assert {"model.safetensors", "export.json", "README.md"} <= files.keys()
    assert (found["to"], found["files"], found["bytes"]) == (PLACE, len(files), sum(map(len, files.values())))
    assert "upload" not in json.loads(files["export.json"])
    assert hub.private == {"team/sft-1": True}
    assert any(asked.startswith("PUT /objects/") for asked in hub.asked)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An export of two files, one of which goes by LFS."""
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (directory / "config.json").write_text("{}")
    return directory


def refusal(files: Path, place: str) -> str:
    with pytest.raises(JobFailure) as raised:
        uploaded(files, destination_of(place), "job")
    return f"{raised.value.reason}: {raised.value}"


def test_nothing_is_uploaded_over_other_files_or_without_an_account(
    files: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("team/other", {"notes.txt": b"mine"}, kind="models")
    found = refusal(files, "hf://team/other")
    assert "invalid_request: the export is proven and was not uploaded to hf://team/other: it has other files" in found
    assert "'notes.txt': name a new one" in found
    monkeypatch.setenv(HUB_TOKEN, "hf_of-nobody")
    assert f"invalid_request: the export is proven and was not uploaded to {PLACE}: {hub.url} refuses" in refusal(
        files, PLACE
    )
    monkeypatch.delenv(HUB_TOKEN)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert f"no account is set for it: set {HUB_TOKEN} (or HF_TOKEN)" in refusal(files, PLACE)
    assert list(hub.repositories) == ["team/other"]


def test_a_commit_with_other_bytes_and_a_hub_that_is_none_are_failures(files: Path, hub: Hub) -> None:
    hub.damages = "model.safetensors"
    found = refusal(files, PLACE)
    assert "has other bytes of 'model.safetensors' than were sent" in found
    assert found.startswith("export_failed: the export is proven and could not be uploaded")
    # Nothing of it is on the main branch, and the branch on which it was found is gone.
    repository = hub.repositories["team/sft-1"]
    assert list(repository.branches) == ["main"]
    assert list(repository.commits[repository.branches["main"]]) == [".gitattributes"]
    hub.status = 502
    assert f"{hub.url} answers with 502, expected the API of a hub: check HF_ENDPOINT" in refusal(files, PLACE)


@pytest.mark.parametrize(
    ("earlier", "outcome"),
    [
        ({}, "main was restored"),
        ({"model.safetensors": b"earlier"}, "main was restored"),
        ({"model.safetensors": b"earlier" * 1000}, "main was restored"),
        # What is sent again for it is damaged, too.
        ({"config.json": b"earlier"}, "main could not be restored: delete what is there"),
    ],
)
def test_the_main_branch_has_what_it_had_where_a_hub_damages_its_commit_alone(
    files: Path, hub: Hub, earlier: dict[str, bytes], outcome: str
) -> None:
    (files / "lineage.json").write_text('{"export_job": "job"}')
    before = {".gitattributes": b""} | ({"lineage.json": b'{"export_job": "job"}', **earlier} if earlier else {})
    hub.add("team/sft-1", before, kind="models")
    hub.objects |= {hashlib.sha256(data).hexdigest(): data for data in earlier.values()}
    hub.damages, hub.damaged_branch = "config.json", "main"
    assert f"on main has other bytes of 'config.json' than were sent, and {outcome}. It was" in refusal(files, PLACE)
    repository = hub.repositories["team/sft-1"]
    main = repository.commits[repository.branches["main"]]
    assert (main == before) is (outcome == "main was restored")
    hub.damages = None
    assert uploaded(files, destination_of(PLACE), "job")["commit"] == repository.branches["main"]


def test_the_main_branch_is_restored_where_a_hub_loses_a_file_of_its_commit(files: Path, hub: Hub) -> None:
    """A path that is not there cannot be deleted."""
    hub.loses, hub.damaged_branch = "config.json", "main"
    found = refusal(files, PLACE)
    assert "on main has other bytes of 'config.json' than were sent, and main was restored." in found
    repository = hub.repositories["team/sft-1"]
    assert list(repository.commits[repository.branches["main"]]) == [".gitattributes"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("moto")
    with bucket_store.serve(tmp_path_factory.mktemp("store") / "log") as store:
        store.make("models")
        yield store


@pytest.fixture
def bucket(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return store


def test_an_export_in_a_bucket_has_its_list_last(files: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place, sent = "s3://models/team/sft-1", list[str]()
    monkeypatch.setattr(faults, "reach", lambda point: sent.extend(bucket.keys("models")))
    found = uploaded(files, destination_of(place), "job")
    names = {path.name for path in files.iterdir()}
    assert sent == sorted(f"team/sft-1/{name}" for name in (*names, "uploading.json"))
    assert "team/sft-1/uploading.json" not in bucket.keys("models")
    assert (found["to"], found["files"], found["manifest"]) == (place, 2, "manifest.json")
    listing = json.loads(bucket.get("models", "team/sft-1/manifest.json"))
    assert listing["job"] == "job"
    for name, file in listing["files"].items():
        data = bucket.get("models", f"team/sft-1/{name}")
        assert data == (files / name).read_bytes()
        assert file == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert uploaded(files, destination_of(place), "job") == found  # of another attempt
    with pytest.raises(JobFailure, match=r"it has another export \(manifest\.json\): name a new directory"):
        uploaded(files, destination_of(place), "another")


def test_the_files_of_another_model_are_not_replaced(files: Path, bucket: Store, hub: Hub) -> None:
    bucket.put("models", "prod/config.json", b"mine")
    assert "it has other files, such as 'config.json': name a new directory" in refusal(files, "s3://models/prod")
    bucket.put("models", "taken/uploading.json", b'{"job": "another"}')
    assert "it has another export (uploading.json): name a new directory" in refusal(files, "s3://models/taken")
    assert bucket.get("models", "prod/config.json") == b"mine"
    for name, more in (("prod", {}), ("theirs", {"lineage.json": b'{"export_job": "another"}'})):
        hub.add(f"team/{name}", {"config.json": b"mine", **more}, kind="models")
        (files / "lineage.json").write_text("{}")
        assert "it has a model of another job or another origin: name a new one" in refusal(files, f"hf://team/{name}")
        assert len(hub.repositories[f"team/{name}"].commits) == 1
    hub.add("team/own", {"lineage.json": b'{"export_job": "job"}'}, kind="models")
    assert uploaded(files, destination_of("hf://team/own"), "job")["files"] == 3


def test_what_a_bucket_refuses_is_told_by_name(files: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("models", "mine/notes.txt", b"mine")
    assert "invalid_request: the export is proven" in (found := refusal(files, "s3://models/mine"))
    assert "it has other files, such as 'notes.txt': name a new directory" in found
    assert "there is no such bucket" in refusal(files, "s3://no-such-bucket/x")
    digest = upload_module._digest
    monkeypatch.setattr(upload_module, "_digest", lambda store, path: (0, digest(store, path)[1]))
    assert "export_failed: " in (found := refusal(files, "s3://models/other"))
    assert "it has other bytes of 'config.json' than were sent" in found
    assert "other/manifest.json" not in bucket.keys("models")


def test_a_killed_upload_to_a_bucket_leaves_no_list_and_the_next_attempt_writes_it(
    tmp_path: Path, bucket: Store
) -> None:
    killed(tmp_path, "s3://models/killed", "uploading")
    assert "killed/manifest.json" not in bucket.keys("models")
    assert upload(exported(tmp_path, "s3://models/killed"))["manifest"] == "manifest.json"
    assert "killed/manifest.json" in bucket.keys("models")


@pytest.mark.parametrize("prefix", ["of begins", "of whole keys", "not read"])
def test_parts_that_a_killed_upload_has_left_are_aborted_by_the_next_one(
    files: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """MinIO lists the uploads of a key that is the prefix."""
    called = unfinished_parts._call

    def call(environ: Any, method: str, at: str, key: str, query: dict[str, str]) -> bytes:
        if prefix == "of whole keys" and method == "GET" and query["prefix"] not in bucket.begun(at):
            return b"<ListMultipartUploadsResult></ListMultipartUploadsResult>"
        return called(environ, method, at, key, {**query, "prefix": ""} if prefix == "not read" else query)

    monkeypatch.setattr(unfinished_parts, "_call", call)
    root = f"team/{prefix.split()[-1]}"
    others = [f"{root}-1/model.safetensors", f"{root}/model.safetensors.old", f"{root}/notes.txt"]
    own = f"{root}/model.safetensors", f"{root}/model.safetensors", f"{root}/manifest.json"
    before = bucket.begun("models")
    for key in (*own, *others):
        bucket.begin("models", key)
    uploaded(files, destination_of(f"s3://models/{root}"), "job")
    assert sorted(set(bucket.begun("models")) - set(before)) == others


def test_a_list_of_uploads_is_read_in_one_pass_and_what_is_none_is_left_out() -> None:
    of = unfinished_parts._uploads
    whole = "<Upload><Key>a&amp;b</Key><Owner><ID>x</ID></Owner><UploadId>1</UploadId></Upload>"
    # A search for the end from each begin would take hours, beyond this test's timeout.
    assert list(of("<Upload>" * (unfinished_parts._MOST_ANSWER >> 3) + whole)) == [("a&b", "1")]
    damaged = "<Upload><Key>c</Key></Upload><Upload><Key>d<UploadId>2</UploadId></Upload><Key>e</Key>"
    number = f"<Upload><Key>&#{'9' * 5000};</Key><UploadId>3</UploadId></Upload>"
    assert list(of(f"{damaged}{number}{whole}{whole[:-30]}")) == [("a&b", "1")]


def test_an_upload_does_not_need_the_right_to_abort_others(
    files: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload_module, "remove_unfinished", _refused_list)
    uploaded(files, destination_of("s3://models/team/without"), "job")
    assert "earlier attempt to s3://models/team/without are not looked for: it answers with 403" in caplog.text


def _refused_list(*_: Any) -> int:
    raise OSError("it answers with 403")


def test_a_call_of_s3_is_signed_as_its_documentation_shows() -> None:
    account = unfinished_parts._Account(
        "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "", "us-east-1"
    )
    now = datetime(2013, 5, 24, tzinfo=UTC)
    headers = unfinished_parts.signed(account, "GET", "examplebucket.s3.amazonaws.com", "/", {"lifecycle": ""}, now)
    expected = "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    assert headers["authorization"].endswith(f"Signature={expected}")


def killed(root: Path, place: str, point: str) -> None:
    """An attempt that SIGKILL ends at a point."""
    armed = root / "faults"
    armed.mkdir(parents=True)
    (armed / point).write_text("kill")
    work = ExportWork(export=ExportSpec(target="safetensors", upload_to=place))
    spec = job_spec(root, tiny_decoder("llama"), work=work, token_cache=None)
    attempt = AttemptSpec(job=spec, attempt=1, run_dir=root)
    RunDir(root).spec.write_text(attempt.model_dump_json())
    argv = [sys.executable, "-m", "llama_stack_provider_trl.recipes.train", str(RunDir(root).spec)]
    if place.startswith("hf:"):
        environ = {**os.environ, "TRL_FAULTS": str(armed), "HF_HUB_OFFLINE": "0"}
        assert subprocess.run(argv, env=environ, timeout=100, check=False).returncode == -signal.SIGKILL
    else:
        account = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        environ = {name: value for name, value in os.environ.items() if name not in account}
        with (root / "log").open("wb") as log:
            process = forked.start_program(argv, environ, log, REPOSITORY, {**account, "TRL_FAULTS": str(armed)})
            if process is None:  # a test before this one has left other conditions
                environ |= {**account, "TRL_FAULTS": str(armed)}
                process = subprocess.Popen(argv, stdout=log, stderr=log, env=environ)
            assert process.wait(100) == -signal.SIGKILL, (root / "log").read_text()
    assert not (root / "checkpoints" / "final").exists()


def test_a_killed_upload_leaves_the_main_branch_and_the_next_attempt_moves_it(tmp_path: Path, hub: Hub) -> None:
    killed(tmp_path, PLACE, "uploading-branch")
    repository = hub.repositories["team/sft-1"]
    assert list(repository.commits[repository.branches["main"]]) == [".gitattributes"]
    assert len(repository.branches) == 2
    assert repository.branches == {"main": upload(exported(tmp_path, PLACE))["commit"]}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["final"]
