"""What the training service refuses, with which sentence; and datasets, from registration to the rows of a job."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl_remote.client import ServiceClient, Timeouts
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.service import JOBS, TrainingService, ndjson, refusal, running_service
from tests.contract.stack import DPO, SFT, Json, poll

pytestmark = pytest.mark.contract

TOKEN = "operator-secret"
SUBMITTER = "submitter-secret"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """Small limits, two tokens; `session` is the operator's."""
    tokens = [{"token": SUBMITTER, "role": "submit"}]
    limits = {"max_body_mb": 1, "max_upload_mb": 64, "max_rows": 60_000, "batch_size": 2, "allowed_hosts": ["trainer"]}
    root = tmp_path_factory.mktemp("service")
    with running_service(root, api_token="${env.NO_SUCH_TOKEN:=" + TOKEN + "}", tokens=tokens, **limits) as service:
        service.session.headers["Authorization"] = f"Bearer {TOKEN}"
        yield service


@pytest.fixture(scope="module")
def pairs(service: TrainingService) -> str:
    return service.register("pairs", PAIRS)


def hold(service: TrainingService, body: Json, path: str = DPO, **more: Any) -> Json:
    """Submit a job, cancel it at once; its effective configuration."""
    job = service.submit(path, {**body, **more})
    assert service.post(f"{JOBS}/{job}/cancel").status_code == 200
    return dict(service.status(job)["resources_allocated"]["effective_config"])


def test_an_unknown_job_is_not_found_by_every_call(service: TrainingService) -> None:
    for what in ("status", "artifacts", "events", "metrics", "logs", "checkpoints", "checkpoints/final"):
        assert "job 'nobody' not found" in refusal(service.get(f"{JOBS}/nobody/{what}"), 404), what
    for what in ("cancel", "pause", "resume"):
        assert "job 'nobody' not found" in refusal(service.post(f"{JOBS}/nobody/{what}"), 404), what
    assert "job 'nobody' not found" in refusal(service.delete(f"{JOBS}/nobody"), 404)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"training_config": {"n_epoch": 3}}, "did you mean `n_epochs`"),
        ({"training_config": {"n_epochs": "many"}}, "training_config.n_epochs='many'"),
        ({"training_config": {"n_epochs": 10**30}}, "training_config.n_epochs="),
        ({"training_config": {"data_config": {"batch_size": 0}}}, "training_config.data_config.batch_size=0"),
        ({"training_config": {"data_config": {"packed": True}}}, "packed=True is not supported"),
        ({"hyperparam_search_config": {"x": 1}}, "hyperparam_search_config.method="),
        ({"hyperparam_search_config": {"method": "bayesian", "parameters": {"x": [1]}}}, "config.trials="),
        ({"hyperparam_search_config": {"method": "grid", "parameters": {"colour": ["red"]}}}, "colour='red'"),
        ({"colour": "red"}, "colour='red'"),
        ({"colour\ud800": "red"}, "'colour\\ud800'"),
        ({"job_uuid": "a/b"}, "job_uuid='a/b'"),
        ({"model": "/no/such/model"}, "model='/no/such/model'"),
        ({"checkpoint_dir": "/etc"}, "checkpoint_dir='/etc'"),
        ({"provider_options": {"merge_adaptor": True}}, "provider_options.merge_adaptor=True"),
        ({"provider_options": 7}, "provider_options=7"),
        ({"dataset_digests": {"pairs": "0" * 64}}, "PUT /v1/blobs/000"),
        ({"dataset_digests": {"pairs": "../x"}}, "dataset_digests.pairs='../x'"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(
    service: TrainingService, pairs: str, change: Json, expected: str
) -> None:
    assert expected in refusal(service.post(DPO, _merged(promised("refused", pairs), change)))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/datasets",
            {"dataset": "x"},
            "dataset='x' is not supported: there is no such field: did you mean `dataset_id`?",
        ),
        (
            "/datasets",
            {"source": {"type": "uri", "uri": "/a", "uris": 1}},
            "source.uris=1 is not supported: there is no",
        ),
        ("/datasets", {"source": {"type": "uri", "uri": "/a", "uris": 1}}, "did you mean `uri`?"),
        ("/datasets", {"source": {"type": "uri", "uri": "/a", "row": 1}}, "there is no such field: leave it out"),
        ("/datasets", {"source": {"type": "rows", "rows": [], "row": 1}}, "did you mean `rows`?"),
        ("/datasets", {"colour": 1}, "there is no such field: leave it out"),
    ],
)
def test_an_unknown_field_of_a_body_is_named_with_the_nearest_one(
    service: TrainingService, path: str, body: Json, expected: str
) -> None:
    source = {"type": "rows", "rows": [{"text": "a"}]}
    assert expected in refusal(service.post(path, {"source": source, **body}))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"null", b'{"job_uuid": NaN}', b"\xff\xfe"])
