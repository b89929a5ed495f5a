"""`trl-remote`: the training service from a shell. Each command imports only its own dependencies."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import TrlError, sentence_of
from llama_stack_provider_trl.system.console import complain, lines_of, show_lines, shown

from . import adapter, jobspec, merge, node_commands
from .promotion import FORM, condition
from .refusals import in_a_shell, with_the_name_meant
from .shared_options import as_trained, at_service, number

SERVE = "run the training service; its settings come from TRL_SERVICE_CONFIG"
TRAINED = ("sft", "dpo", "orpo", "cpo", "simpo", "reward", "kto")
"""Methods that need nothing but rows. A test compares them with `specs.methods`, which imports pydantic."""
_STACK = "address of Llama Stack (LLAMA_STACK_CLIENT_BASE_URL, http://127.0.0.1:8321)"
AGENT = "be a worker node of a training service on another machine"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: failed, with a sentence on standard error. 2: an option, or a token, is invalid. The status of
    `train`, `run`, `resume` and `jobs watch` reports how the job ended.
    """
    given = _behind_their_command(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        return _serve(given[1:])
    options = parser().parse_args(given)
    local = _LOCAL.get(options.group) or _LOCAL.get(f"{options.group} {options.command}")
    try:
        return _run(options) if local is None else local(options)
    except BrokenPipeError:  # such as `| head`; without this, Python reports it again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TrlError, OSError) as error:
        text = sentence_of(error, "run the command again")
        complain(text if options.group == "agent" else in_a_shell(text))
        return 1
    except Exception as error:
        # Such as an answer that is no answer of the service. A traceback would print text from elsewhere as it is.
        text = f"{type(error).__name__}: {error}: this answer was not expected, or it is a bug of this command"
        if local or options.verbose:
            complain(f"{text}\n{''.join(traceback.format_exception(error))}")
        else:
            complain(f"{text}; --verbose shows where")
        return 1
    except KeyboardInterrupt:
        submits = local is None and options.group != "chat"
        continues = " watching; what was submitted continues" if submits else ""
        show_lines("", to=sys.stderr)
        complain(f"stopped{continues}.")
        return 130


_OF_ANY = {"--url": True, "--log-level": True, "--json": False, "--verbose": False}
"""Options that may stand before the command, and whether a value follows."""


def _behind_their_command(given: list[str]) -> list[str]:
    """The words of a command line, with options that stand before the command behind it, where its parser has them."""
    at = 0
    while at < len(given) and (name := given[at].partition("=")[0]) in _OF_ANY:
        at += 1 + (_OF_ANY[name] and "=" not in given[at])
    options, words = given[:at], given[at:]
    if not options or not words:
        return given
    group = _choices(parser(), "group").get(words[0])
    has_command = group is not None and words[1:2] and words[1] in _choices(group, "command")
    count = 2 if has_command else 1
    return [*words[:count], *options, *words[count:]]


def _choices(command: argparse.ArgumentParser, dest: str) -> Mapping[str, argparse.ArgumentParser]:
    """The commands below a command."""
    found = next((action.choices for action in command._actions if action.dest == dest), None)
    return found if isinstance(found, Mapping) else {}


def _serve(arguments: list[str]) -> int:
    from ..service.__main__ import main as serve

    return serve(arguments, "trl-remote serve")


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import report

    return report(options)


def _completion(options: argparse.Namespace) -> int:
    from .completion import completion

    show_lines(*lines_of(completion(parser(), options.shell)))
    return 0


def _openai(options: argparse.Namespace) -> int:
    """Print the two variables by which scripts with OpenAI's SDK call the service. The token is named and not shown."""
    from ..address import checked_url

    try:
        url = checked_url(options.url)
    except ValueError as error:
        complain(f"--url or TRL_SERVICE_URL: {error}")
        return 1
    key = '"$TRL_SERVICE_TOKEN"' if os.environ.get("TRL_SERVICE_TOKEN") else "none"
    show_lines(f"export OPENAI_BASE_URL={shlex.quote(f'{url}/openai/v1')}", f"export OPENAI_API_KEY={key}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from .evaluate import evaluate

    return evaluate(options)


def _check(options: argparse.Namespace) -> int:
    from .check import check

    return check(options)


def _dashboard(options: argparse.Namespace) -> int:
    from ..service.dashboard import serve_dashboard

    serve_dashboard(options.data_dir.expanduser(), options.port, os.environ.get("TRL_SERVICE_TOKEN"))
    return 0


def _jobspec(options: argparse.Namespace) -> int:
    from .jobspec import print_job

    return print_job(options, parser())


_LOCAL = {
    "jobspec": _jobspec,
    "doctor": _doctor,
    "completion": _completion,
    "evaluate": _evaluate,
    "merge": merge.merge,
    "adapter merge": adapter.merge,
    "datasets check": _check,
    "dashboard": _dashboard,
    "openai": _openai,
}
"""Commands that call no service."""


def _run(options: argparse.Namespace) -> int:
    from llama_stack_provider_trl.system.logs import start_logging

    from ..address import checked_token, checked_url
    from ..client import ServiceClient, Timeouts
    from ..trl_client import PREFLIGHT_TIMEOUTS
    from . import commands

    is_agent = options.group == "agent"
    try:
        url = checked_url(options.url)
    except ValueError as error:
        complain(f"{'--service' if is_agent else '--url'} or TRL_SERVICE_URL: {error}")
        return 1
    tokens: dict[str, str] = {}
    for name in ("TRL_SERVICE_TOKEN", "TRL_SERVICE_NODE_TOKEN") if is_agent else ("TRL_SERVICE_TOKEN",):
        try:
            tokens[name] = checked_token(os.environ.get(name)) or ""
        except ValueError as error:
            complain(f"{name}: {error}")
            return 2

    if is_agent:
        token_file = options.token_file or os.environ.get("TRL_SERVICE_NODE_TOKEN_FILE")
        if token_file:
            from ..nodes.identity import read_token

            tokens["TRL_SERVICE_NODE_TOKEN"] = read_token(token_file)
        return _agent(url, options, {**os.environ, **tokens})
    start_logging(None, "debug" if options.verbose else options.log_level or "warning", tokens.values())
    timeouts = PREFLIGHT_TIMEOUTS if options.command in ("preflight", "preview") else Timeouts()
    client = ServiceClient(url, tokens["TRL_SERVICE_TOKEN"] or None, timeouts)
    command = commands.COMMANDS[options.group, options.command]
    return asyncio.run(with_the_name_meant(command, client, options))


def _agent(url: str, options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from ..nodes.start import serve, worker_settings

    names = (
        *("name", "data_dir", "device", "upload_mb_per_s", "download_mb_per_s", "isolation", "warm_start"),
        *("heartbeat_interval", "announce", "ollama"),
        *("loaned", "loaned_max_load", "loaned_idle_seconds", "loaned_user", "trust_remote_code"),
        "python_graders",
    )
    given_level = "debug" if options.verbose else options.log_level
    given = {name: getattr(options, name) for name in names}
    return serve(worker_settings(url, environ, labels=dict(options.label), log_level=given_level, **given))


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse words that a command does not know with its own usage. argparse leaves them to the topmost parser."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = next((word[2:].partition("=")[0] for word in unknown if word.startswith("--")), "")
            known = (option[2:] for action in self._actions for option in action.option_strings if option[:2] == "--")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(name, known, '--')}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Report what is wrong with the words of a command, which may come from elsewhere, and what is like them."""
        if found := _CHOICES.search(message):
            message += _nearest(found[1], (one.strip(" '") for one in found[2].split(",")))
        super().error(shown(message))


_CHOICES = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What was meant, perhaps; empty: nothing known is like it.

    Args:
        prefix: what all names begin with, and which is left out of `word` and `known`.
    """
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; was {prefix}{near[0]} meant?" if near else ""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(
        prog="trl-remote",
        description="Fine-tuning jobs on the training service. The token, where one is needed, is read from "
        "TRL_SERVICE_TOKEN, never from the command line, which other users of a machine can see.",
        epilog="--url, --json, --verbose and --log-level may stand before the command, too.",
    )
    top.set_defaults(command="")
    top.add_argument("--version", action="version", version=f"trl-remote {__version__}")
    groups = top.add_subparsers(dest="group", required=True, metavar="COMMAND")
    groups.add_parser("serve", help=SERVE, add_help=False)
    _train(groups.add_parser("train", help="upload rows, train a model on them, follow that, and pull the result"))
    _generation(groups.add_parser("generate", help="answer prompts with a model; the answers become a dataset"))
    _export(groups.add_parser("export", help="a model to files of other programs, proven equal to it"))
    _chat(groups.add_parser("chat", help="ask the result of a job, a checkpoint or a base model, or two of them"))
    _register(groups.add_parser("register", help="let the result of a job answer in a running Llama Stack or OGX"))
    _run_file(groups.add_parser("run", help="submit the job of a file, or the jobs of a pipeline, and follow them"))
    _resume(groups.add_parser("resume", help="queue a paused job again, follow it, and pull its result"))
    _jobs(groups.add_parser("jobs", help="submit, list, show, watch, logs, cancel, pause, resume, pull, delete"))
    _evaluation(groups.add_parser("evaluate", help="a model of this machine on held-out rows; calls no service"))
    merge.add_options(groups.add_parser("merge", help="models or adapters of this machine into one; calls no service"))
    adapter.add_options(groups.add_parser("adapter", help="merge: an adapter of this machine into its base model"))
    _plot(groups.add_parser("plot", help="metrics of jobs as a .png, .svg or .html file"))
    _dashboard_options(groups.add_parser("dashboard", help="pages of the jobs of a data directory without a service"))
    _datasets(groups.add_parser("datasets", help="add, list, preview, check, delete"))
    node_commands.nodes(
        groups.add_parser(
            "nodes",
            help="list (the default), show, discover, commands, cordon, drain, remove machines; up, down over SSH",
        )
    )
    _tokens(groups.add_parser("tokens", help="create, list, revoke the tokens of callers"))
    _audit(groups.add_parser("audit", help="who did what, from where, with which result"))
    _service_logs(groups.add_parser("logs", help="what the service, or a node's agent, has logged"))
    jobspec.add_options(groups.add_parser("jobspec", help="a job for Slurm, Kubernetes, containers or systemd"))
    node_commands.agent(groups.add_parser("agent", help=AGENT))
    doctor = groups.add_parser("doctor", help="whether this machine is fit for the service; exit status 0 yes, 1 no")
    doctor.add_argument("--config", type=Path, help="the service's run file (TRL_SERVICE_CONFIG, ./run_fsdp.yaml)")
    doctor.add_argument("--json", action="store_true", help="the findings as a list")
    variables = groups.add_parser("openai", help="the variables by which scripts with OpenAI's SDK call the service")
    help_ = "address of the service (TRL_SERVICE_URL, http://127.0.0.1:8322)"
    variables.add_argument("--url", default=os.environ.get("TRL_SERVICE_URL") or "http://127.0.0.1:8322", help=help_)
    completion = groups.add_parser("completion", help="a script that completes these commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh"))
    return top


