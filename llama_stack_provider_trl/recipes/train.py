"""The training process: `python -m llama_stack_provider_trl.recipes.train RUN_DIR/spec.json`.

Reads the frozen spec, appends to `events.jsonl` beside it, and ends with `finished` or `failed`. Imports torch only
after the event file is open, so that even a broken environment ends in a sentence.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidRows, JobFailure, TrlError
from ..specs.events import EventWriter, Failed, NullEventWriter, Reason
from ..specs.job import AttemptSpec, JobSpec
from ..system.files import RunDir
from ..system.process import die_with_parent

_BALLAST = 64 << 10
"""Bytes: an event with a traceback takes 4 KiB at most, the runner's last status 20 KiB."""

_TERMINATION_WAIT = 15.0
"""Seconds. torchrun looks five times a second."""
_SINGLE_RANK_WAIT = 3.0
"""Seconds, of the only rank of its node: its torchrun ends nobody for a rank of another one."""


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""As the CPU allocator, the CUDA driver (also through NCCL, as a DistBackendError), cuBLAS and cuDNN report it."""
_COMMUNICATION_ERRORS = ("DistNetworkError", "DistBackendError", "DistStoreError", "RankLost")
"""By name, since torch may be the very thing that failed to import."""
_GLOO_ERRORS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


def main(argv: list[str]) -> int:
    """Run the attempt whose spec is the one argument; returns the exit status (0 finished, 1 failed)."""
    spec_path = Path(argv[1])
    attempt = AttemptSpec.model_validate_json(spec_path.read_text())
    paths = RunDir(spec_path.parent)
    rank = int(os.environ.get("RANK", "0"))
    if attempt.is_private:
        os.umask(0o077)  # elsewhere the user's own says who may read what was trained
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of its machine: each has a disk of its own
    writer = EventWriter(paths.events)
    try:
        if is_first:
            paths.ballast.write_bytes(bytes(_BALLAST))
        _dump_stacks_on_signal(paths)
        _hide_unused_libraries(attempt.job)
        if attempt.preflight:
            from .preflight import preflight_attempt as run
        else:
            from .session import train_attempt as run
        run(attempt, writer if rank == 0 else NullEventWriter())
    except BaseException as error:
        with suppress(OSError):  # its log is on a full disk
            traceback.print_exc()
        if attempt.world_size > 1 and follows_from_another_rank(error):
            # The rank that ended first reports why: torchrun sees it in this time, and ends us.
            alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
            time.sleep(_SINGLE_RANK_WAIT if alone else _TERMINATION_WAIT)
            return 1
        # The last words need room too: on a full disk, that of the ballast.
        paths.ballast.unlink(missing_ok=True)
        writer.write(classify(error, str(paths.root)).model_copy(update={"rank": rank}), durable=True)
        return 1
    if is_first:
        paths.ballast.unlink(missing_ok=True)
    return 0


def join_ranks(paths: RunDir, environ: Mapping[str, str]) -> None:
    """As one of several ranks: print into a log of our own, and end when torchrun does, even by SIGKILL."""
    if "LOCAL_RANK" not in environ:
        return
    die_with_parent(os.getppid())
    log = os.open(paths.rank_log(int(environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)


def _hide_unused_libraries(job: JobSpec) -> None:
    """Hide quantization libraries from a job that does not quantize: transformers and peft import them wherever they
    are installed, which costs 1.5 s of CPU time at every start."""
    unused = {"bitsandbytes": not (job.lora and job.lora.quantize_base), "torchao": not job.qat}
    for name, hidden in unused.items():
        if hidden:
            # As if it were not installed: the import system takes None for "there is no such module".
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def _dump_stacks_on_signal(paths: RunDir) -> None:
    """SIGUSR1 writes the Python stacks of all threads to a file: the runner asks before it ends a task that hangs.

    At the level of C, so that it works while Python waits for a collective operation that never ends.
    """
    paths.stacks.mkdir(exist_ok=True)
    fd = os.open(paths.stacks / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def classify(error: BaseException, disk: str = "the data directory") -> Failed:
    """The failure event for an exception: our own reasons first, then the machine's limits, then `rank_failed`.

    Args:
        disk: a directory of the one that is full, if that is what it is.
    """
    if isinstance(error, JobFailure):
        return Failed(reason=Reason(error.reason), message=error.message)
    if isinstance(error, InvalidRows):
        return Failed(reason=Reason.invalid_dataset, message=str(error))
    if isinstance(error, ImportError):
        return Failed(
            reason=Reason.launch_failed,
            message=f"the environment that trains ({sys.executable}) cannot import {error.name or error}: {error}. "
            "Install the training extra there: pip install 'llama_stack_provider_trl[train]'.",
            traceback=_tail(error),
        )
    if _is_out_of_memory(error):
        return Failed(
            reason=Reason.out_of_memory,
            message=f"out of memory: {_first_line(error)}. Lower batch_size (raise gradient_accumulation_steps to keep "
            "the global batch), lower max_seq_length, enable_activation_checkpointing, or use LoRA.",
            traceback=_tail(error),
        )
    if _is_disk_full(error):
        return Failed(
            reason=Reason.disk_full,
            message=f"the disk is full: {_first_line(error)}. Free space under {disk} and submit again; "
            "checkpoints that were listed before are kept.",
            traceback=_tail(error),
        )
    return Failed(
        reason=Reason.rank_failed,
        message=f"the training process ended with {type(error).__name__}: {_first_line(error)}",
        traceback=_tail(error),
    )


def _is_out_of_memory(error: BaseException) -> bool:
    # By name: torch may be the very thing that failed to import.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY))
    )


def _is_disk_full(error: BaseException) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left on device" in str(error)  # safetensors raises its own class


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether an exception is the consequence of another rank's end, and no failure of this rank.

    Types decide: what this project raises, running out of memory and a full disk are failures of this rank, whatever
    their text mentions. Only gloo raises a plain RuntimeError, whose text has to be read.
    """
    if isinstance(error, TrlError) or _is_out_of_memory(error) or _is_disk_full(error):
        return False
    if type(error).__name__ in _COMMUNICATION_ERRORS:
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _GLOO_ERRORS)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _tail(error: BaseException, lines: int = 20) -> str:
    text = "".join(traceback.format_exception(error))
    return "\n".join(text.rstrip().splitlines()[-lines:])


if __name__ == "__main__":
    join_ranks(RunDir(Path(sys.argv[1]).parent), os.environ)
    status = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors: gloo's sometimes hang after training succeeded (measured: 11 of 32 forked ranks).
    os._exit(status)