def test_a_body_that_is_no_object_is_refused(service: TrainingService, body: bytes) -> None:
    url, headers = f"{service.url}/v1{DPO}", {"Content-Type": "application/json"}
    assert refusal(service.session.post(url, data=body, headers=headers, timeout=30))


def test_the_configuration_sets_what_a_job_does_not(service: TrainingService, pairs: str) -> None:
    body = promised("defaults", pairs)
    del body["training_config"]["data_config"]["batch_size"]
    assert hold(service, body)["batch_size"] == 2
    assert service.post(DPO, body).status_code == 200  # the same request, so the same job


def test_without_a_token_nothing_but_health_answers(service: TrainingService) -> None:
    assert requests.get(f"{service.url}/v1/health", timeout=30).json()["status"] == "OK"
    for path in (f"/v1{JOBS}", "/v1/nodes", "/openapi.json", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            answer = requests.get(service.url + path, headers=headers, timeout=30)
            assert "the token" in refusal(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_submitter_may_do_everything_but_delete_jobs(service: TrainingService, pairs: str) -> None:
    mine = {"Authorization": f"Bearer {SUBMITTER}"}
    assert service.get(JOBS, headers=mine).status_code == 200
    answer = requests.delete(f"{service.url}/v1{JOBS}/anything", headers=mine, timeout=30)
    assert "role admin" in refusal(answer, 403)


def test_no_answer_and_no_log_repeats_a_token(service: TrainingService) -> None:
    message = "".join(service.get(path, prefix="").text for path in ("/v1/nodes", "/v1/health", "/openapi.json"))
    for secret in (TOKEN, SUBMITTER):
        assert secret not in message + service.log.read_text()


def test_another_host_or_a_foreign_page_is_turned_away(service: TrainingService) -> None:
    for host in ("evil.example", "evil.example:8322", "10.0.0.1", ""):
        assert "Host header" in refusal(service.get("/health", headers={"Host": host}), 403)
    for host in ("localhost:1", "trainer:8322", "[::1]:8322"):
        assert service.get("/health", headers={"Host": host}).status_code == 200
    assert "may not call" in refusal(service.get("/health", headers={"Origin": "https://evil.example"}), 403)
    assert service.get("/health", headers={"Origin": service.url}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_form_can_post_is_refused(service: TrainingService, kind: str) -> None:
    for path in (DPO, f"{JOBS}/nobody/cancel", "/datasets"):
        url = f"{service.url}/v1{path}"
        answer = service.session.post(url, data=b"{}", headers={"Content-Type": kind}, timeout=30)
        assert "expected application/json" in refusal(answer)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_body_over_its_limit_is_refused_with_the_limit(service: TrainingService, announced: bool) -> None:
    body = b'{"x": "' + b"y" * (2 << 20) + b'"}'
    data: Any = body if announced else iter([body[:1000], body[1000:]])
    headers = {"Content-Type": "application/json"}
    answer = service.session.post(f"{service.url}/v1/datasets", data=data, headers=headers, timeout=30)
    assert "larger than 1 MiB" in refusal(answer, 413)


@pytest.mark.parametrize(("path", "has"), [("/datasets", "GET, POST"), (f"/blobs/{'0' * 64}", "GET, HEAD, PUT")])
def test_an_unsupported_method_is_answered_with_those_of_the_path(
    service: TrainingService, path: str, has: str
) -> None:
    for method in ("PATCH", "DELETE", "OPTIONS"):
        answer = service.session.request(method, f"{service.url}/v1{path}", timeout=30)
        assert f"{path} has no {method}, only {has}" in refusal(answer, 405)
        assert answer.headers["Allow"] == has


def test_health_is_served_beside_the_versioned_calls_too(service: TrainingService) -> None:
    assert service.get("/health", prefix="").json() == service.get("/health").json()


def test_a_dataset_is_registered_once_and_listed_without_its_rows(service: TrainingService) -> None:
    name = service.register("org/some rows", PAIRS, dataset_type="preference", metadata={"note": 1})
    for prefix in ("/v1", "/v1beta"):
        shown = service.get(f"/datasets/{name}", prefix=prefix).json()
        assert shown in service.get("/datasets", prefix=prefix).json()["data"]
    assert shown["source"] == {"type": "rows", "rows": []}
    assert shown["metadata"]["num_rows"] == len(PAIRS)
    assert (shown["metadata"]["note"], shown["metadata"]["dataset_type"]) == (1, "preference")
    assert service.register(name, PAIRS, dataset_type="preference", metadata={"note": 1}) == name
    other = {"dataset_id": name, "source": {"type": "rows", "rows": PAIRS[:1]}}
    assert "exists already" in refusal(service.post("/datasets", other), 409)
    assert service.delete(f"/datasets/{name}").status_code == 204
    assert "not found" in refusal(service.get(f"/datasets/{name}"), 404)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"source": {"type": "rows", "rows": [{"a": 1}, 7]}}, "source.rows.1=7"),
        ({"source": {"type": "stone"}}, "source="),
        ({"source": {"type": "rows", "rows": []}, "purpose": "fun"}, "purpose='fun'"),
        ({"source": {"type": "rows", "rows": []}, "colour": 1}, "colour=1"),
        ({"source": {"type": "rows", "rows": [{"a": "b"}, "\ud800"]}}, "source.rows.1="),
        ({"source": {"type": "rows", "rows": []}, "metadata": {"a": "\ud800"}}, "metadata="),
        ({"source": {"type": "blob", "sha256": "0" * 64}}, "PUT the rows"),
        ({"source": {"type": "uri", "uri": "http://example.org/x.csv"}}, "dataset_roots"),
        ({"source": {"type": "uri", "uri": "/etc/passwd"}}, "must lie below"),
        ({"source": {"type": "uri", "uri": "file:///etc/../etc/passwd"}}, "must lie below"),
        ({"source": {"type": "uri", "uri": "huggingface://datasets/../etc"}}, "expected the name of a dataset"),
        ({"source": {"type": "uri", "uri": "huggingface://datasets/a/b?trust_remote_code=1"}}, "expected huggingface"),
        ({"source": {"type": "uri", "uri": "nul\0.csv"}}, "source.uri="),
    ],
)
def test_a_dataset_that_cannot_be_read_from_here_is_refused(
    service: TrainingService, body: Json, expected: str
) -> None:
    assert expected in refusal(service.post("/datasets", {"dataset_id": "refused", **body}))
    assert service.get("/datasets/refused").status_code == 404


