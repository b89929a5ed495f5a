"""Adds the later trials of Bayesian searches at supervisor passes. What they are follows from the record alone.

A generation is chosen when all earlier trials have ended, from their recorded values and results, with a seed of its
own: neither the order in which trials end nor a kill changes it. The proposer runs beside the passes, and so does a
thread that resolves its answer, which reads models and packages. That thread has all that it needs of the store before
it begins, so the store may be closed meanwhile. The trials are stored in one transaction, so a kill before that only
repeats the question.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ... import faults
from ...errors import DamagedRecord, InvalidRequest, JobConflict, LimitReached, StoreError, is_exhausted
from ...requests.bases import NamedJob, model_of
from ...requests.resolve import Resolution, resolve
from ...requests.search import RequestedTrial, in_trial, make_trial
from ...requests.settings import Settings
from ...requests.trial_values import ValuedTrial, answered_values, drawn_values, question
from ...specs.events import Reason
from ...specs.search import SearchSpec
from ...system.ownership import refuse_foreign
from ..decisions.search import Ending, Generation, Trial, best_trial
from ..decisions.states import JobState
from ..inputs.bases import find_base
from ..inputs.of_methods import with_models
from ..store.records import JobRecord
from ..store.related.chains import AFTER
from ..store.related.searches import NewTrial
from ..store.store import NewJob, Store
from .proposer_process import ProposerProcess

log = logging.getLogger(__name__)

THREAD = "trl-trials"
"""Name of the threads that resolve trials."""
WAITS = (2.0, 20.0)
"""Seconds before the second and the third try, after which the search fails."""


_MOST_RUNNING = 2
"""Proposers at once; each has 100 MiB and a core for a second. As many threads resolve trials."""
RESOLVING_S = 60.0
"""A thread that takes longer may never end, as where a file system does not answer. It leaves its place to those of
other searches; where it does end before `GIVE_UP_S`, its own search continues."""
GIVE_UP_S = 3600.0
"""A search whose trials are not resolved within that fails."""
MOST_LATE = 16
"""Threads that take longer. Beyond them none is begun."""

_NO_ANSWER = "the file system with a model, or an installed package, does not answer"

ResolvedTrials = list[tuple[RequestedTrial, Resolution]]


class _Pending(NamedTuple):
    """The question about a generation of a search."""

    generation: Generation
    running: ProposerProcess | None = None
    failed: int = 0
    """Tries."""
    next_try: float = -math.inf

    def end(self) -> None:
        if self.running is not None:
            self.running.end()


class _Resolving(NamedTuple):
    """The trials of a generation, while they are resolved and until they are stored."""

    generation: Generation
    search: JobRecord
    digest: str
    """Of the search's request."""
    trials: Future[ResolvedTrials]
    begun: float


