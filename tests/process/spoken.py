"""Answers in conversations."""

from __future__ import annotations

from typing import Any


def answer(content: str) -> list[Any]:
    return [{"role": "assistant", "content": content}]