def test_a_file_below_a_root_is_read_in_each_format_and_one_outside_is_not(service: TrainingService) -> None:
    _write_formats(service.files, QUESTIONS)
    for name in ("rows.csv", "rows.jsonl", "rows.json", "rows.parquet"):
        register(service, name, f"file://{service.files}/{name}")
        config = hold(service, sft(f"job-{name}", name), SFT)
        assert config["dataset"]["num_rows"] == len(QUESTIONS), name
        shown = service.get(f"/datasets/{name}").json()
        assert shown["metadata"]["sha256"] == config["dataset"]["sha256"]
    (service.files / "link.csv").symlink_to("/etc/passwd")
    answer = service.post("/datasets", {"source": {"type": "uri", "uri": f"{service.files}/link.csv"}})
    assert "must lie below" in refusal(answer)


def test_a_file_that_changes_is_read_again_and_one_that_vanishes_is_reported(service: TrainingService) -> None:
    path = service.files / "changing.jsonl"
    path.write_bytes(ndjson(QUESTIONS))
    register(service, "changing", str(path))
    assert hold(service, sft("before", "changing"), SFT)["dataset"]["num_rows"] == len(QUESTIONS)
    path.write_bytes(ndjson(QUESTIONS * 2))
    assert hold(service, sft("after", "changing"), SFT)["dataset"]["num_rows"] == 2 * len(QUESTIONS)
    path.write_bytes(b'{"prompt": "x"\n')
    assert "row 0: is not JSON" in refusal(service.post(SFT, sft("broken", "changing")))
    path.unlink()
    assert "No such file" in refusal(service.post(SFT, sft("vanished", "changing")))
    assert service.post(SFT, sft("before", "changing")).status_code == 200  # a job that is there needs no rows


