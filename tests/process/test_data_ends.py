"""An answer ends with its end-of-turn token: what a chat template writes after that is not trained, by any method."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.prepare import tokenize_dpo, tokenize_kto, tokenize_sft
from llama_stack_provider_trl.recipes.data.spans import split_rows
from llama_stack_provider_trl.specs.rows import LabelledExample, PreferenceExample, SftExample
from tests.process.talks import SYSTEM, prepare, trained
from tests.required import FULL
from tests.tiny import CHATML, tiny_tokenizer

USER = {"role": "user", "content": "Which fruit is red?"}
NEXT = {"role": "user", "content": "And which one is yellow?"}
TALK = [USER, {"role": "assistant", "content": "An apple."}, NEXT, {"role": "assistant", "content": "A lemon."}]

_TURNS = CHATML.partition("{% if add_generation_prompt")[0]
_HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TEXT = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
_PHI = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
_REVERSED = _TURNS.replace("in messages", "in messages | reverse")
_OPENED = (
    "{{ '<|im_start|>' }}{% for m in messages %}"
    "{{ m['role'] + '\n' + m['content'] + '<|im_end|>\n<|im_start|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
_QUESTION_AGAIN = (
    "{% if messages[-1]['role'] == 'assistant' %}"
    "{{ '<|im_start|>user\n' + messages[-2]['content'] + '<|im_end|>\n' }}{% endif %}"
)
_SYSTEM_LAST = (
    "{% for m in messages if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% for m in messages if m['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + _HEADER
)

ENDING_IN_A_HEADER = {
    "always": _TURNS + "{{ '<|im_start|>assistant\n' }}",
    "thought": _TURNS + "{{ '<|im_start|>assistant\n<think>\n' }}",
    "text": _TEXT + "{{ 'Assistant:' }}",
    "after answers": _TURNS + "{% if messages[-1]['role'] == 'assistant' or add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "user": _TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}"
    "{{ '<|im_start|>user\n' }}{% endif %}",
}
WITH_A_NOTE = {
    "heading": _TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}"
    "{{ '\n\n### End of conversation' }}{% endif %}",
    "date": _TURNS + "{{ '<|im_start|>system\nIt is Monday, 2026-01-05.<|im_end|>\n' }}" + _HEADER,
    "request": _TURNS + "{{ 'Please answer.\n' }}" + _HEADER,
    "token of its own": _TURNS + "{% if not add_generation_prompt %}{{ '<|endoftext|>Bye.' }}{% endif %}" + _HEADER,
    "text": _TEXT + "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% else %}{{ 'Thanks for reading!' }}{% endif %}",
}
WITH_ANOTHER_TURN = {
    "question": _TURNS + _QUESTION_AGAIN + _HEADER,
    "question as text": _TEXT + "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-2]['content'] }}{% endif %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}",
    "system": _SYSTEM_LAST,
    "newest first": _REVERSED + _HEADER,
    "newest first, header first": _HEADER + _REVERSED,
}
WITH_AN_OPENING = {
    "token": _OPENED,
    "token and a word": _OPENED.replace("'<|im_end|>\n<|im_start|>'", "'<|im_end|>\n<|im_start|>turn '").replace(
        "{{ '<|im_start|>' }}", "{{ '<|im_start|>turn ' }}"
    ),
    "preamble": "{{ 'A talk.\n' }}" + _OPENED,
    "text": "{{ '### ' }}{% for m in messages %}{{ m['role'] | capitalize + ':\n' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n### ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}",
}
ALL = [
    pytest.param(template, id=f"{kind}: {name}")
    for kind, templates in (
        ("header", ENDING_IN_A_HEADER),
        ("note", WITH_A_NOTE),
        ("turn", WITH_ANOTHER_TURN),
        ("opening", WITH_AN_OPENING),
    )
    for name, template in templates.items()
]
PROMPTS = {"first": TALK[:1], "second": TALK[:3], "system turn": [SYSTEM, *TALK[:3]]}
CASES = [
    pytest.param(*template.values, prompt, id=f"{template.id}-{name}")
    for number, template in enumerate(ALL)
    for turn, (name, prompt) in enumerate(PROMPTS.items())
    if FULL or turn == number % len(PROMPTS)
]


@pytest.fixture
def chatml() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def base() -> Any:
    """A tokenizer as of a base model: ChatML's end of a turn is none of its named tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


