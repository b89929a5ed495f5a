"""Parsers of `nodes` and `agent`."""

from __future__ import annotations

import argparse
import os

from . import nodes_ssh
from .shared_options import at_service, logged, number

DEFAULT_SECONDS = 4.0
"""Of a search of the network."""
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


def nodes(group: argparse.ArgumentParser) -> None:
    at_service(group)
    commands = group.add_subparsers(dest="command", metavar="COMMAND")
    commands.default = "list"
    for name, meaning in (
        ("list", "machines, their devices, and which job has them"),
        ("show", "everything that the service knows of a machine"),
        ("pools", "pools of machines, and what was requested of them"),
        ("cordon", "give a machine no further jobs"),
        ("uncordon", "give it jobs again"),
        ("drain", "give it no further jobs; those that train there save, and continue elsewhere"),
        ("remove", "remove a machine without jobs, or one that is gone"),
    ):
        command = at_service(commands.add_parser(name, help=meaning), below=True)
        if name not in ("list", "pools"):
            command.add_argument("node", metavar="NODE")
    found = at_service(
        commands.add_parser("discover", help="services, agents and Ollama hosts of the local network; joins nothing"),
        below=True,
    )
    _search(found)
    _lines(found)
    lines = at_service(
        commands.add_parser("commands", help="what to run on each machine; calls no service"), below=True
    )
    lines.add_argument("--nodes", type=int, metavar="N", help="machines, the service's among them (2)")
    lines.add_argument(
        "--discover", action="store_true", help="the machines are those that `nodes discover` finds, with its options"
    )
    _search(lines)
    _lines(lines)
    _torchrun(lines)
    advice = commands.add_parser("advise", help="whether training on several nodes would help; exit status 0 yes, 1 no")
    _advice(at_service(advice, below=True))
    nodes_ssh.add_parsers(commands)


def _advice(command: argparse.ArgumentParser) -> None:
    """Add the options of the advice; those that are left out are the job's, or the defaults in parentheses."""
    command.add_argument(
        "--job", metavar="JOB", help="a job that has trained: its rules, its steps and the link that it has measured"
    )
    command.add_argument("--model", metavar="M", help="a directory, a cached model id, or parameters such as 100M")
    command.add_argument(
        "--step-seconds", type=_positive, metavar="S", help="of a step on one node, as measured; required without --job"
    )
    command.add_argument("--nodes", type=_count, metavar="N", help="nodes that would train (2)")
    command.add_argument("--machines", type=_count, metavar="N", help="physical machines that they are on (one each)")
    command.add_argument("--mbit-per-s", type=_positive, metavar="B", help="between two nodes, each way")
    command.add_argument(
        "--trainable", type=_parameters, metavar="N", help="trained parameters, such as 20M, with LoRA (all)"
    )
    command.add_argument("--sharding", choices=_SHARDING, help="(FULL_SHARD); NO_SHARD: DDP")
    command.add_argument("--accumulation", type=_count, metavar="N", help="micro steps of a step (1)")
    command.add_argument(
        "--gradient-sync",
        choices=("step", "micro_step"),
        help="when FSDP2 reduces accumulated gradients (step, as jobs do where it fits into memory)",
    )
    command.add_argument("--ranks-per-node", type=_count, metavar="N", help="processes of each node (1)")
    command.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        help="a reference is sharded too: DPO of all weights (no)",
    )
    command.add_argument(
        "--averaging-interval",
        type=_count,
        metavar="N",
        help="steps between two averages of the nodes' weights (1: gradients are reduced at every step)",
    )
    command.add_argument("--gpus", action=argparse.BooleanOptionalAction, help="the nodes train on GPUs (CPUs)")


_count = number(int, lambda value: 0 < value < 10**15, "is not 1 or more")
_port = number(int, lambda value: 1024 <= value <= 65535, "is not between 1024 and 65535")
_positive = number(float, lambda value: 0 < value < 1e12, "is not more than 0")
_rate = number(float, lambda value: value > 0, "is not more than 0 MiB per second")
_seconds = number(float, lambda value: 1 <= value <= 30, "is not between 1 and 30 seconds")


