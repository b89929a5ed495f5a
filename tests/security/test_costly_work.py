"""Costly work that one caller orders holds up neither other callers nor nodes, and has a budget of CPU time."""

from __future__ import annotations

import ast
import asyncio
import gc
import hashlib
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl.errors import LimitReached
from llama_stack_provider_trl.stack import compat
from llama_stack_provider_trl.system.limited import Limited
from llama_stack_provider_trl.system.offload import (
    USER_HEADER,
    CallThreads,
    CostlyWork,
    CpuBudget,
    FairSlots,
    FairThreads,
    in_work_thread,
    serving,
    storing,
    to_its_end,
)
from llama_stack_provider_trl_remote.adapter import TrlRemotePostTraining
from llama_stack_provider_trl_remote.config import TrlRemoteConfig
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running
from tests.contract.stack import Json
from tests.fake_service import fake_service
from tests.process.waiting import until
from tests.security import held_calls
from tests.security.guarded import TOKENS, Guarded
from tests.tiny import REPOSITORY

COSTLY = "(" * 14 + "a" + ")+" * 14
"""Each of its parts is written out twice when it is compiled: eight of them take a second."""
ATTACKS = 102
OTHER = "token-of-another-client"


def _compute() -> Iterator[int]:
    while time.process_time() < 0.5:
        pass
    yield 1


def _echo(value: int) -> Iterator[int]:
    yield value


