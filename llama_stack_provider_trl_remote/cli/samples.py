"""`trl-remote jobs samples`: a model's answers while it is trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from ..client import ServiceClient
from ..trl_client import all_samples
from .terminal import emit


async def samples(client: ServiceClient, options: Namespace) -> int:
    """Print each prompt of a job, and the answers to it: before, at checkpoints and after the training."""
    found = await all_samples(client, options.job_uuid)
    none = "" if found["prompts"] else f"job {options.job_uuid} has no prompts: its option `samples` sets them"
    emit(options, found, *([none] if none else _lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Texts as Python writes them: an answer may have control characters of a terminal."""
    for number, turns in enumerate(found["prompts"]):
        yield "prompt " + "; ".join(f"{turn['role']}: {turn['content']!r}" for turn in turns)
        for one in found["data"]:
            answer = one["answers"][number]
            kind = f"{one['kind']}, " if one["kind"] != "checkpoint" else ""
            end = "" if answer["complete"] else " (cut at the limit)"
            yield f"  {kind}step {one['step']}: {answer['text']!r}{end}"
    if not found["data"]:
        yield "  no answers yet"