def _parameters(text: str) -> int:
    from .advise import parameter_count

    number = parameter_count(text)
    try:
        return _count(text) if number is None else _count(str(number))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number of parameters, such as 20M") from error


def _torchrun(lines: argparse.ArgumentParser) -> None:
    lines.add_argument(
        "--torchrun",
        metavar="FILE",
        help="no service: write the job of this request (JSON, YAML, TOML) and print torchrun's line for each machine",
    )
    lines.add_argument(
        "--data", metavar="ROWS", help="with --torchrun: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file"
    )
    lines.add_argument("--validation", metavar="ROWS", help="with --torchrun: rows of its validation_dataset_id")
    lines.add_argument(
        "--directory", metavar="DIR", help="with --torchrun: new directory, at the same path on every machine"
    )
    lines.add_argument(
        "--address", action="append", metavar="A", help="with --torchrun: of a machine, rank 0's first; repeat it"
    )
    lines.add_argument(
        "--sharding",
        choices=_SHARDING,
        help="with --torchrun: how several ranks hold the model (FULL_SHARD); NO_SHARD: DDP",
    )
    lines.add_argument("--port", type=_port, metavar="N", help="with --torchrun: of rank 0's machine (29500)")
    lines.add_argument(
        "--threads",
        type=_count,
        metavar="N",
        help="with --torchrun: CPU threads of each rank, the same on every machine (this machine's cores per rank)",
    )
    lines.add_argument("--python", metavar="FILE", help="with --torchrun: interpreter on every machine (python)")


def _lines(lines: argparse.ArgumentParser) -> None:
    lines.add_argument(
        "--token-file", default="~/.trl-node-token", metavar="FILE", help="on each machine (~/.trl-node-token)"
    )
    lines.add_argument("--certificate", metavar="FILE", help="on each machine: a copy of the service's tls_cert")


def _search(command: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    command.add_argument(
        "--subnet",
        action="append",
        default=[],
        metavar="NETWORK",
        help="also try ports 8322 and 11434 of each address there, such as 10.0.0.0/24 (1024 at most); repeat it",
    )
    command.add_argument(
        "--seconds", type=_seconds, metavar="N", help=f"search for so long, 1 to 30 ({DEFAULT_SECONDS:g})"
    )


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
        "--ollama",
        choices=("on", "off"),
        help="whether the names of the models of this machine's Ollama are reported (TRL_NODE_OLLAMA; on)",
    )
    command.add_argument(
        "--announce",
        action="store_const",
        const="on",
        help="announce this node by mDNS, for `nodes discover` (TRL_NODE_ANNOUNCE=on)",
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
        "--loaned", action="store_true", help="take jobs only while the owner's load is low (TRL_NODE_LOANED on; off)"
    )
    command.add_argument(
        "--loaned-max-load",
        metavar="SHARE",
        help="share of all cores that the owner may use while jobs train, 0 to 1 (TRL_NODE_LOANED_MAX_LOAD; 0.3)",
    )
    command.add_argument(
        "--loaned-idle-seconds",
        metavar="SECONDS",
        help="of a load below that before jobs come again (TRL_NODE_LOANED_IDLE_SECONDS; 60)",
    )
    command.add_argument(
        "--loaned-user",
        metavar="USER",
        help="the owner, whose processes count (TRL_NODE_LOANED_USER; all but the agent's and its trainings')",
    )
    command.add_argument(
        "--trust-remote-code",
        action="append",
        default=[],
        metavar="MODEL",
        help="a model whose own code may run here, a directory or ORG/NAME@REVISION (TRL_NODE_TRUST_REMOTE_CODE, with "
        "commas; none); repeat it",
    )
    command.add_argument(
        "--python-graders",
        action="store_true",
        help="let the source of graders run here, in processes that can only compute (TRL_NODE_PYTHON_GRADERS; off)",
    )
    command.add_argument(
        "--upload-mb-per-s", type=_rate, metavar="MIB", help="MiB per second for checkpoints (as fast as they go)"
    )
    command.add_argument(
        "--download-mb-per-s",
        type=_rate,
        metavar="MIB",
        help="MiB per second for models, rows and checkpoints from the service (as fast as they come)",
    )
    logged(command)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