def test_registered_rows_that_were_removed_are_requested_again(service: TrainingService) -> None:
    rows = [{"prompt": "Whose rows are these?", "completion": "Nobody's any more."}]
    service.register("removed", rows)
    stored = json.dumps(rows[0], separators=(",", ":")).encode() + b"\n"
    (service.data_dir / "datasets" / f"{hashlib.sha256(stored).hexdigest()}.jsonl").unlink()
    assert "are gone: register it again" in refusal(service.post(SFT, sft("rowless", "removed")))


def test_a_hub_dataset_that_is_not_at_hand_is_reported_at_the_job(service: TrainingService) -> None:
    register(service, "hub", "huggingface://datasets/nobody/nothing?split=train")
    assert "dataset 'hub'" in refusal(service.post(SFT, sft("refused", "hub")))


def test_uploaded_rows_are_stored_once_and_used_by_digest_or_by_name(service: TrainingService) -> None:
    rows = [{**row, "id": str(number)} for number, row in enumerate(PAIRS)]
    answer, digest = service.put_blob(rows)
    assert answer.status_code == 201
    assert service.put_blob(rows)[0].status_code == 200
    assert service.session.head(f"{service.url}/v1/blobs/{digest}", timeout=30).status_code == 200
    assert service.session.head(f"{service.url}/v1/blobs/{'0' * 64}", timeout=30).status_code == 404
    by_digest = hold(service, promised("by-digest", "any name"), dataset_digests={"any name": digest})
    assert by_digest["dataset"]["sha256"] == digest
    body = {"dataset_id": "uploaded", "source": {"type": "blob", "sha256": digest}}
    known = {"num_rows": len(rows), "sha256": digest, "created_by": "operator"}
    assert service.post("/datasets", body).json()["metadata"] == known
    assert hold(service, promised("by-name", "uploaded"))["dataset"]["sha256"] == digest


def test_a_bad_row_of_uploaded_rows_is_named_again_and_again(service: TrainingService) -> None:
    rows = [dict(row) for row in PAIRS]
    del rows[5]["chosen"]
    _, digest = service.put_blob(rows)
    for _ in range(2):
        answer = service.post(DPO, promised("refused", "x") | {"dataset_digests": {"x": digest}})
        assert "dataset 'x', row 5:" in refusal(answer)


def test_a_digest_that_does_not_match_keeps_nothing(service: TrainingService) -> None:
    before = _stored(service)
    answer, digest = service.put_blob([{"a": 1}], sha256="ab" * 32)
    assert digest in refusal(answer)
    assert "sha256='XY'" in refusal(service.put_blob([{"a": 1}], sha256="XY")[0])
    assert _stored(service) == before


def test_an_upload_with_too_many_rows_or_bytes_keeps_nothing(service: TrainingService) -> None:
    before = _stored(service)
    assert "more than 60000 rows" in refusal(service.put_blob(b"{}\n" * 60_001)[0], 413)
    assert "larger than 64 MiB" in refusal(service.put_blob(b"x" * (65 << 20))[0], 413)
    assert _stored(service) == before


def test_an_upload_that_breaks_off_keeps_nothing(service: TrainingService) -> None:
    before = _stored(service)
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(_half_an_upload())
        poll(lambda: _stored(service) != before, "the upload has begun", timeout=10)
    poll(lambda: _stored(service) == before, "what it left is gone", timeout=10)


def test_a_service_killed_in_mid_upload_leaves_nothing_after_its_restart(service: TrainingService) -> None:
    before = _stored(service)
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(_half_an_upload())
        poll(lambda: _stored(service) != before, "the upload has begun", timeout=10)
        service.kill()
    service.start()
    assert _stored(service) == before


def test_a_large_upload_and_its_job_do_not_grow_the_service(service: TrainingService) -> None:
    text = "x" * 1000
    rows = b"".join(ndjson([{"prompt": f"{n} {text}", "completion": "yes"}]) for n in range(55_000))
    assert len(rows) > 50 << 20
    before = service.rss_mib()
    answer, digest = service.put_blob(rows)
    assert answer.status_code == 201
    body = sft("large", "large") | {"dataset_digests": {"large": digest}}
    assert hold(service, body, SFT)["dataset"]["num_rows"] == 55_000
    assert service.rss_mib() - before < 30
    verdicts = {path: path.stat().st_mtime_ns for path in (service.data_dir / "datasets").glob(f"{digest}.*.json")}
    assert len(verdicts) == 1
    assert hold(service, body | {"job_uuid": "large-again"}, SFT)["dataset"]["sha256"] == digest
    assert {path: path.stat().st_mtime_ns for path in verdicts} == verdicts  # it is not checked again


