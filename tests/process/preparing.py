"""Rows of a dataset that is tokenized in shards, and a process that prepares them, which test_token_shards.py kills.

python -m tests.process.preparing ROOT WORKERS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.recipes.data import shards
from llama_stack_provider_trl.recipes.data.prepared import Preparation, PreparedRows
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import NullEventWriter
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from tests.tiny import tiny_tokenizer
from tests.training import job_spec

ROWS_EACH = 100
"""Of a shard here, and of a chunk: a shard has whole chunks."""
COUNT = 3 * ROWS_EACH + 20
LOSSY = (
    "{% for message in messages %}{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}note"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out a turn, and writes a note behind the last answer."""


def chat_row(number: int) -> dict[str, Any]:
    """Dialogs of several shapes: some lose a turn, some are cut, and some dropped."""
    question = "word " * (200 if number % 41 == 7 else number % 5) + f"question {number}"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"answer {number}"}]
    if number % 91 == 90:
        messages.insert(0, {"role": "system", "content": f"system {number}"})
    if number % 33 == 0:
        messages[1]["content"] = f"<think>thought {number}</think>{messages[1]['content']}"
    if number % 44 == 0:
        messages += messages[-2:]
    if number % 2 and number > 50:
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"messages": messages}


def pair_row(number: int) -> dict[str, Any]:
    row = chat_row(2 * number)["messages"]
    better = [{"role": "assistant", "content": f"better {number}" if number % 70 else row[-1]["content"]}]
    return {"prompt": row[:-1], "chosen": better, "rejected": row[-1:]}


def labelled_row(number: int) -> dict[str, Any]:
    row = chat_row(2 * number)["messages"]
    return {"prompt": row[:-1], "completion": row[-1:], "label": number % 3 == 0}


def prompt_row(number: int) -> dict[str, Any]:
    return {"messages": chat_row(2 * number)["messages"][:-1]}


LETTERS = RewardSource(name="letters", check=AnswerCheck(type="regex", pattern="[a-z]"))
KINDS = {"sft": chat_row, "dpo": pair_row, "kto": labelled_row, "grpo": prompt_row}


def large(root: Path, algorithm: str = "sft", rows: int = COUNT, **changes: Any) -> JobSpec:
    if algorithm == "grpo":
        changes["method"] = GrpoSpec(rewards=(LETTERS,), num_generations=2, max_completion_length=4)
    made = [KINDS[algorithm](number) for number in range(rows)]
    return job_spec(root, "/no/model", algorithm, rows=made, max_seq_length=90, **changes)


def lossy_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LOSSY
    return tokenizer


def prepare(spec: JobSpec, tokenizer: Any = None, writer: Any = None) -> PreparedRows:
    preparation = Preparation(spec, tokenizer or lossy_tokenizer(), writer or NullEventWriter(), spec.data.dataset)
    return preparation.rows(spec.data.dataset)


if __name__ == "__main__":
    root, workers = sys.argv[1:]
    shards.SHARD_ROWS = ROWS_EACH
    shards.workers_for = lambda rows, shards: int(workers)
    print(prepare(large(Path(root))).source)
