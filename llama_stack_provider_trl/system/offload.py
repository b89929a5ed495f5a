"""Runs what requests order in threads: fair between callers, costly work apart from reads, CPU time within a budget.

`serving` names the caller whose request is served. Within it `in_work_thread` runs costly work in threads of its own,
and `CallThreads`, as the executor of the event loop, runs everything else: calls of nodes apart from those of users,
and of these what stores bodies (`storing`) apart from what reads.
`system.limited` refuses a call that a request orders in any other thread, so no route can hold up the others with it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NamedTuple

from ..errors import LimitReached

Clock = Callable[[], float]
MINUTE = 60.0
USER_HEADER = "X-TRL-User"
"""With it the remote provider names the user for whom it calls, by a digest."""
_USERS = 64
"""Users behind one caller that are distinguished; further ones count as one."""
_EPSILON = 1e-6
"""CPU seconds that count as none."""
_ACCOUNTS = 4096
"""Callers whose CPU time is remembered; the one that has ordered nothing for longest is forgotten first."""
_QUEUE_RETRY_S = 5
_STORING = 3
"""Threads that store the bodies of users: 100 uploads of 1 MiB at once put 2,000 calls into their queue, each of which
waits for a disk. A caller has two of them: the users of one token upload while a write of one of them hangs."""


class FairSlots:
    """Slots that are granted to one caller after the other: a thousand requests of one delay another by one of them.
    Users behind one caller get its slots in turn likewise.

    Safe to share between threads and event loops.

    Args:
        per_caller: slots that one caller may hold.
    """

    def __init__(self, total: int, per_caller: int) -> None:
        self._free, self._per_caller = total, per_caller
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Future[None]]]] = OrderedDict()
        """By caller and user; the ones whose turn is next come first."""
        self._lock = threading.Lock()

    def request(self, caller: str, user: str = "") -> Future[None]:
        """A future that ends once the caller has a slot. One that is cancelled before takes none."""
        slot: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(caller, OrderedDict()).setdefault(user, deque()).append(slot)
        self._grant()
        return slot

    def release(self, caller: str) -> None:
        with self._lock:
            self._free += 1
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]
        self._grant()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a slot for the caller of the current request."""
        caller = caller_name()
        slot = self.request(caller, _user())
        try:
            await asyncio.wrap_future(slot)
        except asyncio.CancelledError:
            slot.cancel()
            if not slot.cancelled():  # it was granted meanwhile
                self.release(caller)
            raise
        try:
            yield
        finally:
            self.release(caller)

    def _grant(self) -> None:
        granted = []
        with self._lock:
            while self._free and (slot := self._next()) is not None:
                granted.append(slot)
        for slot in granted:
            slot.set_result(None)  # outside of the lock: it calls what waits for it

    def _next(self) -> Future[None] | None:
        for caller, users in [*self._waiting.items()]:
            while users and self._held[caller] < self._per_caller:
                user, slots = next(iter(users.items()))
                slot = slots.popleft()
                users.move_to_end(user)
                if not slots:
                    del users[user]
                if slot.set_running_or_notify_cancel():
                    self._free -= 1
                    self._held[caller] += 1
                    self._waiting.move_to_end(caller)
                    if not users:
                        del self._waiting[caller]
                    return slot
            if not users:
                del self._waiting[caller]
        return None


class FairThreads:
    """Threads that callers use in turn.

    Args:
        per_caller: threads that one caller may use; None: all but one, where there are several.
    """

    def __init__(self, threads: int, name: str, per_caller: int | None = None) -> None:
        self._slots = FairSlots(threads, per_caller or max(1, threads - 1))
        self._threads = ThreadPoolExecutor(threads, name)

    def submit[Result](self, caller: str, function: Callable[[], Result], user: str = "") -> Future[Result]:
        """Have a thread call a function, when it is the caller's turn, and that of its user."""
        result: Future[Result] = Future()

        def run() -> None:
            try:
                value = function()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
            finally:
                self._slots.release(caller)

        def begin(slot: Future[None]) -> None:
            # `result` and `slot` would keep each other until the garbage collector finds them, with the piece of a body
            # that the function writes: 21 MiB of 100 uploads of 1 MiB at once.
            waiting.clear()
            if not result.set_running_or_notify_cancel():
                if not slot.cancelled():  # it was granted before
                    self._slots.release(caller)
                return
            try:
                self._threads.submit(run)
            except RuntimeError as error:  # after the shutdown
                result.set_exception(error)
                self._slots.release(caller)

        slot = self._slots.request(caller, user)
        waiting = [slot]

        def ended(result: Future[Result]) -> None:
            if result.cancelled():  # `FairSlots` skips it: releases of granted slots would nest once for each
                for slot in waiting[:]:
                    slot.cancel()

        result.add_done_callback(ended)
        slot.add_done_callback(begin)
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


