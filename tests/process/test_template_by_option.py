"""The options `chat_template` and `system_prompt`: what is trained, what is exported, and who reads it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llama_stack_provider_trl.errors import InvalidRows, JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.prepare import tokenize
from llama_stack_provider_trl.recipes.model.loading import load_job_tokenizer
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.answer_rows import RowsOnDemand
from llama_stack_provider_trl.specs.chat_templates import CHATML
from llama_stack_provider_trl.specs.events import Failed, Prepared, Progress
from llama_stack_provider_trl.specs.job import JobSpec, RowNames
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.rows import check_rows
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, dataset, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

BRIEF = "Answer briefly."
LABELLED = [{**row, "label": number % 3 > 0} for number, row in enumerate(SFT_ROWS)]
TALKS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in SFT_ROWS
]


def tokens(root: Path, algorithm: str, rows: list[dict[str, Any]], system: str | None = None, **changes: Any) -> Any:
    """The tokens of rows that are read with a system prompt."""
    spec = job_spec(root, tiny_model(), algorithm, rows=rows, **changes)
    named = spec.data.dataset.model_copy(update={"names": RowNames(system=system) if system else None})
    return [*tokenize(spec, named, load_job_tokenizer(spec)).collect()[0]]


def with_system(rows: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    turn = {"role": "system", "content": text}
    if "messages" in rows[0]:
        return [{"messages": [turn, *row["messages"]]} for row in rows]
    return [
        {
            name: [turn, {"role": "user", "content": value}]
            if name == "prompt"
            else value
            if name == "label"
            else [{"role": "assistant", "content": value}]
            for name, value in row.items()
        }
        for row in rows
    ]


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [("sft", SFT_ROWS), ("sft", TALKS), ("dpo", DPO_ROWS), ("kto", LABELLED)],
    ids=["instruct", "dialog", "pairs", "labelled"],
)
def test_rows_are_trained_as_with_a_system_turn_of_their_own(
    tmp_path: Path, algorithm: str, rows: list[dict[str, Any]]
) -> None:
    plain = tokens(tmp_path, algorithm, rows)
    found = tokens(tmp_path, algorithm, rows, BRIEF)
    assert found == tokens(tmp_path, algorithm, with_system(rows, BRIEF))
    assert found != plain
    other = with_system(rows, "Answer at length.")
    assert tokens(tmp_path, algorithm, other, BRIEF) == tokens(tmp_path, algorithm, other)


def test_prompts_that_are_answered_have_it_and_so_do_their_rewards(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "answer": "1"} for row in SFT_ROWS[:3]]
    names = RowNames(columns={"prompt": "question"}, system=BRIEF)
    check = AnswerCheck(type="exact", column="answer")
    method = GrpoSpec(rewards=(RewardSource(name="exact", check=check),), num_generations=2, max_completion_length=8)
    spec = job_spec(tmp_path, tiny_model(), "grpo", rows=rows, method=method)
    named = spec.data.dataset.model_copy(update={"names": names})
    tokenizer = load_job_tokenizer(spec)
    (first, *_) = tokenize(spec, named, tokenizer).collect()[0]
    prompt = [{"role": "system", "content": BRIEF}, {"role": "user", "content": rows[0]["question"]}]
    assert first["prompt_ids"] == Chat(tokenizer).tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=False
    )
    checked = RowsOnDemand(named.path, [check], names).checked(0)
    assert checked.messages == prompt
    assert checked.references == ["1"]


def test_rows_with_a_system_turn_keep_it_with_a_warning_and_plain_text_is_refused() -> None:
    rows = [*with_system(TALKS[:2], "Answer at length."), TALKS[2], {**TALKS[3], "system": "Rhyme."}]
    report = check_rows(rows, "sft", names=RowNames(system=BRIEF))
    assert [warning for warning in report.warnings if "system_prompt" in warning] == [
        "3 of 4 rows have a system turn of their own, which stands in place of the option system_prompt"
    ]
    mixed = check_rows([{"text": "Once."}, TALKS[0]], "sft", names=RowNames(system=BRIEF))
    assert "1 of 2 rows are plain text, which gets no system_prompt" in mixed.warnings
    with pytest.raises(InvalidRows, match="the rows are plain text, and none is a conversation"):
        check_rows([{"text": "Once."}], "sft", names=RowNames(system=BRIEF))


def trained(root: Path, spec: JobSpec) -> list[float]:
    status, events = run(root / "run", spec)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    assert of_kind(events, Prepared)
    return [event.metrics["loss"] for event in of_kind(events, Progress)]


SHOUTED = "{% for m in messages %}{{ m['role'] | upper + '! ' + m['content'] + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'ASSISTANT! ' }}{% endif %}"
)


def test_a_template_is_trained_exported_and_read_by_the_jobs_that_follow(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", job_spec(tmp_path / "plain", tiny_model(), lora=LORA))
    spec = job_spec(tmp_path / "own", tiny_model(), lora=LORA, chat_template=SHOUTED, merge_adapter=True)
    assert trained(tmp_path / "own", spec) != plain
    for kind in ("final", "merged"):
        assert AutoTokenizer.from_pretrained(spec.checkpoint_dir / kind).chat_template == SHOUTED
    for use in ("continue", "merge"):
        adapter = AdapterSpec(model=str(spec.checkpoint_dir / "final"), use=use)
        further = job_spec(tmp_path / use, tiny_model(), lora=LORA, adapter=adapter)
        assert load_job_tokenizer(further).chat_template == SHOUTED
    assert load_job_tokenizer(further.changed(chat_template=CHATML)).chat_template == CHATML


def test_a_template_beside_an_adapter_that_cannot_be_read_is_named_and_a_mark_is_left_out(tmp_path: Path) -> None:
    adapter = AdapterSpec(model=str(tmp_path), use="continue")
    spec = job_spec(tmp_path, tiny_model(), lora=LORA, adapter=adapter)
    own = load_job_tokenizer(spec).chat_template
    file = tmp_path / "chat_template.jinja"
    file.write_text("\ufeff" + SHOUTED)
    assert load_job_tokenizer(spec).chat_template == SHOUTED
    file.write_text(" \n")
    assert load_job_tokenizer(spec).chat_template == own
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(JobFailure, match=r"its chat_template\.jinja cannot be read"):
        load_job_tokenizer(spec)


def test_a_template_that_is_no_jinja_fails_the_job_in_one_sentence(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), chat_template="{% for m in messages %}\n{{ m['content' }}{% endfor %}")
    status, events = run(tmp_path / "run", spec)
    (failed,) = of_kind(events, Failed)
    assert status != 0
    assert failed.message.startswith("provider_options.chat_template is no Jinja template: ")
    assert "in line 2. Correct it, or leave it out" in failed.message


def test_rows_of_another_template_or_system_turn_are_other_entries_of_the_cache(tmp_path: Path) -> None:
    from llama_stack_provider_trl.recipes.data.keys import RowKeys

    def key(system: str | None = None, **changes: Any) -> str | None:
        spec = job_spec(tmp_path, tiny_model(), **changes)
        rows = dataset(tmp_path, SFT_ROWS).model_copy(update={"names": RowNames(system=system)})
        return RowKeys(spec, load_job_tokenizer(spec)).of(rows)

    assert len({key(), key(BRIEF), key(chat_template=CHATML), key(BRIEF, chat_template=CHATML)}) == 4
