"""A dataset of the hub is read through the real `datasets` library, from a small hub that the test serves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl_remote.service.datasets.blobs import READING
from llama_stack_provider_trl_remote.service.datasets.reader import read_hub

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

ROWS = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(5)]
FILES = {"train.jsonl": ROWS[:3], "test.jsonl": ROWS[3:]}
COMMIT = "a" * 40
URI = "huggingface://datasets/acme/pairs"


def content(name: str) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in FILES[name]).encode()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as `load_dataset` asks about one repository, `acme/pairs`."""

    protocol_version = "HTTP/1.1"
    api = "/api/datasets/acme/pairs"

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        name = path.rpartition("/")[2]
        if path in (self.api, f"{self.api}/revision/{COMMIT}"):
            self.reply({"id": "acme/pairs", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path == f"{self.api}/tree/{COMMIT}":
            described = [{"type": "file", "path": name, "size": len(content(name)), "oid": name} for name in FILES]
            self.reply(described)
        elif path.startswith("/datasets/acme/pairs/resolve/") and name in FILES:
            etag = f'"{hashlib.sha1(content(name)).hexdigest()}"'
            self.answer(200, content(name), {"ETag": etag, "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def reply(self, body: Any) -> None:
        self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def read(root: Path, uri: str, **environ: str) -> tuple[dict[str, Any], list[Any]]:
    """What the service's reader answers, and the rows that it has stored."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            READING,
            "convert",
            uri,
            str(root),
            "100",
            "64",
            "0",
            "2048",
        ],
        env={**os.environ, "HF_HOME": str(root / "home"), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    answer = json.loads(done.stdout)
    stored = root / f"{answer.get('sha256')}.jsonl"
    return answer, [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []


def test_a_dataset_is_read_from_the_hub_and_offline_from_the_cache(tmp_path: Path) -> None:
    with hub() as url:
        answer, rows = read(tmp_path, f"{URI}?split=train", HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
        assert (answer["num_rows"], rows) == (3, ROWS[:3])
        _, rows = read(tmp_path, f"{URI}?split=test&revision={COMMIT}", HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
        assert rows == ROWS[3:]
        answer, _ = read(tmp_path, f"{URI}?split=validation", HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
        assert "validation" in answer["error"]
    _, rows = read(tmp_path, f"{URI}?split=train", HF_HUB_OFFLINE="1")
    assert rows == ROWS[:3]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_that_a_file_of_the_hub_has_twice_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import datasets
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = tmp_path / "acme" / "pairs" / f"train.{kind}"  # read as a repository of the hub is
    file.parent.mkdir(parents=True)
    if kind == "parquet":
        columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
        write_table(pa.Table.from_arrays(columns, names=["prompt", "completion", "prompt"]), file)
    else:
        text = {"csv": "prompt,completion,prompt\na,b,c\n", "jsonl": '{"prompt":"a","completion":"b","prompt":"c"}\n'}
        file.write_text(text[kind])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(InvalidRows, match="the column prompt is there twice, expected each name once"):
        list(read_hub(URI))


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        ("prompt,completion,x,x.1\na,b,1,2\n", None),
        ("x;x.1;prompt;completion\n1;2;a;b\n", None),
        ("x,x.1,prompt,x\n1,2,a,3\n", "x"),
        ("\ufeffprompt,completion,completion,completion\na,b,c,d\n", "completion"),
    ],
)
def test_a_column_whose_name_ends_in_a_number_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, twice: str | None
) -> None:
    import datasets

    home = tmp_path / "acme" / "pairs"
    home.mkdir(parents=True)
    (home / "train.csv").write_text(text)
    if ";" in text:
        (home / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ;\n---\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if twice:
        with pytest.raises(InvalidRows, match=f"the column {twice} is there twice"):
            read_hub(URI)
    else:
        (row,) = read_hub(URI)
        assert row == {"prompt": "a", "completion": "b", "x": 1, "x.1": 2}