def _train(command: argparse.ArgumentParser) -> None:
    command.add_argument("data", metavar="DATA", help="rows: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file")
    command.add_argument(
        "--model", required=True, metavar="M", help="a directory of the service's machine, a model id, or job:NAME"
    )
    command.add_argument("--adapter", choices=("continue", "merge"), help="of a model that is an adapter")
    command.add_argument(
        "--method",
        type=_method,
        choices=TRAINED,
        metavar="NAME",
        help=f"{', '.join(TRAINED)} (dpo for rows with chosen and rejected)",
    )
    command.add_argument(
        "--lora-r", type=_positive, metavar="N", help="train LoRA adapters of this rank (every weight)"
    )
    command.add_argument("--lora-alpha", type=_positive, metavar="N", help="their scale times the rank (2 x rank)")
    command.add_argument(
        "--lora-modules", type=_words, metavar="M,M", help="adapted modules (q, k, v, o_proj and those of the MLP)"
    )
    command.add_argument("--merge", action="store_true", help="merge the adapters into the model, and pull that")
    command.add_argument("--epochs", type=_positive, default=1, metavar="N", help="passes over the rows (1)")
    command.add_argument("--max-steps", type=_positive, metavar="N", help="optimizer steps of an epoch (all)")
    command.add_argument("--batch-size", type=_positive, default=4, metavar="N", help="rows or pairs of a rank (4)")
    command.add_argument(
        "--gradient-accumulation", type=_positive, metavar="N", help="batches of an optimizer step (1)"
    )
    command.add_argument("--learning-rate", type=_rate_of_learning, metavar="LR", help="peak (that of the method)")
    as_trained(command)
    command.add_argument("--mix", action="append", metavar="FILE", help="further rows to train on; repeat it")
    command.add_argument(
        "--weights", type=_weights, metavar="W,W", help="with --mix: shares of an epoch, DATA's first (by their rows)"
    )
    command.add_argument("--eval-data", metavar="FILE", help="rows to evaluate on before checkpoints and at the end")
    _placement(command)
    _following(command)
    _registration(command)
    _promotion(command)


