"""Rows in the shapes of public datasets."""

from __future__ import annotations

import json
from typing import Any

ASK = {"role": "user", "content": "How warm is it?"}


SAY = {"role": "assistant", "content": "Seven degrees."}


COLD = {"role": "assistant", "content": "Cold."}


EXAMPLES: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {
    "sft": {
        ("chat_completion_input", "expected_answer"): {
            "chat_completion_input": json.dumps([ASK]),
            "expected_answer": "Seven degrees.",
        },
        ("dialog",): {"dialog": [ASK, SAY]},
        ("prompt", "completion"): {"prompt": "How warm is it?", "completion": "Seven degrees."},
        ("instruction", "output"): {"instruction": "Translate.", "input": "warm", "output": "warm"},
        ("input", "output"): {"input": "How warm is it?", "output": "Seven degrees."},
        ("question", "answer"): {"question": "How warm is it?", "answer": "Seven degrees."},
        ("messages",): {"messages": [ASK, SAY]},
        ("conversations",): {
            "conversations": [{"from": "human", "value": "How warm is it?"}, {"from": "gpt", "value": "Seven degrees."}]
        },
        ("text",): {"text": "It is seven degrees warm."},
    },
    "dpo": {
        ("prompt", "chosen", "rejected"): {"prompt": "How warm is it?", "chosen": "Seven.", "rejected": ["No.", "So."]},
        ("chosen", "rejected"): {"chosen": [ASK, SAY], "rejected": [ASK, COLD]},
        ("input", "preferred_output", "non_preferred_output"): {
            "input": {"messages": [ASK]},
            "preferred_output": [SAY],
            "non_preferred_output": [COLD],
        },
        ("instruction", "completions"): {
            "instruction": "How warm is it?",
            "completions": [{"response": "Cold.", "overall_score": 3}, {"response": "Seven.", "overall_score": 8}],
        },
        ("prompt", "answers"): {
            "prompt": "Human: How warm is it?\n\nAssistant:",
            "answers": [{"answer": "Seven.", "rank": 1}, {"answer": "Cold.", "rank": 2}],
        },
        ("prompt", "responses", "scores"): {
            "prompt": "How warm is it?",
            "responses": ["Cold.", "Seven."],
            "scores": [0.1, 0.9],
        },
        ("prompt", "responses", "ranks"): {
            "prompt": "How warm is it?",
            "responses": ["Seven.", "Cold."],
            "ranks": [1, 2],
        },
    },
    "kto": {
        ("prompt", "completion", "label"): {"prompt": "How warm is it?", "completion": "Seven.", "label": True},
        ("messages", "label"): {"messages": [ASK, COLD], "label": False},
    },
    "prompts": {
        ("chat_completion_input",): {"chat_completion_input": json.dumps([ASK])},
        ("prompt",): {"prompt": "How warm is it?"},
        ("instruction",): {"instruction": "Translate.", "input": "warm"},
        ("input",): {"input": "How warm is it?"},
        ("question",): {"question": "How warm is it?"},
        ("messages",): {"messages": [ASK, SAY]},
        ("dialog",): {"dialog": [ASK]},
        ("conversations",): {"conversations": [{"from": "human", "value": "How warm is it?"}]},
    },
}
"""A row of each shape, by its columns."""
