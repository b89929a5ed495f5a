"""Scripts that complete `trl-remote` in a shell, out of its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from llama_stack_provider_trl.errors import MissingExtra

_FILES = {"DATA", "FILE"}
_DIRECTORIES = {"DIR"}
"""Metavars of arguments that name files, and directories."""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for bash or zsh. Raises MissingExtra."""
    try:
        import shtab
    except ImportError as error:
        raise MissingExtra("the script for a shell", "shtab", "completion") from error
    for action in _actions(parser):
        if action.metavar in _FILES | _DIRECTORIES:
            # shtab's own interface to argparse.
            kind = shtab.FILE if action.metavar in _FILES else shtab.DIRECTORY
            action.complete = kind  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
