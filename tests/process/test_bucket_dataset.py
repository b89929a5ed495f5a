"""Datasets in buckets are read by Arrow from a store that moto plays (tests/bucket_store.py)."""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.launch.isolation import isolate
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.bucket_store import ENVIRONMENT, Store, serve
from tests.hub_server import lines
from tests.process.dataset_reader import read_uris
from tests.process.hub_rows import ROWS

pytest.importorskip("pyarrow")
pytest.importorskip("moto")
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serve(tmp_path_factory.mktemp("store") / "log") as store:
        store.make("rows")
        yield store


def read(root: Path, environ: dict[str, str], *uris: str, known: str = "") -> list[Any]:
    """What the service's reader answers for each uri, with the rows that it has stored."""
    return read_uris(root, environ, *uris, secret=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"], known=known)


def test_files_of_a_bucket_are_read_in_the_order_of_their_names_and_again_when_one_changes(
    tmp_path: Path, store: Store
) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_pylist(ROWS[2:4]), parquet := io.BytesIO(), row_group_size=1)
    store.put("rows", "a/1.jsonl.gz", gzip.compress(lines(ROWS[0])))
    store.put("rows", "a/2/x.csv", b"prompt,completion\nquestion 1,answer 1\n")
    store.put("rows", "a/3.parquet", parquet.getvalue())
    for hidden in ("_SUCCESS", ".x.jsonl", "_tmp/y.jsonl", "notes.txt"):
        store.put("rows", f"a/{hidden}", b"{")
    store.put("rows", "ab.jsonl", lines(ROWS[4]))
    all_, one = read(tmp_path, store.environment, "s3://rows/a/", "s3://rows/ab.jsonl")
    assert (all_["rows"], one["rows"]) == (ROWS[:4], [ROWS[4]])
    assert read(tmp_path, store.environment, "s3://rows/a/", known=all_["stamp"]) == [{"same": True}]
    store.put("rows", "a/2/x.csv", b"prompt,completion\nquestion 1,answer 9\n")  # of the same size
    (changed,) = read(tmp_path, store.environment, "s3://rows/a/", known=all_["stamp"])
    assert changed["rows"] == [ROWS[0], {**ROWS[1], "completion": "answer 9"}, *ROWS[2:4]]


def test_what_a_bucket_does_not_give_is_one_sentence(tmp_path: Path, store: Store) -> None:
    store.put("rows", "bad.jsonl", b'{"prompt": "a"}\nnot json\n')
    uris = {
        "s3://rows/none.jsonl": "s3://rows/none.jsonl does not exist",
        "s3://rows/none/": "s3://rows/none/",
        "s3://no-such-bucket/x.jsonl": "does not exist",
        "s3://rows/bad.jsonl": "bad.jsonl: row 1: is not JSON in line 2",
    }
    found = read(tmp_path, store.environment, *uris)
    found += read(tmp_path, {**store.environment, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "s3://rows/ab.jsonl")
    without = {name: value for name, value in store.environment.items() if name not in ENVIRONMENT}
    found += read(tmp_path, {**without, "HOME": str(tmp_path)}, "s3://rows/ab.jsonl")
    texts = [*uris.values(), "the store of s3://rows/ab.jsonl does not answer", "the store refuses s3://rows/ab.jsonl"]
    for answer, text in zip(found, texts, strict=True):
        assert text in answer["error"]
        assert len(answer["error"]) < 400


def test_only_paths_that_the_operator_names_are_read_with_the_operators_account(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.put("rows", "team/x.jsonl", lines(*ROWS))
    settings = ServiceSettings(data_dir=tmp_path / "data", min_free_disk_mb=0, dataset_buckets=("s3://rows/team",))
    registry = DatasetRegistry(settings, blobs := Blobs(settings, isolate("auto", [settings.data_dir])))
    blobs.prepare()
    registry.prepare()

    def register(uri: str) -> None:
        body = {"dataset_id": uri, "source": {"type": "uri", "uri": uri}}
        asyncio.run(registry.register(RegisterDataset.model_validate(body)))

    outside = (
        "s3://rows/teams/x.jsonl",
        "s3://rows/x.jsonl",
        "s3://rows/",
        "s3://other/team/x.jsonl",
        "s3://rows/team",
    )
    for uri in outside:
        with pytest.raises(InvalidRequest, match=r"below one of the configured dataset_buckets \(s3://rows/team\)"):
            register(uri)
    odd = (
        "s3://rows/team/../x.jsonl",
        "s3://rows/team/%2e%2e/x.jsonl",
        "s3://rows/team//x.jsonl",
        "s3://u:p@rows/team/x",
    )
    for uri in (*odd, "s3://rows/team/x.jsonl?versionId=1", "s3:///team/x.jsonl"):
        with pytest.raises(InvalidRequest, match="expected s3://BUCKET/PATH/FILE"):
            register(uri)
    with pytest.raises(InvalidRequest, match="expected a file name that ends in"):
        register("s3://rows/team/x.txt")
    register("s3://rows/team/x.jsonl")
    ref, _ = asyncio.run(registry.fetch("s3://rows/team/x.jsonl", "sft", None))
    assert (ref.num_rows, ref.origin and ref.origin.uri) == (5, "s3://rows/team/x.jsonl")