def _generation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "data", nargs="?", metavar="DATA", help="prompts: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file"
    )
    command.add_argument("--dataset", metavar="ID", help="prompts: a registered dataset, in place of DATA")
    command.add_argument("--model", required=True, metavar="M", help="a directory, a model id, or job:NAME")
    command.add_argument("--output", required=True, metavar="ID", help="the dataset that the answers become")
    command.add_argument("--max-new-tokens", type=_positive, metavar="N", help="tokens of an answer at most (256)")
    command.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token (1)")
    command.add_argument("--top-p", type=float, metavar="P", help="choose among the most likely tokens (1)")
    command.add_argument("--seed", type=_number, metavar="N", help="decides every choice (42)")
    command.add_argument("--samples", type=_positive, metavar="N", help="answers to each prompt (1)")
    command.add_argument("--batch-size", type=_positive, metavar="N", help="answers that are computed together (8)")
    command.add_argument("--job", metavar="NAME", help="the job_uuid (a new name)")
    command.set_defaults(pull=None, register=None)
    command.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between polls (1)")
    at_service(command)
    command.add_argument("--detach", action="store_true", help="print the job_uuid and do not wait for the job")


def _export(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", metavar="MODEL", help="NAME or NAME/CHECKPOINT of a job, a directory, or a model id with a slash"
    )
    command.add_argument(
        "--to", required=True, choices=("safetensors", "gguf", "ollama", "lora-gguf", "vllm"), help="what is written"
    )
    command.add_argument(
        "--type",
        choices=("f32", "f16", "bf16", "q8_0"),
        help="gguf, ollama, lora-gguf: of the weights (as the model's; of an adapter f32)",
    )
    _promotion(command)
    command.add_argument("--job", metavar="NAME", help="the job_uuid (a new name)")
    command.add_argument(
        "--upload-to", metavar="PLACE", help="hf://OWNER/NAME or s3://BUCKET/PATH: the service uploads it there"
    )
    command.add_argument("--pull", metavar="DIR", help="download the export there, a new directory")
    command.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between polls (1)")
    command.set_defaults(checkpoint=None, register=None)
    at_service(command)
    command.add_argument("--detach", action="store_true", help="print the job_uuid and do not wait for the job")