def answers_of(tokenizer: Any, prompt: list[Any], answer: dict[str, str]) -> Iterator[str]:
    """What each method trains of an answer, but for dialogs: the answer as text."""
    (row,), _ = prepare(tokenizer, SftExample([*prompt, answer], len(prompt)))
    yield "".join(trained(tokenizer, row))
    (pair,), _ = tokenize_dpo([PreferenceExample.of(prompt, [answer], [answer])], tokenizer, 1024).collect()
    yield tokenizer.decode(pair["chosen_ids"])
    yield tokenizer.decode(pair["rejected_ids"])
    (labelled,), _ = tokenize_kto([LabelledExample(prompt, [answer], True)], tokenizer, 1024).collect()
    yield tokenizer.decode(labelled["completion_ids"])


@pytest.mark.parametrize(("template", "prompt"), CASES)
def test_nothing_after_the_end_of_an_answer_is_trained(chatml: Any, template: str, prompt: list[Any]) -> None:
    chatml.chat_template = template
    answer = TALK[1] if len(prompt) == 1 else TALK[3]
    for text in answers_of(chatml, prompt, answer):
        assert text.strip() == f"{answer['content']}<|im_end|>"
    dataset, report = prepare(chatml, SftExample([*prompt, answer], None))
    contents = [turn["content"] for turn in (*prompt, answer) if turn["role"] == "assistant"]
    ends = [f"{content}<|im_end|>" for content in contents]
    assert sorted(text.strip() for text in trained(chatml, dataset[0])) == sorted(ends)
    assert not [warning for warning in report.warnings if "all of it is trained" in warning]


@pytest.mark.parametrize(
    "template",
    [
        ENDING_IN_A_HEADER["always"],
        ENDING_IN_A_HEADER["user"],
        WITH_A_NOTE["heading"],
        WITH_A_NOTE["date"],
        WITH_ANOTHER_TURN["question"],
        WITH_ANOTHER_TURN["newest first"],
        WITH_ANOTHER_TURN["system"],
        WITH_AN_OPENING["token"],
        WITH_AN_OPENING["token and a word"],
        "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}" + WITH_ANOTHER_TURN["newest first"],
        "{{ '<|endoftext|>' }}" + WITH_AN_OPENING["token"],
    ],
)
def test_an_end_of_turn_that_the_tokenizer_does_not_name_is_found_by_the_template(base: Any, template: str) -> None:
    base.chat_template = template
    for prompt, answer in ((TALK[:1], TALK[1]), (TALK[:3], TALK[3]), ([SYSTEM, USER], TALK[1])):
        for text in answers_of(base, prompt, answer):
            assert text.strip() == f"{answer['content']}<|im_end|>"
    dataset, _ = prepare(base, SftExample(TALK, None))
    found = [text.strip() for text in trained(base, dataset[0])]
    assert sorted(found) == ["A lemon.<|im_end|>", "An apple.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (_PHI + "{{ '<|assistant|>\n' }}", "<|end|>\n"),
        (_PHI + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}", None),
        ("{% for m in messages %}{{ '### ' + m['role'] + '\n' + m['content'] + '\n\n' }}{% endfor %}"
         "{{ '### assistant\n' }}", "\n\n"),
        ("{{ '### ' }}{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n\n### ' }}{% endfor %}", "\n\n"),
        ("{% for m in messages | reverse %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{{ eos_token }}",
         "\n"),
        ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</turn>' }}{% endfor %}{{ '<assistant>' }}",
         "</turn>"),
        ("{% for m in messages %}{{ '[Q] ' + m['content'] if m['role'] == 'user' else '[A] ' + m['content'] }}"
         "{% endfor %}{{ '[A]' }}", ""),
    ],
)  # fmt: skip
def test_ends_of_other_kinds_are_found(base: Any, template: str, end: str | None) -> None:
    base.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    base.chat_template = template
    chat = Chat(base)
    text = chat.render(TALK[:2], 0)
    start = text.index(TALK[1]["content"]) + len(TALK[1]["content"])
    assert text[start : chat.endings.of(TALK[:2], text)] == (text[start:] if end is None else end)


def test_what_is_left_out_is_a_warning_that_names_it(chatml: Any) -> None:
    chatml.chat_template = WITH_A_NOTE["heading"]
    _, report = prepare(chatml, SftExample(TALK[:2], 1), SftExample(TALK, None))
    assert report.warnings == [
        "after the end of 3 answers the chat template writes more, such as '\\n\\n### End of conversation': that is "
        "not trained"
    ]
    chatml.chat_template = CHATML
    assert not prepare(chatml, SftExample(TALK[:2], 1), SftExample(TALK, None))[1].warnings


