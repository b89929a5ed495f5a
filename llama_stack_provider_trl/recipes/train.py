"""The training process: `python -m llama_stack_provider_trl.recipes.train RUN_DIR/spec.json`.

Reads the frozen spec, appends to `events.jsonl` beside it, and ends with `finished`, `paused` or `failed`. torch is
imported only after the event file is open, so that a broken environment ends in a `failed` event, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ..specs.events import EventWriter, NullEventWriter
from ..specs.job import AttemptSpec, JobSpec
from ..system import fork
from ..system.files import RunDir
from ..system.process import die_with_parent
from .failures import classify, follows_from_another_rank
from .imports import packages_found_once, quick_imports

QUANTIZATION_LIBRARIES = frozenset({"bitsandbytes", "torchao"})
_BALLAST = 64 << 10
"""Bytes: an event with a traceback takes 4 KiB at most, the runner's last status 20 KiB."""
_WAIT_FOR_TORCHRUN = 15.0
"""Seconds. torchrun polls its processes five times a second."""
_WAIT_FOR_OTHER_NODE = 3.0
"""Seconds, on a node with one rank: its torchrun does not end it for a failure on another node."""


def main(argv: list[str]) -> int:
    """Run the attempt whose spec is the one argument; returns the exit status (0 finished, 1 failed)."""
    spec_path = Path(argv[1])
    attempt, run_dir = AttemptSpec.model_validate_json(spec_path.read_text()), RunDir(spec_path.parent)
    if needs_cold_start(attempt):
        os.execv(sys.executable, sys.orig_argv)
    if attempt.is_private:
        os.umask(0o077)  # elsewhere the user's own umask decides who may read the result
    events = EventWriter(run_dir.events)
    try:
        _reserve_disk_space(run_dir)
        _dump_stacks_on_signal(run_dir)
        with unused_libraries_hidden(_unused_libraries(attempt.job)):
            with quick_imports():
                run = _import_task(attempt)
            with packages_found_once():
                run(attempt, events if _rank() == 0 else NullEventWriter(events))
    except BaseException as error:
        _report(error, attempt, run_dir, events)
        return 1
    if _is_first_of_machine():
        _release_disk_space(run_dir)
    return 0


def join_ranks(run_dir: RunDir, environ: Mapping[str, str]) -> None:
    """As one of several ranks: print into a log of this rank, and end when torchrun ends, even by SIGKILL."""
    if "LOCAL_RANK" not in environ:
        return
    die_with_parent(os.getppid())
    log = os.open(run_dir.rank_log(int(environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)


def _import_task(attempt: AttemptSpec) -> Callable[[AttemptSpec, EventWriter], None]:
    """What the attempt runs. Imports torch."""
    module, function = ("preflight", "preflight_attempt") if attempt.preflight else attempt.job.does.recipe
    return getattr(import_module(f".{module}", __package__), function)


def _report(error: BaseException, attempt: AttemptSpec, run_dir: RunDir, events: EventWriter) -> None:
    """Log the exception, and write `failed` unless it follows from another rank's failure."""
    with suppress(OSError):  # the log may be on a full disk
        traceback.print_exc()
    if attempt.world_size > 1 and follows_from_another_rank(error):
        # The rank that failed first reports the reason. Within this time its torchrun ends this process.
        is_only_rank = os.environ.get("LOCAL_WORLD_SIZE") == "1"
        time.sleep(_WAIT_FOR_OTHER_NODE if is_only_rank else _WAIT_FOR_TORCHRUN)
        return
    _release_disk_space(run_dir)  # on a full disk the event takes this space
    events.write(classify(error, str(run_dir.root)).model_copy(update={"rank": _rank()}), durable=True)


def _reserve_disk_space(run_dir: RunDir) -> None:
    if _is_first_of_machine():
        run_dir.ballast.write_bytes(bytes(_BALLAST))


def _release_disk_space(run_dir: RunDir) -> None:
    run_dir.ballast.unlink(missing_ok=True)


def _dump_stacks_on_signal(run_dir: RunDir) -> None:
    """Have SIGUSR1 write the Python stacks of all threads to a file. The runner sends it before it ends a hung task.

    The handler is in C, so it works while Python waits for a collective operation that never ends.
    """
    run_dir.stacks.mkdir(exist_ok=True)
    fd = os.open(run_dir.stacks / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def needs_cold_start(attempt: AttemptSpec) -> bool:
    """Whether this process was forked from one that has hidden libraries which the attempt's job uses."""
    return fork.is_prepared() and _unused_libraries(attempt.job) != QUANTIZATION_LIBRARIES


def _unused_libraries(job: JobSpec) -> Set[str]:
    adapters = [job.lora, *(member.lora for member in job.does.ensemble)]
    is_quantized = any(lora is not None and lora.quantize_base for lora in adapters)
    uses_bitsandbytes = job.train.optimizer.name == "adamw_8bit" or is_quantized
    unused = {"bitsandbytes": not uses_bitsandbytes, "torchao": not job.train.qat and job.compute.float8 == "never"}
    return {name for name, is_unused in unused.items() if is_unused}


@contextmanager
def unused_libraries_hidden(hidden: Set[str]) -> Iterator[None]:
    """Hide quantization libraries from a job that does not quantize.

    transformers and peft import them wherever they are installed, which costs 1.5 s of CPU time at every start. None in
    `sys.modules` would hide them too, but TRL's activation offloading empties CUDA's cache at every micro step where
    bitsandbytes is a key there.
    """
    finders = sys.meta_path[:]
    sys.meta_path[:] = [_HidingFinder(finder, hidden) for finder in finders]
    try:
        yield
    finally:
        sys.meta_path[:] = finders


class _HidingFinder:
    """A finder of the import system without some top-level packages."""

    def __init__(self, finder: Any, hidden: Set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.partition(".")[0] in self._hidden else self._finder.find_spec(fullname, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_first_of_machine() -> bool:
    """Whether this is the first rank of its machine; each machine has a disk of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


if __name__ == "__main__":
    join_ranks(RunDir(Path(sys.argv[1]).parent), os.environ)
    status = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors: gloo's sometimes hang after training succeeded (measured: 11 of 32 forked ranks).
    os._exit(status)
