"""Datasets that a real Ray cluster reads with Ray Data. Run by command: needs ray[default,data]."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import requests
from pyarrow import parquet

from tests.cluster import ray_cluster as clusters
from tests.cluster.bed import NODE_TOKEN, Bed
from tests.cluster.jobs import dpo, ready, submit
from tests.cluster.ray_cluster import RayCluster
from tests.contract.payloads import PAIRS
from tests.required import FULL, IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), IN_FULL]
if FULL:
    pytestmark.append(pytest.mark.skipif(bool(clusters.why_not()), reason=clusters.why_not()))
FILES = 3


@pytest.fixture
def ray(bed: Bed, tmp_path: Path) -> Iterator[RayCluster]:
    head, worker = bed.machine("head"), bed.machine("n1")
    tiny_model()
    cluster = RayCluster(bed, tmp_path / "ray", head, [worker])
    (cluster.root / "data").mkdir()
    yield cluster
    print(cluster.logs())  # shown where the test fails
    cluster.stop()


def serve(bed: Bed, cluster: RayCluster, changes: dict[str, object] | None = None, **settings: object) -> None:
    pool = cluster.pool(dataset_roots=[str(cluster.root / "data")], **(changes or {}))
    cluster.head.serve({"pools": [pool], **settings})
    ready(bed)


def register(bed: Bed, name: str, uri: object) -> Any:
    body = {"dataset_id": name, "purpose": "post-training/messages", "source": {"type": "uri", "uri": str(uri)}}
    return bed.post("/datasets", body)


def job(dataset_id: str, job_uuid: str = "job") -> dict[str, Any]:
    body = dpo(job_uuid, 4)
    body["training_config"]["data_config"]["dataset_id"] = dataset_id
    return body


def post(bed: Bed, body: dict[str, Any]) -> Any:
    """The answer to a job; the first one on a dataset waits until Ray has read it."""
    return bed.session.post(f"{bed.url}/post-training/preference-optimize", json=body, timeout=400)


def refusal(bed: Bed, name: str, uri: object) -> str:
    """The answer to a job on a registered uri that cannot be read."""
    assert register(bed, name, uri).ok
    answer = post(bed, job(name))
    assert answer.status_code == 400, answer.text
    return str(answer.json()["detail"])


def rows_of(bed: Bed, name: str) -> list[dict[str, Any]]:
    metadata = bed.get(f"/datasets/{name}")["metadata"]
    text = bed.session.get(f"{bed.url}/blobs/{metadata['sha256']}", timeout=30).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == metadata["num_rows"]
    return rows


def test_files_of_a_ray_cluster_are_read_there_and_a_job_trains_on_them(bed: Bed, ray: RayCluster) -> None:
    data = ray.root / "data"
    # As many rows in the first file as take several batches: files are read at once, and keep their order.
    rows = [{**PAIRS[number % len(PAIRS)], "number": number} for number in range(2000)]
    (data / "parts").mkdir()
    (data / "parts" / "_SUCCESS").touch()
    cuts = (0, 1900, 1950, len(rows))
    for part in range(FILES):
        table = pyarrow.Table.from_pylist(rows[cuts[part] : cuts[part + 1]])
        parquet.write_table(table, data / "parts" / f"part-{part}.parquet", row_group_size=100)
    # One row lacks a column that another one has: it does not get one.
    lines = [*PAIRS, {**PAIRS[0], "source": {"page": 1}}]
    (data / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    (data / "list.json").write_text(json.dumps(lines, indent=1))
    serve(bed, ray)
    before = set(Path(tempfile.gettempdir()).glob("trl-rows-*"))
    found = {"parts": rows, "pairs.jsonl": lines, "list.json": lines}
    for number, (name, expected) in enumerate(found.items()):
        assert register(bed, name, f"ray://{'ray' if number else ''}{data}/{name}").ok
        answer = post(bed, job(name, f"job-{number}"))
        assert answer.ok, answer.text
        assert rows_of(bed, name) == expected
    assert ray.jobs() == []
    jobs = ray.get("/api/jobs/")
    assert isinstance(jobs, list)
    assert [one["status"] for one in jobs] == ["SUCCEEDED"] * len(found), jobs
    assert NODE_TOKEN not in json.dumps(jobs)
    assert "operator" not in json.dumps([one["entrypoint"] for one in jobs])
    # Read once: another job has the same rows without Ray.
    submit(bed, job("parts", "again"))
    assert len(ray.get("/api/jobs/") or []) == len(found)  # type: ignore[arg-type]
    for name in ("job-0", "again"):
        assert bed.wait_for_end(name)["status"] == "completed", ray.logs()
    assert set(Path(tempfile.gettempdir()).glob("trl-rows-*")) == before
    # What Ray shows of a job whose reading has ended opens nothing.
    upload = re.search(r"/v1/(readings/\w+)", jobs[0]["entrypoint"])
    assert upload is not None
    answer = bed.session.put(f"{bed.url}/{upload[1]}/{'0' * 64}", data=b"", timeout=30)
    assert (answer.status_code, answer.json()["detail"][:20]) == (404, "no request waits for")


def test_a_service_that_is_killed_while_ray_reads_leaves_nothing_and_the_job_is_sent_again(
    bed: Bed, ray: RayCluster
) -> None:
    """At three points of a reading; its client sees a broken connection."""
    (ray.root / "data" / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    before = set(Path(tempfile.gettempdir()).glob("trl-rows-*"))
    serve(bed, ray)
    assert register(bed, "lines", f"ray://{ray.root}/data/pairs.jsonl").ok

    def states() -> set[str]:
        found = ray.get("/api/jobs/")
        assert isinstance(found, list)
        return {one["status"] for one in found if one["submission_id"] in ray.jobs()}

    def makes_rows() -> bool:
        return bool(set(Path(tempfile.gettempdir()).glob("trl-rows-*")) - before)

    points: list[Callable[[], bool]] = [lambda: bool(states()), lambda: states() == {"RUNNING"}, makes_rows]
    for reached in points:
        lost: list[Exception] = []
        asking = threading.Thread(target=lambda lost=lost: lost.append(_lost(bed, job("lines"))))
        asking.start()
        bed.wait(reached, "Ray reads", 60)
        ray.head.process.kill()  # type: ignore[union-attr]
        ray.head.reap()
        asking.join(60)
        assert isinstance(lost[0], requests.ConnectionError), lost
        serve(bed, ray)
        bed.wait(lambda: not ray.jobs(), "the Ray job of the lost request ends", 120)
        assert set(Path(tempfile.gettempdir()).glob("trl-rows-*")) == before
        assert bed.get("/post-training/jobs")["data"] == []
    submit(bed, job("lines"))
    assert rows_of(bed, "lines") == PAIRS
    assert bed.wait_for_end("job")["status"] == "completed", ray.logs()
    assert ray.jobs() == []


def _lost(bed: Bed, body: dict[str, Any]) -> Any:
    """What a client gets: the exception, or the answer."""
    try:
        return post(bed, body)
    except requests.RequestException as error:
        return error


def test_what_ray_cannot_read_is_one_sentence_and_no_job_is_left(bed: Bed, ray: RayCluster) -> None:
    data, outside = ray.root / "data", ray.root / "secret.jsonl"
    outside.write_text('{"prompt": "hunter2"}\n')
    (data / "link.jsonl").symlink_to(outside)
    (data / "broken.jsonl").write_text(f"{json.dumps(PAIRS[0])}\n{{\n")
    (data / "broken.parquet").write_text("no table")
    (data / "empty").mkdir()
    (data / "good.jsonl").write_text(f"{json.dumps(PAIRS[0])}\n" * 3)
    serve(bed, ray, max_rows=len(PAIRS))
    root = f"ray://{data}"
    assert "does not exist on the machine of the Ray job" in refusal(bed, "missing", f"{root}/missing.jsonl")
    assert "leads out of the pool's dataset_roots" in refusal(bed, "link", f"{root}/link.jsonl")
    assert "has no file that ends in" in refusal(bed, "empty", f"{root}/empty")
    assert "broken.jsonl: row 1: is not JSON in line 2" in refusal(bed, "broken", f"{root}/broken.jsonl")
    assert re.search(r"FAILED: .*(magic bytes|[Pp]arquet)", refusal(bed, "table", f"{root}/broken.parquet"))
    (data / "many.jsonl").write_text(f"{json.dumps(PAIRS[0])}\n" * (len(PAIRS) + 1))
    assert f"more than {len(PAIRS)} rows (max_rows)" in refusal(bed, "many", f"{root}/many.jsonl")
    answer = register(bed, "outside", f"ray://{outside}")
    assert (answer.status_code, "below the pool's dataset_roots" in answer.text) == (400, True)
    assert ray.jobs() == []
    ray.head.process.kill()  # type: ignore[union-attr]
    ray.head.reap()
    wrong = ray.root / "wrong"
    wrong.write_text("another-token")
    wrong.chmod(0o600)
    serve(bed, ray, {"token_file": str(wrong)})
    assert re.search(r"401.*token", refusal(bed, "token", f"{root}/good.jsonl"))
    ray.head.process.kill()  # type: ignore[union-attr]
    ray.head.reap()
    serve(bed, ray, convert_timeout=2)
    assert "took more than 2 s (convert_timeout)" in refusal(bed, "slow", f"{root}/good.jsonl")
    bed.wait(lambda: not ray.jobs(), "its Ray job is stopped", 30)
    ray.head.process.kill()  # type: ignore[union-attr]
    ray.head.reap()
    serve(bed, ray, {"address": f"http://{ray.head.address}:9"})
    assert register(bed, "gone", f"{root}/good.jsonl").ok
    answer = post(bed, job("gone"))
    assert (answer.status_code, "cannot be reached (Connection refused)" in answer.text) == (503, True)
