"""`trl-remote jobs answers`: the answers of a job that answers prompts, with what each passes."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from contextlib import aclosing
from pathlib import Path

from ..answers import answer_lines
from ..client import ServiceClient
from .terminal import emit

_CONTROL = re.compile(r"[\x7f-\x9f]")
"""Control characters of a terminal that JSON does not escape."""


async def answers(client: ServiceClient, options: Namespace) -> int:
    """Print each answer as a line of JSON, or write them to a file, which appears when it is complete."""
    if options.output is None:
        async with aclosing(answer_lines(client, options.job_uuid)) as lines:
            async for line in lines:
                print(_CONTROL.sub(_escaped, line.decode()))
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


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
