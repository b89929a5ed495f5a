"""Rows with tools, and the tokenizers whose templates write them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import trl

from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.tables import IGNORED
from llama_stack_provider_trl.recipes.data.tokenize import SftEncoder
from llama_stack_provider_trl.specs.rows import SftExample, parse_row
from tests.tiny import tiny_tokenizer

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


MISTRAL = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if tools and loop.index0 == messages | length - 1 or (tools and messages[-1]['role'] != 'user' and "
    "not messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list) %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% elif m['tool_calls'] %}{{ '[TOOL_CALLS] [' }}{% for call in m['tool_calls'] %}"
    "{% if call['id'] | length != 9 %}{{ raise_exception('Tool call IDs should be 9 characters long!') }}{% endif %}"
    "{{ '{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' + call['function']['arguments'] | tojson "
    "+ ', \"id\": \"' + call['id'] + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + eos_token }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + m['content'] }}"
    "{{ ', \"call_id\": \"' + m['tool_call_id'] + '\"}[/TOOL_RESULTS]' }}"
    "{% elif m['role'] == 'system' %}{{ '[SYSTEM] ' + m['content'] + '[/SYSTEM]' }}{% endif %}{% endfor %}"
)
"""By Mistral 7B v0.3's: tools before the last question, ids of nine characters, no header of an answer."""


SPECIAL = re.compile("<[|\uff5c][^<>]+[|\uff5c]>" r"|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>")


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln \\"Deutz\\""}'}}


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"t": 7}'},
    {"role": "assistant", "content": "Seven degrees.", "reasoning_content": "It says 7."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]


ROW = {"messages": TALK, "tools": [TOOL]}


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"Deutz\\""}}\n</tool_call><|im_end|>\n'


WRITTEN: dict[str, list[list[str]]] = {
    "llama3_1": [
        [
            '{"name": "weather", "parameters": {"city": "Köln \\"Deutz\\""}}<|eot_id|>',
            "<think>\nIt says 7.\n</think>\n\nSeven degrees.<|eot_id|>",
            "Bye.<|eot_id|>",
        ]
    ],
    "qwen2_5": [
        [
            f"<think>\nI look it up.\n</think>\n\n\n{HERMES}",
            "<think>\nIt says 7.\n</think>\n\nSeven degrees.<|im_end|>\n",
            "Bye.<|im_end|>\n",
        ]
    ],
    "qwen3": [
        [
            f"<think>\nI look it up.\n</think>\n\n{HERMES}",
            "<think>\nIt says 7.\n</think>\n\nSeven degrees.<|im_end|>\n",
        ],
        ["<think>\n\n</think>\n\nBye.<|im_end|>\n"],
    ],
    "glm4moe": [
        [
            "\n<think>I look it up.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
            '<arg_value>Köln "Deutz"</arg_value>\n</tool_call><|observation|>',
            "\n<think>It says 7.</think>\nSeven degrees.<|user|>",
        ],
        ["\n<think></think>\nBye.<|user|>"],
    ],
    "gptoss": [
        [
            "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant to=functions.weather<|channel|>"
            'commentary json<|message|>{"city": "Köln \\"Deutz\\""}<|call|>',
            "<|channel|>analysis<|message|>It says 7.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Seven degrees.<|return|>",
        ],
        ["<|channel|>final<|message|>Bye.<|return|>"],
    ],
    "deepseekv3": [
        [
            "I look it up.\n</think>\n\n"
            "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>weather\n"
            '```json\n{"city": "Köln \\"Deutz\\""}\n```'
            "<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c><\uff5cend▁of▁sentence\uff5c>"
        ],
        ["Seven degrees.<\uff5cend▁of▁sentence\uff5c>", "\n</think>\n\nBye.<\uff5cend▁of▁sentence\uff5c>"],
    ],
    "mistral": [
        [
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln \\"Deutz\\""}, "id": "000000000"}]</s>',
            " <think>\nIt says 7.\n</think>\n\nSeven degrees.</s>",
        ],
        [" Bye.</s>"],
    ],
}
"""What is trained of `ROW`, by sequence; DeepSeek-V3's template writes calls and no tools."""


ENDS = {
    **dict.fromkeys(("qwen2_5", "qwen3"), "<|im_end|>"),
    "llama3_1": "<|eot_id|>",
    "gptoss": "<|return|>",
    "deepseekv3": "<\uff5cend▁of▁sentence\uff5c>",
    "mistral": "</s>",
}


def tokenizer_of(name: str) -> Any:
    """The template of a family, and its tokens."""
    tokenizer = tiny_tokenizer()
    text = MISTRAL if name == "mistral" else (_TEMPLATES / f"{name}.jinja").read_text()
    tokens = dict.fromkeys(SPECIAL.findall(text))
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    if name in ENDS:
        tokenizer.add_special_tokens({"eos_token": ENDS[name]})
    tokenizer.chat_template = text
    return tokenizer


def row_for(name: str, row: dict[str, Any] = ROW) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "tools" or name != "deepseekv3"}


def example_of(row: dict[str, Any]) -> SftExample:
    example = parse_row(row, 0, "sft")
    assert isinstance(example, SftExample)
    return example


def runs(tokenizer: Any, ids: list[int], labels: list[int]) -> list[str]:
    found: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        if label == IGNORED:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(part) for part in found if part]


def trained(tokenizer: Any, row: dict[str, Any], **options: Any) -> list[list[str]]:
    ((*sequences,),) = SftEncoder(Chat(tokenizer), **options).encode([(0, example_of(row))])
    return [runs(tokenizer, *sequence) for sequence in sequences]


def _generated(generator: random.Random) -> dict[str, Any]:
    """A conversation with calls and thoughts, as a chat service records it."""
    words = ["one", "zwei", "trois 3", "</tag>", '"quoted"', "{x}", "a\nb", "ö 😊", "\\n"]
    text = lambda: " ".join(generator.choices(words, k=generator.randint(1, 4))) + "."  # noqa: E731
    talk: list[dict[str, Any]] = [{"role": "system", "content": text()}] if generator.random() < 0.5 else []
    for number in range(generator.randint(1, 3)):
        talk.append({"role": "user", "content": text()})
        for step in range(generator.choice((0, 0, 1, 2))):
            arguments: dict[str, Any] = {"city": text()}
            if generator.random() < 0.5:
                arguments |= {"days": generator.randint(1, 9), "units": {"of": [text(), True]}}
            call = {
                "id": f"call_{number}_{step}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            turn = {"role": "assistant", "content": generator.choice(("", None)), "tool_calls": [call]}
            if generator.random() < 0.5:
                turn["reasoning_content"] = text()
            talk += [turn, {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(text())}]
        answer = {"role": "assistant", "content": text()}
        if generator.random() < 0.5:
            answer["reasoning_content"] = text()
        talk.append(answer)
    return {"messages": talk, "tools": [TOOL]}