class CallThreads(ThreadPoolExecutor):
    """An executor for the calls of several callers: those of nodes never wait for those of users, and what only reads
    never waits for what stores bodies.

    Args:
        threads: for users, and as many again for nodes.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(1, name)  # has no thread until something is submitted to it
        self._of_users = FairThreads(threads, name)
        self._of_nodes = FairThreads(threads, f"{name}-nodes", threads)
        self._of_bodies = FairThreads(_STORING, f"{name}-bodies")

    def submit[Result](self, function: Callable[..., Result], /, *args: Any, **options: Any) -> Future[Result]:
        order = _order.get()
        threads = self._of_bodies if _stores.get() else self._of_users
        if order is not None and order.of_node:
            threads = self._of_nodes
        return threads.submit(caller_name(), partial(function, *args, **options), _user())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for threads in (self._of_users, self._of_nodes, self._of_bodies):
            threads.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


class CpuBudget:
    """CPU seconds that a caller may have computed per minute. What it takes beyond them, it waits for.

    Users behind one caller divide them: one that has taken more than its part waits, so that the others get theirs.
    A caller that invents users gains nothing.

    Args:
        per_minute: None: any number.
    """

    def __init__(self, caller: str, per_minute: float | None, clock: Clock = time.monotonic) -> None:
        self.caller, self.per_minute = caller, per_minute
        self._clock = clock
        self._taken: dict[str, float] = {}
        """User -> CPU seconds that are not refilled yet."""
        self._wanted: dict[str, float] = {}
        """User -> time of the last request: one that is refused keeps its part for a minute."""
        self._filled_at = clock()
        self._lock = threading.Lock()

    def require(self, user: str = "") -> None:
        """Raises LimitReached: nothing is left, or nothing of the user's part."""
        if self.per_minute is None:
            return
        with self._lock:
            self._refill(self.per_minute)
            user = self._distinguished(user)
            self._wanted[user] = self._filled_at
            beyond = sum(self._taken.values()) - self.per_minute
            users = len(self._users())
            beyond_part = self._taken.get(user, 0.0) * users - self.per_minute
        if max(beyond, beyond_part) < 0:
            return
        seconds = max(1, math.ceil((max(beyond, beyond_part) + 1.0) * MINUTE / self.per_minute))
        whose = "" if beyond >= beyond_part else f" for one of its {users} users have taken that user's part of"
        raise LimitReached(
            f"the checks that requests of the token {self.caller!r} need{whose or ' have taken'} the "
            f"{self.per_minute:g} CPU seconds per minute that they may: send this one again in {seconds} s",
            seconds,
        )

    def charge(self, seconds: float, user: str = "") -> None:
        if self.per_minute is not None:
            with self._lock:
                self._refill(self.per_minute)
                user = self._distinguished(user)
                self._taken[user] = self._taken.get(user, 0.0) + seconds

    def _distinguished(self, user: str) -> str:
        users = self._users()
        return user if user in users or len(users) < _USERS else ""

    def _users(self) -> set[str]:
        return self._taken.keys() | self._wanted.keys()

    def _refill(self, per_minute: float) -> None:
        """Give each user its part of what the time has brought; what one does not need is for the others."""
        now = self._clock()
        seconds = (now - self._filled_at) * per_minute / MINUTE
        self._filled_at = now
        while self._taken and seconds > _EPSILON:
            each = min(seconds / len(self._taken), *self._taken.values())
            seconds -= each * len(self._taken)
            self._taken = {user: taken - each for user, taken in self._taken.items() if taken - each > _EPSILON}
        self._wanted = {user: at for user, at in self._wanted.items() if now - at < MINUTE}


class Account(NamedTuple):
    """The budget of which a call takes its CPU time, and the user that it counts for."""

    budget: CpuBudget
    user: str

    def require(self) -> None:
        self.budget.require(self.user)

    def charge(self, seconds: float) -> None:
        self.budget.charge(seconds, self.user)


