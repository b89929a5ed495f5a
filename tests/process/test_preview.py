"""The preview of rows is what their training gets: the same tokens, loss and cuts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.prepare import TruncationCounter, tokenize
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.token_texts import TokenTexts
from llama_stack_provider_trl.recipes.masked_rows import MaskedPart, MaskedRow
from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
from llama_stack_provider_trl.recipes.preview import _Compared, _Place, _shown, preview
from llama_stack_provider_trl.specs.events import EventWriter, Previewed, iter_events
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import job_spec

pytestmark = pytest.mark.process

DIALOG = [
    {"role": "user", "content": "What is one plus one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And 你好 <script>?"},
    {"role": "assistant", "content": "Four, and hello."},
]
SFT_ROWS = [
    {"messages": DIALOG},
    {"prompt": "What is two times two?", "completion": "Four."},
    {"prompt": "word " * 80, "completion": "Never seen."},
    {"prompt": "Short?", "completion": "word " * 80},
]
DPO_ROWS = [
    {"prompt": "What is two times two?", "chosen": "Four.", "rejected": "word " * 80},
    {"prompt": "word " * 80, "chosen": "Yes.", "rejected": "No."},
]


def shown(root: Path, spec: JobSpec, **requested: int) -> Previewed:
    events = root / "events.jsonl"
    preview(spec, PreviewSpec(**requested), EventWriter(events))
    (found,) = [event for event in iter_events(events) if isinstance(event, Previewed)]
    return found


def of_rows(root: Path, algorithm: Any, rows: list[dict[str, Any]], **changes: Any) -> JobSpec:
    return job_spec(root, tiny_model(), algorithm, rows=rows, **changes)


@pytest.mark.parametrize("limit", [24, 400])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("train_on_input", [False, True])
def test_tokens_and_loss_of_rows_are_those_of_the_training(
    tmp_path: Path, limit: int, side: str, train_on_input: bool
) -> None:
    changes = {"max_seq_length": limit, "truncation_side": side, "train_on_input": train_on_input}
    spec = of_rows(tmp_path, "sft", SFT_ROWS, **changes)
    found = shown(tmp_path, spec)
    dataset, report = tokenize(spec, spec.data.dataset, load_tokenizer(spec.source)).collect()
    kept = [row for row in found.rows if row.outcome != "dropped"]
    assert [row.row for row in found.rows] == [0, 1, 2, 3]
    assert len(kept) == len(dataset) == report.kept == found.data["trained"]
    for row, trained in zip(kept, dataset, strict=True):
        marks = list(zip(row.ids, row.kept, row.trained, strict=True))
        assert [token for token, is_kept, _ in marks if is_kept == "1"] == trained["input_ids"]
        loss = [token if covers == "1" else IGNORED for token, is_kept, covers in marks if is_kept == "1"]
        assert loss == [IGNORED, *trained["labels"][1:]]
        assert "1" not in "".join(covers for _, is_kept, covers in marks if is_kept == "0")
        assert (row.outcome == "cut") == ("0" in row.kept)
    assert (found.data["truncated"], found.data["trained_tokens"]) == (report.truncated, report.trained_tokens)
    assert found.warnings[-1:] == report.warnings[-1:]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [24, 400])
def test_tokens_of_pairs_are_those_of_the_training(tmp_path: Path, limit: int, side: str) -> None:
    spec = of_rows(tmp_path, "dpo", DPO_ROWS, max_seq_length=limit, truncation_side=side)
    found = shown(tmp_path, spec)
    dataset, _ = tokenize(spec, spec.data.dataset, load_tokenizer(spec.source)).collect()
    kept = [row for row in found.rows if row.outcome != "dropped"]
    assert len(kept) == len(dataset)
    for row, trained in zip(kept, dataset, strict=True):
        begin = 0
        for name, length in row.parts.items():
            part = slice(begin, begin + length)
            begin += length
            ids = [token for token, mark in zip(row.ids[part], row.kept[part], strict=True) if mark == "1"]
            assert ids == trained[f"{name}_ids"], name
            assert row.trained[part] == (row.kept[part] if name != "prompt" else "0" * length)
    if limit == 24 and side == "right":
        assert [row.outcome for row in found.rows] == ["cut", "dropped"]
        assert "the prompt leaves none for an answer" in found.rows[1].reason


def test_texts_are_those_of_the_tokens_and_special_ones_are_marked(tmp_path: Path) -> None:
    spec = of_rows(tmp_path, "sft", SFT_ROWS[:1])
    (row,) = shown(tmp_path, spec).rows
    tokenizer = load_tokenizer(spec.source)
    special = [text for text, mark in zip(row.texts, row.special, strict=True) if mark == "1"]
    assert special
    assert set(special) <= {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    assert "one plus one?" in "".join(row.texts)
    assert len(row.texts) == len(row.ids) == row.tokens


@pytest.mark.parametrize("text", ["Colour é ☕ 日本語?", "Год 😀👩‍👩‍👧 ok", "ก็ नमस्ते \u0301é\u200d.", "日" * 20])
def test_characters_of_several_tokens_are_shown_whole(tmp_path: Path, text: str) -> None:
    found = shown(tmp_path, of_rows(tmp_path, "sft", [{"prompt": text, "completion": f"Bleu foncé ☕ {text}"}]))
    (row,) = found.rows
    assert len(row.texts) == len(row.ids)
    assert "".join(row.texts).count(text) == 2
    trained = "".join(one for one, mark in zip(row.texts, row.trained, strict=True) if mark == "1")
    assert f"Bleu foncé ☕ {text}" in trained


def test_a_row_that_is_cut_within_a_character_shows_its_bytes_as_such() -> None:
    tokenizer = tiny_tokenizer()
    texts, ids = TokenTexts(tokenizer), tokenizer("日本")["input_ids"]
    for begin in range(len(ids)):
        for end in range(begin, len(ids) + 1):
            shown_texts = texts.of(ids[begin:end])
            assert len(shown_texts) == end - begin
            assert set(re.sub(r"<0x[0-9A-F]{2}>", "", "".join(shown_texts))) <= {"日", "本"}
    assert "".join(texts.of(ids[:-1])) == "日<0xE6><0x9C>"


def test_characters_whose_bytes_are_in_tokens_across_their_borders_are_shown_however_many_follow() -> None:
    """Each token but the first and last ends a character and begins the next one, or is the middle of one."""
    tokenizer = bytes_tokenizer(merges=[("½", "å")])  # the last byte of one 好 and the first one of the next
    texts = TokenTexts(tokenizer)
    ids = tokenizer("0" + "好" * 20)["input_ids"]
    assert len(ids) < 61
    assert "".join(texts.of(ids)) == "0" + "好" * 20


@pytest.mark.parametrize("has_decoder", [True, False])
def test_a_byte_level_tokenizer_without_a_decoder_shows_characters_too(has_decoder: bool) -> None:
    tokenizer = bytes_tokenizer(has_decoder=has_decoder)
    texts = TokenTexts(tokenizer)
    for text in ("Hi 😊 你好", "a  b\n", "é\ufffd"):
        ids = tokenizer(text)["input_ids"]
        found = texts.of(ids)
        assert len(found) == len(ids)
        assert "".join(found) == text


def bytes_tokenizer(*, merges: Sequence[tuple[str, str]] = (), has_decoder: bool = True) -> Any:
    """One token for each byte, and for each of these pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if has_decoder:
        made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_character_of_the_text_that_decoders_write_for_broken_ones_is_shown_as_it_is(tmp_path: Path) -> None:
    for text in ("A \ufffd B", "日\ufffd日 \ufffd\ufffd", "\ufffd" * 9):
        found = shown(tmp_path, of_rows(tmp_path, "sft", [{"prompt": "Name it?", "completion": text}]))
        (row,) = found.rows
        trained = "".join(one for one, mark in zip(row.texts, row.trained, strict=True) if mark == "1")
        assert trained.startswith(text)
        assert len(row.texts) == len(row.ids)
        (tmp_path / "events.jsonl").unlink()