def turns(work: CostlyWork, *orders: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Five calls of the first caller (with its user), and then two of the second, are ordered while one thread is held.

    Returns:
        The calls that were made, in their order; and why others were refused.
    """
    made, may_end = list[str](), threading.Event()

    async def ordered(caller: str, user: str, number: int) -> str:
        with serving(work, caller, user=user):
            try:
                await in_work_thread(lambda: (may_end.wait(30), made.append(f"{user or caller}-{number}")))
            except LimitReached as error:
                return str(error)
        return ""

    async def run() -> list[str]:
        calls = []
        for (caller, user), count in zip(orders, (5, 2), strict=True):
            calls += [asyncio.ensure_future(ordered(caller, user, number)) for number in range(count)]
            await asyncio.sleep(0)
        may_end.set()
        return [refusal for refusal in await asyncio.gather(*calls) if refusal]

    refused = asyncio.run(run())
    assert not work._admitted
    work.close()
    return made, refused


def test_a_caller_waits_for_one_call_of_another_and_not_for_all() -> None:
    made, refused = turns(CostlyWork(threads=1, per_caller=1), ("many", ""), ("few", ""))
    assert made == ["many-0", "many-1", "few-0", "many-2", "few-1", "many-3", "many-4"]
    assert not refused


def test_one_caller_never_holds_all_threads_that_read_and_nodes_have_their_own() -> None:
    async def run() -> None:
        loop, may_end, work = asyncio.get_running_loop(), threading.Event(), CostlyWork()
        loop.set_default_executor(CallThreads(2, "test"))

        async def read(caller: str, function: Any, of_node: bool = False) -> Any:
            with serving(work, caller, of_node=of_node):
                return await asyncio.to_thread(function)

        stuck = [asyncio.ensure_future(read("one", lambda: may_end.wait(30))) for _ in range(20)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(read("another", lambda: 1), 10) == 1
            stuck += [asyncio.ensure_future(read("another", lambda: may_end.wait(30))) for _ in range(20)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(read("node", lambda: 2, of_node=True), 10) == 2
        finally:
            may_end.set()
            await asyncio.gather(*stuck)

    asyncio.run(run())


def test_what_reads_never_waits_for_bodies_that_are_stored() -> None:
    async def run() -> None:
        loop, may_end, work = asyncio.get_running_loop(), threading.Event(), CostlyWork()
        loop.set_default_executor(CallThreads(2, "test"))

        async def store(caller: str, of_node: bool = False) -> Any:
            with serving(work, caller, of_node=of_node), storing():
                return await to_its_end(lambda: may_end.wait(30))

        async def read() -> int:
            with serving(work, "one"):
                return await asyncio.to_thread(lambda: 1)

        stuck = [asyncio.ensure_future(store(caller)) for caller in ("one", "another") for _ in range(20)]
        stuck += [asyncio.ensure_future(store("node", of_node=True)) for _ in range(20)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(read(), 10) == 1
        finally:
            may_end.set()
            await asyncio.gather(*stuck)

    asyncio.run(run())


def test_a_body_of_a_user_is_stored_while_a_write_of_another_behind_the_same_token_hangs() -> None:
    async def run() -> None:
        loop, may_end, work = asyncio.get_running_loop(), threading.Event(), CostlyWork()
        loop.set_default_executor(CallThreads(4, "test"))

        async def store(caller: str, user: str, function: Any) -> Any:
            with serving(work, caller, user=user), storing():
                return await to_its_end(function)

        hanging = [asyncio.ensure_future(store("stack", "ada", lambda: may_end.wait(30)))]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(store("stack", "bob", lambda: 1), 10) == 1
            hanging += [asyncio.ensure_future(store("stack", "bob", lambda: may_end.wait(30))) for _ in range(20)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(store("another", "", lambda: 2), 10) == 2
        finally:
            may_end.set()
            await asyncio.gather(*hanging)

    asyncio.run(run())


def test_a_caller_that_hangs_up_gives_its_turn_and_its_slot_back() -> None:
    async def run() -> None:
        slots = FairSlots(1, 1)

        async def held(until: asyncio.Event) -> None:
            async with slots.taken():
                await until.wait()

        first, second, third = (asyncio.Event() for _ in range(3))
        holding = asyncio.ensure_future(held(first))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(held(second))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        holding.cancel()
        await asyncio.wait([holding])
        third.set()
        await asyncio.wait_for(held(third), 10)

    asyncio.run(run())


def test_any_number_of_calls_that_are_cancelled_while_they_wait_is_skipped() -> None:
    threads, may_end = FairThreads(1, "of-a-test"), threading.Event()
    first = threads.submit("many", lambda: may_end.wait(30))
    waiting = [threads.submit("many", lambda: True) for _ in range(3000)]
    last = threads.submit("many", lambda: "called")
    assert all(one.cancel() for one in waiting)
    may_end.set()
    assert first.result(10)
    assert last.result(10) == "called"
    assert threads.submit("other", lambda: "called").result(10) == "called"
    threads.shutdown()


def test_what_a_call_gets_is_gone_when_it_has_ended() -> None:
    """A cycle kept each piece of an upload until the garbage collector found it."""

    class Piece:
        pass

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(CallThreads(1, "test"))
        piece, may_end = Piece(), threading.Event()
        alive = weakref.ref(piece)
        before = asyncio.ensure_future(asyncio.to_thread(may_end.wait, 30))
        waiting = asyncio.ensure_future(to_its_end(isinstance, piece, Piece))
        del piece
        await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.gather(before, waiting)
        del waiting
        await asyncio.to_thread(lambda: None)  # the thread has dropped what it called before
        assert alive() is None

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_queue_of_one_caller_is_bounded_and_that_of_another_is_its_own() -> None:
    work, may_end = CostlyWork(threads=2, per_caller=1, queue=3), threading.Event()

    async def ordered(caller: str, function: Any) -> str:
        with serving(work, caller):
            try:
                await in_work_thread(function)
                await in_work_thread(function)  # the same request: it is not counted again
            except LimitReached as error:
                return f"{error} ({error.retry_after})"
        return ""

    async def run() -> None:
        many = [asyncio.ensure_future(ordered("many", lambda: may_end.wait(30))) for _ in range(5)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(ordered("few", lambda: None), 10) == ""
        may_end.set()
        answers = await asyncio.gather(*many)
        assert [bool(text) for text in answers] == [False] * 3 + [True] * 2
        assert answers[-1].startswith("3 requests of 'many' are being checked or wait for it")
        assert answers[-1].endswith("send this one again in 5 s (5)")
        assert await ordered("many", lambda: None) == ""

    asyncio.run(run())
    work.close()


def test_cpu_time_beyond_the_budget_is_waited_for() -> None:
    now = [0.0]
    budget = CpuBudget("client", 20.0, clock=lambda: now[0])
    budget.charge(19.0)
    budget.require()
    budget.charge(11.0)  # a call may take more than is left
    with pytest.raises(
        LimitReached,
        match=r"^the checks that requests of the token 'client' need have taken the 20 CPU seconds per minute",
    ) as refusal:
        budget.require()
    assert refusal.value.retry_after == 33
    now[0] += 29.0
    with pytest.raises(LimitReached):
        budget.require()
    now[0] += refusal.value.retry_after - 29.0
    budget.require()
    now[0] += 1e6
    budget.charge(20.5)  # no more than a minute's is saved
    with pytest.raises(LimitReached):
        budget.require()
    CpuBudget("local", None).charge(1e9)
    CpuBudget("local", None).require()


def test_users_behind_one_token_divide_its_cpu_time_and_none_gains_by_inventing_others() -> None:
    now = [0.0]
    budget = CpuBudget("stack", 20.0, clock=lambda: now[0])
    budget.require("greedy")
    budget.charge(20.0, "greedy")  # all of it, while it is the only one
    for user in ("greedy", "other", "invented"):
        with pytest.raises(LimitReached, match="requests of the token 'stack' need have taken the 20 CPU seconds"):
            budget.require(user)
    now[0] += 6.0
    budget.require("other")  # 2 s were refilled
    budget.charge(1.0, "other")
    with pytest.raises(LimitReached, match="need for one of its 3 users have taken that user's part of the") as refusal:
        budget.require("greedy")
    budget.require("other")
    now[0] += 12.0 + refusal.value.retry_after
    budget.require("greedy")

    taken, now[0] = 0, now[0] + 1e6
    for number in range(1000):  # names that one client invents
        try:
            budget.require(f"invented-{number}")
        except LimitReached:
            break
        budget.charge(1.0, f"invented-{number}")
        taken += 1
    assert taken == 20
    now[0] += 1e6
    for number in range(1000):
        budget.charge(0.001, f"invented-{number}")
    assert len(budget._taken) <= 65


def test_a_user_that_takes_all_it_can_leaves_others_their_part() -> None:
    now = [0.0]
    budget = CpuBudget("stack", 60.0, clock=lambda: now[0])
    taken, next_at = {"greedy": 0.0, "patient": 0.0}, {"greedy": 0.0, "patient": 70.0}
    cost, jitter = {"greedy": 3.0, "patient": 0.5}, random.Random(0)
    while now[0] < 600:
        user = min(next_at, key=next_at.__getitem__)
        now[0] = next_at[user]
        try:
            budget.require(user)
        except LimitReached as refusal:
            next_at[user] += jitter.uniform(0.02, 0.2) if user == "greedy" else refusal.retry_after
        else:
            budget.charge(cost[user], user)
            taken[user] += cost[user]
            next_at[user] += jitter.uniform(0.02, 0.2)
    assert taken["patient"] > 200
    assert sum(taken.values()) < 600 + 60 + 3


def test_users_behind_one_token_take_turns_and_none_fills_its_queue() -> None:
    made, refused = turns(CostlyWork(threads=1, per_caller=1, queue=8), ("stack", "many"), ("stack", "few"))
    assert made == ["many-0", "many-1", "few-0", "many-2", "few-1", "many-3"]
    [reason] = refused
    assert reason.startswith("4 requests of a user of 'stack' are being checked or wait for it")


def test_a_limited_call_is_charged_with_the_cpu_time_of_its_process() -> None:
    now = [0.0]
    work = CostlyWork(cpu_seconds=0.4, clock=lambda: now[0])
    calls = Limited(5, 64 << 20)

    async def ordered(*call: Any) -> list[Any]:
        with serving(work, "client"):
            return await in_work_thread(calls.call, *call)

    assert asyncio.run(ordered(_echo, 1)) == [1]
    assert asyncio.run(ordered(_compute)) == [1]
    with pytest.raises(LimitReached, match="CPU seconds per minute") as refusal:
        asyncio.run(ordered(_echo, 3))
    now[0] += refusal.value.retry_after
    assert asyncio.run(ordered(_echo, 4)) == [4]
    work.close()


def test_a_limited_call_that_a_request_orders_in_another_thread_is_refused() -> None:
    work, calls = CostlyWork(), Limited(1, 64 << 20)

    async def ordered() -> None:
        with serving(work, "client"):
            for call in (lambda: asyncio.to_thread(calls.call, _echo, 1), lambda: _at_once(calls)):
                with pytest.raises(RuntimeError, match="use in_work_thread"):
                    await call()

    asyncio.run(ordered())
    assert calls.call(_echo, 1) == [1]  # of a program
    work.close()


async def _at_once(calls: Limited) -> None:
    calls.call(_echo, 1)


SHARED: dict[str, str] = {
    "service/cluster/models.py": "nodes alone call it, and its threads are theirs",
    "service/datasets/buckets.py": "the reader's process, which has one caller",
}
"""Modules of the service that make threads of their own, with the reason why no caller waits for another there."""


def test_threads_of_the_service_are_fair_between_callers() -> None:
    """Those that callers share are `CallThreads` or `CostlyWork`."""
    package = REPOSITORY / "llama_stack_provider_trl_remote"
    makers = {
        str(path.relative_to(package))
        for path in (package / "service").rglob("*.py")
        if any(
            isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in POOLS
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert makers == SHARED.keys()


POOLS = ("ThreadPoolExecutor", "ProcessPoolExecutor")
ORDERING = ("jobs", "requests", "specs")
"""Packages whose functions requests call, in whichever process: what they order goes through `in_work_thread`."""


def test_what_checks_requests_uses_no_threads_but_those_of_costly_work() -> None:
    users = [
        str(path)
        for package in ORDERING
        for path in (REPOSITORY / "llama_stack_provider_trl" / package).rglob("*.py")
        if "to_thread" in path.read_text() or "run_in_executor" in path.read_text()
    ]
    assert users == []


class _Watched:
    """Calls again and again, and counts the answers."""

    def __init__(self, call: Any) -> None:
        self._call, self.answers = call, list[int]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def answers_again(self) -> bool:
        """Wait until a call that is made from now on is answered."""
        count = len(self.answers)
        return until(lambda: len(self.answers) > count + 1)  # the first one may have been made before

    def _run(self) -> None:
        while not self._end.is_set():
            self.answers.append(self._call().status_code)
            self._end.wait(0.1)


def _evaluation(number: int, pattern: str) -> Json:
    checks = [
        {"type": "regex", "name": f"check-{check}", "pattern": f"{pattern}{number}-{check}"} for check in range(8)
    ]
    checks.append({"type": "regex", "pattern": "("})
    model = sft("evaluated", "questions")["model"]
    return {"job_uuid": f"evaluated-{number}", "model": model, "dataset_id": "questions", "checks": checks}


@pytest.mark.contract
def test_the_remote_provider_names_the_user_that_llama_stack_has_authenticated_and_no_other() -> None:
    headers = compat._headers
    forged = {"X-LlamaStack-Provider-Data": '{"__authenticated_user": {"principal": "forged"}}'}
    with fake_service() as service:
        adapter = TrlRemotePostTraining(TrlRemoteConfig(url=service.url), {})
        for given, user in ((forged, None), ({}, None), (forged, headers.User("alice", None))):
            with headers.request_provider_data_context(given, user):
                asyncio.run(adapter.get_training_jobs())
    assert service.users == ["", "", hashlib.sha256(b"alice").hexdigest()]


class HeldService(Guarded):
    """A service in which a test can hold what requests order."""

    module = held_calls.__name__
    is_forked = forks = False


@pytest.mark.contract
def test_costly_patterns_of_one_token_hold_up_neither_another_token_nor_a_node(tmp_path: Path) -> None:
    tokens = [
        {"token": TOKENS["submit"], "role": "submit", "name": "attacker"},
        {"token": OTHER, "role": "submit", "name": "other"},
        {"token": TOKENS["node"], "role": "node", "name": "joining"},
    ]
    with running(HeldService(tmp_path, tokens=tokens, check_cpu_seconds=2.0)) as service:
        service.register("questions", QUESTIONS)
        service.join("mine")
        root = f"{service.url}/v1"

        def sent(token: str, method: str, path: str, body: Json | None = None) -> requests.Response:
            headers = {"Authorization": f"Bearer {token}", USER_HEADER: "greedy"}
            return requests.request(method, root + path, json=body, headers=headers, timeout=120)

        def attack(number: int) -> requests.Response:
            return sent(TOKENS["submit"], "POST", "/post-training/evaluate", _evaluation(number, COSTLY))

        poll = {"boot_id": "boot of mine", "tasks": [], "seen": -1}
        with (
            ThreadPoolExecutor(ATTACKS) as threads,
            _Watched(lambda: sent(OTHER, "GET", JOBS)) as lists,
            _Watched(lambda: sent(service.credentials["mine"], "POST", "/nodes/mine/poll", poll)) as polls,
        ):
            service.arm(held_calls.POINT, "hold")
            attacks = [threads.submit(attack, number) for number in range(ATTACKS)]
            try:
                service.wait_taken(held_calls.POINT)
                until(lambda: any(one.done() for one in attacks))
                answer = sent(OTHER, "POST", "/post-training/evaluate", _evaluation(ATTACKS, "[0-9]+"))
                assert answer.status_code == 400, answer.text  # for its last pattern: no job is stored
                assert lists.answers_again()
                assert polls.answers_again()
                assert not all(one.done() for one in attacks), "they were answered when the attacks were over"
            finally:
                service.go(held_calls.POINT)
            answers = [one.result() for one in attacks]
        assert set(lists.answers) == set(polls.answers) == {200}
        statuses = Counter(one.status_code for one in answers)
        assert statuses.keys() <= {400, 429}
        assert statuses[429] > ATTACKS / 2
        refusals = [one for one in answers if one.status_code == 429]
        assert all(int(one.headers["Retry-After"]) >= 1 for one in refusals)
        sentences = {one.json()["detail"].partition(":")[0] for one in refusals}
        assert "32 requests of a user of 'attacker' are being checked or wait for it, as many as may" in sentences
        assert any("'attacker' need have taken the 2 CPU seconds per minute" in text for text in sentences), sentences


@pytest.mark.contract
def test_the_only_caller_of_a_service_without_tokens_is_not_slowed_down(tmp_path: Path) -> None:
    """100 evaluations at once, each with patterns that are compiled."""
    with running(TrainingService(tmp_path, check_cpu_seconds=0.5)) as service:
        service.register("questions", QUESTIONS)

        def sent(number: int) -> int:
            body = {**_evaluation(number, "(?:a|b){3}"), "checks": [{"type": "regex", "pattern": f"[0-9]{{{number}}}"}]}
            url = f"{service.url}/v1/post-training/evaluate"
            return requests.post(url, json=body, timeout=100).status_code

        with ThreadPoolExecutor(100) as threads:
            assert Counter(threads.map(sent, range(1, 101))) == {200: 100}
