"""Options that several commands have."""

from __future__ import annotations

import argparse
import os


def at_service(command: argparse.ArgumentParser, *, below: bool = False) -> argparse.ArgumentParser:
    """Add the options of a command that calls the service.

    Args:
        below: the command above has them too, and what is given there counts unless it is given here again.
    """
    address = os.environ.get("TRL_SERVICE_URL") or "http://127.0.0.1:8322"
    help_ = f"address of the service (TRL_SERVICE_URL; now {address})"
    command.add_argument("--url", default=argparse.SUPPRESS if below else address, help=help_)
    help_ = "the answer as JSON; while a job runs, one object per line"
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
    command.add_argument("--max-seq-length", type=int, metavar="N", help="tokens (as the service sets)")
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
    command.add_argument(
        "--column", action="append", default=[], type=_named, metavar="OWN=NAME", help="read column NAME as OWN"
    )
    command.add_argument(
        "--role", action="append", default=[], type=_named, metavar="OWN=NAME", help="read role NAME as OWN"
    )


def _named(text: str) -> tuple[str, str]:
    own, equals, name = text.partition("=")
    if not own or not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: write it as prompt=question")
    return own, name
