"""The agent of a worker node: joins a service, polls it for orders, and follows them.

The agent always calls and is never called. Trainings outlive it, and a later agent on the same data directory restores
their tasks. They outlive an absence of the service, too: their events and checkpoints wait here until it answers. A
service that has replaced an attempt meanwhile answers with 410, or with orders that do not name the task.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from llama_stack_provider_trl.errors import InvalidRequest, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.torchrun import interface_of
from llama_stack_provider_trl.requests.names import JOB_UUID_PATTERN
from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl.system.files import private_directory
from llama_stack_provider_trl.system.logs import Unsent
from llama_stack_provider_trl.system.process import FileLock

from ..wire import (
    MOST_KEPT,
    MOST_LOG_LINES,
    POLL_SECONDS,
    Joined,
    Load,
    LogEntries,
    NodeReport,
    Orders,
    Poll,
    Stage,
    StageProgress,
    TaskOrder,
    TaskReport,
)
from .calls import GONE, NodeClient, is_gone
from .consent import NoConsent, check_consent
from .identity import ADDRESS, CredentialFile, NodeError
from .localize import check_order
from .models import Models, models_used
from .owner import OwnerWatch
from .task import NodeContext, NodeTask, kept_tasks

log = logging.getLogger(__name__)
NEWS = 0.1
"""Seconds for which news are gathered before they are reported."""
RETRY = 1.0
"""Seconds between calls of a service that is away."""
REPORT = 60.0
"""Seconds between two reports of this machine."""
ROTATION = 24 * 3600.0
"""Seconds after which a node joins again for another credential, without any other reason."""
OWNER = 2.0
"""Seconds between two measurements of the owner's load on a loaned machine."""
KEEP = 24 * 3600.0
"""Seconds for which files of a job are kept: its next attempt may run here again."""


