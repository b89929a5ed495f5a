"""Reads the token of an agent from a file."""

from __future__ import annotations

from llama_stack_provider_trl.system import token_file

from .identity import NodeError


def read_token(file: str) -> str:
    """The token in `file`, without white space around it. Raises NodeError: as `system.token_file.read_token` raises
    ValueError."""
    try:
        return token_file.read_token(file)
    except ValueError as error:
        raise NodeError(str(error)) from error
