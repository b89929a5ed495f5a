"""A large dataset is tokenized in shards, and a preparation that is killed keeps those that are whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data import cache, prepared, shards
from llama_stack_provider_trl.recipes.data import prepare as preparing_rows
from llama_stack_provider_trl.recipes.data.cache import KEEP_SECONDS, TokenCache
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.lengths import row_lengths
from llama_stack_provider_trl.recipes.data.prepare import TruncationCounter, tokenize, with_filler
from llama_stack_provider_trl.recipes.data.shards import ShardedRows, ranges_of
from llama_stack_provider_trl.specs.events import EventWriter, Tokenizing, iter_events
from llama_stack_provider_trl.specs.job import JobSpec
from tests import forked
from tests.process.preparing import COUNT, LOSSY, ROWS_EACH, large, lossy_tokenizer, prepare
from tests.required import in_full
from tests.tiny import REPOSITORY, tiny_tokenizer
from tests.training import of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing_rows, "CHUNK_ROWS", ROWS_EACH)
    monkeypatch.setattr(shards, "SHARD_ROWS", ROWS_EACH)
    monkeypatch.setattr(shards, "workers_for", lambda rows, shards: 0)


def values(rows: Any) -> dict[str, Any]:
    return {name: rows[name][:] for name in rows.column_names}


def entry(spec: JobSpec, ending: str = "") -> Path:
    assert spec.data.token_cache is not None
    (found,) = (path for path in spec.data.token_cache.iterdir() if path.suffix == ending)
    return found


def shards_at(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("rows-*.arrow"))


# --- the same rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [("sft", 0), ("dpo", 0), *in_full(*(("sft", 2), ("grpo", 0), ("dpo", 2), ("kto", 0), ("kto", 2), ("grpo", 2)))],
)
def test_rows_and_report_are_those_of_one_process_without_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, workers: int
) -> None:
    monkeypatch.setattr(shards, "workers_for", lambda rows, shards: workers)
    spec = large(tmp_path, algorithm)
    tokenization = tokenize(spec, spec.data.dataset, lossy_tokenizer())
    rows, report = tokenization.collect()
    found = [prepare(spec) for _ in range(2)]
    assert [one.source for one in found] == ["computed", "cache"]
    assert shards_at(entry(spec)) == [f"rows-0000{number}.arrow" for number in range(4)]
    for one in found:
        assert values(one.dataset) == values(rows)
        assert one.dataset.features == rows.features
        assert one.report == report
        assert one.digests == tokenization.counter.digests
        assert row_lengths(one.dataset).tolist() == row_lengths(rows).tolist()
        assert values(with_filler(one.dataset)) == values(with_filler(rows))
    assert len(found[1].dataset.cache_files) == 4  # mapped, not copied
    assert report.lost_turns
    assert report.dropped or report.truncated


def test_packed_sequences_are_those_of_rows_without_shards(tmp_path: Path) -> None:
    spec = large(tmp_path, packed=True)
    alone, found = prepare(spec.changed(token_cache=None)), prepare(spec)
    assert values(alone.dataset) == values(found.dataset)
    assert alone.report == found.report


def test_a_dataset_of_one_shard_has_one_file(tmp_path: Path) -> None:
    spec = large(tmp_path, rows=ROWS_EACH)
    prepare(spec)
    assert sorted(path.name for path in entry(spec).iterdir()) == ["entry.json", "rows.arrow"]


def test_ranges_are_all_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    lines = ["é\n", "", "b\n", "ccc\n", "d\n", "e"]
    for count in range(len(lines) + 1):
        path = tmp_path / "rows"
        path.write_text(text := "".join(lines[:count]))
        found = ranges_of(path)
        data = text.encode()
        ends = [*(one.offset for one in found[1:]), len(data)]
        parts = [data[one.offset : end].decode() for one, end in zip(found, ends, strict=False)]
        assert "".join(parts) == text
        assert [part.count("\n") + (not part.endswith("\n")) for part in parts] == [one.count for one in found]
        assert [one.first for one in found] == [2 * number for number in range(len(found))]


def test_all_that_a_chat_counts_is_in_the_counts_of_a_shard() -> None:
    chat = Chat(tiny_tokenizer())
    listed = {*shards._SUMS, *shards._of_chat(chat), "endings"}
    known = {"tokenizer", "images", "forms", "_unwritten", "_calls_lost"}  # no counts
    assert {*vars(chat)} - known <= listed
    assert {name for name, value in vars(chat.endings).items() if not name.startswith("_")} <= listed
    one = TruncationCounter(None, None, 4)
    other = TruncationCounter(None, None, 4)
    settings = {"eos", "bos", "limit", "side", "digests"}
    for number, field in enumerate(fields(TruncationCounter), start=1):
        if field.name not in settings:
            setattr(other, field.name, [1] if field.name == "example_end" else number)
    one.add(other)
    assert one == other
    rows, row = one.rows, other.largest_id_row
    one.add(other)
    assert one.largest_id_row == row  # of equal ids the first row
    other.largest_id += 1
    one.add(other)
    assert one.largest_id_row == 2 * rows + row


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, *in_full(0)])
def test_the_first_row_that_cannot_be_tokenized_is_named_and_no_shard_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(shards, "workers_for", lambda rows, shards: workers)
    tokenizer = tiny_tokenizer()
    bad = [f"question {number}" for number in (2 * ROWS_EACH + 1, ROWS_EACH + 90)]
    refusal = "{%% if messages[0]['content'].endswith('%s') %%}{{ raise_exception('no') }}{%% endif %%}"
    tokenizer.chat_template = LOSSY + "".join(refusal % text for text in bad)
    spec = large(tmp_path)
    with pytest.raises(JobFailure, match=f"row {ROWS_EACH + 90}: the model's chat template refuses"):
        prepare(spec, tokenizer)
    assert [path.suffix for path in entry(spec, ".lock").parent.iterdir()] == [".lock"]


def test_a_full_disk_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checked = large(tmp_path), []

    def full(path: Path) -> int:
        checked.append(path)
        return 1 << 40 if len(checked) < 4 else 0

    monkeypatch.setattr(cache, "free_bytes", full)
    found = prepare(spec)
    assert found.source == "not kept"
    assert [path.suffix for path in entry(spec, ".lock").parent.iterdir()] == [".lock"]


def test_the_number_of_processes_follows_from_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    spec = large(tmp_path)
    rows = ShardedRows(spec, spec.data.dataset, tiny_tokenizer(), None, tmp_path, "key", ("input_ids", "labels"))
    for cores, gib, parts, expected in (
        (1, 64, 9, 0),
        (2, 64, 9, 2),
        (64, 64, 9, 4),
        (64, 64, 3, 3),
        (64, 64, 1, 0),
        (8, 3, 9, 2),
        (8, 1, 9, 0),
    ):
        monkeypatch.setattr(shards, "usable_cpus", lambda cores=cores: cores)
        monkeypatch.setattr(shards, "available_memory", lambda gib=gib: gib << 30)
        assert shards.workers_for(rows, parts) == expected, (cores, gib, parts)


def preparing(root: Path, workers: int, faults_at: Path) -> Any:
    """A process that prepares the rows, forked from one that has imported torch; what it prints is in `printed`."""
    argv = [sys.executable, "-m", "tests.process.preparing", str(root), str(workers)]
    added = {faults.VARIABLE: str(faults_at)}
    with (root / "printed").open("wb") as output:
        process = forked.start_program(argv, os.environ, output, REPOSITORY, added)
        if process is None:  # a test before this one has left other conditions
            process = subprocess.Popen(argv, stdout=output, cwd=REPOSITORY, env={**os.environ, **added})
    return process


def until(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "faults"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("workers", [2, *in_full(0)])
def test_an_attempt_after_a_kill_keeps_whole_shards_and_the_workers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, armed: Path, workers: int
) -> None:
    for number in (2, 3):
        (armed / f"shard-{number}").write_text("hold")  # its rows are written, and its name is not final
    child = preparing(tmp_path, workers, armed)
    spec = large(tmp_path)
    until(lambda: (armed / "shard-2.taken").exists())
    until(lambda: len(list(entry(spec, ".tmp").glob("rows-*.json"))) == 2)
    if workers:
        until(lambda: (armed / "shard-3.taken").exists())
    below = psutil.Process(child.pid).children()
    assert len(below) == workers
    child.send_signal(signal.SIGKILL)
    child.wait()
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in below))
    kept = {path: path.stat().st_mtime_ns for path in entry(spec, ".tmp").glob("rows-*.arrow")}
    assert len(kept) == 2
    (entry(spec, ".tmp") / "rows-00001.json").write_text("{")  # damaged meanwhile
    written: list[int] = []
    original = TokenCache.write_shard

    def counted(self: TokenCache, key: str, number: int, *rest: Any) -> None:
        written.append(number)
        original(self, key, number, *rest)

    monkeypatch.setattr(TokenCache, "write_shard", counted)
    found = prepare(spec)
    assert written == [1, 2, 3]
    rows, report = tokenize(spec, spec.data.dataset, lossy_tokenizer()).collect()
    assert values(found.dataset) == values(rows)
    assert found.report == report
    whole = {path.name: path.stat().st_mtime_ns for path in entry(spec).glob("rows-*.arrow")}
    assert [whole[path.name] == time for path, time in sorted(kept.items())] == [True, False]


def test_what_a_killed_worker_leaves_another_process_does(tmp_path: Path, armed: Path) -> None:
    for number in (0, 1):
        (armed / f"shard-{number}").write_text("kill")
    child = preparing(tmp_path, 2, armed)
    assert child.wait(120) == 0
    assert (tmp_path / "printed").read_text().splitlines()[-1].split()[0] == "computed"
    spec = large(tmp_path)
    assert len(list(armed.glob("*.taken"))) == 2
    found = prepare(spec)
    rows, report = tokenize(spec, spec.data.dataset, lossy_tokenizer()).collect()
    assert found.source == "cache"
    assert values(found.dataset) == values(rows)
    assert found.report == report


def test_a_preparation_that_is_killed_while_an_entry_becomes_visible_tokenizes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = large(tmp_path)
    original = cache.put_in_place

    def killed(staging: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "put_in_place", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(spec)
    monkeypatch.setattr(cache, "put_in_place", original)
    monkeypatch.setattr(TokenCache, "write_shard", None)
    assert prepare(spec).source == "computed"


def test_progress_counts_the_rows_of_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_INTERVAL", 0.0)
    spec, writer = large(tmp_path), EventWriter(tmp_path / "events.jsonl")
    prepare(spec, writer=writer)
    shown = [event.rows for event in of_kind(iter_events(tmp_path / "events.jsonl"), Tokenizing)]
    assert shown == [ROWS_EACH, 2 * ROWS_EACH, 3 * ROWS_EACH, COUNT, COUNT]


# --- the cache --------------------------------------------------------------------------------------------------------

DAMAGE = {
    "cut": lambda path: os.truncate(path / "rows-00002.arrow", 900),
    "missing": lambda path: (path / "rows-00001.arrow").unlink(),
    "another report": lambda path: (path / "entry.json").write_text(
        re.sub('"kept": [0-9]+', '"kept": 13', (path / "entry.json").read_text())
    ),
    "a link": lambda path: (
        (path / "rows-00000.arrow").rename(path / "x") and (path / "rows-00000.arrow").symlink_to(path / "x")
    ),
    "exchanged": lambda path: os.replace(path / "rows-00003.arrow", path / "rows-00000.arrow"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_written_again(tmp_path: Path, damage: Any) -> None:
    spec = large(tmp_path)
    expected = values(prepare(spec).dataset)
    damage(entry(spec))
    again = prepare(spec)
    assert (again.source, values(again.dataset)) == ("computed", expected)
    assert prepare(spec).source == "cache"


def test_all_shards_of_an_entry_count_for_the_size_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = large(tmp_path), large(tmp_path, rows=COUNT - 1)
    old = prepare(first)
    path = entry(first)
    size = sum(file.stat().st_size for file in path.iterdir())
    monkeypatch.setattr(cache, "KEEP_BYTES", 2 * size + 4096)
    os.utime(path, (time.time() - 100,) * 2)
    prepare(second)
    assert path.exists()
    monkeypatch.setattr(cache, "KEEP_BYTES", 3 * size // 2)
    prepare(large(tmp_path, rows=COUNT - 2))
    assert not path.exists()
    assert values(old.dataset)["input_ids"]  # it is still mapped
    os.utime(entry(second), (time.time() - KEEP_SECONDS - 60,) * 2)
    assert prepare(first).source == "computed"
    entry(first)


def test_an_example_of_a_prompt_has_the_number_of_its_row(tmp_path: Path) -> None:
    spec = large(tmp_path, "grpo")
    rows = prepare(spec).dataset["row"]
    assert rows[len(rows) - 1] == [COUNT - 1]
