"""Datasets of the hub are read by the real libraries from a hub that the test serves (tests/hub_server.py)."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.launch.isolation import isolate
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.hub_server import Hub, lines, serve
from tests.process.dataset_reader import read_uris
from tests.process.hub_rows import ROWS

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

URI = "huggingface://datasets/acme/pairs"
TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as hub:
        hub.add("acme/pairs", {"train.jsonl": lines(*ROWS[:3]), "test.jsonl": lines(*ROWS[3:])})
        yield hub


def read(root: Path, hub: Hub | None, *uris: str, known: str = "", max_mb: int = 64, **environ: str) -> list[Any]:
    """What the service's reader answers for each uri, with the rows that it has stored. None: offline."""
    variables = {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "0" if hub else "1", "HF_HUB_DISABLE_XET": "1"}
    if hub:
        variables["HF_ENDPOINT"] = hub.url
    return read_uris(root, {**variables, **environ}, *uris, secret=TOKEN, known=known, max_rows=100, max_mb=max_mb)


def test_a_revision_is_a_commit_online_and_offline_and_a_branch_that_moves_is_read_again(
    tmp_path: Path, hub: Hub
) -> None:
    repository = hub.repositories["acme/pairs"]
    first = repository.branches["main"]
    (answer,) = read(tmp_path, hub, f"{URI}?split=train")
    assert (answer["num_rows"], answer["rows"], answer["stamp"]) == (3, ROWS[:3], first)
    assert hub.sent() == ["train.jsonl"]  # and no file of another split
    assert read(tmp_path, hub, f"{URI}?split=train", known=first) == [{"same": True}]
    second = repository.push({"train.jsonl": lines(ROWS[4])})
    moved, pinned, by_suffix, other = read(
        tmp_path, hub, URI, f"{URI}?revision={first}", f"hf://datasets/acme/pairs@{first}?split=test", f"{URI}@{second}"
    )
    assert (moved["rows"], moved["stamp"]) == ([ROWS[4]], second)
    assert (pinned["rows"], pinned["stamp"]) == (ROWS[:3], first)
    assert (by_suffix["rows"], by_suffix["stamp"]) == (ROWS[3:], first)
    assert other["rows"] == [ROWS[4]]
    old, new, missing = read(tmp_path, None, f"{URI}?revision={first}", URI, f"{URI}?revision={'d' * 40}")
    assert (old["rows"], new["rows"], new["stamp"]) == (ROWS[:3], [ROWS[4]], second)
    assert "has no revision" in missing["error"]
    assert "hf download acme/pairs --repo-type dataset --revision ddd" in missing["error"]
    # A hub that does not answer: what a commit has is known, what a branch has is not.
    gone = Hub(url="http://127.0.0.1:9")
    old, branch = read(tmp_path, gone, f"{URI}?revision={first}", URI)
    assert old["rows"] == ROWS[:3]
    assert "the hub http://127.0.0.1:9 does not answer" in branch["error"]
    (tmp_path / "home" / "hub" / "datasets--acme--pairs" / "snapshots" / first / "train.jsonl").unlink()
    (cut,) = read(tmp_path, None, f"{URI}?revision={first}")
    assert "lacks 1 of 1 files of the split 'train'" in cut["error"]


def test_what_cannot_be_read_is_one_sentence_without_the_token(tmp_path: Path, hub: Hub) -> None:
    hub.add("acme/gated", {"train.jsonl": lines(*ROWS)}, gated=True)
    hub.add("acme/private", {"train.jsonl": lines(*ROWS)}, token="hf_of_somebody_else")
    hub.add("acme/mine", {"train.jsonl": lines(*ROWS)}, token=TOKEN)
    hub.add("acme/empty", {"README.md": b"# nothing"})
    away = b"---\nconfigs:\n- config_name: default\n  data_files: %s\n---\n"
    for number, named in enumerate((b"/etc/hosts", b"https://127.0.0.1:9/x.jsonl", b"../../x.jsonl")):
        hub.add(f"acme/away{number}", {"README.md": away % named, "train.jsonl": lines(*ROWS)})
    # The library ends lines at \n only, and so sees what is behind this \r.
    hidden = b"---\n# c\n---\r" + (away % b"http://127.0.0.1:9/x.jsonl").removeprefix(b"---\n")
    hub.add("acme/away3", {"README.md": hidden, "train.jsonl": lines(*ROWS)})
    hub.add("acme/odd", {"../../../odd.jsonl": lines(*ROWS)})
    expected = {
        "acme/gated": "is gated on",
        "acme/private": "has no dataset 'acme/private' that may be read",
        "acme/absent": "check the name",
        "acme/pairs?revision=v9": "has no revision 'v9'",
        "acme/pairs?split=dev": "has no split 'dev': expected one of 'train', 'test'",
        "acme/pairs?name=other": "BuilderConfig 'other' not found",
        "acme/pairs?split=train[x]": "'train[x]' is no split",
        "acme/empty": "cannot be read by datasets",
        "acme/away0": "names the files '/etc/hosts' in its card",
        "acme/away1": "names the files 'https://127.0.0.1:9/x.jsonl' in its card",
        "acme/away2": "names the files '../../x.jsonl' in its card",
        "acme/away3": "names the files 'http://127.0.0.1:9/x.jsonl' in its card",
        "acme/odd": "lists a file '../../../odd.jsonl'",
    }
    uris = [f"huggingface://datasets/{name}" for name in (*expected, "acme/mine")]
    *refused, mine = read(tmp_path, hub, *uris, HF_TOKEN=TOKEN)
    for answer, text in zip(refused, expected.values(), strict=True):
        assert text in answer["error"]
        assert len(answer["error"]) < 400
        assert "\n" not in answer["error"]
    assert mine["rows"] == ROWS
    hub.status = 503
    (busy,) = read(tmp_path, hub, URI, HF_TOKEN=TOKEN)
    assert f"{hub.url} answers with 503" in busy["error"]
    hub.status = 200  # a login page, or a directory listing
    (page,) = read(tmp_path, hub, URI, HF_ENDPOINT=hub.url.replace("//", f"//user:{TOKEN}@"))
    assert f"the hub {hub.url} does not answer" in page["error"]


