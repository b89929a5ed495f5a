"""Follows the points of the job store for one tracker: sends them in order of their steps, each exactly once.

What may be in the tracker is recorded before it is sent (`sent_step`), and what it has accepted afterwards (`step`). An
attempt that resumed before `sent_step` has superseded points that the tracker may have: its copy is begun again. The
newest step of a job that has not ended waits: its evaluation may follow, in a later attempt too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from .. import faults
from ..errors import JobNotFound
from ..jobs.decisions.states import TERMINAL
from ..jobs.store.records import ExportRecord
from ..jobs.store.store import Store
from ..specs.job import JobSpec
from .points import Step, steps_of
from .tracker import CopyLost, Target, Tracker

log = logging.getLogger(__name__)

STEPS = 500
"""Steps that are sent at once."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 300.0
"""Seconds before an export that failed is tried again; doubled with each further failure."""
_LONGEST_ERROR = 300
_SECRET = re.compile(r"\w*(KEY|TOKEN|SECRET|PASSWORD|USERNAME)\w*")


class Follower:
    """Exports to one tracker. Used by one thread.

    Args:
        make: makes the tracker, which may fail like any try to send.
        environ: its secrets are removed from error messages.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        make: Callable[[], Tracker],
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._name, self._make, self._clock = store, name, make, clock
        self._tracker: Tracker | None = None
        self._secrets = [value for key, value in environ.items() if _SECRET.fullmatch(key) and len(value) >= 4]
        self._waits: dict[str, tuple[float, float]] = {}
        """key of an export that failed -> when it is tried again, seconds that it waited last."""

    def advance_all(self) -> bool:
        """One pass over the exports that are due. Returns whether any advanced. Raises StoreError."""
        advanced = False
        due = self._store.exports.due([self._name])
        for record in due:
            if self._waits.get(record.key, (0.0, 0.0))[0] <= self._clock():
                advanced |= self._guarded(record)
        self._waits = {key: wait for key, wait in self._waits.items() if key in {record.key for record in due}}
        return advanced

    def _guarded(self, record: ExportRecord) -> bool:
        """Advance one export. A failure is recorded, and delays this export only."""
        try:
            advanced = self.advance(record)
        except JobNotFound:  # deleted since
            return False
        except CopyLost as error:
            log.warning("job %s, %s: %s; it is written again", record.job_uuid, self._name, self._sentence(error))
            return self._store.exports.restart(record, record.attempt)
        except Exception as error:
            _, last = self._waits.get(record.key, (0.0, FIRST_WAIT / 2))
            self._waits[record.key] = (self._clock() + min(2 * last, LONGEST_WAIT), min(2 * last, LONGEST_WAIT))
            sentence = self._sentence(error)
            if sentence != record.error:
                log.warning("job %s, %s: %s", record.job_uuid, self._name, sentence)
                self._store.exports.fail(record, sentence)
            return False
        self._waits.pop(record.key, None)
        return advanced

    def advance(self, record: ExportRecord) -> bool:
        """Send the next steps of an export, or its end. Returns whether there was anything to do."""
        exports, tracker = self._store.exports, self._made()
        ended = record.state in TERMINAL  # then no point changes any more
        if tracker.at_end and not ended:
            return False
        with self._store.snapshot():
            begun = exports.begun_since(record)
            last = exports.last_step(record.job_uuid)
            steps = [] if tracker.at_end else list(islice(self._steps(record, last), STEPS))
        attempt, start_step = begun or (record.attempt, record.sent_step)
        if start_step < record.sent_step:
            log.info("job %s, %s: written again from its first step", record.job_uuid, self._name)
            return exports.restart(record, attempt)
        if not ended and last <= record.step:
            return False
        target = _target(record, self._store.get(record.job_uuid).spec)
        if last > record.step:
            through = last if tracker.at_end else steps[-1].step
            if not exports.intend(record, through, attempt):
                return False
            faults.reach(f"export-{self._name}-intended")
            sent: Iterable[Step] = self._steps(record, last) if tracker.at_end else steps
            position = tracker.write(target, record.position, sent)
            faults.reach(f"export-{self._name}-accepted")
            return exports.accept(record, through, position)
        tracker.finish(target, record.position, record.state)
        faults.reach(f"export-{self._name}-ended")
        return exports.finish(record)

    def _made(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._make()
        return self._tracker

    def _steps(self, record: ExportRecord, last: int) -> Iterator[Step]:
        return steps_of(self._store.scan_points(record.job_uuid, record.step + 1, last))

    def _sentence(self, error: Exception) -> str:
        """One line about an error, without secrets of the environment and without credentials in addresses."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = re.sub(r"(://)[^/\s@]*@", r"\1***@", " ".join(text.split()))
        return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 1]}…"


def _target(record: ExportRecord, spec: JobSpec) -> Target:
    return Target(
        *(record.job_uuid, record.project, record.run, record.key, record.generation, record.scheduled_at),
        config=shown_config(spec),
    )


def shown_config(spec: JobSpec) -> dict[str, str | int | float | bool]:
    """What trackers show of a job's configuration: numbers and names, and no path of this machine."""
    fields = spec.flat()
    named = {"job_uuid": spec.job_uuid, "algorithm": spec.algorithm, "dtype": spec.compute.dtype, "device": spec.device}
    model = {} if spec.source.model.startswith("/") else {"model": spec.source.model}
    return {**named, **model, "dataset_id": spec.data.dataset.dataset_id, **dict(_numbers(fields))}


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float | bool]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield prefix + name, value