class Agent:
    """The agent of one node. Call `run`.

    Args:
        report: describes this machine; called at every REPORT.
        data_dir: the node's own, used by one agent at a time.
        python: interpreter that trains; None: the interpreter of this process.
        load: measures this machine, for each poll; None: it is not measured.
        unsent: entries of the log that polls send; None: none are sent.
        heartbeat_interval: seconds after which a poll without an answer is replaced by the next one.
        models: the models of this node; None: those in `data_dir` and the cache of this process's environment.
        owner: measures the load of this machine's owner; None: it is not loaned.
        trusted: models whose own code may run here.
        python_graders: whether the source of graders may.
    """

    def __init__(
        self,
        calls: NodeClient,
        report: Callable[[], NodeReport],
        data_dir: Path,
        launcher: Launcher | None = None,
        *,
        python: str | None = None,
        load: Callable[[], Load | None] | None = None,
        unsent: Unsent | None = None,
        heartbeat_interval: float = POLL_SECONDS,
        models: Models | None = None,
        owner: OwnerWatch | None = None,
        trusted: Sequence[str] = (),
        python_graders: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls, self._report, self._python = calls, report, python
        self._load, self._unsent, self._run = load, unsent, uuid.uuid4().hex
        self._data_dir = data_dir.resolve()
        self._models = models or Models(self._data_dir)
        self._launcher = launcher or LocalLauncher()
        self._clock, self._sleep = clock, sleep
        self._heartbeat_interval, self._owner = heartbeat_interval, owner
        self._trusted, self._python_graders = tuple(trusted), python_graders
        self._tasks: dict[str, NodeTask] = {}
        self._refused: dict[str, TaskReport] = {}
        """Tasks whose orders are not followed."""
        self._news = asyncio.Event()
        self._seen = self._polls = 0
        self._interrupted = False
        """Whether the last poll was abandoned for news: the next one finds out whether the service answers."""
        self._reported: tuple[float, NodeReport | None] = (-math.inf, None)
        self._joined_at = -math.inf
        self._credential: str | None = None
        """That the service has issued to this node; None: it has not joined this service under this name yet."""
        self._trouble = ""
        self._leaving = self._reported_leaving = False
        """Whether this machine is about to be taken away, and whether the service knows."""

    def leave(self) -> None:
        """Have the jobs here saved, to continue elsewhere; `run` returns then."""
        log.info("this machine is about to be taken away: its jobs save, and continue elsewhere")
        self._leaving = True
        self._news.set()

    async def run(self) -> None:
        """Serve until cancelled, when trainings continue, or until everything here has ended after `leave`.

        Raises:
            NodeError: another agent uses the data directory, or this machine cannot be a node.
            ServiceRefusal: the service does not accept this node: its name belongs to another one, its versions differ,
                its token is wrong, it was removed. After a join only a removal and a name that is taken are final.
        """
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = NodeDir(self._data_dir)
        place.prepare()
        # In a directory that was there, and may have others' files too.
        for directory in (place.jobs, place.datasets, place.tokens, place.reference, place.models):
            private_directory(directory)
        lock = FileLock(place.lock)
        if not lock.acquire(f"agent (pid {os.getpid()})"):
            raise NodeError(
                f"another agent runs on {self._data_dir} ({lock.holder()}): stop it, or set another --data-dir"
            )
        watching: asyncio.Task[None] | None = None
        try:
            report = await asyncio.to_thread(self._report)
            await asyncio.to_thread(_check_address, report.address)
            self._credential = self._kept_credential(report).read()
            await self._restore_tasks(report)
            if self._owner is not None:
                watching = asyncio.create_task(self._watch_owner(self._owner))
            await self._join(report)
            for kept in self._tasks.values():
                if not kept.begun:  # else the owner of the machine has ended it
                    kept.begin()
            try:
                while not (self._reported_leaving and await self._has_ended_all()):
                    await self._poll_once()
            except ServiceRefusal as final:
                for known in self._tasks.values():
                    known.end(f"the service no longer accepts this node: {final}")
                for known in self._tasks.values():
                    await known.settle()
                raise
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            for known in self._tasks.values():
                await known.leave()
            lock.release()

    async def _watch_owner(self, owner: OwnerWatch) -> None:
        """Report how much of a loaned machine its owner uses. While that is much, tasks that do not save and end in
        time are ended, whether the service answers or not."""
        while True:
            run_dirs = [known.paths.run_dir for known in self._tasks.values()]
            if await asyncio.to_thread(owner.measure, run_dirs):
                log.info("the load of this machine's owner is %s", owner.use)
                self._news.set()
            if owner.is_overdue():
                for known in self._tasks.values():
                    if not known.has_exited:
                        known.end("the owner of this machine uses it, and it had not saved and ended in time")
            await self._sleep(OWNER)

    async def _join(self, report: NodeReport) -> None:
        """Report this machine until the service has answered."""
        while True:
            try:
                joined = await self._call_join(report)
            except ServiceRefusal as refusal:
                # A refusal of a node that had joined passes, like a service that is away: the service may have been
                # restarted with other tokens. But 409 is final (another node has the name, or the versions differ), and
                # so is 410 (an operator has removed the node).
                if refusal.status < 500 and (self._reported[1] is None or refusal.status in (409, GONE)):
                    raise
                await self._wait(refusal)
                continue
            except ServiceUnreachable as error:
                await self._wait(error)
                continue
            self._note_answer()
            if self._reported[1] is None:
                log.info("node %s (%s) has joined the service on %s", report.name, report.address, joined.head)
            self._joined_at = self._clock()
            self._reported = (self._joined_at, report)
            if joined.credential:
                await self._replace_credential(report, joined.credential)
            return

    async def _call_join(self, report: NodeReport) -> Joined:
        """Join with this node's credential, else with the token: the service may have another database, or may have
        removed the node before this agent was started."""
        self._calls.authenticate(self._credential)
        try:
            return await self._calls.join(report)
        except ServiceRefusal as refusal:
            unknown = refusal.status == 401 or (refusal.status == GONE and self._reported[1] is None)
            if self._credential is None or not unknown:
                raise
        self._calls.authenticate(None)
        try:
            return await self._calls.join(report)
        except (ServiceRefusal, ServiceUnreachable):
            self._calls.authenticate(self._credential)  # until the next try: the service may come back as it was
            raise

    async def _replace_credential(self, report: NodeReport, credential: str) -> None:
        """Store a new credential, then use it. The one before it is valid until then."""
        try:
            await asyncio.to_thread(self._kept_credential(report).write, credential)
        except OSError as error:  # a full disk: an agent that is started again would have the old one
            log.warning("the new credential of this node cannot be stored: %s", error)
            if self._credential is not None:
                return self._calls.authenticate(self._credential)
        self._credential = credential
        self._calls.authenticate(credential)

    def _kept_credential(self, report: NodeReport) -> CredentialFile:
        return CredentialFile(self._data_dir, self._calls.url, report.name)

    async def _restore_tasks(self, report: NodeReport) -> None:
        """Restore the tasks of the agent before this one, and end processes that belong to no task."""
        node = self._node(report)
        for kept in await asyncio.to_thread(kept_tasks, node):
            log.info("task %s: restored", kept.order.task_id)
            self._tasks[kept.order.task_id] = kept
        known = [kept.paths.run_dir for kept in self._tasks.values()]
        for run_dir in await asyncio.to_thread(self._launcher.sweep, NodeDir(self._data_dir).jobs, known):
            log.warning("ended the processes of %s, which belong to no task of this node", run_dir)
        await asyncio.to_thread(self._clean)

    async def _poll_once(self) -> None:
        """Send reports and follow the answer."""
        now, (reported, before) = self._clock(), self._reported
        if now - reported > REPORT or self._models.has_news:
            self._reported, self._models.has_news = (now, before), False
            await asyncio.to_thread(self._clean)
            report = await asyncio.to_thread(self._report)
            if _differs(report, before) or now - self._joined_at > ROTATION:
                await self._join(report)
        self._news.clear()
        await self._forget()
        assert before is not None
        # With -1 the service answers at once, and the answer is awaited: endless news would hide a service that is
        # gone.
        seen = -1 if self._interrupted else self._seen
        load = None if self._load is None else await asyncio.to_thread(self._load)
        log_entries = self._log_entries()
        self._polls += 1
        body = Poll(
            boot_id=before.boot_id,
            agent_id=before.agent_id,
            run=self._run,
            number=self._polls,
            tasks=self._reports(),
            load=load,
            log=log_entries,
            leaving=self._leaving,
            owner=None if self._owner is None else self._owner.use,
            seen=seen,
        )
        kept = await asyncio.to_thread(self._kept)
        try:
            orders = await (self._calls.poll(body, kept) if self._interrupted else self._poll_until_news(body, kept))
        except ServiceUnreachable as error:
            await self._wait(error)
        except ServiceRefusal as refusal:
            if is_gone(refusal):  # an operator has removed this node
                raise
            if refusal.status in (401, 404, 409):
                # The service has another database, or another agent has had this name meanwhile.
                if refusal.status == 401:
                    await self._wait(refusal)
                self._seen = 0
                await self._join(await asyncio.to_thread(self._report))
            else:
                await self._wait(refusal)
        else:
            self._interrupted = orders is None
            if orders is not None:
                self._note_answer()
                self._reported_leaving = body.leaving
                if self._unsent is not None and log_entries is not None:
                    self._unsent.sent(log_entries.number + len(log_entries.lines) - 1)
                await self._follow(orders)
                await asyncio.to_thread(self._remove, set(kept) & set(orders.over))

    async def _poll_until_news(self, body: Poll, kept: Collection[str]) -> Orders | None:
        """The answer to a poll; None: there is news to report, or it is time for the next heartbeat."""
        requested, news = asyncio.create_task(self._calls.poll(body, kept)), asyncio.create_task(self._news.wait())
        try:
            # The service answers after POLL_SECONDS: a poll is abandoned only for a shorter interval.
            limit = self._heartbeat_interval if self._heartbeat_interval < POLL_SECONDS else None
            await asyncio.wait([requested, news], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not requested.done() and news.done():
                await asyncio.wait([requested], timeout=NEWS)
            return requested.result() if requested.done() else None
        finally:
            for one in (requested, news):
                one.cancel()
            await asyncio.gather(requested, news, return_exceptions=True)

    async def _follow(self, orders: Orders) -> None:
        self._seen = orders.revision
        wanted = {order.task_id: order for order in orders.tasks}
        self._refused = {task_id: report for task_id, report in self._refused.items() if task_id in wanted}
        for task_id, order in wanted.items():
            assert self._reported[1] is not None
            known = self._tasks.get(task_id)
            try:
                # A task that is here can always be ended, also where the operator has withdrawn a consent since.
                if known is None or order.stage is not Stage.stop:
                    check_order(order)
                if known is None or order.spec != known.order.spec:
                    cpus = self._reported[1].cpus
                    check_consent(order, self._trusted, cpus, python_graders=self._python_graders)
            except InvalidRequest as error:
                self._refuse(order, str(error))
                continue
            except NoConsent as error:
                self._refuse(order, str(error), is_lasting=True)
                continue
            if known is None:
                log.info("task %s: %s on %s", task_id, order.stage, ", ".join(order.devices))
                self._tasks[task_id] = new = NodeTask(self._node(self._reported[1]), order)
                new.begin()
            else:
                known.follow(order)
        for task_id in self._tasks.keys() - wanted.keys():
            known = self._tasks[task_id]
            known.forgotten = True
            known.end("the service has no such task here")

    def _refuse(self, order: TaskOrder, why: str, is_lasting: bool = False) -> None:
        """Refuse an order: nothing of the task is here, or it stays unchanged.

        Args:
            is_lasting: another attempt of the job here is refused, too.
        """
        is_over = order.stage is Stage.stop
        progress = StageProgress.done if is_over else StageProgress.failed
        if order.task_id not in self._refused:
            log.error("task %s is refused: %s", order.task_id[:200], why)
        self._refused[order.task_id] = TaskReport(
            task_id=order.task_id,
            stage=order.stage,
            progress=progress,
            error="" if is_over else why,
            lasting=is_lasting and not is_over,
        )
        self._news.set()

    async def _has_ended_all(self) -> bool:
        """Whether no task is left. Without a further poll: the service would hold it until it has news."""
        await self._forget()
        return not self._tasks

    async def _forget(self) -> None:
        """Delete tasks that have ended and are no longer ordered."""
        for task_id, known in list(self._tasks.items()):
            if known.forgotten and known.gone:
                await known.leave()
                del self._tasks[task_id]
                others = {other.paths.home for other in self._tasks.values()}
                await asyncio.to_thread(known.forget, known.paths.home not in others)

    def _log_entries(self) -> LogEntries | None:
        """What was logged and is not known to have reached the service."""
        number, lines = (1, ()) if self._unsent is None else self._unsent.first(MOST_LOG_LINES)
        return LogEntries(run=self._run, number=number, lines=lines) if lines else None

    def _reports(self) -> tuple[TaskReport, ...]:
        refused = [report for task_id, report in self._refused.items() if task_id not in self._tasks]
        return (*(known.report() for known in self._tasks.values()), *refused)

    def _node(self, report: NodeReport) -> NodeContext:
        return NodeContext(
            name=report.name,
            address=report.address,
            boot_id=report.boot_id,
            data_dir=self._data_dir,
            calls=self._calls,
            launcher=self._launcher,
            changed=self._news.set,
            ports_given=lambda: [port for known in self._tasks.values() if (port := known.port) is not None],
            models=self._models,
            models_used=self._models_used,
            python=self._python,
            sleep=self._sleep,
        )

    def _note_answer(self) -> None:
        if self._trouble:
            log.info("the service answers again")
        self._trouble = ""

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("%s; trainings continue, and the service is called again", trouble.removesuffix("."))
        self._trouble = trouble

    async def _wait(self, error: ServiceUnreachable | ServiceRefusal) -> None:
        """Wait before the next call, however long the service does not answer or accept this node: trainings continue.
        Only the service knows whether it has replaced them."""
        self._note_trouble(str(error))
        await self._sleep(RETRY)

    def _kept(self) -> list[str]:
        """Jobs with files and no task here: their next attempt may run here again."""
        ours = {known.paths.home.name for known in self._tasks.values()}
        names = (path.name for path in (NodeDir(self._data_dir).jobs).glob("*"))
        return sorted(name for name in names if name not in ours and re.fullmatch(JOB_UUID_PATTERN, name))[:MOST_KEPT]

    def _remove(self, over: Collection[str]) -> None:
        """Remove the files of jobs that have ended."""
        ours = {known.paths.home.name for known in self._tasks.values()}
        for job_uuid in set(over) - ours:
            log.info("job %s is over: its files on this node are removed", job_uuid)
            shutil.rmtree(NodeDir(self._data_dir).jobs / job_uuid, ignore_errors=True)

    def _models_used(self) -> set[str]:
        """Digests or names of the models of the tasks here. Called in threads, while tasks may begin."""
        return {used for known in list(self._tasks.values()) for used in models_used(known.paths)}

    def _clean(self) -> None:
        """Remove files of jobs that no attempt has used for KEEP seconds, and rows likewise; and models (`Models`)."""
        self._models.clean(self._models_used)
        ours = {known.paths.home for known in self._tasks.values()}
        rows = {known.paths.rows(found.sha256) for known in self._tasks.values() for found in known.paths.datasets()}
        for path in [*(NodeDir(self._data_dir).jobs).glob("*"), *(NodeDir(self._data_dir).datasets).glob("*")]:
            with suppress(FileNotFoundError):
                if path not in ours | rows and time.time() - path.stat().st_mtime > KEEP:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_address(address: str) -> None:
    """Check that ranks can listen at this node's address. Raises NodeError."""
    try:
        interface_of(address)
    except OSError as error:
        raise NodeError(f"{ADDRESS} must be an address of this machine: {error}") from error


def _differs(report: NodeReport, before: NodeReport | None) -> bool:
    """Whether a machine's description has changed: a GiB of disk more or less counts."""
    return before is None or any(
        getattr(report, field) != getattr(before, field)
        if field != "disk_free_bytes"
        else abs(report.disk_free_bytes - before.disk_free_bytes) > 1 << 30
        for field in NodeReport.model_fields
    )
