"""The ends of the logs that a job's processes wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.files import RunDir, is_regular, tail

from ..http.errors import NotFound

LAUNCHER = "launcher"
MOST_BYTES = 8 << 20


def read_log(
    store: Store, job_uuid: str, rank: str, lines: int, attempt: int | None = None, size: int = MOST_BYTES
) -> str:
    """The last lines of a log, at most `size` bytes of them.

    Args:
        attempt: None: the current one.

    Raises:
        JobNotFound.
        NotFound: there is no such attempt or log; the message names the logs that exist.
    """
    job = store.get(job_uuid)
    attempts = {tried.attempt: tried for tried in store.attempts(job.job_uuid)}
    chosen = attempts.get(attempt or max(attempts, default=0))
    if chosen is None:
        found = _without_attempts(job) if attempt is None else f"has no attempt {attempt}"
        raise NotFound(f"job {job_uuid!r} {found}: there is no log")
    run_dir = RunDir(chosen.run_dir)
    path = run_dir.root / "torchrun.log" if rank == LAUNCHER else run_dir.root / f"rank-{int(rank)}.log"
    if not is_regular(path):
        found = ", ".join(_ranks(run_dir.root)) or ("none" if job.state in TERMINAL else "none yet")
        raise NotFound(
            f"attempt {chosen.attempt} of job {job_uuid!r} has no log of rank {rank}; it has logs of: {found}"
        )
    # Zeros: logs written before they were kept without holes.
    text = tail(path, lines, size).replace("\0", "")
    return f"{text}\n" if text else ""


def _without_attempts(job: JobRecord) -> str:
    if job.spec.search is not None:
        return "is a search, which trains nothing itself (its trials have logs)"
    return f"is {job.state} and was never started" if job.state in TERMINAL else "has not been started yet"


def _ranks(directory: Path) -> Iterator[str]:
    yield from sorted((path.stem.removeprefix("rank-") for path in directory.glob("rank-*.log")), key=str)
    if is_regular(directory / "torchrun.log"):
        yield LAUNCHER