def test_files_that_are_too_large_are_not_downloaded(tmp_path: Path, hub: Hub) -> None:
    hub.add("acme/large", {"train.jsonl": lines({"prompt": "x" * (1 << 20), "completion": "y"}, ROWS[0])})
    (answer,) = read(tmp_path, hub, "hf://datasets/acme/large", max_mb=1)
    assert answer == {"too_large": True, "what": "the files of the split 'train' have 1 MiB,"}
    assert hub.sent() == []


def test_rows_of_the_hub_keep_their_own_keys_and_types(tmp_path: Path, hub: Hub) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    call = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]}
    other = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"b": "x"}}}]}]}
    hub.add("acme/calls", {"a.jsonl": lines(call), "b.jsonl": lines(other, {"messages": [], "weight": 1})})
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    write_table(twice, parquet := io.BytesIO())
    hub.add("acme/twice", {"train.parquet": parquet.getvalue()})
    hub.add("acme/csv", {"train.csv": b"prompt,completion,x,x.1\na,b,1,2\n"})
    hub.add("acme/csv2", {"train.csv": b"x,x.1,prompt,x\n1,2,a,3\n"})
    card = b"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ;\n---\n"
    hub.add("acme/sep", {"README.md": card, "train.csv": b"x;x.1;prompt;completion\n1;2;a;b\n"})
    hub.add("acme/sep2", {"README.md": card, "train.csv": b"prompt;completion;completion\na;b;c\n"})
    names = ("calls", "twice", "csv", "csv2", "sep", "sep2", "pairs?split=train[1:]+test[:50%]")
    found = read(tmp_path, hub, *(f"hf://datasets/acme/{name}" for name in names))
    calls, twice_, csv, csv2, sep, sep2, part = found
    assert calls["rows"] == [call, other, {"messages": [], "weight": 1}]  # and no `"b": null` in the first one
    for answer, column in ((twice_, "prompt"), (csv2, "x"), (sep2, "completion")):
        assert f"the column {column} is there twice" in answer["error"]
    assert csv["rows"] == [{"prompt": "a", "completion": "b", "x": "1", "x.1": "2"}]
    assert sep["rows"] == [{"x": 1, "x.1": 2, "prompt": "a", "completion": "b"}]
    assert part["rows"] == [ROWS[1], ROWS[2], ROWS[3]]


def test_what_a_card_calls_an_image_is_opened_by_nobody(tmp_path: Path, hub: Hub) -> None:
    """The author of a dataset would have the service send requests, and learn which files it has."""
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ;\n"
        "dataset_info:\n  features:\n  - name: prompt\n    dtype: string\n  - name: x\n    dtype: image\n---\n"
    )
    table = f"prompt;x\na;{hub.url}/secret-admin\nb;/etc/hostname\nc;/nonexistent\n"
    hub.add("acme/opened", {"README.md": card.encode(), "train.csv": table.encode()})
    (answer,) = read(tmp_path, hub, "hf://datasets/acme/opened")
    assert not [one for one in hub.asked if "secret-admin" in one]
    assert [row["x"]["path"] for row in answer["rows"]] == [f"{hub.url}/secret-admin", "/etc/hostname", "/nonexistent"]


def test_jobs_on_a_branch_that_moves_have_the_rows_and_the_commit_of_their_time(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    settings = ServiceSettings(data_dir=tmp_path / "data", min_free_disk_mb=0)
    registry = DatasetRegistry(settings, blobs := Blobs(settings, isolate("auto", [settings.data_dir])))
    blobs.prepare()
    registry.prepare()
    body = {"dataset_id": "d", "source": {"type": "uri", "uri": URI}}

    async def fetch() -> Any:
        ref, _ = await registry.fetch("d", "sft", None)
        return ref

    asyncio.run(registry.register(RegisterDataset.model_validate(body)))
    first, again = asyncio.run(fetch()), asyncio.run(fetch())
    assert first == again
    assert hub.sent() == ["train.jsonl"]
    repository = hub.repositories["acme/pairs"]
    commits = [repository.branches["main"], repository.push({"train.jsonl": lines(ROWS[4])})]
    second = asyncio.run(fetch())
    assert [ref.origin.version for ref in (first, second)] == commits
    assert [ref.num_rows for ref in (first, second)] == [3, 1]
    assert first.path.exists()
    assert registry.get("d").metadata["commit"] == commits[1]
    assert not list(blobs.directory.glob(".incoming-*"))
    shutil.rmtree(tmp_path / "home")
    pinned = {"dataset_id": "p", "source": {"type": "uri", "uri": f"{URI}@{commits[0]}"}}
    asyncio.run(registry.register(RegisterDataset.model_validate(pinned)))
    ref, _ = asyncio.run(registry.fetch("p", "sft", None))
    assert (ref.sha256, ref.origin and ref.origin.version) == (first.sha256, commits[0])
    hub.asked.clear()
    asyncio.run(registry.fetch("p", "sft", None))
    assert hub.asked == []  # what a commit has, does not change