def in_thread[T](function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own, which a process does not wait for when it ends. Raises OSError."""
    future: Future[T] = Future()
    try:
        threading.Thread(target=_call, args=(function, future), name=THREAD, daemon=True).start()
    except RuntimeError as error:  # there can be no further thread
        raise OSError(errno.EAGAIN, str(error)) from error
    return future


def _call[T](function: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class Proposals:
    """Every public method may raise StoreError.

    Args:
        settings: later trials are resolved with them.
        start: has a question answered, without waiting for that.
        begin: has a function called, without waiting for that.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        start: Callable[[bytes], ProposerProcess] = ProposerProcess,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], ResolvedTrials]], Future[ResolvedTrials]] = in_thread,
    ) -> None:
        self._store, self._settings, self._start, self._clock, self._begin = store, settings, start, clock, begin
        self._pending: dict[str, _Pending] = {}
        self._resolving: dict[str, _Resolving] = {}
        self._begun: list[tuple[Future[ResolvedTrials], float]] = []
        """Those of searches that have ended meanwhile, too, and when they began."""
        self._exhausted: set[str] = set()
        """Searches whose lack of descriptors or memory was logged."""

    def tend(self, name: str, search: SearchSpec, trials: Sequence[Trial], generation: Generation) -> Ending | None:
        """Store the trials of a generation once they are known, without waiting for that. Returns how the search ends,
        where its next trials cannot be made; else None.

        Args:
            trials: all earlier ones, which have ended.
        """
        try:
            resolving = self._resolving.get(name)
            if resolving is None or resolving.generation != generation:
                resolving = self._begin_resolving(name, search, trials, generation)
            if resolving is not None and resolving.trials.done():
                del self._resolving[name]
                self._store_trials(name, resolving.search, self._new_trials(resolving))
                self._exhausted.discard(name)
            elif resolving is not None and self._clock() - resolving.begun >= GIVE_UP_S:
                del self._resolving[name]
                raise ProposerFailed(f"they have not been resolved within {GIVE_UP_S:.0f} s, {_NO_ANSWER}")
            return None
        except Exception as error:
            if is_exhausted(error) or isinstance(error, LimitReached):
                if name not in self._exhausted:
                    self._exhausted.add(name)
                    log.warning("search %s: its next trials are made as soon as this has ended: %s", name, error)
                return None  # nothing was stored; the next pass tries again
            if isinstance(error, StoreError) and not isinstance(error, DamagedRecord):
                raise
            # Raised further, others would stop the pass, and with it all other jobs, each time.
            return _failed(name, search, trials, error)

    def delay(self, name: str) -> str:
        """Why the next trials of a search take longer than they should; empty: they do not."""
        resolving = self._resolving.get(name)
        if resolving is not None:
            is_late = self._is_late(resolving.begun) and not resolving.trials.done()
            return f"they have not been resolved within {RESOLVING_S:.0f} s, {_NO_ANSWER}" if is_late else ""
        late = [one for one, begun in self._begun if self._is_late(begun) and not one.done()]
        if len(late) < MOST_LATE:
            return ""
        todo = "repair that, then restart this process"
        return f"{len(late)} threads that resolve trials have not ended, {_NO_ANSWER}: {todo}"

    def end_others(self, names: Iterable[str]) -> None:
        """End the proposers of all searches but these, and forget their trials that are being resolved."""
        for name in set(self._pending).difference(names):
            self._pending.pop(name).end()
        for name in set(self._resolving).difference(names):
            del self._resolving[name]

    def _begin_resolving(
        self, name: str, search: SearchSpec, trials: Sequence[Trial], generation: Generation
    ) -> _Resolving | None:
        """Have the next trials resolved; None: they are not known yet, or enough others are resolved now. Raises
        InvalidRequest, ProposerFailed, OSError."""
        self._resolving.pop(name, None)
        if not self._has_place():
            return None
        values = drawn_values(search, generation.first, generation.last)
        if values is None:
            values = self._proposed(name, search, trials, generation)
        if values is None:
            return None
        assert search.submitted is not None
        digest = self._store.database.select("request_digest", {"job_uuid": name})[0]["request_digest"]
        own = self._store.get(name)
        requested: list[tuple[RequestedTrial, NamedJob | None]] = []
        for count, one in enumerate(values, generation.first):
            trial = make_trial(search.submitted, count, one)
            try:
                requested.append((trial, find_base(model_of(trial.request), self._store)))
            except InvalidRequest as error:
                raise in_trial(trial, error) from error
        future, now = self._begin(partial(_resolved, requested, self._settings)), self._clock()
        self._begun.append((future, now))
        self._resolving[name] = _Resolving(generation, own, digest, future, now)
        return self._resolving[name]

    def _has_place(self) -> bool:
        """Whether a further thread may resolve trials."""
        self._begun = [one for one in self._begun if not one[0].done()]
        late = sum(self._is_late(begun) for _, begun in self._begun)
        return late < MOST_LATE and len(self._begun) - late < _MOST_RUNNING

    def _is_late(self, begun: float) -> bool:
        return self._clock() - begun >= RESOLVING_S

    def _proposed(
        self, name: str, search: SearchSpec, trials: Sequence[Trial], generation: Generation
    ) -> list[dict[str, Any]] | None:
        """The values that the proposer has answered; None: not yet. Raises ProposerFailed."""
        pending = self._pending.get(name)
        if pending is None or pending.generation != generation:
            if pending is not None:
                pending.end()
            pending = self._pending[name] = _Pending(generation)
        if pending.running is None and (self._clock() < pending.next_try or self._are_enough()):
            return None
        try:
            if pending.running is None:
                text = json.dumps(proposal_question(search, trials, generation)).encode()
                self._pending[name] = pending._replace(running=self._start(text))
                faults.reach("search-proposing")
                return None
            if (answer := pending.running.answer()) is None:
                return None
            found = answered_values(search, answer, generation.size)
        except (ValueError, OSError) as error:
            if is_exhausted(error):
                raise
            self._note_failure(name, pending, str(error))
            return None
        del self._pending[name]
        return found

    def _are_enough(self) -> bool:
        return sum(one.running is not None for one in self._pending.values()) >= _MOST_RUNNING

    def _note_failure(self, name: str, pending: _Pending, why: str) -> None:
        """Have another try follow. Raises ProposerFailed: there were enough."""
        failed = pending.failed + 1
        log.warning("search %s: its proposer failed (try %d of %d): %s", name, failed, len(WAITS) + 1, why)
        if failed > len(WAITS):
            del self._pending[name]
            raise ProposerFailed(f"the process that chooses the next trials failed {failed} times: {why}")
        self._pending[name] = _Pending(pending.generation, None, failed, self._clock() + WAITS[failed - 1])

    def _store_trials(self, name: str, search: JobRecord, new: list[tuple[NewTrial, NewJob]]) -> None:
        """Store trials, all or none. Raises InvalidRequest, JobConflict."""
        faults.reach("search-proposed")
        if self._store.add_trials(search, new):
            log.info("search %s: %s are queued", name, ", ".join(job.spec.job_uuid for _, job in new))
        faults.reach("search-trials-stored")

    def _new_trials(self, resolving: _Resolving) -> list[tuple[NewTrial, NewJob]]:
        """The jobs of resolved trials, on the rows of the search. Raises InvalidRequest."""
        own, new = resolving.search.spec, []
        for trial, resolution in resolving.trials.result():
            try:
                fields = with_models(resolution.fields, self._settings, self._store)
            except InvalidRequest as error:
                raise in_trial(trial, error) from error
            others = [(one.dataset, one.validation) for one in own.data.mixed_with]
            spec = replace(resolution, fields=fields).spec(own.data.dataset, own.data.validation, *others)
            # Its rows are those of the search, which are kept as long as its record is.
            digest = f"{resolving.digest}:{trial.number}"
            job = NewJob(spec, digest, resolution.warnings, (), resolution.trackers)
            new.append((NewTrial(trial.number, trial.values), job))
        return new


