"""Files of training rows, as a client of OpenAI uploads them."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

Json = dict[str, Any]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} times two?"},
            {"role": "assistant", "content": "I do not know.", "weight": 0},
            {"role": "user", "content": "Try."},
            {"role": "assistant", "content": f"{2 * n}.", "weight": 1},
        ]
    }
    for n in range(10)
]


def lines(rows: list[Json]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def uploaded(client: OpenAI, rows: list[Json], name: str = "rows.jsonl") -> str:
    return client.files.create(file=(name, lines(rows)), purpose="fine-tune").id
