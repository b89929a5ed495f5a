"""Datasets with a ray:// uri: what is refused, what is requested of Ray, and what its job does; Ray is played."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl_remote.nodes.pools.base import PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.ray_jobs import RayAnswer, RayJobs
from llama_stack_provider_trl_remote.nodes.pools.ray_rows import (
    RowsOrder,
    find_files,
    is_beneath,
    json_lines,
    limited,
    main,
    sentence,
)
from llama_stack_provider_trl_remote.service.cluster.ray_datasets import RayDatasets, RaySource, RayUnavailable
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

SHA = "a" * 64
URI = "ray:///shared/pairs.jsonl"


class Dashboard:
    """Ray's Jobs API with at most one job, which ends with `status` once it has been polled."""

    def __init__(self, status: str = "RUNNING", logs: str = "") -> None:
        self.status, self.logs = status, logs
        self.polls = 0
        self.job: dict[str, Any] | None = None
        self.stopped = 0
        self.unavailable = False

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None) -> RayAnswer:
        if self.unavailable:
            raise PoolUnavailable("Ray at http://10.0.0.5:8265 cannot be reached (Connection refused)")
        if method == "POST" and path == "/api/jobs/":
            assert body is not None
            self.job = {"status": "RUNNING", **body}
        elif path.endswith("/stop"):
            self.stopped += 1
            assert self.job is not None
            self.job["status"] = "STOPPED"
        elif path.endswith("/logs"):
            return RayAnswer(200, json.dumps({"logs": self.logs}))
        else:
            self.polls += 1
            if self.job is not None and self.polls > 1 and self.job["status"] == "RUNNING":
                self.job["status"] = self.status
        return RayAnswer(200, json.dumps(self.job))

    def order(self) -> dict[str, Any]:
        """What the job was received to do."""
        assert self.job is not None
        return dict(json.loads(shlex.split(self.job["entrypoint"])[-1]))


def source(dashboard: Dashboard, pool: str = "ray", roots: tuple[str, ...] = ("/shared",)) -> RaySource:
    jobs = RayJobs("http://10.0.0.5:8265", dashboard)
    return RaySource(pool, jobs, "/opt/ray env/python", roots, "http://10.0.0.1:8322", "/etc/trl-token")


def made(*sources: RaySource, timeout: float = 60.0) -> RayDatasets:
    return RayDatasets(sources, max_rows=10, max_bytes=1 << 20, timeout=timeout, poll=0.001)


async def upload(datasets: RayDatasets, dashboard: Dashboard, *digests: str) -> None:
    """What the job sends, once it has been submitted."""
    while dashboard.job is None:
        await asyncio.sleep(0)
    reading = dashboard.order()["upload"].rpartition("/")[2]
    for digest in digests:
        async with datasets.receiving(reading, digest):
            pass


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ray:///etc/passwd.json", "expected a path below the pool's dataset_roots \\(/shared\\)"),
        ("ray:///shared/../etc/secret.json", "below the pool's dataset_roots"),
        ("ray:///shared/%2e%2e/etc/secret.json", "below the pool's dataset_roots"),
        ("ray:///shared", "below the pool's dataset_roots"),
        ("ray:///sharedother/a.json", "below the pool's dataset_roots"),
        ("ray://shared/a.json", "expected the name of a pool .*\\(ray\\), never an address"),
        ("ray://10.0.0.9:10001/shared/a.json", "never an address"),
        ("ray:///shared/a.csv", "expected a file that ends in .parquet, .jsonl, .ndjson, .json, or a directory"),
        ("ray:///shared/a.json?x=1", "without \\? and #"),
        ("ray://[/shared/a.json", "expected ray:///DIRECTORY/FILE"),
    ],
)
def test_a_uri_names_no_address_and_nothing_outside_the_roots(uri: str, message: str) -> None:
    dashboard = Dashboard()
    with pytest.raises(InvalidRequest, match=message):
        made(source(dashboard)).find(uri)
    assert dashboard.job is None


def test_a_uri_needs_a_cluster_with_roots_and_the_name_of_one_of_several() -> None:
    one, other = source(Dashboard()), source(Dashboard(), "gpus", ("/data", "/scratch"))
    with pytest.raises(InvalidRequest, match="no pool of kind ray has dataset_roots"):
        made(source(Dashboard(), roots=())).find(URI)
    with pytest.raises(InvalidRequest, match=r"several \(ray, gpus\): ray://ray/"):
        made(one, other).find(URI)
    assert made(one, other).find("ray://gpus/scratch/a%20b/c.parquet") == (other, "/scratch/a b/c.parquet")
    assert made(source(Dashboard(), roots=()), other).find("ray:///data/parts") == (other, "/data/parts")