def _resolved(requested: Sequence[tuple[RequestedTrial, NamedJob | None]], settings: Settings) -> ResolvedTrials:
    """What later trials request. Uses no store. Raises InvalidRequest."""
    found: ResolvedTrials = []
    for trial, named in requested:
        try:
            resolution = resolve(trial.request, trial.options, settings, named)
            refuse_foreign(settings.data_dir, resolution.fields["checkpoint_dir"])
        except InvalidRequest as error:
            raise in_trial(trial, error) from error
        found.append((trial, resolution))
    return found


class ProposerFailed(Exception):
    """The next trials of a search are not known, and are not requested again."""


def proposal_question(search: SearchSpec, trials: Sequence[Trial], generation: Generation) -> dict[str, Any]:
    """What the proposer is to answer about a generation, from all earlier trials."""
    ended = [ValuedTrial(one.values, _objective(search, one)) for one in trials]
    digest = hashlib.sha256(f"{search.seed}:{generation.first}".encode()).digest()
    return question(search, ended, generation.size, int.from_bytes(digest[:4]))


def _objective(search: SearchSpec, trial: Trial) -> float | None:
    """The result of a trial; None: it has not completed, or its result is no finite number."""
    found = trial.result(search.objective) if trial.state is JobState.completed else None
    return found if found is not None and math.isfinite(found) else None


def _failed(name: str, search: SearchSpec, trials: Sequence[Trial], error: Exception) -> Ending:
    reason, why = Reason.internal, str(error)
    match error:
        case ProposerFailed():
            reason = Reason.no_proposal
        case InvalidRequest(field=field) if field == AFTER:
            reason = Reason.predecessor_failed
        case InvalidRequest() | JobConflict():
            reason = Reason.invalid_request
        case DamagedRecord():
            pass
        case _:
            log.error("search %s: its next trials cannot be made", name, exc_info=error)
            why = f"{type(error).__name__}: {error}"
    best = best_trial(search, trials)
    kept = f"; the best of the {len(trials)} trials before is {best.job_uuid}" if best else ""
    return Ending(JobState.failed, None, reason, f"the next trials cannot be made: {why}{kept}")