def test_the_parts_of_a_pair_are_read_apart(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(of_rows(tmp_path, "dpo", DPO_ROWS).source)
    begun, rest = tokenizer("日")["input_ids"][:1], tokenizer("日")["input_ids"][1:]
    parts = [MaskedPart("chosen", begun, {0}, {0}), MaskedPart("rejected", rest, {0}, {0})]
    counter = TruncationCounter(None, None, 100)
    row = _shown(MaskedRow(parts, 3), _Place(0, 0, 1), counter, TokenTexts(tokenizer), _Compared(), 100)
    assert "日" not in row.texts
    assert len(row.texts) == len(row.ids) == len(begun + rest)


@pytest.mark.parametrize("packed", [False, True])
def test_a_warmup_that_is_not_shorter_than_the_job_is_shown(tmp_path: Path, packed: bool) -> None:
    rows, few = [SFT_ROWS[1]] * 8, OptimizerSpec(learning_rate=1e-3, warmup_steps=2)
    changes = {"rows": rows, "packed": packed, "n_epochs": 1, "optimizer": few, "max_seq_length": 128}
    spec = job_spec(tmp_path, tiny_model(), batch_size=4, **changes)
    (warmup,) = [warning for warning in shown(tmp_path, spec).warnings if warning.startswith("the warmup of 2 steps")]
    assert f"the job of {1 if packed else 2} optimizer steps" in warmup
    (tmp_path / "events.jsonl").unlink()
    long = spec.changed(n_epochs=3)
    assert not [warning for warning in shown(tmp_path, long).warnings if "warmup" in warning]
    (tmp_path / "events.jsonl").unlink()
    last = [warning for warning in shown(tmp_path, spec, first_row=1).warnings if "warmup" in warning]
    assert last == ([] if packed else [warmup]), "rows that are not read are taken for kept ones"


def test_few_rows_are_shown_from_the_first_one_on_and_the_counts_are_of_those_behind_it(tmp_path: Path) -> None:
    spec = of_rows(tmp_path, "sft", [SFT_ROWS[1]] * 120)
    found = shown(tmp_path, spec, first_row=15, rows=3)
    assert [row.row for row in found.rows] == [15, 16, 17]
    assert (found.data["num_rows"], found.data["read"]) == (120, 105)
    assert sum(bucket["rows"] for bucket in found.data["histogram"]) == 105
    with pytest.raises(JobFailure, match="has 120 rows and none at 120"):
        shown(tmp_path, spec, first_row=120)


def test_long_rows_are_shown_in_part_within_the_size_of_an_event(tmp_path: Path) -> None:
    rows = [{"prompt": "a, [b] {c} " * 3000, "completion": '{"a": [1, 2]}, ' * 3000}] * 5
    spec = of_rows(tmp_path, "sft", rows, max_seq_length=100_000)
    found = shown(tmp_path, spec)
    assert sum(len(row.ids) for row in found.rows) <= 8000 < found.rows[0].tokens
    assert [row.outcome for row in found.rows] == ["trained"] * 5 or found.max_seq_length < 100_000
    assert len(json.dumps(found.model_dump(mode="json"))) < 1 << 20