def _chat(command: argparse.ArgumentParser) -> None:
    what = "NAME (the result of that job), job:NAME/CHECKPOINT, a directory, or a model id with a slash"
    command.add_argument("model", metavar="MODEL", help=what)
    command.add_argument("--against", metavar="MODEL", help="ask this model the same, and print its answer below")
    command.add_argument("-m", "--message", metavar="TEXT", help="ask this and exit; left out: each line that is typed")
    command.add_argument("--system", metavar="TEXT", help="a system turn before the conversation")
    command.add_argument("--max-tokens", type=_positive, metavar="N", help="tokens of an answer at most (all)")
    command.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token (1)")
    command.add_argument("--top-p", type=float, metavar="P", help="choose among the most likely tokens (1)")
    command.add_argument("--seed", type=_number, metavar="N", help="the same seed gives the same answers (a new one)")
    at_service(command)


def _register(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="NAME (the result of that job), or a base model of the service")
    command.add_argument("--stack", metavar="URL", help=_STACK)
    command.add_argument(
        "--provider", metavar="ID", help="its inference provider that calls the service (the one with its address)"
    )
    _promotion(command)
    at_service(command)


def _run_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="FILE", help="the request as JSON, YAML or TOML, or a recipe of examples/recipes; - reads stdin"
    )
    command.add_argument("--algorithm", choices=("sft", "dpo"), help="default: from the request's fields")
    _placement(command)
    _following(command)
    _registration(command)
    _promotion(command)
    _checkpoint(command)


