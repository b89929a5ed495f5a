"""Several ranks of one attempt in a second instead of six: forked from one process that has imported torch and trl.

`python -m tests.ranks` reads lines of JSON, [paths of the nodes' spec files, ranks, ranks per node, port, constants,
counted function, function to call, directory of faults], forks the ranks with the variables that torchrun sets, waits
for them, and prints their exit codes. They end with it, and it with pytest. The recipe and the process group are the
real ones. The modules that one pytest process runs share it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import operator
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.specs.events import Event, Failed, iter_events
from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import die_with_parent
from tests import forked
from tests.ports import free_port
from tests.zygote import begin, environment, train_and_exit

_NO_TORCHRUN = {"train._WAIT_FOR_TORCHRUN": 0.0}
"""A rank that fails because another has waits this long for torchrun, which ends it. Here is none."""


class Ranks:
    """Runs attempts, one after the other."""

    def __init__(self, process: subprocess.Popen[str], faults_dir: str) -> None:
        self._process, self._faults_dir = process, faults_dir

    def run(
        self,
        run_dir: Path,
        spec: JobSpec,
        resume_from: Path | None = None,
        *,
        world_size: int | None = None,
        started: int | None = None,
        per_node: int | None = None,
        fall_back_to: tuple[Path, ...] = (),
        prepare: Callable[[RunDir], object] = lambda paths: None,
        constants: Mapping[str, Any] | None = None,
        elsewhere: Sequence[AttemptSpec] = (),
        counted: str = "",
        before: str = "",
        estimates: bool = False,
    ) -> tuple[list[int], list[Event]]:
        """Exit codes of the ranks (negative: the signal) and the events of one attempt at `spec`.

        Args:
            world_size: ranks of the attempt; None: as many as the job has.
            started: ranks to start; None: as many as the attempt has.
            per_node: how many of them believe that they share a machine; None: all.
            fall_back_to: checkpoints for the case that `resume_from` is damaged.
            prepare: called with the run directory before they start.
            constants: values for constants of the recipes, by `module.NAME`.
            elsewhere: the specs of nodes beyond the first: the same attempt, at their own paths.
            counted: a function of torch, such as `distributed.barrier`; `calls` in the run directory gets a line for
                each call of it on rank 0.
            before: a function without arguments, by `module.name`, that each rank calls before it trains.
            estimates: whether the ranks estimate their memory first, which takes as long as all else that a tiny job
                does; the tests of estimates are `test_memory` and `test_preflight`.
        """
        if not estimates:
            spec = spec.model_copy(update={"preflight": "off"})
        run_dir.mkdir(parents=True)
        paths = RunDir(run_dir)
        prepare(paths)
        world_size = world_size or spec.ranks
        attempt = AttemptSpec(
            job=spec,
            attempt=1,
            run_dir=run_dir,
            world_size=world_size,
            resume_from=resume_from,
            fall_back_to=fall_back_to,
        )
        attempts = [attempt, *elsewhere]
        for one in attempts:
            one.run_dir.mkdir(parents=True, exist_ok=True)
            RunDir(one.run_dir).spec.write_text(one.model_dump_json())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        started = started or world_size
        specs = [str(RunDir(one.run_dir).spec) for one in attempts]
        per_node = per_node or started // len(specs)
        constants = {**_NO_TORCHRUN, **(constants or {})}
        order = [specs, started, per_node, free_port(), constants, counted, before, self._faults_dir]
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline())
        except BaseException:  # the test's time is over: the next one would read this answer
            _process.cache_clear()
            self._process.kill()
            raise
        return codes, list(iter_events(paths.events))


@contextmanager
def forked_ranks() -> Iterator[Ranks]:
    """Runs attempts with the faults that are armed now."""
    environ = environment()
    faults_dir = environ.pop(faults.VARIABLE, "")
    environ.pop("PYTEST_CURRENT_TEST", None)
    yield Ranks(_process(tuple(environ.items())), faults_dir)


@cache
def _process(environ: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process with this environment that has imported torch. It ends with this one."""
    process = forked.start_talking(forked.RECIPES, "tests.ranks", dict(environ))
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # on a machine whose other work leaves it no time; there is nothing to lose
        process.kill()


def main() -> None:
    begin()
    for line in sys.stdin:
        specs, world_size, per_node, port, constants, counted, before, faults_dir = json.loads(line)
        os.environ[faults.VARIABLE] = faults_dir
        specs = [specs[min(rank // per_node, len(specs) - 1)] for rank in range(world_size)]
        pids = [
            _fork(spec, rank, world_size, per_node, port, constants, "" if rank else counted, before)
            for rank, spec in enumerate(specs)
        ]
        print(json.dumps(_wait(pids)), flush=True)


def _wait(pids: Sequence[int]) -> list[int]:
    """Exit codes of the ranks. This process ends with pytest, which requests nothing before it has the answer."""
    running = {os.pidfd_open(pid): pid for pid in pids}
    codes: dict[int, int] = {}
    while running:
        readable = select.select([sys.stdin, *running], [], [])[0]
        if sys.stdin in readable:
            os._exit(1)
        for descriptor in readable:
            pid = running.pop(descriptor)
            os.close(descriptor)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def _fork(
    spec: str,
    rank: int,
    world_size: int,
    per_node: int,
    port: int,
    constants: Mapping[str, Any],
    counted: str,
    before: str,
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        for constant, value in constants.items():
            module, _, name = constant.rpartition(".")
            setattr(importlib.import_module(f"llama_stack_provider_trl.recipes.{module}"), name, value)
        if counted:
            _count(counted, Path(spec).parent / "calls")
        if before:
            module, _, name = before.rpartition(".")
            getattr(importlib.import_module(module), name)()
        if world_size > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank % per_node),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(per_node),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        train_and_exit(spec, rank)
    finally:
        os._exit(3)


def _count(function: str, calls: Path) -> None:
    import torch

    where, _, name = function.rpartition(".")
    owner = operator.attrgetter(where)(torch)
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        with calls.open("a") as file:
            file.write(f"{name}\n")
        return original(*args, **kwargs)

    setattr(owner, name, counting)


if __name__ == "__main__":
    main()


def trained(ranks: Ranks, run_dir: Path, spec: JobSpec, resume_from: Path | None = None, **how: Any) -> list[Any]:
    """The events of an attempt that succeeds."""
    codes, events = ranks.run(run_dir, spec, resume_from, **how)
    assert set(codes) == {0}, [event.message for event in events if isinstance(event, Failed)]
    return events
