"""`trl-remote openai`: the two variables by which scripts with OpenAI's SDK call the service."""

from __future__ import annotations

import argparse
import os
import shlex

from llama_stack_provider_trl.system.console import complain, show_lines

from ..address import checked_url


def print_lines(options: argparse.Namespace) -> int:
    """Print lines for a shell. The token is named and not shown."""
    try:
        url = checked_url(options.url)
    except ValueError as error:
        complain(f"--url or TRL_SERVICE_URL: {error}")
        return 1
    key = '"$TRL_SERVICE_TOKEN"' if os.environ.get("TRL_SERVICE_TOKEN") else "none"
    base = shlex.quote(f"{url.rstrip('/')}/openai/v1")
    show_lines(f"export OPENAI_BASE_URL={base}", f"export OPENAI_API_KEY={key}")
    return 0