def _resume(command: argparse.ArgumentParser) -> None:
    command.set_defaults(detach=False)
    _job(command)
    _following(command, detach=False)
    _checkpoint(command)


def _placement(command: argparse.ArgumentParser) -> None:
    command.add_argument("--job", metavar="NAME", help="the job_uuid (a new name)")
    command.add_argument("--nodes", type=_positive, metavar="N", help="machines that train together (the service's)")
    command.add_argument("--nproc-per-node", type=_positive, metavar="N", help="ranks on each of them (the service's)")
    command.add_argument("--resume-from", metavar="JOB", help="begin with a checkpoint: JOB, or JOB/checkpoint-N")
    help_ = "jobs of a higher one run first (the service's)"
    command.add_argument("--priority", choices=("low", "normal", "high", "critical"), help=help_)


def _following(command: argparse.ArgumentParser, *, detach: bool = True) -> None:
    command.set_defaults(checkpoint=None, register=None)
    command.add_argument("--pull", metavar="DIR", help="download the result into this new directory")
    command.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between polls (1)")
    if detach:
        at_service(command)
        command.add_argument("--detach", action="store_true", help="print the job_uuid and do not wait for the job")


def _registration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--register", nargs="?", const="", metavar="URL", help="let the result answer in Llama Stack, as `register`"
    )


def _promotion(command: argparse.ArgumentParser) -> None:
    what = "only if that evaluation found this, or 'JOB:METRIC<=BEFORE + CHANGE' against another one; repeat it"
    command.add_argument("--promote-if", action="append", type=condition, metavar=FORM, help=what)


def _checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument("--checkpoint", metavar="NAME", help="what to pull: final, merged, checkpoint-100 ... (final)")


def _evaluation(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a directory, or a model id")
    command.add_argument("data", metavar="DATA", help="rows: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file")
    command.add_argument("--method", choices=("sft", "dpo"), help="default: dpo for rows with chosen and rejected")
    command.add_argument("--reference", metavar="M", help="dpo: the model before training")
    command.add_argument("--batch-size", type=_positive, default=4, metavar="N", help="rows or pairs at once (4)")
    command.add_argument(
        "--max-seq-length", type=_positive, metavar="N", help="tokens of a row; longer ones are cut (1024)"
    )
    command.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), help="(bf16 on cuda, else fp32)")
    command.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(the best there is)")
    command.add_argument("--json", action="store_true", help="the measures as JSON")


def _plot(command: argparse.ArgumentParser) -> None:
    command.add_argument("job_uuids", nargs="*", metavar="JOB", help="in the same axes; default: the newest job")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="ends with .png, .svg or .html")
    command.add_argument("--metric", action="append", metavar="NAME", help="loss (default), grad_norm ...; repeat it")
    command.add_argument("--x", choices=("step", "epoch", "time"), default="step", help="the horizontal axis (step)")
    command.add_argument(
        "--smoothing",
        type=_smoothing,
        default=0.8,
        metavar="W",
        help="weight of earlier points, 0 to less than 1 (0.8)",
    )
    command.add_argument("--data-dir", type=Path, metavar="DIR", help="read this data directory; no service is needed")
    at_service(command)


def _dashboard_options(command: argparse.ArgumentParser) -> None:
    help_ = "the data_dir of an inline provider"
    command.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help=help_)
    command.add_argument("--port", type=_port, default=8323, metavar="N", help="on 127.0.0.1; 0: any free one (8323)")


