"""Bayesian searches from request to table: generations that neither order nor kills change, and refusals by name."""

from __future__ import annotations

import errno
import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict, LimitReached
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.database import Database
from llama_stack_provider_trl.jobs.submission import Submitter
from llama_stack_provider_trl.jobs.supervision import bayesian_trials
from llama_stack_provider_trl.jobs.supervision.bayesian_trials import Proposals, ResolvedTrials
from llama_stack_provider_trl.jobs.supervision.proposer_process import ProposerProcess
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.requests import search as requested
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.search import resolve_search
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Finished, Reason
from tests.fakes import job_spec
from tests.unit.search_world import HALVING, LR, RANK, World, prepared, sft, trials_of

ALPHA = "algorithm_config.alpha"
SPACE = {LR: {"min": 1e-5, "max": 1e-2, "log": True}, RANK: {"min": 4, "max": 64}, ALPHA: [8, 16]}
LORA = {"type": "LoRA", "rank": 8, "alpha": 16}
SEARCH = "hyperparam_search_config"


def bayesian(**changes: Any) -> dict[str, Any]:
    return {"method": "bayesian", "parameters": SPACE, "trials": 9, "parallel": 2, "seed": 5, **changes}


class Answering:
    """A proposer whose answer follows from the question alone; it comes at the second poll."""

    def __init__(self, question: bytes) -> None:
        self.question = json.loads(question)
        self.polls = 0
        self.ended = False

    def answer(self) -> bytes | None:
        self.polls += 1
        return json.dumps(self.proposed(random.Random(json.dumps(self.question)))).encode() if self.polls > 1 else None

    def proposed(self, source: random.Random) -> list[dict[str, Any]]:
        def number(given: dict[str, Any]) -> float:
            if "choices" in given:
                return source.randrange(given["choices"])
            return (source.randint if given["integer"] else source.uniform)(given["min"], given["max"])

        space = self.question["space"]
        return [{path: number(given) for path, given in space.items()} for _ in range(self.question["count"])]

    def end(self) -> None:
        self.ended = True


def at_once(function: Callable[[], ResolvedTrials]) -> Future[ResolvedTrials]:
    """In place of a thread: the trials are known in the same pass."""
    future: Future[ResolvedTrials] = Future()
    bayesian_trials._call(function, future)
    return future


class Searching(World):
    """A data directory whose supervisor adds trials, as `start` has them proposed."""

    start: Callable[[bytes], ProposerProcess]
    begin_to: Any

    def __init__(self, root: Path) -> None:
        self.posed: list[Answering] = []
        self.begin_to = at_once
        self.start = self._ask
        super().__init__(root)

    def _ask(self, question: bytes) -> ProposerProcess:
        self.posed.append(Answering(question))
        return self.posed[-1]

    def restart(self) -> None:
        super().restart()
        settings = Settings(data_dir=self.root, devices=("cpu",))
        adding = Proposals(self.store, settings, lambda question: self.start(question), self.clock, self.begin_to)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.root, proposing=adding)

    def begin(self, **changes: Any) -> None:
        assert self.submit(sft(bayesian(**changes), algorithm_config=LORA))

    def end_next(self, loss: Callable[[dict[str, Any]], float] | None = None) -> str:
        """Let the oldest trial that is left end; without a loss it fails. Returns its name."""
        self.tick()
        name = next(one["job_uuid"] for one in self.table() if one["state"] in ("scheduled", "launching"))
        number = int(name.rpartition("-")[2])
        values = self.table()[number - 1]["values"]
        if loss is None:
            half_way = Evaluated(step=4, epoch=0.5, metrics={"eval_loss": 0.1})
            self.run(number, prepared(), half_way, Failed(reason=Reason.diverged, message="the loss is nan", step=5))
        else:
            metrics = {"eval_loss": loss(values)}
            self.run(number, prepared(), Evaluated(step=8, epoch=1.0, metrics=metrics), Finished(step=8))
        return name

    def finish(self, loss: Callable[[dict[str, Any]], float], disturb: Callable[[], None] = lambda: None) -> None:
        for _ in range(200):
            if self.state() is not JobState.in_progress:
                return
            disturb()
            if any(one["state"] in ("scheduled", "launching") for one in self.table()):
                self.end_next(loss)
            else:
                self.tick()
        raise AssertionError(self.table())

    def table(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.shown()["resources_allocated"]["search"]["trials"]
        return found


def loss_of(values: dict[str, Any]) -> float:
    return abs(values[RANK] - 20) + values[LR] + values[ALPHA]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested, "optuna_is_installed", lambda: True)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Searching]:
    made = Searching(tmp_path)
    yield made
    made.store.close()


