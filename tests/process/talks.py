"""Conversations and templates, with what of them is trained."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl.recipes.data.prepare import (
    DataReport,
    tokenize_sft,
)
from llama_stack_provider_trl.specs.rows import SftExample

SYSTEM = {"role": "system", "content": "Be brief."}


TALK = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Two, I think. 😊"},
    {"role": "user", "content": "And the\n\nlargest city of Germany?"},
    {"role": "assistant", "content": "  Berlin,\n    schön und groß.\n"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]


# The templates below are ours, written to behave as those of the models they are called after.
SMOLLM = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% if loop.last %}{% if '</think>' not in content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% else %}{{ content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
    "{% else %}{{ content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


THINKING_WITH_TOOLS = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if loop.index0 < ns.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


END_OF_DIALOG = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


TRIMMING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained(tokenizer: Any, row: dict[str, list[int]]) -> list[str]:
    """The text of every run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


def prepare(tokenizer: Any, *examples: SftExample, limit: int = 1024, **options: Any) -> tuple[Any, DataReport]:
    return tokenize_sft(examples, tokenizer, limit, **options).collect()


# Templates that write the prompt differently once the answer follows, before the end of its last turn.
_SYSTEM_IN_LAST_USER_TURN = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and first is defined %}{{ first + '\n\n' }}{% endif %}{{ m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)


_NUMBER_OF_TURNS = (
    "{{ '(' ~ messages | length ~ ' turns)\n' }}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


_LAST_USER_TURN_IN_CAPITALS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] | upper if loop.last and m['role'] == 'user' else m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_WITHOUT = (
    "{% for m in messages %}{% if m['role'] not in ROLES %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