def test_a_reading_is_one_ray_job_whose_order_has_no_secret() -> None:
    async def run() -> str:
        datasets, dashboard = made(source(found)), found
        digest, _ = await asyncio.gather(datasets.read(URI), upload(datasets, dashboard, SHA, SHA))
        return digest

    found = Dashboard("SUCCEEDED")
    assert asyncio.run(run()) == SHA
    assert found.job is not None
    assert shlex.split(found.job["entrypoint"])[0] == "/opt/ray env/python"
    order = found.order()
    assert order.pop("upload").startswith("/v1/readings/")
    assert order == {
        **{"path": "/shared/pairs.jsonl", "roots": ["/shared"], "service_url": "http://10.0.0.1:8322"},
        **{"token_file": "/etc/trl-token", "max_rows": 10, "max_bytes": 1 << 20, "seconds": 60.0},
    }
    assert RowsOrder(**found.order()).path == "/shared/pairs.jsonl"
    assert found.stopped == 0


def test_a_job_that_has_sent_its_rows_and_does_not_end_is_stopped() -> None:
    async def run() -> str:
        datasets = made(source(found))
        return (await asyncio.gather(datasets.read(URI), upload(datasets, found, SHA)))[0]

    found = Dashboard()
    assert (asyncio.run(run()), found.stopped) == (SHA, 1)


def test_a_reading_accepts_one_upload_and_nothing_after_its_end() -> None:
    async def run() -> None:
        datasets = made(source(found))
        reading = asyncio.ensure_future(datasets.read(URI))
        with pytest.raises(Conflict, match="other rows already"):
            await upload(datasets, found, SHA, "b" * 64)
        assert await reading == SHA
        with pytest.raises(NotFound, match="no request waits for this reading"):
            await upload(datasets, found, SHA)

    found = Dashboard("SUCCEEDED")
    asyncio.run(run())


def test_rows_that_break_off_are_not_the_result() -> None:
    async def run() -> None:
        datasets = made(source(found))
        reading = asyncio.ensure_future(datasets.read(URI))
        while found.job is None:
            await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            async with datasets.receiving(found.order()["upload"].rpartition("/")[2], SHA):
                raise ConnectionError
        await reading

    found = Dashboard("FAILED", "Ray's own line\ntrl: the service refuses it\nits traceback\n")
    with pytest.raises(InvalidRows, match=r"Ray job trl-rows-\w{12}: FAILED: the service refuses it$"):
        asyncio.run(run())


def test_a_reading_without_an_end_is_stopped_at_its_time_limit() -> None:
    found = Dashboard()
    with pytest.raises(InvalidRows, match=r"its Ray job took more than 0 s \(convert_timeout\)"):
        asyncio.run(made(source(found), timeout=0.05).read(URI))
    assert found.stopped == 1


def test_a_request_that_ends_stops_its_job() -> None:
    async def run() -> None:
        reading = asyncio.ensure_future(made(source(found)).read(URI))
        while found.polls < 2:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    found = Dashboard()
    asyncio.run(run())
    assert found.stopped == 1


def test_a_cluster_that_does_not_answer_is_a_503() -> None:
    found = Dashboard()
    found.unavailable = True
    with pytest.raises(RayUnavailable, match=r"ray:///shared/pairs\.jsonl: Ray at \S+ cannot be reached") as refused:
        asyncio.run(made(source(found)).read(URI))
    assert refused.value.status_code == 503


