"""Options that several commands have."""

from __future__ import annotations

import argparse
import os


def at_service(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    default = os.environ.get("TRL_SERVICE_URL") or "http://127.0.0.1:8322"
    command.add_argument("--url", default=default, help=f"address of the service (TRL_SERVICE_URL; now {default})")
    command.add_argument(
        "--json", action="store_true", help="the answer as JSON; while a job runs, one object per line"
    )
    return logged(command)


def logged(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    help_ = "lowest level that is logged to standard error (warning; of an agent TRL_NODE_LOG_LEVEL, info)"
    command.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help=help_)
    command.add_argument("--verbose", action="store_true", help="as --log-level debug: log each call of the service")
    return command