def undisturbed(root: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The table and the questions of a search whose trials end in order, in one process."""
    made = Searching(root)
    made.begin(**changes)
    made.finish(loss_of)
    found = made.table(), [one.question for one in made.posed]
    made.store.close()
    return found


# --- generations ------------------------------------------------------------------------------------------------------


def test_the_first_third_is_drawn_as_by_random_and_the_others_are_proposed_from_all_results(
    world: Searching,
) -> None:
    world.begin()
    assert [one["job_uuid"] for one in world.table()] == ["s-trial-1", "s-trial-2"]
    world.finish(loss_of)
    table = world.table()
    assert (world.state(), len(table)) == (JobState.completed, 9)
    drawn = trials_of({**bayesian(), "method": "random", "parallel": None})
    assert [one["values"] for one in table[:4]] == drawn[:4]
    assert [one["values"] for one in table[4:]] != drawn[4:]
    assert [(len(one.question["trials"]), one.question["count"]) for one in world.posed] == [(4, 2), (6, 2), (8, 1)]
    assert len({one.question["seed"] for one in world.posed}) == 3
    last = world.posed[-1].question
    assert last["direction"] == "minimize"
    assert last["space"] == {
        LR: {"min": 1e-5, "max": 1e-2, "log": True, "integer": False},
        RANK: {"min": 4, "max": 64, "log": False, "integer": True},
        ALPHA: {"choices": 2},
    }
    for shown, found in zip(table, last["trials"], strict=False):
        values = shown["values"]
        assert found["numbers"] == {LR: values[LR], RANK: values[RANK], ALPHA: [8, 16].index(values[ALPHA])}
        assert found["value"] == pytest.approx(loss_of(values))
        assert float(f"{values[LR]:.6g}") == values[LR]
        spec = world.store.get(shown["job_uuid"]).spec
        assert spec.lora is not None
        assert (spec.train.optimizer.learning_rate, spec.lora.rank) == (values[LR], values[RANK])
    best = min(table, key=lambda one: one["value"])
    assert world.shown()["resources_allocated"]["search"]["best"]["job_uuid"] == best["job_uuid"]
    assert "submitted" not in world.shown()["resources_allocated"]["effective_config"]["search"]


def test_neither_the_order_of_trials_nor_a_kill_at_any_pass_changes_the_table(world: Searching, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    expected, questions = undisturbed(tmp_path / "other")
    world.begin()
    source = random.Random(1)

    def disturb() -> None:
        waiting = [one["job_uuid"] for one in world.table() if one["state"] == "scheduled"]
        if waiting and source.random() < 0.5:  # then another trial of the generation comes first
            world.store.request_pause(waiting[0])
            if not any(one["state"] in ("scheduled", "launching") for one in world.table()):
                world.store.request_resume(waiting[0])
        for one in world.table():
            if one["state"] == "paused" and source.random() < 0.5:
                world.store.request_resume(one["job_uuid"])
        if source.random() < 0.4:
            world.restart()

    world.finish(loss_of, disturb)
    assert world.table() == expected
    assert [one for one in questions if one not in [posed.question for posed in world.posed]] == []
    assert [posed.question for posed in world.posed if posed.question not in questions] == []
    assert len(world.posed) > len(questions)  # some were repeated


class Killed(BaseException):
    """What a kill is to the code: no handler sees it."""


def test_a_kill_at_each_step_of_a_proposal_repeats_no_more_than_the_question(
    world: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    expected, questions = undisturbed(tmp_path / "other")
    left = ["search-proposing", "search-proposed", "search-trials-stored"]

    def reach(point: str) -> None:
        if world.posed and point in left:
            left.remove(point)
            raise Killed

    def tick() -> None:
        try:
            Searching.tick(world)
        except Killed:
            world.restart()

    monkeypatch.setattr(bayesian_trials.faults, "reach", reach)
    monkeypatch.setattr(world, "tick", tick)
    world.begin()
    world.finish(loss_of)
    assert (left, world.table()) == ([], expected)
    repeated = [questions[0]] * 3  # of the generation that was killed twice before its trials were stored
    assert [one.question for one in world.posed] == [*repeated, *questions[1:]]


def test_another_seed_gives_another_table(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = undisturbed(tmp_path / "a")[0], undisturbed(tmp_path / "b", seed=6)[0]
    assert [one["values"] for one in first] != [one["values"] for one in second]


def test_trials_that_failed_or_were_cancelled_are_reported_without_a_value(world: Searching) -> None:
    world.begin(trials=4)
    world.end_next()
    world.store.request_cancel("s-trial-2")
    world.tick()
    world.tick()
    assert [one["value"] for one in world.posed[0].question["trials"]] == [None, None]
    world.finish(loss_of)
    assert [one["state"] for one in world.table()] == ["failed", "cancelled", "completed", "completed"]


def test_a_cancel_while_trials_are_proposed_ends_the_search_and_the_proposer(world: Searching) -> None:
    world.begin(trials=4)
    world.end_next(loss_of)
    world.end_next(loss_of)
    world.tick()
    assert world.store.get("s").detail == "2 of 4 trials have ended, the next ones are being chosen"
    world.store.request_cancel("s")
    world.tick()
    assert (world.state(), len(world.table()), world.posed[0].ended) == (JobState.cancelled, 2, True)


def test_trials_that_are_known_after_a_cancel_are_not_queued(world: Searching) -> None:
    class Late(Answering):
        def proposed(self, source: random.Random) -> list[dict[str, Any]]:
            world.store.request_cancel("s")
            return super().proposed(source)

    world.start = Late
    world.begin(trials=4)
    world.finish(loss_of)
    world.tick()
    assert (world.state(), len(world.table())) == (JobState.cancelled, 2)


def test_later_trials_are_of_the_owner_who_may_have_a_generation_waiting(world: Searching) -> None:
    request = sft(bayesian(), algorithm_config=LORA)
    with pytest.raises(LimitReached):
        world.submit(request, Submitter("alice", 1))
    assert world.submit(request, Submitter("alice", 2))
    world.finish(loss_of)
    assert {world.store.get(name).created_by for name in world.store.names()} == {"alice"}


def test_each_trial_comes_after_the_job_that_the_search_names_which_is_kept_until_its_end(world: Searching) -> None:
    world.submit(sft(None, job_uuid="before"))
    world.submit(sft(bayesian(trials=3), algorithm_config=LORA), after=["before"], priority="high")
    world.tick()
    assert world.store.get("s-trial-1").detail.startswith("waits for job")
    world.launcher.emit("before-1", *(prepared(), Finished(step=8)))
    world.launcher.exit("before-1", 0)
    world.tick()
    with pytest.raises(JobConflict, match="cannot be deleted while s"):
        world.store.delete("before")
    world.finish(loss_of)
    assert {world.store.get(f"s-trial-{n}").spec.after for n in (1, 2, 3)} == {("before",)}
    assert len({world.store.get(name).spec.lifecycle.priority for name in ("s", "s-trial-1", "s-trial-3")}) == 1
    world.store.delete("before")


# --- beside the passes ------------------------------------------------------------------------------------------------


class Slow:
    """The resolution of trials, which waits for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate, self.calls = threading.Event(), threading.Event(), 0
        self._resolve = bayesian_trials.resolve
        monkeypatch.setattr(bayesian_trials, "resolve", self)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(60)
        return self._resolve(*arguments)

    def finish(self) -> None:
        self.gate.set()
        for thread in threading.enumerate():
            if thread.name == bayesian_trials.THREAD:
                thread.join(60)
                assert not thread.is_alive()


@pytest.fixture
def slow(world: Searching, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """A search whose third and fourth trial are being resolved by a thread."""
    world.begin_to = bayesian_trials.in_thread
    world.restart()
    world.begin(trials=4)
    made = Slow(monkeypatch)
    world.end_next(loss_of)
    world.end_next(loss_of)
    for _ in range(3):  # the proposer answers at the second poll
        world.tick()
    assert made.entered.wait(60)
    yield made
    made.finish()


def test_other_jobs_start_while_trials_are_resolved(world: Searching, slow: Slow) -> None:
    assert world.submit(sft(None, job_uuid="other"))
    for _ in range(3):
        world.tick()
    assert world.store.get("other").state is JobState.launching
    assert world.store.get("s").detail == "2 of 4 trials have ended, the next ones are being chosen"
    assert (len(world.table()), slow.calls) == (2, 1)
    slow.finish()
    world.tick()
    assert (len(world.table()), slow.calls, len(world.posed)) == (4, 2, 1)


def test_a_store_that_is_closed_while_trials_are_resolved_is_not_used_by_their_thread(
    world: Searching, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    own = Database._own

    def recorded(database: Database) -> object:
        used.append(threading.current_thread().name)
        return own(database)

    monkeypatch.setattr(Database, "_own", recorded)
    world.supervisor.stop()
    world.store.close()
    slow.finish()
    assert bayesian_trials.THREAD not in used
    world.restart()
    for _ in range(4):
        world.tick()
        slow.finish()
    assert len(world.table()) == 4
    assert (len(world.posed), bayesian_trials.THREAD in used) == (2, False)


def test_trials_that_are_resolved_after_a_cancel_are_not_queued(world: Searching, slow: Slow) -> None:
    world.store.request_cancel("s")
    world.tick()
    slow.finish()
    world.tick()
    assert (world.state(), len(world.table())) == (JobState.cancelled, 2)


class Hanging:
    """In place of threads: those that never end, until the test lets them."""

    def __init__(self, world: Searching) -> None:
        self.begun: list[tuple[Callable[[], ResolvedTrials], Future[ResolvedTrials]]] = []
        self._world = world
        world.begin_to = self
        world.restart()

    def __call__(self, function: Callable[[], ResolvedTrials]) -> Future[ResolvedTrials]:
        self.begun.append((function, Future()))
        return self.begun[-1][1]

    def submit(self, *names: str) -> None:
        """Searches whose second trial is to be resolved."""
        metrics = {"eval_loss": 1.0}
        for name in names:
            drawn = bayesian(parallel=1, trials=9)
            assert self._world.submit(sft(drawn, job_uuid=name, algorithm_config=LORA))
            self._world.run(1, prepared(), Evaluated(step=8, epoch=1.0, metrics=metrics), Finished(step=8), name=name)
        for _ in range(3):
            self._world.tick()

    def end(self, number: int) -> None:
        bayesian_trials._call(*self.begun[number])
        self._world.tick()

    def detail(self, name: str) -> str:
        return self._world.store.get(name).detail


def test_a_thread_that_does_not_end_delays_its_own_search_only(
    world: Searching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bayesian_trials, "RESOLVING_S", 1000.0)
    threads = Hanging(world)
    threads.submit(*"abc")
    world.tick()
    expected = "1 of 9 trials have ended, the next ones are being chosen"
    assert (len(threads.begun), threads.detail("a")) == (2, expected)
    world.clock.advance(1000)
    world.tick()
    world.tick()
    assert len(threads.begun) == 3
    why = "they have not been resolved within 1000 s, the file system with a model, or an installed package, does not"
    assert threads.detail("a") == threads.detail("b") == f"{expected}: {why} answer"
    assert threads.detail("c") == expected
    threads.end(2)
    assert len(world.store.searches.names_of_trials("c")) == 2
    threads.end(0)  # what did not answer answers again
    assert len(world.store.searches.names_of_trials("a")) == 2
    world.tick()
    assert threads.detail("a") == "1 of 9 trials have ended"


def test_a_search_whose_trials_are_not_resolved_for_an_hour_fails(world: Searching) -> None:
    threads = Hanging(world)
    threads.submit("a")
    world.clock.advance(bayesian_trials.GIVE_UP_S - 600)
    world.tick()
    assert world.store.get("a").state is JobState.in_progress
    world.clock.advance(600)
    world.tick()
    job = world.store.get("a")
    assert (job.state, job.reason) == (JobState.failed, Reason.no_proposal)
    assert "they have not been resolved within 3600 s, the file system with a model" in job.message
    assert "the best of the 1 trials before is a-" in job.message
    threads.end(0)  # it ends after all: nothing is queued
    assert len(world.store.searches.names_of_trials("a")) == 1


def test_threads_that_do_not_end_are_few(world: Searching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayesian_trials, "MOST_LATE", 2)
    threads = Hanging(world)
    threads.submit(*"abc")
    world.clock.advance(bayesian_trials.RESOLVING_S)
    for _ in range(3):
        world.tick()
    assert len(threads.begun) == 2
    assert "2 threads that resolve trials have not ended, the file system" in threads.detail("c")
    threads.end(1)
    world.tick()
    world.tick()
    assert len(threads.begun) > 2
    assert "threads" not in threads.detail("c")


# --- failures ---------------------------------------------------------------------------------------------------------


class Failing(Answering):
    def answer(self) -> bytes | None:
        raise ValueError("it ended with 1: ModuleNotFoundError: No module named 'optuna'")


def test_a_proposer_that_fails_is_tried_again_and_then_the_search_names_what_is_missing(world: Searching) -> None:
    tries: list[bytes] = []

    def start(question: bytes) -> ProposerProcess:
        tries.append(question)
        return Failing(question)

    world.begin(trials=4)
    world.end_next(loss_of)
    world.start = start
    best = world.end_next(loss_of)
    for _ in range(20):
        world.tick()
    job = world.store.get("s")
    assert (job.state, job.reason, len(tries)) == (JobState.failed, Reason.no_proposal, len(bayesian_trials.WAITS) + 1)
    assert "failed 3 times: it ended with 1: ModuleNotFoundError: No module named 'optuna'" in job.message
    assert f"the best of the 2 trials before is {best[:-1]}" in job.message
    assert "extra `search`" in job.advice


def test_a_proposer_that_fails_once_changes_nothing(world: Searching, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    expected, _ = undisturbed(tmp_path / "other")
    failed: list[bytes] = []

    def start(question: bytes) -> ProposerProcess:
        if question not in failed:
            failed.append(question)
            return Failing(question)
        return Answering(question)

    world.start = start
    world.begin()
    world.finish(loss_of)
    assert (world.table(), len(failed)) == (expected, 3)


@pytest.mark.parametrize("answer", [b"", b"[]", b'[{"x": 1}]', b"7", None], ids=[*"abcd", "twice"])
def test_an_answer_that_is_none_counts_as_failed(world: Searching, answer: bytes | None) -> None:
    class Wrong(Answering):
        def answer(self) -> bytes | None:
            return json.dumps(2 * self.proposed(random.Random(1))).encode() if answer is None else answer

    world.start = Wrong
    world.begin(trials=4)
    world.end_next(loss_of)
    world.end_next(loss_of)
    for _ in range(20):
        world.tick()
    assert world.store.get("s").reason is Reason.no_proposal
    assert "its answer" in world.store.get("s").message


def test_a_combination_that_is_refused_ends_the_search_and_names_the_trial(world: Searching) -> None:
    modules, mlp = "algorithm_config.lora_attn_modules", "algorithm_config.apply_lora_to_mlp"

    class Nothing(Answering):
        def proposed(self, source: random.Random) -> list[dict[str, Any]]:
            return [{modules: 0, mlp: 0}, {modules: 1, mlp: 1}]

    world.start = Nothing
    world.begin(trials=5, parameters={modules: [["q_proj"], []], mlp: [True, False]}, seed=1)
    world.finish(lambda values: 1.0)
    job = world.store.get("s")
    assert (job.state, job.reason) == (JobState.failed, Reason.invalid_request)
    assert "(trial 4 of the search: lora_attn_modules=[], apply_lora_to_mlp=false)" in job.message
    assert "; the best of the 2 trials before is s-trial-1" in job.message
    assert len(world.table()) == 2  # none of the generation


def test_a_short_lack_of_descriptors_delays_trials_and_ends_nothing(
    world: Searching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check, lacks = bayesian_trials.refuse_foreign, 5

    def lacking(data_dir: Path, checkpoint_dir: Path) -> None:
        nonlocal lacks
        lacks -= 1
        if lacks > 0:
            error = OSError(errno.EMFILE, "Too many open files")
            raise InvalidRequest("checkpoint_dir", str(checkpoint_dir), "it cannot be read") from error
        check(data_dir, checkpoint_dir)

    world.begin()
    monkeypatch.setattr(bayesian_trials, "refuse_foreign", lacking)
    world.finish(loss_of)
    assert (world.state(), len(world.table())) == (JobState.completed, 9)
    assert caplog.text.count("its next trials are made as soon as this has ended") == 1


def test_trials_that_cannot_be_checked_now_are_made_later(world: Searching, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, calls = bayesian_trials.resolve, []

    def busy(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) < 3:
            raise LimitReached("too many requests are being checked: send it again later")
        return resolve(*arguments)

    world.begin(trials=4)
    monkeypatch.setattr(bayesian_trials, "resolve", busy)
    world.finish(loss_of)
    assert (world.state(), len(world.table())) == (JobState.completed, 4)


def test_a_damaged_record_of_a_trial_stops_neither_the_search_nor_other_jobs(world: Searching) -> None:
    world.begin(parallel=1)
    world.end_next(loss_of)
    with closing(sqlite3.connect(world.store.path)) as database, database:
        database.execute("UPDATE jobs SET spec = '{}' WHERE job_uuid = 's-trial-1'")
    world.tick()
    assert len(world.table()) == 2
    assert world.submit(sft(None, job_uuid="other"))
    world.end_next(loss_of)
    for _ in range(3):
        world.tick()
    assert len(world.table()) == 3
    assert world.store.get("other").state is not JobState.scheduled


def test_a_predecessor_that_failed_is_the_reason_of_the_search(world: Searching) -> None:
    world.submit(sft(None, job_uuid="before"))
    world.submit(sft(bayesian(), algorithm_config=LORA), after=["before"])
    world.tick()
    world.launcher.emit("before-1", *(prepared(), Failed(reason=Reason.diverged, message="the loss is nan", step=5)))
    world.launcher.exit("before-1", 1)
    for _ in range(10):
        world.tick()
    assert (world.state(), world.store.get("s").reason) == (JobState.failed, Reason.predecessor_failed)


def test_names_of_later_trials_are_kept_free_until_the_search_has_ended(world: Searching) -> None:
    world.begin()
    for name in ("s-trial-3", "s-trial-9"):
        with pytest.raises(JobConflict, match=f"'{name}' is a trial of the search 's' that is still to come"):
            world.submit(sft(None, job_uuid=name))
    with pytest.raises(JobConflict, match="still to come"):
        world.submit(sft(bayesian(), job_uuid="s-trial-3", algorithm_config=LORA))
    assert world.submit(sft(None, job_uuid="s-trial-10"))
    world.store.request_cancel("s-trial-10")
    world.finish(loss_of)
    assert (world.state(), len(world.table())) == (JobState.completed, 9)


def test_the_same_request_while_it_is_stored_is_the_same_search(
    world: Searching, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin()
    holds, first = world.store.holds, iter([False])  # the second request was checked before the first one was stored
    monkeypatch.setattr(world.store, "holds", lambda *key: next(first, True) and holds(*key))
    assert not world.submit(sft(bayesian(), algorithm_config=LORA))


def test_jobs_that_only_some_values_need_are_kept_for_later_trials() -> None:
    search = resolve_search(sft(bayesian(), algorithm_config=LORA), ProviderOptions())
    assert search is not None
    first = job_spec(job_uuid="s-trial-1", after=("a",))
    base = BaseJob(job_uuid="b", checkpoint="final")
    second = first.changed(source=first.source.model_copy(update={"made_by": base}), after=("b", "a"))
    own = search.own_spec("s", first, [first, second])
    assert (own.after, own.bases) == (("a", "b"), (base,))
    assert own.search is not None
    assert own.search.settings == ("bases", "after")


def test_a_name_that_a_later_trial_needs_is_a_conflict_at_once(world: Searching) -> None:
    world.submit(sft(None, job_uuid="s-trial-9"))
    with pytest.raises(JobConflict, match="'s-trial-9' exists already"):
        world.begin()
    assert world.store.names() == ["s-trial-9"]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "field", "hint"),
    [
        (bayesian(trials=None), f"{SEARCH}.trials", "a bayesian search needs their number"),
        (bayesian(pruning=HALVING), f"{SEARCH}.pruning", "chosen by results of whole ones"),
        (bayesian(parallel=0), f"{SEARCH}.parallel", "greater than 0"),
        (bayesian(trials=3, parallel=4), f"{SEARCH}.parallel", "no result would decide on one"),
        (bayesian(method="random"), f"{SEARCH}.parallel", "all trials of a random search are queued at once"),
        (
            {"method": "grid", "parameters": {RANK: [4]}, "parallel": 2},
            *(f"{SEARCH}.parallel", "all trials of a grid search are queued at once"),
        ),
        (bayesian(parameters={RANK: list(range(1, 300))}), f"{SEARCH}.parameters", "299 values and ends of ranges"),
        (bayesian(parameters={LR: {"min": 1}}), f"{SEARCH}.parameters.{LR}", "both `min` and `max`"),
        (bayesian(parameters={LR: {"min": -1.0, "max": 1.0}}, seed=2), LR, "(tried for the search: lr=-1.0)"),
    ],
)
def test_a_search_that_cannot_be_done_is_refused_by_name(search: Any, field: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        trials_of(search)
    assert refused.value.field == field
    assert hint in str(refused.value)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested, "optuna_is_installed", lambda: False)
    with pytest.raises(InvalidRequest, match=r"pip install 'llama_stack_provider_trl\[search\]', or use 'random'"):
        resolve_search(sft(bayesian()), ProviderOptions())


DATA = "training_config.data_config."
SPLIT = {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2, "train_split_percentage": 0.5}}


@pytest.mark.parametrize(
    ("path", "values", "training"),
    [
        (DATA + "dataset_id", ["rows", "other"], None),
        (DATA + "validation_dataset_id", ["rows", "other"], None),
        (DATA + "train_split_percentage", {"min": 0.3, "max": 0.9}, SPLIT),
        ("provider_options.seed", {"min": 0, "max": 1}, SPLIT),
        ("provider_options.seed", [7, 8], SPLIT),  # by chance these hold out the same rows
        ("provider_options.shard", [{"index": 0, "count": 2}, {"index": 1, "count": 2}], None),
    ],
)
def test_fields_that_choose_rows_are_refused(world: Searching, path: str, values: Any, training: Any) -> None:
    more = {} if training is None else {"training_config": training}
    for seed in range(4):
        with pytest.raises(InvalidRequest) as refused:
            world.submit(sft(bayesian(parameters={path: values}, seed=seed), **more))
        assert world.store.names() == []
        assert refused.value.field == f"{SEARCH}.parameters.{path}"
        assert "grid or random" in str(refused.value)
