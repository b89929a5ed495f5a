"""Turns that a chat template leaves out are counted with their roles, wherever they are, and reported or refused."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl.recipes.data.prepare import (
    DataReport,
    tokenize_dpo,
    tokenize_kto,
    tokenize_prompts,
    tokenize_sft,
    tokenize_taught_prompts,
)
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, PromptExample, SftExample
from tests.process.test_data_masks import _WITHOUT, SYSTEM, TALK
from tests.tiny import CHATML, tiny_tokenizer

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
    pairs = [PreferenceExample(TALK[:1], TALK[1:2], TALK[1:2]), PreferenceExample(TALK[:1], TALK[1:2], rejected)]
    (warning,) = lost(tokenize_dpo(pairs, chatml, 1024).collect()[1])
    assert "1 of 2 pairs (1 tool), first in row 1" in warning


def test_turns_of_a_prompt_are_counted_once_for_both_answers(chatml: Any) -> None:
    chatml.chat_template = _WITHOUT.replace("ROLES", "['tool', 'system']")
    pair = PreferenceExample([SYSTEM, TALK[0]], [TALK[1], TOOL, TALK[3]], [TALK[1], TOOL, TALK[5]])
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


def test_turns_that_the_teachers_template_leaves_out_are_counted(chatml: Any) -> None:
    teacher = tiny_tokenizer()
    teacher.chat_template = _WITHOUT.replace("ROLES", "['system']")
    prompts = [PromptExample([SYSTEM, TALK[0]]), PromptExample(TALK[:1])]
    (warning,) = lost(tokenize_taught_prompts(prompts, chatml, teacher, 1024, 8).collect()[1])
    assert warning.startswith("the teacher's chat template leaves out turns of 1 of 2 prompts (1 system)")