def test_a_second_service_on_the_same_data_directory_is_refused(service: TrainingService) -> None:
    log = service.root / "second.log"
    second = service.spawn(0, service.data_dir, log)
    assert second.wait(60) == 1
    message = log.read_text()
    assert f"another service runs on the data directory {service.data_dir}" in message
    assert str(service.port) in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--host", "0.0.0.0", "--config", "open.yaml"], {}, "TRL_SERVICE_TOKEN"),
        (["--host", "0.0.0.0", "--config", "open.yaml"], {"TRL_SERVICE_TOKEN": "t"}, "--insecure"),
        (["--config", "missing.yaml"], {}, "missing.yaml cannot be read"),
        ([], {"TRL_SERVICE_PORT": "many"}, "port='many'"),
    ],
)
def test_a_start_that_would_be_wrong_is_refused_with_a_sentence(
    service: TrainingService, tmp_path: Path, arguments: list[str], environ: dict[str, str], expected: str
) -> None:
    log = tmp_path / "log"
    entry = {"provider_type": "remote::trl_remote"}
    (service.root / "open.yaml").write_text(json.dumps({"providers": {"post_training": [entry]}}))
    process = service.spawn(0, tmp_path / "data", log, *arguments, **environ)
    assert process.wait(60) == 1
    assert expected in log.read_text()
    assert "Traceback" not in log.read_text()


def test_nodes_report_what_the_machine_has(service: TrainingService) -> None:
    (node,) = service.get("/nodes").json()["data"]
    assert node["devices"] == ["cpu"]
    assert node["memory_bytes"] > node["memory_available_bytes"] > 0
    refused = service.post(f"/nodes/{node['node']}/drain")
    assert (refused.status_code, "is the service's own machine and has no agent" in refused.text) == (409, True)


def register(service: TrainingService, dataset_id: str, uri: str) -> None:
    answer = service.post("/datasets", {"dataset_id": dataset_id, "source": {"type": "uri", "uri": uri}})
    assert answer.status_code == 200, answer.text


def _merged(body: Json, change: Json) -> Json:
    for name, value in change.items():
        inner = body.get(name)
        body[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return body


def _stored(service: TrainingService) -> set[str]:
    return {path.name for path in (service.data_dir / "datasets").iterdir()}


def _half_an_upload() -> bytes:
    digest = hashlib.sha256(b"never").hexdigest()
    head = f"PUT /v1/blobs/{digest} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: 9000000\r\n\r\n".encode() + b'{"a": 1}\n' * 3000


def _write_formats(directory: Path, rows: list[Json]) -> None:
    with open(directory / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (directory / "rows.jsonl").write_bytes(ndjson(rows) + b"\n")
    (directory / "rows.json").write_text(json.dumps(rows))
    script = (
        "import sys, json, pyarrow; from pyarrow import parquet; "
        "parquet.write_table(pyarrow.Table.from_pylist(json.load(open(sys.argv[1]))), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, directory / "rows.json", directory / "rows.parquet"], check=True)


def test_a_check_that_outlasts_its_client_is_done_once_and_the_repeated_post_picks_it_up(tmp_path: Path) -> None:
    slow, readings = tmp_path / "slow-python", tmp_path / "readings"
    slow.write_text(f'#!/bin/sh\necho "$3" >> "{readings}"\n[ "$1" = -c ] || sleep 3\nexec "{sys.executable}" "$@"\n')
    slow.chmod(0o755)
    rows = ndjson(PAIRS) * 7_000  # above what is checked in the service itself
    with running_service(tmp_path, train_python=str(slow), device="cpu") as service:
        answer, digest = service.put_blob(rows)
        assert answer.status_code == 201
        body = {**promised("patient", "rows"), "dataset_digests": {"rows": digest}}
        client = ServiceClient(service.url, timeouts=Timeouts(5.0, 1.0, 60.0, 60.0))
        assert asyncio.run(client.submit(f"/v1{DPO}", body)) == {"job_uuid": "patient"}
        assert service.post(f"{JOBS}/patient/cancel").ok
        assert [job["job_uuid"] for job in service.get(JOBS).json()["data"]] == ["patient"]
    assert readings.read_text().split().count("check") == 1
