"""`python -m llama_stack_provider_trl`: lists the jobs of a data directory, pauses, resumes and cancels them.

It works on the job database itself and needs no running Llama Stack; a supervisor reacts within a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .config import DEFAULT_DATA_DIR
from .errors import TrlError
from .jobs.store.reader import read_watched
from .jobs.store.records import JobRecord
from .jobs.store.store import Store
from .stack.responses import status_response
from .system.console import complain, show_json, show_lines
from .system.data_dir import DataDir


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or 1 with a sentence on standard error."""
    options = _parser().parse_args(arguments)
    database = DataDir(options.data_dir.expanduser()).database
    try:
        if not database.exists():
            raise FileNotFoundError(f"{database} does not exist: name the provider's data_dir with --data-dir")
        store = Store(database)
        _run(store, options)
        store.close()
    except (TrlError, FileNotFoundError) as error:
        complain(str(error), "llama_stack_provider_trl")
        return 1
    return 0


def _run(store: Store, options: argparse.Namespace) -> None:
    match options.command:
        case "list":
            for job in store.list():
                show_lines(_line(job))
        case "show":
            job = store.get(options.job_uuid)
            answer = status_response(
                *(job, store.checkpoints(job.job_uuid), store.attempts(job.job_uuid)),
                *(store.exports.of_job(job.job_uuid), store.chains.of_job(job.job_uuid)),
                searched=store.searches.of_job(job.job_uuid),
                watched=read_watched(store, job.job_uuid),
            )
            show_json(answer.model_dump(mode="json"), indent=2)
        case "pause":
            show_lines(_line(store.request_pause(options.job_uuid)))
        case "resume":
            show_lines(_line(store.request_resume(options.job_uuid)))
        case "cancel":
            show_lines(_line(store.request_cancel(options.job_uuid)))


def _line(job: JobRecord) -> str:
    progress = f"{job.progress.step}/{job.progress.total_steps or '?'}"
    detail = job.detail or job.message.partition("\n")[0]
    return "  ".join([job.job_uuid, job.state.value, f"step {progress}", f"attempt {job.attempt}", detail]).rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llama_stack_provider_trl", description=(__doc__ or "").split(": ")[1]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    default = Path(os.environ.get("TRL_OUTPUT_DIR") or DEFAULT_DATA_DIR)
    for name, meaning in (
        ("list", "one line per job"),
        ("show", "the whole status as JSON"),
        ("pause", "save a checkpoint, then free the device"),
        ("resume", "queue a paused job again"),
        ("cancel", "end a job; its checkpoints stay"),
    ):
        command = commands.add_parser(name, help=meaning)
        command.add_argument("--data-dir", type=Path, default=default, help="the provider's data_dir")
        if name != "list":
            command.add_argument("job_uuid")
    return parser


if __name__ == "__main__":
    sys.exit(main())