def _jobs(group: argparse.ArgumentParser) -> None:
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    submit = at_service(commands.add_parser("submit", help="queue a job; the same file again is the same job"))
    submit.add_argument(
        "file", metavar="FILE", help="the request as JSON, YAML or TOML, as Llama Stack takes it; - reads stdin"
    )
    submit.add_argument("--algorithm", choices=("sft", "dpo"), help="default: from the request's fields")
    preflight = at_service(
        commands.add_parser("preflight", help="what a job would do and whether it fits; exit status 0 it fits, 1 not")
    )
    preflight.add_argument("file", metavar="FILE", help="the request as JSON, YAML or TOML; - reads standard input")
    preflight.add_argument("--algorithm", choices=("sft", "dpo"), help="default: from the request's fields")
    listing = at_service(commands.add_parser("list", help="one line per job, oldest first, or sorted by a column"))
    listing.add_argument(
        "--status", help="only these: waiting, running, completed, failed, cancelled, paused ..., or a state of the API"
    )
    listing.add_argument(
        "--sort",
        choices=("name", "state", "method", "model", "loss", "eval", "progress", "duration", "created", "owner"),
        help="as the page of jobs sorts them; jobs without a value come last",
    )
    listing.add_argument("--reverse", action="store_true", help="the largest, or the newest, first")
    show = _job(
        commands.add_parser("show", help="state, progress, metrics of the last step, checkpoints, what to do next")
    )
    show.add_argument("--config", action="store_true", help="with the effective configuration, which is most of it")
    watch = at_service(
        commands.add_parser("watch", help="follow jobs to their end; exit status 0 completed, 1 failed, 2 cancelled")
    )
    watch.add_argument("job_uuids", nargs="+", metavar="JOB")
    watch.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between polls (1)")
    watch.add_argument("--after", metavar="ID", help="with --json: only what follows the line with this id")
    logs = _job(commands.add_parser("logs", help="what the training processes print"))
    logs.add_argument("--rank", default="0", help="a rank's number, or launcher for torchrun's own log (0)")
    logs.add_argument("--tail", type=_lines, default=200, metavar="N", help="last lines to show, 1 to 10000 (200)")
    logs.add_argument("--follow", action="store_true", help="continue until the job has ended")
    _job(
        commands.add_parser(
            "samples", help="the model's answers to the job's prompts, before, at checkpoints and after"
        )
    )
    answers = _job(commands.add_parser("answers", help="answers of a job that has answered prompts, as JSON lines"))
    answers.add_argument("--output", metavar="FILE", help="write them there; default: print them")
    for name, meaning in (
        ("cancel", "end a job; its checkpoints stay"),
        ("pause", "save a checkpoint, then free the devices"),
        ("resume", "queue a paused job again"),
    ):
        _job(commands.add_parser(name, help=meaning))
    delete = _job(
        commands.add_parser("delete", help="forget a job that has ended, with its log and events (role admin)")
    )
    delete.add_argument("--checkpoints", action="store_true", help="remove its checkpoints, too")
    pull = _job(commands.add_parser("pull", help="download a checkpoint; run it again to continue where it stopped"))
    pull.add_argument("directory", metavar="DIR", help="where the checkpoint goes; must not exist yet")
    pull.add_argument("--checkpoint", default="final", metavar="NAME", help="final, merged, checkpoint-100 ... (final)")


def _datasets(group: argparse.ArgumentParser) -> None:
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = at_service(commands.add_parser("add", help="upload rows, or name a uri, and register them under an id"))
    add.add_argument(
        "file",
        metavar="FILE",
        help="a .jsonl, .json, .csv (also .gz, .zst) or .parquet file; or a uri that the service reads: "
        "huggingface://, file://, ray://",
    )
    add.add_argument("--id", required=True, dest="dataset_id", metavar="ID", help="the dataset_id that jobs name")
    at_service(commands.add_parser("list", help="one line per dataset"))
    delete = at_service(commands.add_parser("delete", help="forget a dataset, and its rows, which queued jobs keep"))
    delete.add_argument("dataset_id", metavar="ID", help="of datasets list")
    preview = at_service(commands.add_parser("preview", help="rows as they are trained: tokens, loss, cuts, drops"))
    preview.add_argument("dataset_id", metavar="ID", help="of datasets list")
    preview.add_argument("--model", required=True, help="the model whose tokenizer and chat template are used")
    preview.add_argument(
        "--method", choices=("sft", "dpo", "kto"), default="sft", help="(sft); dpo for all methods that read pairs"
    )
    preview.add_argument("--first-row", type=_number, default=0, metavar="N", help="counted from 0 (0)")
    preview.add_argument("--rows", type=int, default=10, metavar="N", help="1 to 100 (10)")
    as_trained(preview)
    check = commands.add_parser(
        "check", help="whether every row of a file trains, as inference renders it; calls no service"
    )
    check.add_argument("data", metavar="DATA", help="rows: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file")
    check.add_argument(
        "--model", required=True, metavar="M", help="a directory, or a model id; its weights are not read"
    )
    check.add_argument(
        "--method",
        choices=("sft", "dpo", "kto"),
        help="default: dpo for rows with chosen and rejected, else sft; dpo for all methods that read pairs",
    )
    as_trained(check)
    check.add_argument("--strict", action="store_true", help="a warning is a failure, such as of dropped rows")
    check.add_argument("--json", action="store_true", help="the counts, problems and warnings as JSON")


