"""Damaged rows of every shape, through the readers and a template: each is trained or refused by a sentence.

    python -m tests.process.row_fuzz --rows 100000 [--seed N]

Says how many were trained and refused, and ends with status 1 at the first other exception, with the smallest row that
makes it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import trl
from hypothesis import strategies as st

from llama_stack_provider_trl.errors import InvalidRows, JobFailure
from llama_stack_provider_trl.recipes.data.chat import Chat
from llama_stack_provider_trl.recipes.data.tokenize import SftEncoder, encode_chats, encode_labelled, encode_pairs
from llama_stack_provider_trl.specs.rows import check_rows, parse_row
from tests.process.public_rows import EXAMPLES
from tests.tiny import tiny_tokenizer

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = (
    *("qwen3", "llama3_1", "gptoss", "deepseekv3", "glm4moe", "gemma3"),
    *("deepseek_r1_distill", "qwen3_5_think", "nemotron_3_nano", "gemma4"),
)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null, "x"]}'}}
_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
    {"role": "assistant", "content": "So.", "weight": 1},
]
_SHAREGPT = [
    {"from": "human", "value": "Why?"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "7"},
    {"from": "gpt", "value": "<think>\nHm.\n</think>\n\nSo."},
]
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sft", {"messages": _TALK, "tools": [_TOOL]}),
    ("sft", {"conversations": _SHAREGPT, "tools": json.dumps([_TOOL]), "system": "Be brief."}),
    ("sft", {"prompt": _TALK[:2], "completion": _TALK[2:], "functions": [{"name": "f"}]}),
    ("sft", {"instruction": "Why?", "input": "", "output": "So."}),
    ("sft", {"text": "So."}),
    ("dpo", {"prompt": _TALK[:2], "chosen": _TALK[2:3], "rejected": ["No.", "Never."], "tools": [_TOOL]}),
    (
        "dpo",
        {
            "input": {"messages": _TALK[:2], "tools": [_TOOL]},
            "preferred_output": _TALK[2:3],
            "non_preferred_output": [{"role": "assistant", "content": "No."}],
        },
    ),
    (
        "dpo",
        {
            "instruction": "Why?",
            "completions": [{"response": "A", "overall_score": 1}, {"response": "B", "overall_score": 2}],
        },
    ),
    ("dpo", {"prompt": "Why?", "responses": ["A", "B"], "scores": [1, 2.5]}),
    ("kto", {"messages": [*_TALK[:2], _TALK[4]], "label": True}),
    ("kto", {"prompt": _TALK[:2], "completion": _TALK[2:3], "label": "false", "tools": [_TOOL]}),
    ("prompts", {"messages": _TALK[:4], "tools": [_TOOL]}),
    *((use, row) for use, rows in EXAMPLES.items() for row in rows.values()),
)
"""Rows with calls, thoughts and weights, and one of each shape."""
_PART = 10_000
"""Rows of one hunt: Hypothesis remembers its choices."""
_VALUES: tuple[Any, ...] = (
    *(None, "", " ", "x", "[]", "{}", "[{", '"\\ud800"', "\ud800", "<think>", "</think>", "<think>a</think>b", "null"),
    *(0, 1, -1, 2.5, float("nan"), float("inf"), True, False, 10**30, [], {}, [None], [[]], {"a": None}, [1, "x"]),
    *({"type": "text", "text": "t"}, [{"type": "image"}], _CALL, [_CALL], [_TOOL], _TALK, "assistant", "tool", b"x"),
)


def damaged(generator: random.Random) -> tuple[str, Any]:
    """A use, and a row of it of which up to three values were changed, moved or removed."""
    use, row = generator.choice(ROWS)
    row = copy.deepcopy(row)
    for _ in range(generator.randint(0, 3)):
        places = list(_places(row))
        if not places:
            break
        holder, key = generator.choice(places)
        action = generator.random()
        if action < 0.6:
            holder[key] = copy.deepcopy(generator.choice(_VALUES))
        elif action < 0.75:
            del holder[key]
        elif action < 0.85 and isinstance(holder, list):
            holder.insert(generator.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif isinstance(holder, dict):
            holder[generator.choice(("weight", "tool_calls", "train", "name", "from", "value", "tools", "id"))] = (
                copy.deepcopy(generator.choice(_VALUES))
            )
    return use, row


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


def outcome(use: Any, row: Any, chat: Chat) -> str:
    """trained, or refused. Every other exception is a fault."""
    try:
        check_rows([row], use)
        example: Any = parse_row(row, 0, use)
        if use == "sft":
            ids = [one for sequences in SftEncoder(chat).encode([(0, example)]) for one in sequences]
        elif use == "dpo":
            ids = list(encode_pairs(chat, [(0, example)]))  # type: ignore[arg-type]
        elif use == "kto":
            ids = list(encode_labelled(chat, [(0, example)]))  # type: ignore[arg-type]
        else:
            ids = list(encode_chats(chat, [(0, example)]))  # type: ignore[arg-type]
        assert isinstance(ids, list)
    except (InvalidRows, JobFailure) as error:
        str(error).encode()
        return "refused"
    return "trained"


def chats() -> list[Chat]:
    """One for each template."""
    found = []
    for name in NAMES:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (_TEMPLATES / f"{name}.jinja").read_text()
        found.append(Chat(tokenizer))
    return found


@st.composite
def damaged_rows(draw: st.DrawFn) -> tuple[str, Any]:
    """`damaged`, whose choices Hypothesis makes, and makes fewer of where a row fails."""
    return damaged(draw(st.randoms(use_true_random=False)))


def hunt(rows: int, seed: int) -> Counter[str]:
    """Counts the outcomes of so many rows. Raises the exception of the smallest row that makes one, with that row."""
    counts, by_name = Counter[str](), dict(zip(NAMES, chats(), strict=True))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=rows,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(damaged_rows(), st.sampled_from(NAMES))
    def try_row(found: tuple[str, Any], template: str) -> None:
        counts[outcome(*found, by_name[template])] += 1

    try_row()
    return counts


def main() -> int:
    """Run by command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, begun = Counter[str](), time.monotonic()
    for part in range(0, options.rows, _PART):
        try:
            counts += hunt(min(_PART, options.rows - part), options.seed + part)
        except Exception:
            traceback.print_exc()
            return 1
    print(f"{counts.total()} rows, seed {options.seed}: {dict(counts)} in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
