"""The searches of a database: their trials, and what each supervisor pass does about them (`searching.decide`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .... import faults
from ....errors import JobConflict
from ....specs.job import JobSpec
from ....specs.search import BETWEEN, SearchSpec
from ...decisions.search import (
    NOT_SEARCHED,
    Ending,
    Generation,
    SearchDecisions,
    Searched,
    Trial,
    best_trial,
    decide,
    waits_at,
)
from ...decisions.states import JobState
from ..database import Database, Execute
from ..records import JobRecord

log = logging.getLogger(__name__)


class NewTrial(NamedTuple):
    """A trial that is to be stored with its search."""

    number: int
    values: dict[str, Any]
    """Path of a field -> its value in this trial."""


class Jobs(Protocol):
    """What a pass does to the trials."""

    def request_cancel(self, job_uuid: str, message: str = "") -> JobRecord: ...


class Proposing(Protocol):
    """Adds the later trials of Bayesian searches."""

    def tend(self, name: str, search: SearchSpec, trials: Sequence[Trial], generation: Generation) -> Ending | None: ...

    def delay(self, name: str) -> str: ...

    def end_others(self, names: Iterable[str]) -> None: ...


class Searches:
    """Every method may raise StoreError."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now
        self._settled: dict[str, object] = {}
        """The trials of a search, as they were when nothing was left to do about them."""
        self._damaged: set[str] = set()

    def of_job(self, job_uuid: str) -> Searched:
        """The trials of a search, or the search of a trial; neither of any other job."""
        if rows := self._database.select("select_trials", {"search": job_uuid}):
            return Searched(self._with_evaluations(rows))
        if found := self._database.select("select_search_of", {"job_uuid": job_uuid}):
            rows = self._database.select("select_trials", {"search": found[0]["search"]})
            own = [row for row in rows if row["job_uuid"] == job_uuid]
            return Searched((), found[0]["search"], self._with_evaluations(own)[0])
        return NOT_SEARCHED

    def names_of_trials(self, job_uuid: str) -> list[str]:
        """The trials of a search; empty: the job is none."""
        return [row["job_uuid"] for row in self._database.select("select_trials", {"search": job_uuid})]

    def search_of(self, job_uuid: str) -> str | None:
        """The search that a job is a trial of; None: it is none."""
        rows = self._database.select("select_search_of", {"job_uuid": job_uuid})
        return rows[0]["search"] if rows else None

    def compared_at(self, job: JobRecord) -> int | None:
        """The step at which a trial is paused until it is decided whether it continues; None: it is not."""
        if job.spec.pruning is None:
            return None
        trial = self.of_job(job.job_uuid).trial
        return trial and waits_at(job.spec.pruning, trial)

    def best(self, job_uuid: str, search: SearchSpec) -> str | None:
        """The trial whose result is that of a completed search."""
        found = best_trial(search, self.of_job(job_uuid).trials)
        return found and found.job_uuid

    def advance(self, jobs: Jobs, proposing: Proposing | None = None) -> None:
        """Decide about every search that has not ended, record that, and act on it."""
        live = self._database.select("select_searches", {})
        waiting: set[str] = set()
        for row in live:
            name = row["job_uuid"]
            try:
                search = SearchSpec.model_validate_json(row["search"] or "")
            except ValueError as error:
                if name not in self._damaged:
                    self._damaged.add(name)
                    log.error("job %s: its record cannot be read, so nothing is decided about it: %s", name, error)
                continue
            state = JobState(row["state"])
            delay = "" if proposing is None else proposing.delay(name)
            while (decided := self._advance(name, state, search, row["detail"], jobs, delay)) is None:
                pass  # what was recorded is acted on at once
            if decided.generation is not None and proposing is not None:
                waiting.add(name)
                trials = self.of_job(name).trials
                if (ending := proposing.tend(name, search, trials, decided.generation)) is not None:
                    self._end(name, state, ending)
        if proposing is not None:
            proposing.end_others(waiting)

    def _advance(
        self, name: str, state: JobState, search: SearchSpec, detail: str, jobs: Jobs, delay: str
    ) -> SearchDecisions | None:
        """Returns what was decided; None: about a rung, which is recorded and not acted on yet.

        Args:
            delay: why the next trials take long.
        """
        rows = self._database.select("select_trials", {"search": name})
        seen = (state, tuple(map(tuple, rows)))
        if self._settled.get(name) == seen:
            return SearchDecisions()
        decided = decide(search, state, self._with_evaluations(rows))
        if decided.promoted or decided.pruned:
            self._record(name, decided)
            return None
        self._act(name, decided, jobs)
        if decided.ending is not None:
            self._end(name, state, decided.ending)
            self._settled.pop(name, None)
            return decided
        new_detail = f"{decided.detail}: {delay}" if decided.generation and delay else decided.detail
        if new_detail != detail:
            with self._database.transaction() as execute:
                execute("change_detail", {"job_uuid": name, "state": state, "detail": new_detail})
        if not decided.resume and not decided.cancel and not decided.generation:
            self._settled[name] = seen
        return decided

    def _record(self, name: str, decided: SearchDecisions) -> None:
        faults.reach("search-rung-decided")
        with self._database.transaction() as execute:
            for trial in decided.promoted:
                execute("promote_trial", {"search": name, "number": trial.number, "rung": trial.rung})
            for trial, why in decided.pruned:
                execute("prune_trial", {"search": name, "number": trial.number, "rung": trial.rung, "why": why})
        log.info(
            "search %s: %s continue, %s are pruned",
            *(name, [trial.number for trial in decided.promoted], [trial.number for trial, _ in decided.pruned]),
        )
        faults.reach("search-rung-recorded")

    def _act(self, name: str, decided: SearchDecisions, jobs: Jobs) -> None:
        for trial in decided.cancel:
            try:
                jobs.request_cancel(trial.job_uuid, trial.pruned or f"its search {name} was cancelled")
            except JobConflict as error:  # it has ended meanwhile
                log.info("search %s: %s", name, error)
            faults.reach("search-trial-cancelled")
        for trial in decided.resume:
            key = {"job_uuid": trial.job_uuid, "attempt": trial.attempt}
            moved = {"source": JobState.paused, "target": JobState.scheduled, "reason": None, "message": ""}
            with self._database.transaction() as execute:
                if execute("change_state", {**key, **moved, "now": self._now()}).rowcount:
                    execute("note_trial_resumed", key)
            faults.reach("search-trial-resumed")

    def _end(self, name: str, state: JobState, ending: Ending) -> None:
        faults.reach("search-ending")
        row = {"job_uuid": name, "attempt": 0, "source": state, "target": ending.state, "reason": ending.reason}
        with self._database.transaction() as execute:
            ended = execute("change_state", {**row, "message": ending.message, "now": self._now()}).rowcount
            if ended and ending.best is not None:
                execute("insert_checkpoints_of_best", {"job_uuid": name, "best": ending.best.job_uuid})
        if ended:
            best = f", the best trial is {ending.best.job_uuid}" if ending.best else ""
            log.info("search %s: %s%s %s", name, ending.state, best, ending.message)

    def _with_evaluations(self, rows: Sequence[Any]) -> tuple[Trial, ...]:
        return tuple(
            _trial(row, self._database.select("select_evaluations", {"job_uuid": row["job_uuid"]})) for row in rows
        )


