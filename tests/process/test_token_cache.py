"""Rows are tokenized once and mapped; what is trained on them is the same, whatever happens to the cache.

Two ranks: tests/process/test_ranks.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data import cache, keys, packing, prepared
from llama_stack_provider_trl.recipes.data.cache import KEEP_SECONDS, TokenCache
from llama_stack_provider_trl.recipes.data.keys import RowKeys
from llama_stack_provider_trl.recipes.data.lengths import lengths_before_packing, num_rows, row_lengths
from llama_stack_provider_trl.recipes.data.packing import pack
from llama_stack_provider_trl.recipes.data.prepare import tokenize, with_filler
from llama_stack_provider_trl.recipes.data.prepared import Preparation, PreparedRows
from llama_stack_provider_trl.recipes.fast.batches import first_largest
from llama_stack_provider_trl.specs.events import EventWriter, Prepared, Progress, Tokenizing, Warned, iter_events
from llama_stack_provider_trl.specs.job import DpoSpec, JobSpec, LifecycleSpec
from llama_stack_provider_trl.system.process import FileLock
from tests.fakes import FakeClock
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import DPO_ROWS, SFT_ROWS, dataset, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
DIALOGS = [{"messages": [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant")]} for n in range(5)]
MIXED = [*SFT_ROWS, *DIALOGS, {"text": "plain text"}, {"prompt": "long " * 200, "completion": "cut"}]
DATED = "{{ strftime_now('%d') }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Writer(EventWriter):
    """Counts heartbeats, and returns what was written."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(root / "events.jsonl")
        self.path, self.heartbeats = root / "events.jsonl", 0

    def heartbeat(self) -> None:
        self.heartbeats += 1

    def written[E](self, kind: type[E]) -> list[E]:
        return of_kind(iter_events(self.path), kind)


def kept(root: Path, algorithm: str = "sft", **changes: Any) -> JobSpec:
    """A job that keeps its tokens below `root`; its model is never loaded."""
    return job_spec(root, "/no/model", algorithm, token_cache=root / "tokens", **changes)


def prepare(spec: JobSpec, tokenizer: Any = None, writer: EventWriter | None = None, **options: Any) -> PreparedRows:
    writer = writer or Writer(spec.checkpoint_dir)
    return Preparation(spec, tokenizer or tiny_tokenizer(), writer, spec.data.dataset, **options).rows(
        spec.data.dataset
    )


def values(rows: Any) -> dict[str, Any]:
    return {name: rows[name][:] for name in rows.column_names}


def entries(root: Path) -> list[Path]:
    return sorted(path for path in (root / "tokens").iterdir() if not path.suffix)


# --- the same rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("sft", {"rows": MIXED, "max_seq_length": 64}),
        ("sft", {"rows": MIXED, "max_seq_length": 64, "train_on_input": True, "truncation_side": "left"}),
        ("sft", {"rows": SFT_ROWS * 120, "max_seq_length": 96, "packed": True}),
        ("dpo", {"rows": DPO_ROWS * 120, "max_seq_length": 40}),
    ],
    ids=["sft", "whole rows", "packed", "dpo"],
)
def test_rows_of_the_cache_and_their_report_are_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(cache, "_BATCH_BYTES", 20_000)  # several record batches
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 9_600)
    spec = kept(tmp_path, algorithm, **changes)
    rows, report = tokenize(spec, spec.data.dataset, tiny_tokenizer()).collect()
    rows = pack(rows, spec.data.max_seq_length) if spec.data.packed else rows
    in_memory = prepare(spec.changed(token_cache=None))
    found = [prepare(spec) for _ in range(2)]
    assert [one.source for one in (in_memory, *found)] == ["not kept", "computed", "cache"]
    for one in (in_memory, *found):
        assert values(one.dataset) == values(rows)
        assert one.dataset.features == rows.features
        assert one.report == report
        assert row_lengths(one.dataset).tolist() == row_lengths(rows).tolist()
        assert num_rows(one.dataset) == report.kept == len(lengths_before_packing(one.dataset))
        assert values(with_filler(one.dataset)) == values(with_filler(rows))
    assert len(found[1].dataset.data.column(0).chunks) > 1 or len(rows) < 50
    assert found[1].dataset.cache_files


