"""A soak: a real Llama Stack, real runners, real trainings of a tiny model, and everything that can happen to them.

    python -m tests.soak --minutes 15 --seed 1

Draws operations at random (jobs good and bad, cancel, pause, resume, kill -9 and SIGTERM of the server, kill -9 of
runners and trainers, stopped trainers) in rounds. After each round it lets every job come to rest and checks that all
of them ended as their history permits: states, reasons, checkpoints, every metric point once, weights equal to those
of an undisturbed training, no process and no half-written directory left. All the while a second thread asks the
server and checks the device. The first violation ends it: exit status 1, the directory is kept, with a report of the
seed, the operations and the server's log.

The seed fixes the dice, not the moments at which the machine acts: two runs of one seed are alike, not equal. At most
20 minutes, then at most `world.SETTLE` seconds for the jobs that still run. No part of scripts/test.sh.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.checks import unlisted
from tests.soak.watch import Violation
from tests.soak.world import World

ROUND = 120.0
"""Seconds of operations between two rests."""
STEADY = 1 / 3
"""The last part of the time, in which the server is not restarted: one long life shows whether it grows."""


def main() -> int:
    options = _options()
    root = Path(tempfile.mkdtemp(prefix="trl-soak-"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    began = time.monotonic()
    world = World(root, options.seed, options.keep_going)
    world.note(f"seed {options.seed}, directory {root}")
    try:
        soak(world, began + options.minutes * 60)
        world.finish()
    except BaseException as error:
        world.violations.append(f"{type(error).__name__}: {error}")
        world.note(f"VIOLATION: {error}")
        _report(world, options.seed, error)
        if isinstance(error, Violation):
            return 1
        raise
    finally:
        print(table(world, options.seed, time.monotonic() - began), flush=True)
        world.abandon()
    if world.violations:
        return 1
    shutil.rmtree(root)
    return 0


def soak(world: World, deadline: float) -> None:
    world.start()
    world.compute_references()
    began = time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        world.may_restart = left > (deadline - began) * STEADY
        world.operate(min(ROUND, left))
        world.settle()


def table(world: World, seed: int, seconds: float) -> str:
    """The result, as Markdown."""
    jobs = world.store.list()
    lives = world.watch.lives
    longest = max(lives, key=lambda life: life.lasted, default=None)
    rows = {
        "minutes, seed": f"{seconds / 60:.1f}, {seed}",
        "operations": _counted(world.operations),
        "jobs by end state": _counted(Counter(job.state.value for job in jobs)),
        "reasons of failures": _counted(Counter(job.reason.value for job in jobs if job.reason)),
        "attempts, retries": f"{sum(job.attempt for job in jobs)}, {sum(job.retries_used for job in jobs)}",
        "attempts that were killed": sum(len(job.killed) for job in world.jobs.values()),
        "starts of the server": len(lives),
        "GETs, slowest": f"{world.watch.requests}, {world.watch.slowest:.2f} s",
        "longest life of a server": "-" if longest is None else f"{longest.lasted:.0f} s",
        "its memory, first and last": "-" if not longest else " -> ".join(f"{rss >> 20} MiB" for rss in longest.rss),
        "its file descriptors, first and last": "-" if not longest else " -> ".join(map(str, longest.fds)),
        "final models that loaded": world.loaded,
        "checkpoints on disk that are not listed": len(unlisted(world.store)),
        "violations": len(world.violations),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _counted(counts: Counter[str]) -> str:
    return f"{counts.total()}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _report(world: World, seed: int, error: BaseException) -> None:
    text = "\n".join([f"seed {seed}: {type(error).__name__}: {error}", *world.log, "", world.stack.log_tail()])
    report = world.root / "report.txt"
    report.write_text(text + "\n")
    print(f"soak: everything is kept in {world.root}; what was done and the server's log: {report}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=_minutes, default=15.0, help="at most 20")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="count what is wrong with a single job and continue")
    return parser.parse_args()


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 20:
        raise argparse.ArgumentTypeError(f"{value}: expected more than 0 and at most 20")
    return value


if __name__ == "__main__":
    sys.exit(main())