class CostlyWork:
    """Threads for the costly work that requests order, with a bounded queue and a budget of CPU time for each caller.

    Args:
        threads: at most this many functions run at once.
        per_caller: of one caller.
        queue: requests of one caller that may have such work at once; a user behind it may have half as many.
        cpu_seconds: that one caller may use per minute in `system.limited`; None: any number.
    """

    def __init__(
        self,
        threads: int = 2,
        per_caller: int = 2,
        queue: int = 64,
        cpu_seconds: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._threads = FairThreads(threads, "trl-work", per_caller)
        self._queue, self._cpu_seconds, self._clock = queue, cpu_seconds, clock
        self._admitted: Counter[tuple[str, str]] = Counter()
        """By caller and user, and with an empty user by caller."""
        self._budgets: OrderedDict[str, CpuBudget] = OrderedDict()
        self._lock = threading.Lock()

    def admit(self, caller: str, user: str = "") -> None:
        """Count a request of a caller until `leave`. Raises LimitReached."""
        self.budget(caller).require(user)
        most = {(caller, ""): self._queue, **({(caller, user): max(1, self._queue // 2)} if user else {})}
        with self._lock:
            for key, limit in most.items():
                if self._admitted[key] >= limit:
                    whose = f"a user of {caller!r}" if key[1] else repr(caller) if caller else "this caller"
                    raise LimitReached(
                        f"{limit} requests of {whose} are being checked or wait for it, as many as may: send this one "
                        f"again in {_QUEUE_RETRY_S} s",
                        _QUEUE_RETRY_S,
                    )
            self._admitted.update(most.keys())

    def leave(self, caller: str, user: str = "") -> None:
        with self._lock:
            for key in {(caller, ""), (caller, user)}:
                self._admitted[key] -= 1
                if not self._admitted[key]:
                    del self._admitted[key]

    def budget(self, caller: str) -> CpuBudget:
        with self._lock:
            budget = self._budgets.setdefault(caller, CpuBudget(caller, self._cpu_seconds, self._clock))
            self._budgets.move_to_end(caller)
            if len(self._budgets) > _ACCOUNTS:
                self._budgets.popitem(last=False)
            return budget

    async def run[Result](self, order: Order, function: Callable[..., Result], *args: Any) -> Result:
        """The result of a function that runs in a thread of this object. Raises LimitReached."""
        order.admit()
        context = copy_context()
        context.run(_charged.set, Account(self.budget(order.caller), order.user))
        call: Callable[[], Result] = partial(context.run, partial(function, *args))
        return await asyncio.wrap_future(self._threads.submit(order.caller, call, order.user))

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Order:
    def __init__(self, work: CostlyWork, caller: str, of_node: bool = False, user: str = "") -> None:
        self.work, self.caller, self.of_node, self.user = work, caller, of_node, user
        self._is_admitted = self._has_ended = False

    def admit(self) -> None:
        """Count this request, once. Raises LimitReached."""
        if not self._is_admitted and not self._has_ended:
            self.work.admit(self.caller, self.user)
            self._is_admitted = True

    def end(self) -> None:
        """The request is answered; what it has left behind is not counted."""
        if self._is_admitted:
            self.work.leave(self.caller, self.user)
        self._is_admitted, self._has_ended = False, True


_order: ContextVar[Order | None] = ContextVar("trl_order", default=None)
_charged: ContextVar[Account | None] = ContextVar("trl_charged", default=None)
"""Set in threads of costly work only."""
_stores: ContextVar[bool] = ContextVar("trl_stores", default=False)
"""Whether the calls of this context store the body of a request."""


@contextmanager
def serving(work: CostlyWork, caller: str, *, of_node: bool = False, user: str = "") -> Iterator[None]:
    """Serve a request of a caller: what it orders in this context is the caller's.

    Args:
        user: for whom it calls; empty: not known.
    """
    order = Order(work, caller, of_node, user)
    token = _order.set(order)
    try:
        yield
    finally:
        order.end()
        with suppress(ValueError):  # a generator that is closed in another context
            _order.reset(token)


@contextmanager
def storing() -> Iterator[None]:
    """What the block calls in threads stores the body of a request. It waits for disks, and for other writers of the
    database, so that threads of its own run it."""
    token = _stores.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed in another context
            _stores.reset(token)


async def in_work_thread[Result](function: Callable[..., Result], *args: Any) -> Result:
    """The result of a costly function that the current request has ordered. Raises LimitReached: the caller has too
    many requests with costly work, or has used its CPU time."""
    order = _order.get()
    if order is None:  # no server: a test, or a program
        return await asyncio.to_thread(function, *args)
    return await order.work.run(order, function, *args)


async def to_its_end[Result](function: Callable[..., Result], *args: Any) -> Result:
    """The result of a function that a thread runs to its end, even where its caller is cancelled: what it uses, such as
    a descriptor, is closed afterwards only."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await _ended(running)
        raise


@asynccontextmanager
async def entered[Value](context: AbstractContextManager[Value, bool | None]) -> AsyncIterator[Value]:
    """A context that a thread begins and ends: one that makes files waits for a disk."""
    entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await _ended(entering)
        if not entering.cancelled() and entering.exception() is None:
            await to_its_end(context.__exit__, None, None, None)
        raise
    try:
        yield value
    except BaseException as error:
        if not await to_its_end(context.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await to_its_end(context.__exit__, None, None, None)


async def _ended(running: asyncio.Future[Any]) -> None:
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])


def caller_name() -> str:
    """The caller of the current request; empty: none is served."""
    order = _order.get()
    return "" if order is None else order.caller


def _user() -> str:
    """The user for whom the caller of the current request calls; empty: not known."""
    order = _order.get()
    return "" if order is None else order.user


def charged_account() -> Account | None:
    """The budget of which a limited call takes its CPU time; None: no request has ordered it. Raises RuntimeError: a
    request has ordered it in a thread that others need."""
    budget = _charged.get()
    if budget is None and _order.get() is not None:
        raise RuntimeError("a request orders a limited call in a thread that other requests need: use in_work_thread")
    return budget