def _tokens(group: argparse.ArgumentParser) -> None:
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = at_service(commands.add_parser("create", help="print a new token, which cannot be read again"))
    create.add_argument("name", type=_token_name, metavar="NAME", help="for records: created_by of jobs, the audit log")
    roles = ("submit", "read", "admin", "node", "metrics")
    create.add_argument("--role", choices=roles, default="submit", help="read: sees all, changes nothing (submit)")
    create.add_argument("--expires", type=_span, metavar="TIME", help="such as 12h, 30d (never)")
    create.add_argument("--max-queued-jobs", type=int, metavar="N", help="jobs that may wait at once (any number)")
    create.add_argument("--requests-per-second", type=float, metavar="R", help="on average (any number)")
    create.add_argument("--priorities", type=_words, metavar="P,P", help="of low, normal, high, critical (all)")
    at_service(commands.add_parser("list", help="one line per token, without the tokens themselves"))
    revoke = at_service(commands.add_parser("revoke", help="refuse a token from now on"))
    revoke.add_argument("name", type=_token_name, metavar="NAME")


def _audit(command: argparse.ArgumentParser) -> None:
    at_service(command)
    command.set_defaults(command="show")
    command.add_argument("--after", type=_number, metavar="N", help="lines behind number N (the last 100)")
    command.add_argument("--caller", metavar="NAME", help="only of this token")
    command.add_argument("--route", metavar="PATH", help="only of this path template, such as /v1/tokens/{name}")
    command.add_argument("--follow", action="store_true", help="continue with new lines until interrupted")


def _service_logs(command: argparse.ArgumentParser) -> None:
    at_service(command)
    command.set_defaults(command="show")
    command.add_argument("node", nargs="?", metavar="NODE", help="whose agent (the service)")
    command.add_argument("--tail", type=_lines, default=200, metavar="N", help="last lines to show, 1 to 10000 (200)")


def _job(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("job_uuid", metavar="JOB")
    return at_service(command)


_lines = number(int, lambda value: 0 < value <= 10_000, "is not between 1 and 10000 lines")
_number = number(int, lambda value: value >= 0, "is less than 0")
_port = number(int, lambda value: 0 <= value <= 65535, "is not between 0 and 65535")
_positive = number(int, lambda value: 0 < value <= 10**6, "is not between 1 and 1000000")
_rate_of_learning = number(float, lambda value: value > 0, "is not more than 0")
_seconds = number(float, lambda value: 0 < value <= 3600, "is not between 0 and 3600 seconds")
_smoothing = number(float, lambda value: 0 <= value < 1, "is not from 0 to less than 1")


def _token_name(text: str) -> str:
    if text.startswith("trl_") and len(text) >= 36:
        # Not repeated: terminals are recorded.
        raise argparse.ArgumentTypeError(
            "found a token, expected the name of one: trl-remote tokens list shows the names"
        )
    return text


def _span(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or not int(text[:-1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write a number and s, m, h or d, such as 30d")
    return float(int(text[:-1]) * unit)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _weights(text: str) -> list[float]:
    values = [float(word) for word in text.split(",")]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers above 0, such as 3,1")
    return values


def _method(text: str) -> str:
    if text not in TRAINED:
        near = difflib.get_close_matches(text, [*TRAINED, "grpo", "distillation"], 1)
        if near and near[0] in TRAINED:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TRAINED)}; was {near[0]} meant?")
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(TRAINED)}; grpo (rewards), distillation (a teacher) and methods of "
            "installed packages have fields of their own: write them into algorithm_config of a file, and use "
            "`trl-remote run FILE`"
        )
    return text
