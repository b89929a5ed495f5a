"""`trl-remote jobs answers`: the answers of a job that answers prompts, with what each passes."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import aclosing
from pathlib import Path

from llama_stack_provider_trl.system.console import show_lines

from ..answer_lines import answer_lines
from ..client import ServiceClient
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
