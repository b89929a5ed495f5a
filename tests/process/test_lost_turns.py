"""Turns that a chat template leaves out are counted with their roles, wherever they are, and reported or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.prepare import (
    DataReport,
    tokenize_dpo,
    tokenize_kto,
    tokenize_prompts,
    tokenize_sft,
)
from llama_stack_provider_trl.recipes.data.prepared import Preparation
from llama_stack_provider_trl.recipes.data.prompts import encode_prompts
from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
from llama_stack_provider_trl.recipes.preview import preview
from llama_stack_provider_trl.recipes.reward_templates import lost_by_reward_models
from llama_stack_provider_trl.specs.events import EventWriter, Failed, Prepared, Previewed, iter_events
from llama_stack_provider_trl.specs.job import JobSpec, SampleMessage, SamplesSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.preflight import PreviewSpec
from llama_stack_provider_trl.specs.rewards import RewardModel, RewardSource
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, PromptExample, SftExample
from tests.process.talks import _WITHOUT, SYSTEM, TALK
from tests.tiny import CHATML, tiny_model, tiny_tokenizer
from tests.training import job_spec, of_kind, run

pytestmark = pytest.mark.process
TOOL = {"role": "tool", "content": '{"degrees": 31}'}
_DROPS_NOTES = CHATML.replace(
    "{{ '<|im_start|>'", "{% if not message['content'].startswith('[note]') %}{{ '<|im_start|>'", 1
).replace("'\n' }}{% endfor %}", "'\n' }}{% endif %}{% endfor %}")
_ONLY_LAST_ANSWER = _WITHOUT.replace("m['role'] not in ROLES", "m['role'] != 'assistant' or loop.last")


@pytest.fixture
def chatml() -> Any:
    return tiny_tokenizer()


def lost(report: DataReport) -> list[str]:
    return [warning for warning in report.warnings if "leaves out turns" in warning]


def test_answers_that_are_left_out_of_a_prompt_are_counted(chatml: Any) -> None:
    chatml.chat_template = _ONLY_LAST_ANSWER
    for _, report in (
        tokenize_sft([SftExample(TALK[:4], 3), SftExample(TALK[:2], 1)], chatml, 1024).collect(),
        tokenize_sft([SftExample(TALK[:4], None), SftExample(TALK[:2], None)], chatml, 1024).collect(),
        tokenize_kto([LabelledExample(TALK[:3], TALK[3:4], True)] * 2, chatml, 1024).collect(),
        tokenize_prompts([PromptExample(TALK[:3])] * 2, chatml, 1024, 8).collect(),
    ):
        (warning,) = lost(report)
        assert "assistant), first in row 0" in warning


def test_turns_of_the_rejected_answer_alone_are_counted(chatml: Any) -> None:
    chatml.chat_template = _WITHOUT.replace("ROLES", "['tool']")
    rejected = [TALK[1], TOOL, TALK[3]]
    pairs = [PreferenceExample.of(TALK[:1], TALK[1:2], TALK[1:2]), PreferenceExample.of(TALK[:1], TALK[1:2], rejected)]
    (warning,) = lost(tokenize_dpo(pairs, chatml, 1024).collect()[1])
    assert "1 of 2 pairs (1 tool), first in row 1" in warning


def test_turns_of_a_prompt_are_counted_once_for_both_answers(chatml: Any) -> None:
    chatml.chat_template = _WITHOUT.replace("ROLES", "['tool', 'system']")
    pair = PreferenceExample.of([SYSTEM, TALK[0]], [TALK[1], TOOL, TALK[3]], [TALK[1], TOOL, TALK[5]])
    (warning,) = lost(tokenize_dpo([pair], chatml, 1024).collect()[1])
    assert "1 of 1 pairs (1 system, 2 tool)" in warning


def test_turns_are_counted_where_their_content_decides(chatml: Any) -> None:
    chatml.chat_template = _DROPS_NOTES
    note = {"role": "system", "content": "[note] Rain is expected."}
    examples = [SftExample([SYSTEM, *TALK[:2]], None), SftExample([note, *TALK[:2]], None)]
    (warning,) = lost(tokenize_sft(examples, chatml, 1024).collect()[1])
    assert "1 of 2 rows (1 system), first in row 1" in warning


def test_turns_are_no_loss_where_the_template_writes_them_for_their_content(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'assistant' or 'apple' in m['content'] %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    talk = [TALK[0], {"role": "assistant", "content": "An apple."}]
    dataset, report = tokenize_sft([SftExample(talk, None)], chatml, 1024).collect()
    assert "An apple." in chatml.decode(dataset[0]["input_ids"])
    assert not lost(report)


def test_what_an_answer_thought_before_is_no_lost_turn(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
    thought = {"role": "assistant", "content": "<think>Hm.</think>"}
    _, report = tokenize_sft([SftExample([TALK[0], thought, *TALK[2:4]], None)], chatml, 1024).collect()
    assert not lost(report)


THOUGHT = {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."}
_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WITHOUT = CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
"""Leaves out thoughts, and begins none in generation."""


def unwritten(report: DataReport) -> list[str]:
    return [warning for warning in report.warnings if "are not written by the chat template" in warning]


@pytest.mark.parametrize(
    ("template", "content", "is_whole"),
    [
        ("deepseek_r1_distill", THOUGHT["content"], True),
        ("deepseekv3", THOUGHT["content"], True),
        ("deepseek_r1_distill", "use the tag </think> in HTML", True),
        ("deepseek_r1_distill", "<think></think>Two.", True),
        ("deepseek_r1_distill", "<think>Two.", True),
        ("deepseek_r1_distill", "<think>Two</think>Two.", True),
        ("without", "<think>Two</think>Two.", False),  # the thought is in the answer's text, too
        ("without", THOUGHT["content"], False),
        ("qwen3", "  <think>One and one.</think>Two.\n", True),  # written with other white space
        ("qwen3", "Hm. <think>One</think> Two <think>three</think> four", False),
        ("glm4moe", "Hm. <think>One</think> Two <think>three</think> four", False),
        ("glm4moe", THOUGHT["content"], True),
        ("gemma4", "<|channel>thought\nOne and one.<channel|>Two.", False),
        ("llama3", THOUGHT["content"], True),
    ],
)
def test_text_of_a_trained_answer_that_is_not_written_is_counted(
    chatml: Any, template: str, content: str, is_whole: bool
) -> None:
    chatml.chat_template = WITHOUT if template == "without" else (_TEMPLATES / f"{template}.jinja").read_text()
    chatml.bos_token, talk = "<|im_start|>", [TALK[0], {"role": "assistant", "content": content}]
    plain = SftExample(TALK[:2], 1)
    for _, report in (
        tokenize_sft([plain, SftExample(talk, 1)], chatml, 1024).collect(),
        tokenize_sft([plain, SftExample(talk, None)], chatml, 1024).collect(),
        tokenize_sft([plain, SftExample(talk, None)], chatml, 1024, train_on_input=True).collect(),
        tokenize_kto([LabelledExample(TALK[:1], [turn], True) for turn in (TALK[1], talk[1])], chatml, 1024).collect(),
        tokenize_dpo(
            [PreferenceExample.of(TALK[:1], [turn], TALK[5:]) for turn in (TALK[1], talk[1])], chatml, 1024
        ).collect(),
    ):
        found = unwritten(report)
        assert len(found) == (not is_whole)
        assert found == report.lost_turns
        for warning in found:
            assert warning.startswith("thoughts, or other text, of 1 answers are not written by the chat template")
            assert "(1 of 2 " in warning
            assert "first in row 1)" in warning


def test_thoughts_of_earlier_answers_are_trained_in_sequences_of_their_own(chatml: Any) -> None:
    chatml.chat_template = (_TEMPLATES / "qwen3.jinja").read_text()
    talk = [TALK[0], THOUGHT, TALK[2], THOUGHT]
    assert not unwritten(tokenize_sft([SftExample(talk, None)], chatml, 1024).collect()[1])
    assert not unwritten(tokenize_sft([SftExample(talk, 3)], chatml, 1024).collect()[1])
    assert not unwritten(tokenize_prompts([PromptExample(talk[:3])], chatml, 1024, 8).collect()[1])


def test_thoughts_are_not_counted_where_the_template_refuses_or_changes_marks(chatml: Any) -> None:
    for change in (
        "{% if messages[-1]['content'] | length > 36 %}{{ raise_exception('too long') }}{% endif %}",
        "{{ messages[-1]['content'] | length }}",
    ):
        chatml.chat_template = change + CHATML.replace(
            "message['content'] +", "(message['content'] | replace('\n', ' ')) +"
        )
        assert not unwritten(tokenize_sft([SftExample([TALK[0], THOUGHT], None)], chatml, 1024).collect()[1])


def test_pairs_that_the_template_makes_equal_are_counted(chatml: Any) -> None:
    chatml.chat_template = WITHOUT
    other = {**THOUGHT, "content": THOUGHT["content"].replace("One", "1")}
    pairs = [([THOUGHT], [other]), ([THOUGHT], [THOUGHT]), ([THOUGHT], TALK[5:])]
    examples = [PreferenceExample.of(TALK[:1], *answers) for answers in pairs]
    expected = "1 of 3 pairs have different answers that the chat template writes as the same tokens: no signal"
    assert expected in tokenize_dpo(examples, chatml, 1024).collect()[1].warnings
    chatml.chat_template = CHATML
    assert not [one for one in tokenize_dpo(examples, chatml, 1024).collect()[1].warnings if "same tokens" in one]


def test_turns_that_the_teachers_template_leaves_out_are_counted(chatml: Any) -> None:
    teacher = tiny_tokenizer()
    teacher.chat_template = _WITHOUT.replace("ROLES", "['system']")
    prompts = [PromptExample([SYSTEM, TALK[0]]), PromptExample(TALK[:1])]
    (warning,) = lost(tokenize_prompts(prompts, chatml, 1024, 8, teacher=teacher).collect()[1])
    assert warning.startswith("the teacher's chat template leaves out turns of 1 of 2 prompts (1 system)")


def model_with(root: Path, template: str) -> Path:
    """The tiny model with another chat template."""
    shutil.copytree(tiny_model(), root / "model")
    (root / "model" / "chat_template.jinja").write_text(template)
    return root / "model"


ROWS = [{"messages": [*TALK[:2]]}, {"messages": [SYSTEM, *TALK[:2]]}]
WITHOUT_SYSTEM = _WITHOUT.replace("ROLES", "['system']")


def refused(root: Path, spec: JobSpec) -> str:
    """The message of the preparation of a job's rows, which fails."""
    tokenizer = load_tokenizer(spec.source)
    with pytest.raises(JobFailure) as caught:
        Preparation(spec, tokenizer, EventWriter(root / "events.jsonl"), spec.data.dataset).rows(spec.data.dataset)
    assert caught.value.reason == "invalid_dataset"
    return caught.value.message