class Cluster:
    """Files of a cluster that always has the same rows."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs, self.reads = blobs, 0

    def find(self, uri: str) -> str:
        return uri

    async def read(self, uri: str) -> str:
        self.reads += 1
        self.blobs.path(SHA).write_text('{"prompt": "a", "completion": "b"}\n' * 3)
        return SHA


def test_rows_of_a_cluster_are_read_for_the_first_job_and_again_when_they_are_gone(tmp_path: Path) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu"})
    blobs = Blobs(settings)
    cluster = Cluster(blobs)
    datasets = DatasetRegistry(settings, blobs, cluster)
    blobs.prepare()
    datasets.prepare()
    body = {"dataset_id": "pairs", "source": {"type": "uri", "uri": URI}}
    asyncio.run(datasets.register(RegisterDataset.model_validate(body)))
    assert cluster.reads == 0
    for _ in range(2):
        asyncio.run(datasets.fetch("pairs", "sft", None))
    assert cluster.reads == 1
    assert datasets.get("pairs").metadata == {"num_rows": 3, "sha256": SHA}
    blobs.path(SHA).unlink()
    asyncio.run(datasets.fetch("pairs", "sft", None))
    assert cluster.reads == 2


@pytest.mark.parametrize("is_registered_again", [True, False])
def test_what_is_registered_or_deleted_while_the_rows_of_a_name_are_read_stays_so(
    tmp_path: Path, is_registered_again: bool
) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu"})
    blobs = Blobs(settings)
    body = {"dataset_id": "pairs", "source": {"type": "uri", "uri": URI}}
    other = {"dataset_id": "pairs", "source": {"type": "rows", "rows": [{"prompt": "c", "completion": "d"}]}}

    class Changing(Cluster):
        async def read(self, uri: str) -> str:
            datasets.delete("pairs")
            if is_registered_again:
                await datasets.register(RegisterDataset.model_validate(other))
            return await super().read(uri)

    datasets = DatasetRegistry(settings, blobs, Changing(blobs))
    blobs.prepare()
    datasets.prepare()
    asyncio.run(datasets.register(RegisterDataset.model_validate(body)))
    rows, _ = asyncio.run(datasets.fetch("pairs", "sft", None))
    assert rows.num_rows == 3  # the job was submitted before
    if is_registered_again:
        assert datasets.get("pairs").metadata["num_rows"] == 1
        assert datasets.get("pairs").source.type == "rows"
    else:
        assert not datasets.holds("pairs")


def test_a_registry_without_a_cluster_refuses_ray(tmp_path: Path) -> None:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu"})
    body = RegisterDataset.model_validate({"dataset_id": "pairs", "source": {"type": "uri", "uri": URI}})
    with pytest.raises(InvalidRequest, match="expected an absolute path or file://"):
        asyncio.run(DatasetRegistry(settings, Blobs(settings)).register(body))


# In the Ray job


def test_files_of_a_directory_are_of_one_kind_and_do_not_lead_out_of_the_roots(tmp_path: Path) -> None:
    root, roots = tmp_path / "root", [str(tmp_path / "root")]
    (root / "parts" / "b").mkdir(parents=True)
    names = ("parts/b/2.parquet", "parts/1.parquet")
    for name in (*names, "parts/_SUCCESS", "parts/.1.parquet.crc", "parts/readme.txt"):
        (root / name).write_text("x")
    assert find_files(str(root / "parts"), roots) == [str(root / name) for name in sorted(names)]
    (root / "parts" / "3.JSON").write_text("x")
    for name, message in {
        "parts": "has files of Parquet and of JSON",
        "parts/readme.txt": "expected a file that ends in .parquet",
        "missing.json": "does not exist on the machine of the Ray job",
    }.items():
        with pytest.raises(InvalidRows, match=message):
            find_files(str(root / name), roots)
    (tmp_path / "secret.json").write_text("{}")
    (root / "link.json").symlink_to(tmp_path / "secret.json")
    (root / "out").symlink_to(tmp_path)
    for name in ("link.json", "out/secret.json"):
        with pytest.raises(InvalidRows, match="leads out of the pool's dataset_roots"):
            find_files(str(root / name), roots)
    (root / "inner.json").symlink_to(root / "parts" / "3.JSON")
    assert find_files(str(root / "inner.json"), roots) == [str(root / "parts" / "3.JSON")]


def test_a_path_is_beneath_a_root_by_its_parts() -> None:
    assert is_beneath("/a/b/c", ["/x", "/a/b"])
    for path in ("/a/bc", "/a/b", "/a/b/../c", "a/b/c", "/a/b/c\0"):
        assert not is_beneath(path, ["/a/b"]), path


def test_lines_are_the_rows_of_a_file_in_batches(tmp_path: Path) -> None:
    rows = [{"number": number} for number in range(600)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    batches = list(json_lines({"file": [str(file)]}))
    assert [len(batch["line"]) for batch in batches] == [256, 256, 88]
    assert [json.loads(line) for batch in batches for line in batch["line"]] == rows
    file.write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(InvalidRows, match=r"rows.jsonl: row 1: is not JSON in line 2"):
        list(json_lines({"file": [str(file)]}))


def test_too_many_rows_and_too_many_bytes_end_a_reading(tmp_path: Path) -> None:
    rows = [{"a": 1}] * 3
    assert list(limited(rows, tmp_path, 3, 0)) == rows
    with pytest.raises(InvalidRows, match=r"more than 2 rows \(max_rows\): split it"):
        list(limited(rows, tmp_path, 2, 0))
    (tmp_path / "rows").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(InvalidRows, match=r"more than 1 MiB \(max_upload_mb\): split it"):
        list(limited(rows, tmp_path, 3, 1 << 20))


def test_the_error_of_a_task_is_found_below_those_of_ray() -> None:
    task = RuntimeError("ray::Map()\n  File ...\nRuntimeError")
    task.cause = InvalidRows("rows.jsonl: row 1: is not\nJSON")  # type: ignore[attr-defined]
    assert sentence(task) == "rows.jsonl: row 1: is not JSON"
    assert sentence(OSError("first\nlast line\n")) == "it cannot be read: OSError: last line"


def test_a_job_without_its_token_file_ends_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = RowsOrder("/shared/a.json", ["/shared"], "http://10.0.0.1:8322", "/v1/readings/a", "", 1, 1, 60.0)
    text = json.dumps(order._replace(token_file=str(tmp_path / "missing"))._asdict())
    assert main([text]) == 1
    assert capsys.readouterr().out.startswith(f"trl: the token file {tmp_path}/missing cannot be read")