def test_a_tokenizer_without_a_template_has_one_also_where_its_rows_were_found(tmp_path: Path) -> None:
    spec = kept(tmp_path)
    tokenizers = [tiny_tokenizer(chat_template=False) for _ in range(3)]
    reports = [prepare(spec, tokenizer).report for tokenizer in tokenizers[:2]]
    assert reports[0] == reports[1] == prepare(spec.changed(token_cache=None), tokenizers[2]).report
    assert "has no chat template" in reports[0].warnings[0]
    assert len({tokenizer.chat_template for tokenizer in tokenizers}) == 1
    assert len(entries(tmp_path)) == 1


def test_of_the_validation_rows_as_many_are_used_as_the_job_asks_for(tmp_path: Path) -> None:
    for packed in (False, True):
        spec = kept(tmp_path, packed=packed, max_seq_length=96)
        alone = spec.changed(token_cache=None)
        expected, found, again = (
            Preparation(one, tiny_tokenizer(), Writer(tmp_path / "run"), one.data.dataset).rows(one.data.dataset, 5)
            for one in (alone, spec, spec)
        )
        assert values(expected.dataset) == values(found.dataset) == values(again.dataset)
        assert num_rows(again.dataset) == 5
        assert again.report.kept == 12
        assert num_rows(prepare(spec).dataset) == 12


def test_a_job_and_its_resumed_attempt_have_the_losses_of_one_without_a_cache(tmp_path: Path) -> None:
    outcomes, records = [], []
    for name, places in {"alone": None, "kept": tmp_path / "tokens"}.items():
        root = tmp_path / name
        changes = {"validation_rows": SFT_ROWS[:5], "save_steps": 2, "batch_size": 3, "token_cache": places}
        spec = job_spec(root, tiny_model(), **changes)
        status, events = run(root / "run", spec)
        assert status == 0
        status, resumed = run(root / "again", spec, spec.checkpoint_dir / "checkpoint-2")
        assert status == 0
        outcomes.append([point.metrics["loss"] for point in of_kind([*events, *resumed], Progress)])
        records += [of_kind(one, Prepared)[0].effective.get("token_cache") for one in (events, resumed)]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 6
    assert outcomes[0][2:4] == outcomes[0][4:]
    written, found = ({"train_dataset": one, "validation_dataset": one} for one in ("computed", "cache"))
    assert records == [None, None, written, found]


def test_of_equal_rows_the_first_is_the_largest() -> None:
    values = torch.tensor([3, 9, 1, 9, 3, 9, 3])
    for count in range(1, 9):
        assert first_largest(values, count) == values.argsort(descending=True, stable=True)[:count].tolist()


# --- which rows are the same ------------------------------------------------------------------------------------------


def test_what_decides_the_tokens_is_in_the_key_and_nothing_else_is(tmp_path: Path) -> None:
    spec = kept(tmp_path)

    def key(tokenizer: Any = None, **changes: Any) -> str | None:
        changed = spec.changed(**changes)
        return RowKeys(changed, tokenizer or tiny_tokenizer()).of(changed.data.dataset)

    same: list[dict[str, Any]] = [{}, {"seed": 7}, {"job_uuid": "other"}, {"batch_size": 2}, {"n_epochs": 3}]
    other: list[dict[str, Any]] = [
        {"max_seq_length": 100},
        {"truncation_side": "left"},
        {"train_on_input": True},
        {"data_format": "dialog"},
        {"method": DpoSpec()},
        {"dataset": dataset(tmp_path, SFT_ROWS[1:])},
    ]
    assert len({key(**changes) for changes in same}) == 1
    changed = {key(**changes) for changes in other} | {key(tiny_tokenizer(vocabulary=300))}
    for name, value in {"chat_template": DATED, "eos_token": "<|endoftext|>", "split_special_tokens": True}.items():
        tokenizer = tiny_tokenizer()
        setattr(tokenizer, name, value)
        changed.add(key(tokenizer))
    assert len(changed - {key()}) == len(other) + 4


def test_a_tokenizer_keeps_its_key_while_it_is_used(tmp_path: Path) -> None:
    spec, tokenizer = kept(tmp_path), tiny_tokenizer(chat_template=False)
    tokenizer.backend_tokenizer.enable_truncation(5)
    before = RowKeys(spec, tokenizer).of(spec.data.dataset)
    tokenize(spec, spec.data.dataset, tokenizer).collect()
    assert RowKeys(spec, tokenizer).of(spec.data.dataset) == before