def insert_trial(execute: Execute, search: JobSpec, trial: JobSpec, new: NewTrial) -> None:
    """Store that a job is a trial, in the transaction that stores both jobs."""
    row = {"search": search.job_uuid, "number": new.number, "job_uuid": trial.job_uuid}
    execute("insert_trial", {**row, "parameters": json.dumps(new.values)})


def refuse_names_to_come(execute: Execute, names: Iterable[str]) -> None:
    """Keep the names of a Bayesian search's later trials free while it is in progress. Raises JobConflict."""
    for name in names:
        search, _, number = name.rpartition(BETWEEN)
        row = execute("select_trials_to_come", {"job_uuid": search}).fetchone() if number.isdecimal() else None
        if row is not None and row["stored"] < int(number) <= row["trials"]:
            raise JobConflict(
                f"job {name!r} is a trial of the search {search!r} that is still to come: choose another job_uuid"
            )


def _trial(row: Any, evaluations: Sequence[Any]) -> Trial:
    return Trial(
        number=row["number"],
        job_uuid=row["job_uuid"],
        state=JobState(row["state"]),
        attempt=row["attempt"],
        step=row["step"] or 0,
        total_steps=row["planned_steps"],
        paused_at_step=row["paused_at_step"],
        rung=row["rung"],
        pruned=row["pruned"],
        resumed_attempt=row["resumed_attempt"],
        evaluations=tuple((one["step"], json.loads(one["metrics"])) for one in evaluations),
        best_checkpoint=row["best_checkpoint"],
        values=json.loads(row["parameters"]),
    )