def test_a_template_that_ends_no_answer_has_the_token_of_the_next_turn_trained(base: Any) -> None:
    base.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|assistant|>"]})
    base.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    answers = ["An apple.<|user|>", "A lemon.<|user|>"]
    for example, expected in (
        (SftExample(TALK[:2], 1), answers[:1]),
        (SftExample(TALK, None), answers),
        (SftExample(TALK, 3), answers[1:]),
        (SftExample(TALK[:3], None), answers[:1]),
        (SftExample([TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]], None), answers[1:]),
    ):
        (row,), report = prepare(base, example)
        assert trained(base, row) == expected
        (warning,) = report.warnings
        assert "<|user|>', not in the tokenizer's eos_token '<|endoftext|>': generation stops there only" in warning
    text = base.apply_chat_template(TALK, tokenize=False)
    ((whole,), _) = tokenize_sft([SftExample(TALK, None)], base, 1024, train_on_input=True).collect()
    assert base.decode(whole["input_ids"]) == f"{text}<|user|>"
    for answer in answers_of(base, TALK[:1], TALK[1]):
        assert answer == "An apple.<|user|>"


def test_a_template_that_ends_no_answer_by_a_token_is_a_warning_that_names_one(base: Any) -> None:
    base.chat_template = (
        "{% for m in messages %}{{ '\n' + m['role'] + ':\n' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% endif %}"
    )
    (row,), report = prepare(base, SftExample(TALK[:2], 1))
    assert trained(base, row) == ["An apple."]
    (warning,) = report.warnings
    assert "writes nothing that ends an answer after 1 of them: these rows teach the model no token to stop" in warning
    assert "write '<|endoftext|>' behind each answer" in warning
    base.chat_template = base.chat_template.replace("m['content']", "m['content'] + eos_token")
    assert not prepare(base, SftExample(TALK[:2], 1))[1].warnings


_ONE_ROUND = "{% if messages | length > 2 %}{{ raise_exception('one round') }}{% endif %}"


def test_text_that_no_rule_takes_away_is_trained_with_a_warning_that_names_it(base: Any, chatml: Any) -> None:
    note = "{% if not add_generation_prompt %}{{ 'The end.' }}{% endif %}"
    base.chat_template = chatml.chat_template = _ONE_ROUND + CHATML + note
    (row,), report = prepare(base, SftExample(TALK[:2], 1))
    assert trained(base, row) == ["An apple.<|im_end|>\nThe end."]
    (warning,) = [warning for warning in report.warnings if "all of it is trained" in warning]
    assert "such as '<|im_end|>\\nThe end.'" in warning
    assert "write '<|endoftext|>' behind each answer" in warning
    (row,), report = prepare(chatml, SftExample(TALK[:2], 1))
    assert trained(chatml, row) == ["An apple.<|im_end|>\n"]
    assert len(report.warnings) == 1


def test_an_answer_keeps_the_only_token_that_ends_it(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ 'The end.' + eos_token }}{% endif %}"
    )
    (row,), report = prepare(chatml, SftExample(TALK[:2], 1))
    assert trained(chatml, row) == ["An apple.\nThe end.<|im_end|>"]
    assert "such as '\\nThe end.<|im_end|>', and where in it the answer ends is not known" in report.warnings[0]


@pytest.mark.parametrize("content", ["assistant", "<|im_end|>", "e", "Which fruit is red?", "user\nassistant"])
@pytest.mark.parametrize("first", [[], [SftExample(TALK[:2], 1)]], ids=["first row", "second row"])
def test_contents_that_templates_write_too_end_where_they_end(chatml: Any, content: str, first: list[Any]) -> None:
    answer = [{"role": "assistant", "content": content}]
    for template in (CHATML, ENDING_IN_A_HEADER["always"], WITH_ANOTHER_TURN["question"], WITH_ANOTHER_TURN["system"]):
        chatml.chat_template = template
        dataset, _ = prepare(chatml, *first, SftExample([SYSTEM, USER, *answer], 2))
        assert trained(chatml, dataset[-1]) == [f"{content}<|im_end|>\n"]


