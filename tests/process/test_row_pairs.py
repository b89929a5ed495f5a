"""Rows with several preference pairs are trained as rows of one pair each are, and stay rows in every count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.prepare import tokenize, tokenize_dpo
from llama_stack_provider_trl.recipes.data.prepared import Preparation
from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
from llama_stack_provider_trl.recipes.preview import preview
from llama_stack_provider_trl.specs.events import (
    EventWriter,
    NullEventWriter,
    Prepared,
    Previewed,
    Progress,
    Tokenizing,
    Warned,
    iter_events,
)
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from llama_stack_provider_trl.specs.rows import PreferenceExample
from tests.process.spoken import answer
from tests.process.talks import _LAST_USER_TURN_IN_CAPITALS, _NUMBER_OF_TURNS, _SYSTEM_IN_LAST_USER_TURN, SYSTEM, TALK
from tests.process.trl_templates import COMPLETIONS, TEMPLATES
from tests.tiny import CHATML, tiny_model, tiny_tokenizer
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

THOUGHT = "<think>\nOne and one.\n</think>\n\nTwo."
ALL_TEMPLATES: dict[str, str | None] = {
    **TEMPLATES,
    "system in last user turn": _SYSTEM_IN_LAST_USER_TURN,
    "number of turns": _NUMBER_OF_TURNS,
    "capitals": _LAST_USER_TURN_IN_CAPITALS,
    "by the answer": (
        "{% if '<think>' in messages[-1]['content'] %}{{ 'Think.\n' }}{% else %}{{ 'Plainly:\n' }}{% endif %}" + CHATML
    ),
    "a border within a token": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
SEVERAL = [
    {
        "prompt": f"What is {n} plus {n}?",
        "chosen": f"It is {2 * n}.",
        "rejected": [f"I would rather not add {n}.", "No. " * (1 + n % 3), f"It is {n}."][: 1 + n % 3],
    }
    for n in range(8)
]
WRITTEN_OUT = [{**row, "rejected": rejected} for row in SEVERAL for rejected in row["rejected"]]


def written_out(examples: list[PreferenceExample]) -> list[PreferenceExample]:
    return [
        PreferenceExample.of(pair.prompt, pair.chosen, pair.rejected)
        for example in examples
        for pair in example.written_out()
    ]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_tokens_of_pairs_of_a_row_are_those_of_rows_of_their_own(name: str, side: Any) -> None:
    tokenizer = tiny_tokenizer(trim_offsets=True)
    tokenizer.chat_template = ALL_TEMPLATES[name]
    texts = [*COMPLETIONS, THOUGHT, "11 is it", "No."]
    prompts = [TALK[:1], [SYSTEM, TALK[0]], [*TALK[:2], {"role": "user", "content": "And "}]]
    examples = [PreferenceExample.of(prompt, *map(answer, texts[n:] + texts[:n])) for n, prompt in enumerate(prompts)]
    examples.insert(1, PreferenceExample(TALK[:1], [], []))
    examples.append(PreferenceExample(TALK[:1], [*map(answer, texts)], [(2, 0), (6, 7), (1, 6)]))
    for limit in (1024, 40):
        found, report = tokenize_dpo(examples, tokenizer, limit, side).collect()
        expected, alone = tokenize_dpo(written_out(examples), tokenizer, limit, side).collect()
        assert list(found) == list(expected)
        assert (report.num_rows, report.examples) == (5, 27)
        assert (alone.num_rows, alone.examples) == (27, 27)
        for count in ("kept", "truncated", "dropped", "total_tokens", "trained_tokens", "max_tokens", "largest_id"):
            assert getattr(report, count) == getattr(alone, count), count
        assert report.warnings[0] == "5 rows make 27 pairs"
        per_pair = [warning for warning in report.warnings if " of 27 pairs" in warning]
        assert per_pair == [
            warning for warning in alone.warnings if " of 27 pairs" in warning and "turns of" not in warning
        ]


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "reward"])
def test_training_on_several_rejected_answers_equals_training_on_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def trained(name: str, rows: list[dict[str, Any]]) -> tuple[list[float], Prepared, list[str], bytes]:
        root = tmp_path / name
        spec = job_spec(root, tiny_model(), algorithm, rows=rows, n_epochs=2, validation_rows=rows[:3])
        status, events = run(root, spec)
        assert status == 0
        losses = [event.metrics["loss"] for event in of_kind(events, Progress)]
        (weights,) = (spec.checkpoint_dir / "final").glob("*.safetensors")
        warnings = [event.message for event in of_kind(events, Warned)]
        return losses, of_kind(events, Prepared)[0], warnings, weights.read_bytes()

    losses, prepared, warnings, weights = trained("several", SEVERAL)
    expected, alone, _, same = trained("alone", WRITTEN_OUT)
    assert len(losses) == 2 * 4
    assert losses == expected
    assert (prepared.num_rows, prepared.total_steps) == (alone.num_rows, alone.total_steps) == (15, 8)
    data = prepared.effective["data"]
    assert (data["num_rows"], data["examples"], data["kept"], data["dropped"]) == (8, 15, 15, 0)
    assert "8 rows make 15 pairs" in warnings
    assert prepared.effective["validation_data"]["examples"] == 6
    if algorithm == "dpo":  # the validation rows differ, and are not trained
        assert weights == same


def shown(root: Path, spec: JobSpec, **requested: int) -> Previewed:
    events = root / "events.jsonl"
    events.unlink(missing_ok=True)
    preview(spec, PreviewSpec(**requested), EventWriter(events))
    (found,) = [event for event in iter_events(events) if isinstance(event, Previewed)]
    return found


def test_a_preview_shows_the_pairs_of_a_row_under_its_number(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), "dpo", rows=SEVERAL)
    found = shown(tmp_path, spec, first_row=1, rows=3)
    assert [(row.row, row.example, row.examples) for row in found.rows] == [
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 3),
        (2, 1, 3),
        (2, 2, 3),
        (3, 0, 1),
    ]
    counts = [found.data[name] for name in ("num_rows", "read", "examples", "trained", "dropped")]
    assert counts == [8, 7, 14, 14, 0]
    assert sum(bucket["rows"] for bucket in found.data["histogram"]) == 14
    assert "7 rows make 14 pairs" in found.warnings
    dataset, _ = tokenize(spec, spec.data.dataset, load_tokenizer(spec.source)).collect()
    for row, trained in zip(found.rows, dataset.select(range(1, 7)), strict=True):
        assert row.ids == [*trained["prompt_ids"], *trained["chosen_ids"], *trained["rejected_ids"]]


def test_a_preview_shows_no_more_pairs_than_its_event_holds(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "chosen": "Yes.", "rejected": [f"No {n}." for n in range(70)]}] * 3
    found = shown(tmp_path, job_spec(tmp_path, tiny_model(), "dpo", rows=rows), rows=3)
    assert [(row.row, row.example) for row in found.rows[-31:]] == [(0, 69), *((1, n) for n in range(30))]
    assert (found.data["read"], found.data["examples"]) == (3, 210)


def test_unread_rows_count_for_a_warmup_with_the_pairs_that_rows_have(tmp_path: Path) -> None:
    """8 rows make 15 pairs, and the last 2 of them 3: the 6 unread ones are taken for 9."""
    few = OptimizerSpec(learning_rate=1e-3, warmup_steps=8)
    spec = job_spec(tmp_path, tiny_model(), "dpo", rows=SEVERAL, batch_size=2, optimizer=few)
    for first, steps in ((0, 8), (6, 6)):
        (warmup,) = [text for text in shown(tmp_path, spec, first_row=first).warnings if "the warmup of" in text]
        assert f"the job of {steps} optimizer steps" in warmup


def test_rows_without_a_preference_make_no_pair_and_alone_they_fail_the_job(tmp_path: Path) -> None:
    none = {"prompt": "Why?", "responses": ["Because.", "So."], "scores": [1, 1]}
    spec = job_spec(tmp_path, tiny_model(), "dpo", rows=[none, *SEVERAL[:1], none])
    found = shown(tmp_path, spec, rows=2)
    assert [(row.row, row.example) for row in found.rows] == [(1, 0)]
    assert (found.data["read"], found.data["examples"], found.data["dropped"]) == (3, 1, 0)
    only = job_spec(tmp_path / "only", tiny_model(), "dpo", rows=[none, none])
    message = "the 2 rows make no pair: expected a row of which an answer is better than another"
    with pytest.raises(JobFailure, match=message):
        shown(tmp_path, only)
    with pytest.raises(JobFailure, match=message):
        Preparation(only, load_tokenizer(only.source), NullEventWriter(), only.data.dataset).rows(only.data.dataset)


def test_progress_and_the_row_of_a_token_count_rows(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), "dpo", rows=SEVERAL * 300)
    tokenizer, events = load_tokenizer(spec.source), tmp_path / "events.jsonl"
    times = iter(range(0, 10_000, 5))
    preparation = Preparation(spec, tokenizer, EventWriter(events), spec.data.dataset, clock=lambda: float(next(times)))
    report = preparation.rows(spec.data.dataset).report
    found = [(event.rows, event.total_rows) for event in iter_events(events) if isinstance(event, Tokenizing)]
    assert found == [(1000, 2400), (2000, 2400), (2400, 2400), (2400, 2400)]
    assert report.largest_id_row < 8
    again = Preparation(spec, tokenizer, NullEventWriter(), spec.data.dataset).rows(spec.data.dataset)
    assert (again.source, again.report) == ("cache", report)