def test_a_job_that_is_not_to_lose_turns_fails_and_names_row_role_and_counts(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, model_with(tmp_path, WITHOUT_SYSTEM), rows=ROWS, dropped_turns="refuse")
    expected = "dataset 'rows': the chat template leaves out turns of 1 of 2 rows (1 system), first in row 1: "
    for _ in range(2):  # tokenized, and from the cache
        assert refused(tmp_path, spec).startswith(expected)
    assert refused(tmp_path, spec.changed(token_cache=None)).startswith(expected)
    warned = spec.changed(dropped_turns="warn")
    prepared = Preparation(
        warned, load_tokenizer(spec.source), EventWriter(tmp_path / "events.jsonl"), spec.data.dataset
    )
    assert lost(prepared.rows(spec.data.dataset).report)
    kept = spec.changed(model=str(tiny_model()))
    whole = Preparation(kept, load_tokenizer(kept.source), EventWriter(tmp_path / "events.jsonl"), kept.data.dataset)
    assert not whole.rows(kept.data.dataset).report.lost_turns


def test_thoughts_that_are_not_written_are_in_job_and_preview_and_refused(tmp_path: Path) -> None:
    model = model_with(tmp_path, WITHOUT)
    rows = [{"messages": [TALK[0], THOUGHT]}]
    spec = job_spec(tmp_path, model, rows=rows, dropped_turns="refuse")
    for _ in range(2):  # tokenized, and from the cache
        message = refused(tmp_path, spec)
        assert message.startswith("dataset 'rows': thoughts, or other text, of 1 answers are not written")
        assert message.endswith("with dropped_turns 'warn' the job trains without them")
    preview(spec, PreviewSpec(), EventWriter(tmp_path / "preview.jsonl"))
    (found,) = [event for event in iter_events(tmp_path / "preview.jsonl") if isinstance(event, Previewed)]
    assert [warning for warning in found.warnings if warning.startswith("thoughts, or other text, of 1 answers")]
    assert found.warnings[-1] == "with dropped_turns 'refuse' the job fails for what a chat template leaves out"