def test_a_template_that_changes_contents_is_left_as_it_is(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace("+ message['content'] +", "+ message['content'] | tojson +")
    (row,), report = prepare(chatml, SftExample([USER, {"role": "assistant", "content": 'An "apple".'}], 1))
    assert trained(chatml, row) == ['"An \\"apple\\"."<|im_end|>\n']
    assert not report.warnings


def test_text_after_an_answer_whose_place_is_not_found_is_a_warning_that_names_it(chatml: Any) -> None:
    only = "{% if messages[1]['content'] not in ['Yes.', 'No.'] %}{{ raise_exception('yes or no') }}{% endif %}"
    examples = [SftExample([USER, {"role": "assistant", "content": "Yes."}], turns) for turns in (1, None)]
    chatml.chat_template = "{% if not add_generation_prompt %}" + only + "{% endif %}" + CHATML
    dataset, report = prepare(chatml, *examples)
    assert [trained(chatml, row) for row in dataset] == [["Yes.<|im_end|>\n"]] * 2
    assert not report.warnings
    chatml.chat_template += "{% if not add_generation_prompt %}{{ 'The end.' }}{% endif %}"
    _, report = prepare(chatml, *examples)
    assert "after 2 answers the chat template writes text, such as 'The end.', and where" in report.warnings[0]


WITHOUT_A_HEADER = {
    "token": _TURNS,
    "text": _TEXT,
    "brackets": "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + eos_token }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("name", "header"), [("token", "<|im_start|>assistant\n"), ("text", "Assistant: "), ("brackets", "[assistant]")]
)
def test_a_header_that_generation_lacks_is_trained_since_the_model_has_to_write_it(
    chatml: Any, name: str, header: str
) -> None:
    chatml.chat_template = WITHOUT_A_HEADER[name]
    for text in answers_of(chatml, TALK[:1], TALK[1]):
        assert text.strip() == f"{header}An apple.<|im_end|>"
    dataset, report = prepare(chatml, SftExample(TALK, None))
    assert [text.strip() for text in trained(chatml, dataset[0])] == [
        f"{header}An apple.<|im_end|>",
        f"{header}A lemon.<|im_end|>",
    ]
    (warning,) = [warning for warning in report.warnings if "are trained with their header" in warning]
    assert warning.startswith(f"2 answers are trained with their header, such as {header!r}:")


def test_an_answer_in_the_middle_ends_before_the_next_turn_where_tags_are_text(chatml: Any) -> None:
    chatml.chat_template = (
        "<chat>{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</' + m['role'] + '>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}</chat>{% endif %}"
    )
    dataset, _ = prepare(chatml, SftExample(TALK, None))
    assert trained(chatml, dataset[0]) == ["An apple.</assistant>", "A lemon.</assistant>"]


def test_a_conversation_that_a_user_ends_has_the_warning_of_its_answers_end(base: Any) -> None:
    _, report = prepare(base, SftExample(TALK[:3], None))
    assert "answers end in '.<|im_end|>\\n', not in the tokenizer's eos_token" in report.warnings[0]


def test_a_template_without_headers_of_answers_has_no_warning(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else "
        "' ' + m['content'] + eos_token }}{% endfor %}"
    )
    (row,), report = prepare(chatml, SftExample(TALK[:2], 1))
    assert trained(chatml, row) == [" An apple.<|im_end|>"]
    assert not report.warnings


def _published() -> list[Any]:
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    files = [path for path in sorted(folder.glob("*.jinja")) if not path.stem.endswith("_training")]
    return [pytest.param(path.read_text(), id=path.stem) for path in files]


@pytest.mark.parametrize("template", _published())
def test_templates_of_published_models_are_trained_whole(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokens = sorted({*re.findall(r"<[^<>\s'\"]+>", template)})
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", template
    chat = Chat(tokenizer)
    prompts, answers = [TALK[:1], TALK[:3]], [[TALK[1:2]], [TALK[3:4]]]
    try:
        texts = [chat.render([*prompt, *answer], 0) for prompt, (answer,) in zip(prompts, answers, strict=True)]
        before = [chat.render(prompt, 0, add_generation_prompt=True) for prompt in prompts]
    except JobFailure:
        pytest.skip("it takes no plain text")
    for split, text, begun in zip(split_rows(chat, prompts, answers, [0, 1]), texts, before, strict=True):
        if begun.rstrip().endswith("<think>"):  # the answer has the end of an empty thought
            assert [split.prompt] == chat.tokenize([begun])
            thought, end, answer = tokenizer.decode(split.answers[0]).partition("</think>")
            assert (thought.strip(), end) == ("", "</think>")
            assert text.endswith(answer.lstrip())
        else:
            stop = "<|user|>" if "[gMASK]" in template else ""  # of GLM-4.5, which ends no answer
            assert [[*split.prompt, *split.answers[0]]] == chat.tokenize([text + stop])
    assert not [*chat.endings.warnings()]
