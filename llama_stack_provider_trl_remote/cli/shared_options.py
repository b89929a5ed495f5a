"""Options that several commands have."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest


def number[Value: (int, float)](
    kind: Callable[[str], Value], fits: Callable[[Value], bool], problem: str
) -> Callable[[str], Value]:
    """The type of an option that takes a number.

    Args:
        problem: what a number is that does not fit, such as "is less than 0".
    """

    def parsed(text: str) -> Value:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite: expected a number")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} {problem}")
        return value

    parsed.__name__ = kind.__name__  # argparse names it where the text is no number
    return parsed


def at_service(command: argparse.ArgumentParser, *, below: bool = False) -> argparse.ArgumentParser:
    """Add the options of a command that calls the service.

    Args:
        below: the command above has them too, and what is given there counts unless it is given here again.
    """
    address = os.environ.get("TRL_SERVICE_URL") or "http://127.0.0.1:8322"
    help_ = f"address of the service (TRL_SERVICE_URL; now {address})"
    command.add_argument("--url", default=argparse.SUPPRESS if below else address, help=help_)
    help_ = "the answer as JSON; while a job runs, one object per line for each change"
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS if below else False, help=help_)
    return logged(command, below=below)


def logged(command: argparse.ArgumentParser, *, below: bool = False) -> argparse.ArgumentParser:
    """Add the options of what is logged; `below` as for `at_service`."""
    help_ = "lowest level that is logged to standard error (warning; of an agent TRL_NODE_LOG_LEVEL, info)"
    default = argparse.SUPPRESS if below else None
    command.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=default, help=help_)
    help_ = "as --log-level debug: log each call of the service"
    command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS if below else False, help=help_)
    return command


def as_trained(command: argparse.ArgumentParser) -> None:
    """Add the options of how rows are read and trained."""
    command.add_argument("--max-seq-length", type=int, metavar="N", help="tokens of a row (the service's)")
    command.add_argument(
        "--truncation-side", choices=("right", "left"), help="longer rows lose their end, or beginning"
    )
    command.add_argument("--data-format", choices=("instruct", "dialog"), help="of SFT rows (by their columns)")
    command.add_argument("--train-on-input", action="store_true", help="the loss covers every token (SFT)")
    command.add_argument(
        "--train-on",
        choices=("assistant", "all", "last_turn", "final_answer"),
        help="what the loss covers (assistant: every answer; SFT)",
    )
    command.add_argument("--reasoning", choices=("keep", "drop"), help="thoughts of answers (keep; SFT)")
    command.add_argument("--system-prompt", metavar="TEXT", help="a system turn for rows that begin without one")
    command.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, chatml, or a name of TRL's, in place of the model's own"
    )
    command.add_argument(
        "--column", action="append", default=[], type=_named, metavar="OWN=NAME", help="read column NAME as OWN"
    )
    command.add_argument(
        "--role", action="append", default=[], type=_named, metavar="OWN=NAME", help="read role NAME as OWN"
    )


def trained_as(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `data_config`, and provider options, that the options of `as_trained` ask for. Raises InvalidRequest: a
    file cannot be read."""
    data = {"data_format": options.data_format, "train_on_input": options.train_on_input or None}
    names = ("max_seq_length", "truncation_side", "train_on", "reasoning", "system_prompt")
    roles: dict[str, list[str]] = {}
    for own, name in options.role:
        roles.setdefault(own, []).append(name)
    given = {
        **{name: getattr(options, name) for name in names},
        "chat_template": _template(options.chat_template),
        "columns": dict(options.column),
        "roles": roles,
    }
    return without_none(data), {name: value for name, value in without_none(given).items() if value != {}}


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _template(given: str | None) -> str | None:
    """The text of a chat template's file, or its name."""
    if given is None or not (file := Path(given)).is_file():
        return given  # what reads it refuses a name that it does not know
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidRequest("--chat-template", given, f"it cannot be read as UTF-8 text: {error}") from error


def _named(text: str) -> tuple[str, str]:
    own, equals, name = text.partition("=")
    if not own or not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: write it as prompt=question")
    return own, name