@pytest.mark.parametrize("template", [DATED, DATED.replace("strftime_now('%d')", "[1, 2] | random")])
def test_a_template_that_varies_is_rendered_once_per_job(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    spec = kept(tmp_path)
    other = spec.model_copy(update={"job_uuid": "other"})
    assert [prepare(one, tokenizer).source for one in (spec, spec, other)] == ["computed", "cache", "computed"]


def test_rows_of_a_tokenizer_with_code_of_its_own_are_not_kept(tmp_path: Path) -> None:
    tokenizer, writer = tiny_tokenizer(), Writer(tmp_path)
    tokenizer.__class__ = type("Own", (type(tokenizer),), {"__module__": "transformers_modules.own"})
    spec = kept(tmp_path)
    assert prepare(spec, tokenizer, writer).source == "not kept"
    assert not (tmp_path / "tokens").exists()
    assert writer.written(Warned) == []


def test_another_release_of_this_code_does_not_use_what_this_one_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kept(tmp_path)
    prepare(spec)
    monkeypatch.setattr(keys, "_CODE", "another")
    assert prepare(spec).source == "computed"


# --- damage, full disks, other processes ------------------------------------------------------------------------------


def damaged_rows(path: Path, at: int, data: bytes) -> None:
    with open(path / "rows.arrow", "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


DAMAGE = {
    "cut": lambda path: os.truncate(path / "rows.arrow", 900),
    "empty": lambda path: os.truncate(path / "rows.arrow", 0),
    "longer": lambda path: damaged_rows(path, 0, (path / "rows.arrow").read_bytes() + b"more"),
    "head": lambda path: damaged_rows(path, 4, b"\xff" * 64),
    "without rows": lambda path: (path / "rows.arrow").unlink(),
    "no report": lambda path: (path / "entry.json").write_text("{"),
    "another report": lambda path: (path / "entry.json").write_text(
        (path / "entry.json").read_text().replace('"kept": 12', '"kept": 13')
    ),
    "a link": lambda path: (path / "rows.arrow").rename(path / "x") and (path / "rows.arrow").symlink_to(path / "x"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_written_again(tmp_path: Path, damage: Any) -> None:
    spec = kept(tmp_path)
    expected = values(prepare(spec).dataset)
    damage(entries(tmp_path)[0])
    again = prepare(spec)
    assert (again.source, values(again.dataset)) == ("computed", expected)
    assert prepare(spec).source == "cache"
    assert [path.suffix for path in (tmp_path / "tokens").iterdir() if path.suffix] == [".lock"]


def test_offsets_that_lead_out_of_the_file_are_damage(tmp_path: Path) -> None:
    spec = kept(tmp_path)
    found = prepare(spec)
    path = entries(tmp_path)[0] / "rows.arrow"
    offsets = found.dataset.data.column("labels").chunks[0].offsets.to_numpy().tobytes()
    at = path.read_bytes().rindex(offsets)
    damaged_rows(path.parent, at + 8, (1 << 30).to_bytes(4, "little"))
    assert prepare(spec).source == "computed"


def test_without_room_on_the_disk_rows_are_in_memory_and_a_warning_states_it(tmp_path: Path) -> None:
    spec = kept(tmp_path).model_copy(update={"lifecycle": LifecycleSpec(min_free_bytes=1 << 60)})
    writer = Writer(tmp_path / "run")
    assert prepare(spec, writer=writer).source == "not kept"
    assert "No space left" in writer.written(Warned)[0].message
    assert entries(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kept(tmp_path)
    monkeypatch.setattr(prepared, "_BYTES_PER_BYTE", 0)
    monkeypatch.setattr(cache, "free_bytes", lambda path: 100)
    assert prepare(spec).source == "not kept"
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".lock"]
    (tmp_path / "file").touch()
    assert prepare(spec.changed(token_cache=tmp_path / "file")).source == "not kept"


def test_a_row_that_cannot_be_tokenized_leaves_no_entry(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    spec = kept(tmp_path)
    for _ in range(2):  # the lock is free again
        with pytest.raises(JobFailure, match="row 0: the model's chat template refuses"):
            prepare(spec, tokenizer)
    assert entries(tmp_path) == []


@contextmanager
def another_writer(spec: JobSpec, note: str) -> Iterator[FileLock]:
    """Another process that has the lock of the job's rows."""
    key = RowKeys(spec, tiny_tokenizer()).of(spec.data.dataset)
    assert spec.data.token_cache is not None
    spec.data.token_cache.mkdir()
    lock = FileLock(spec.data.token_cache / f"{key}.lock")
    assert lock.acquire(note)
    yield lock
    lock.release()


@pytest.mark.parametrize("note", ["7", "", "rubbish", "9" * 500])
def test_while_another_process_writes_the_rows_this_one_waits_and_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    monkeypatch.setattr(prepared, "_INTERVAL", 0.0)
    spec, writer, done = kept(tmp_path), Writer(tmp_path / "run"), []
    with another_writer(spec, note) as lock:
        waiting = threading.Thread(target=lambda: done.append(prepare(spec, writer=writer)))
        waiting.start()
        deadline = time.monotonic() + 30
        while writer.heartbeats < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert writer.heartbeats >= 2
        assert not done
        shown = [event.rows for event in writer.written(Tokenizing)]
        assert set(shown) == ({7} if note == "7" else set())
        lock.release()  # as when its process is killed
        waiting.join(30)
    assert done[0].source == "computed"


def test_rows_that_another_process_has_written_meanwhile_are_used(tmp_path: Path) -> None:
    spec, done = kept(tmp_path), []
    elsewhere = spec.changed(token_cache=tmp_path / "elsewhere")
    prepare(elsewhere)
    with another_writer(spec, "7") as lock:
        waiting = threading.Thread(target=lambda: done.append(prepare(spec)))
        waiting.start()
        for path in (tmp_path / "elsewhere").iterdir():
            if not path.suffix:
                path.rename(tmp_path / "tokens" / path.name)
        lock.release()
        waiting.join(30)
    assert done[0].source == "cache"


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_shown_every_two_seconds_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, writer = FakeClock(), Writer(tmp_path / "run")
    original = TokenCache.check_space

    def slow(self: TokenCache, size: int) -> None:
        original(self, size)
        clock.advance(0.9)

    monkeypatch.setattr(TokenCache, "check_space", slow)
    monkeypatch.setattr(cache, "_BATCH_BYTES", 1)
    spec = kept(tmp_path, rows=SFT_ROWS * 500)
    prepare(spec, writer=writer, clock=clock)
    assert [(event.rows, event.total_rows) for event in writer.written(Tokenizing)] == [
        (2000, 6000),
        (5000, 6000),
        (6000, 6000),
    ]


def test_quick_and_found_rows_show_no_progress(tmp_path: Path) -> None:
    spec, writer = kept(tmp_path), Writer(tmp_path / "run")
    prepare(spec, writer=writer)
    prepare(spec, writer=writer)
    assert writer.written(Tokenizing) == []


# --- how long entries stay --------------------------------------------------------------------------------------------


def test_entries_go_by_their_last_use_and_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(number: int) -> JobSpec:
        return kept(tmp_path, rows=SFT_ROWS[number:])

    old = prepare(of(0))
    (first,) = entries(tmp_path)
    os.utime(first, (time.time() - KEEP_SECONDS - 60,) * 2)
    left = tmp_path / "tokens" / ("0" * 64 + ".tmp")
    left.mkdir()
    os.utime(left, (0, 0))
    prepare(of(1))
    assert first not in entries(tmp_path)
    assert not left.exists()
    assert values(old.dataset)["input_ids"]  # it is still mapped
    size = (entries(tmp_path)[0] / "rows.arrow").stat().st_size
    monkeypatch.setattr(cache, "KEEP_BYTES", 5 * size // 2)
    prepare(of(2))
    used, other = of(1), of(2)
    now = time.time()
    for age, path in enumerate(entries(tmp_path)):
        os.utime(path, (now - 100 - age,) * 2)
    assert prepare(used).source == "cache"  # now the last used
    prepare(of(3))
    assert prepare(used).source == "cache"
    assert prepare(other).source == "computed"


def test_an_entry_is_kept_although_it_alone_exceeds_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEEP_BYTES", 1)
    spec = kept(tmp_path)
    assert [prepare(spec).source for _ in range(2)] == ["computed", "cache"]
    assert json.loads((entries(tmp_path)[0] / "entry.json").read_text())["entry"]["rows"] == 12