def test_such_a_job_fails_before_its_model_is_loaded(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, model_with(tmp_path, WITHOUT_SYSTEM), rows=ROWS, dropped_turns="refuse")
    status, events = run(tmp_path / "run", spec)
    (failed,) = of_kind(events, Failed)
    assert status != 0
    assert not of_kind(events, Prepared)
    assert failed.reason == "invalid_dataset"
    assert "1 of 2 rows (1 system), first in row 1" in failed.message


def test_the_prompts_of_samples_are_counted_and_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(job_spec(tmp_path, model_with(tmp_path, WITHOUT_SYSTEM)).source)
    turns = tuple(SampleMessage(**message) for message in (SYSTEM, TALK[0]))
    samples = SamplesSpec(prompts=(turns[1:], turns), max_new_tokens=4)
    (message,) = encode_prompts(samples, tokenizer, None).lost_turns
    assert "leaves out turns of 1 of 2 sample prompts (1 system), first in prompt 1" in message
    with pytest.raises(JobFailure, match=r"provider_options\.samples: the chat template leaves out turns") as caught:
        encode_prompts(samples, tokenizer, None, "refuse")
    assert caught.value.reason == "invalid_request"
    assert not encode_prompts(samples, tiny_tokenizer(), None, "refuse").lost_turns


