"""Parsers of `nodes` and `agent`."""

from __future__ import annotations

import argparse
import os

from . import nodes_ssh
from .shared_options import at_service, logged


def nodes(group: argparse.ArgumentParser) -> None:
    at_service(group)
    commands = group.add_subparsers(dest="command", metavar="COMMAND")
    commands.default = "list"
    for name, meaning in (
        ("list", "machines, their devices, and which job has them"),
        ("show", "everything that the service knows of a machine, as JSON"),
        ("pools", "pools of machines, and what was requested of them"),
        ("cordon", "give a machine no further jobs"),
        ("uncordon", "give it jobs again"),
        ("drain", "give it no further jobs; those that train there save, and continue elsewhere"),
        ("remove", "remove a machine without jobs, or one that is gone"),
    ):
        command = at_service(commands.add_parser(name, help=meaning), below=True)
        if name not in ("list", "pools"):
            command.add_argument("node", metavar="NODE")
    lines = at_service(
        commands.add_parser("commands", help="what to run on each machine; calls no service"), below=True
    )
    lines.add_argument("--nodes", type=int, default=2, metavar="N", help="machines, the service's among them (2)")
    lines.add_argument(
        "--token-file", default="~/.trl-node-token", metavar="FILE", help="on each machine (~/.trl-node-token)"
    )
    lines.add_argument("--certificate", metavar="FILE", help="on each machine: a copy of the service's tls_cert")
    nodes_ssh.add_parsers(commands)


def agent(command: argparse.ArgumentParser) -> None:
    default = os.environ.get("TRL_SERVICE_URL") or "http://127.0.0.1:8322"
    command.add_argument(
        "--service", dest="url", default=default, metavar="URL", help="address of the service (TRL_SERVICE_URL)"
    )
    command.add_argument(
        "--token-file",
        metavar="FILE",
        help="a token of the service, in a file of mode 600 (TRL_SERVICE_NODE_TOKEN_FILE)",
    )
    command.add_argument("--name", help="of this node (TRL_NODE_NAME; the host name)")
    command.add_argument("--data-dir", metavar="DIR", help="its own directory (TRL_NODE_DATA_DIR; ~/.llama/trl-node)")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N or mps (TRL_NODE_DEVICE; auto)")
    command.add_argument(
        "--isolation",
        choices=("auto", "off", "required"),
        help="whether trainings are kept apart from the agent and its files (TRL_NODE_ISOLATION; auto)",
    )
    command.add_argument(
        "--warm-start",
        choices=("on", "off"),
        help="whether trainings are forked from a process that has imported torch (TRL_NODE_WARM_START; on)",
    )
    command.add_argument(
        "--label",
        action="append",
        type=_label,
        default=[],
        metavar="NAME=VALUE",
        help="for `labels` of a job; repeat it",
    )
    command.add_argument(
        "--heartbeat-interval",
        metavar="SECONDS",
        help="seconds between two calls of the service, 0.5 to 5 (TRL_NODE_HEARTBEAT_INTERVAL; 5)",
    )
    command.add_argument(
        "--upload-mb-per-s", type=_rate, metavar="MIB", help="MiB per second for checkpoints (as fast as they go)"
    )
    logged(command)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 MiB per second")
    return value
