"""Answers are found, and prompts kept out of the loss, where a chat template reads the content of turns."""

from __future__ import annotations

from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.prepare import DataReport, tokenize_dpo, tokenize_kto, tokenize_sft
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, SftExample
from tests.process.spoken import answer
from tests.process.talks import (
    _LAST_USER_TURN_IN_CAPITALS,
    _NUMBER_OF_TURNS,
    _SYSTEM_IN_LAST_USER_TURN,
    SYSTEM,
    prepare,
    trained,
)
from tests.required import FULL
from tests.tiny import CHATML, tiny_tokenizer

USER = {"role": "user", "content": "Which fruit is red?"}
ANSWERS = ["Apple.", "<think>\nRed?\n</think>\n\nAn apple.", '{"fruit": "apple"}', "  Cherry,\n", "<table> is none"]


@pytest.fixture
def chatml() -> Any:
    return tiny_tokenizer()


def pair_of(tokenizer: Any, prompt: list[Any], chosen: str, rejected: str) -> tuple[list[str], DataReport]:
    """Prompt, chosen and rejected as texts."""
    found, report = tokenize_dpo(
        [PreferenceExample.of(prompt, answer(chosen), answer(rejected))], tokenizer, 1024
    ).collect()
    (row,) = found
    return [tokenizer.decode(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")], report


# What templates ask of the last turn's content. Each of them writes the prompt differently where it is true.
QUESTIONS = [
    "'<think>' in messages[-1]['content']",
    "messages[-1]['content'].startswith('<think>')",
    "messages[-1]['content'].startswith('{')",
    "messages[-1]['content'].endswith('}')",
    "messages[-1]['content'] | length > 3",
    "messages[-1]['content'].startswith('<t')",
]


@pytest.mark.parametrize(
    ("question", "text", "is_within"),
    [
        (question, text, is_within)
        for number, question in enumerate(QUESTIONS)
        for turn, text in enumerate(ANSWERS)
        for is_within in (False, True)
        if FULL or is_within == (number + turn) % 2
    ],
)
def test_the_loss_covers_no_prompt_where_a_template_reads_the_answer(
    chatml: Any, question: str, text: str, is_within: bool
) -> None:
    note = f"{{% if messages[-1]['role'] == 'assistant' and {question} %}}{{{{ 'Answer briefly.\n' }}}}{{% endif %}}"
    chatml.chat_template = (
        note + CHATML if not is_within else CHATML.replace("{{ '<|im_start|>' +", note + "{{ '<|im_start|>' +")
    )
    prompt = [SYSTEM, USER]
    for example in (SftExample(prompt + answer(text), 2), SftExample(prompt + answer(text), None)):
        dataset, _ = prepare(chatml, example)
        assert [run.strip() for run in trained(chatml, dataset[0])] == [f"{text}<|im_end|>".strip()]
    (row,), _ = tokenize_kto([LabelledExample(prompt, answer(text), True)], chatml, 1024).collect()
    assert chatml.decode(row["completion_ids"]).strip() == f"{text}<|im_end|>".strip()
    (_, chosen, rejected), _ = pair_of(chatml, prompt, text, "No.")
    assert chosen.strip() == f"{text}<|im_end|>".strip()
    assert rejected == "No.<|im_end|>\n"


def test_a_template_that_counts_the_characters_of_the_answer_trains_the_answer(chatml: Any) -> None:
    chatml.chat_template = "{{ messages[-1]['content'] | length }}" + CHATML
    dataset, _ = prepare(chatml, SftExample([USER, *answer("Apple.")], 1))
    assert trained(chatml, dataset[0]) == ["Apple.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("<think>\nRed?\n</think>\n\nApple.", "No."), ("No.", "<think>\nRed?\n</think>\n\nApple.")]
)
def test_answers_whose_template_writes_unlike_prompts_share_that_of_generation(
    chatml: Any, chosen: str, rejected: str
) -> None:
    for note in ("Think.\n", "<|im_start|>system\nThink about: ' + messages[0]['content'] + '<|im_end|>\n"):
        chatml.chat_template = (
            f"{{% if '<think>' in messages[-1]['content'] %}}{{{{ '{note}' }}}}{{% else %}}{{{{ 'Plainly:\n' }}}}"
            "{% endif %}" + CHATML
        )
        texts, report = pair_of(chatml, [USER], chosen, rejected)
        header = f"Plainly:\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert texts == [header, f"{chosen}<|im_end|>\n", f"{rejected}<|im_end|>\n"]
        assert sum("differently for each answer" in warning for warning in report.warnings) == 1


def test_answers_that_both_change_the_prompt_keep_the_prompt_that_both_have(chatml: Any) -> None:
    for template in (_SYSTEM_IN_LAST_USER_TURN, _NUMBER_OF_TURNS, _LAST_USER_TURN_IN_CAPITALS):
        chatml.chat_template = template
        texts, report = pair_of(chatml, [SYSTEM, USER], "Apple.", "No.")
        assert USER["content"] in texts[0]
        assert [text.strip() for text in texts[1:]] == ["Apple.<|im_end|>", "No.<|im_end|>"]
        assert not any("differently for each answer" in warning for warning in report.warnings)


_THINKS_IN_GENERATION = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


def test_an_answer_without_the_thought_that_generation_opens_has_an_empty_one(chatml: Any) -> None:
    chatml.chat_template = _THINKS_IN_GENERATION
    texts, _ = pair_of(chatml, [USER], "Apple.", "<think>\nRed?\n</think>\n\nApple.")
    assert texts[0].endswith("<|im_start|>assistant\n<think>\n")
    assert texts[1:] == ["\n</think>\n\nApple.<|im_end|>\n", "Red?\n</think>\n\nApple.<|im_end|>\n"]
    dataset, report = prepare(chatml, SftExample([USER, *answer("Apple.")], 1))
    assert trained(chatml, dataset[0]) == ["\n</think>\n\nApple.<|im_end|>\n"]
    assert "1 answers have no thought, and the chat template begins one in generation" in report.warnings[0]


# A note behind the last user turn, which is written once the answer is there.
_NOTE_BEFORE_ANSWER = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_start|>system\nToday is Monday.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_what_a_template_writes_between_the_prompt_and_the_answer_is_not_trained(chatml: Any) -> None:
    chatml.chat_template = _NOTE_BEFORE_ANSWER
    talk = [USER, *answer("Apple."), USER, *answer("Cherry.")]
    dataset, _ = prepare(chatml, SftExample(talk[:2], 1), SftExample(talk, None))
    assert trained(chatml, dataset[0]) == ["Apple.<|im_end|>\n"]
    assert trained(chatml, dataset[1]) == ["Apple.<|im_end|>\n", "Cherry.<|im_end|>\n"]
    texts, _ = pair_of(chatml, [USER], "Apple.", "No.")
    assert texts[0].endswith("Monday.<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1:] == ["Apple.<|im_end|>\n", "No.<|im_end|>\n"]


def test_a_thought_that_the_template_opens_in_the_answer_is_trained_as_generation_needs_it(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace(
        "+ message['content'] +",
        "+ ('<think>\n\n</think>\n\n' if message['role'] == 'assistant' else '') + message['content'] +",
    )
    dataset, _ = prepare(chatml, SftExample([USER, *answer("Apple.")], 1), SftExample([USER, *answer("Apple.")], None))
    for row in dataset:
        assert trained(chatml, row) == ["<think>\n\n</think>\n\nApple.<|im_end|>\n"]


@pytest.mark.parametrize("question", ["Be", "Be brief", "Be brief."])
def test_no_header_is_trained_where_the_users_text_begins_the_systems(chatml: Any, question: str) -> None:
    chatml.chat_template = _SYSTEM_IN_LAST_USER_TURN
    prompt = [SYSTEM, {"role": "user", "content": question}]
    for example in (SftExample(prompt + answer("Apple."), 2), SftExample(prompt + answer("Apple."), None)):
        dataset, _ = prepare(chatml, example)
        assert [text.strip() for text in trained(chatml, dataset[0])] == ["Apple.<|im_end|>"]
    texts, _ = pair_of(chatml, prompt, "Apple.", "No.")
    assert [text.strip() for text in texts[1:]] == ["Apple.<|im_end|>", "No.<|im_end|>"]


def test_an_answer_whose_place_is_not_found_fails_the_job_and_names_what_was_found(chatml: Any) -> None:
    chatml.chat_template = (
        "{% if messages[-1]['role'] == 'assistant' and messages[-1]['content'] not in ['yes', 'no'] %}"
        "{{ raise_exception('yes or no') }}{% endif %}" + _NUMBER_OF_TURNS
    )
    with pytest.raises(JobFailure, match=r"row 0: .*where the answer begins cannot be found") as caught:
        tokenize_sft([SftExample([USER, *answer("yes")], 1)], chatml, 1024).collect()
    assert caught.value.reason == "invalid_dataset"
    assert "leaves out" not in caught.value.message


# As templates of models that think: generation opens a thought, and an answer without one has it closed.
_CLOSES_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and '<think>' not in m['content'] %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_the_end_of_a_thought_that_generation_opens_is_trained(chatml: Any) -> None:
    chatml.chat_template = _CLOSES_THOUGHTS
    for turns in (1, None):
        dataset, _ = prepare(chatml, SftExample([USER, *answer("Apple.")], turns))
        assert trained(chatml, dataset[0]) == ["</think>Apple.<|im_end|>\n"]
    texts, report = pair_of(chatml, [USER], "<think>Red?</think>Apple.", "No.")
    assert texts[0].endswith("<|im_start|>assistant\n<think>\n")
    assert texts[1:] == ["Red?</think>Apple.<|im_end|>\n", "</think>No.<|im_end|>\n"]
    assert not any("differently for each answer" in warning for warning in report.warnings)


def test_no_part_of_a_header_is_taken_for_the_beginning_of_the_answer(chatml: Any) -> None:
    chatml.chat_template = (
        CHATML.replace("+ message['content'] +", "+ message['content'].split('</think>')[-1] +")
        .replace("assistant\n' }}{% endif %}", "assistant><think>\n' }}{% endif %}")
        .replace("+ message['role'] + '\n'", "+ message['role'] + '>'")
    )
    for turns in (1, None):
        dataset, _ = prepare(chatml, SftExample([USER, *answer("<think>Red?</think>Apple.")], turns))
        assert trained(chatml, dataset[0]) == ["Red?\n</think>\n\nApple.<|im_end|>\n"]