def test_a_template_with_a_byte_order_mark_is_used_without_it(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, model_with(tmp_path, f"\ufeff{CHATML}"), rows=ROWS)
    tokenizer = load_tokenizer(spec.source)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert "\ufeff" not in tokenizer.apply_chat_template(TALK[:2], tokenize=False)


def test_the_preview_shows_what_would_fail_the_job(tmp_path: Path) -> None:
    turns = tuple(SampleMessage(**message) for message in (SYSTEM, TALK[0]))
    spec = job_spec(
        tmp_path,
        model_with(tmp_path, WITHOUT_SYSTEM),
        rows=ROWS,
        dropped_turns="refuse",
        samples=SamplesSpec(prompts=(turns,), max_new_tokens=4),
    )
    preview(spec, PreviewSpec(), EventWriter(tmp_path / "events.jsonl"))
    (found,) = [event for event in iter_events(tmp_path / "events.jsonl") if isinstance(event, Previewed)]
    assert [warning for warning in found.warnings if "1 of 1 sample prompts (1 system)" in warning]
    assert [warning for warning in found.warnings if "1 of 2 rows (1 system), first in row 1" in warning]
    assert found.warnings[-1].startswith("with dropped_turns 'refuse' the job fails")


def test_turns_that_a_reward_models_template_leaves_out_are_counted_before_it_scores(tmp_path: Path) -> None:
    path = model_with(tmp_path, WITHOUT_SYSTEM)
    judges = [
        RewardModel(job_uuid=name, source=ModelSource(model=str(directory)), base=ModelSource(model=str(directory)))
        for name, directory in (("judge", path), ("later", tmp_path / "none"))
    ]
    rewards = tuple(RewardSource(name=judge.job_uuid, model=judge) for judge in judges)
    rows = [{"prompt": [TALK[0]]}, {"prompt": [SYSTEM, TALK[0]]}]
    spec = job_spec(tmp_path, tiny_model(), "grpo", rows=rows, method=GrpoSpec(rewards=rewards))
    (message,) = lost_by_reward_models(spec, lambda: None)
    assert message.startswith(
        "the reward model's (job 'judge') chat template leaves out turns of 1 of 2 prompts (1 system), first in row 1"
    )
    with pytest.raises(JobFailure, match="the reward model's"):
        lost_by_reward_models(spec.changed(dropped_turns="refuse"), lambda: None)
    preview(spec, PreviewSpec(), EventWriter(tmp_path / "events.jsonl"))
    (found,) = [event for event in iter_events(tmp_path / "events.jsonl") if isinstance(event, Previewed)]
    assert message in found.warnings


def test_a_prompt_with_a_token_that_a_reward_model_has_no_embedding_for_is_refused_before_it_scores(
    tmp_path: Path,
) -> None:
    shutil.copytree(tiny_model(), path := tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(path)
    # More than the embeddings that the model has beyond its tokenizer.
    tokenizer.add_tokens([*(f"<unused {number}>" for number in range(2000)), "<extra>"])
    tokenizer.save_pretrained(path)
    judge = RewardModel(job_uuid="judge", source=ModelSource(model=str(path)), base=ModelSource(model=str(path)))
    rewards = (RewardSource(name="judge", model=judge),)
    rows = [{"prompt": [TALK[0]]}, {"prompt": [{"role": "user", "content": "What is <extra>?"}]}]
    spec = job_spec(tmp_path, tiny_model(), "grpo", rows=rows, method=GrpoSpec(rewards=rewards))
    with pytest.raises(JobFailure, match=r"the reward model of job 'judge', row 1: .* token '<extra>'") as refused:
        lost_by_reward_models(spec, lambda: None)
    assert refused.value.reason == "invalid_model"
    assert not lost_by_reward_models(spec, lambda: None, [(0, PromptExample([TALK[0]]))])
