"""What README.md and the tutorials have a reader type, taken out of their fences."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from tests.tiny import REPOSITORY

LLAMA_STACK, SERVICE, TWO_MACHINES = (
    f"docs/tutorials/{name}.md" for name in ("first-job-llama-stack", "first-job-service", "two-machines")
)
MODEL = "quickstart-output/base-model"
"""What the README and the first tutorial name as the model."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language, "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(page: str) -> list[list[str]]:
    """Arguments of `trl-remote` of each line `$ trl-remote ...`."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ trl-remote ")]


def job(page: str) -> dict[str, Any]:
    """The only JSON block of a page: the `job.json` of its commands."""
    (text,) = blocks(page, "json")
    return dict(json.loads(text))
