"""`trl-remote jobs answers` and `jobs samples`: what a job has answered, and its model while it was trained."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.console import show_lines

from ..answer_lines import answer_lines
from ..client import ServiceClient
from ..trl_client import all_samples
from .terminal import emit


async def answers(client: ServiceClient, options: Namespace) -> int:
    """Print each answer as a line of JSON, or write them to a file, which appears when it is complete."""
    if options.output is None:
        async with aclosing(answer_lines(client, options.job_uuid)) as lines:
            async for line in lines:
                show_lines(line.decode(errors="backslashreplace"))
        return 0
    target = Path(options.output)
    part, count = target.with_name(f".{target.name}.part"), 0
    try:
        with open(part, "wb") as file:
            async with aclosing(answer_lines(client, options.job_uuid)) as lines:
                async for line in lines:
                    file.write(line + b"\n")
                    count += 1
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    emit(options, {"file": str(target), "answers": count}, f"{target}: {count} answers")
    return 0


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
