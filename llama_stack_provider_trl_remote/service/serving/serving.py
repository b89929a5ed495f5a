"""Answers requests with processes that are started on demand, at most a few on each device.

A process is started where no job has the device, and its runner gives the device up when a training wants it. It ends
when it is idle, when another model needs its place, and with the service. Nothing of it survives a restart.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple
from uuid import uuid4

from llama_stack_provider_trl.errors import LimitReached, NotServed
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.devices import CORE
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.chat_templates import UNENDED
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.serving import ADAPTERS, Answer, AnswerRefused, ServeRequest, ServeSpec
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.offload import FairSlots, caller_name
from llama_stack_provider_trl.system.process import available_memory

from ..settings import ServiceSettings
from ..space import Space
from .process import ProcessEnded, ServingProcess
from .served import Served

log = logging.getLogger(__name__)
_AT_ONCE, _OF_CALLER = 4, 2
"""Answers that one process computes in turns, and those of one caller: it computes one token after the other, so that
fewer answers at a time are done sooner."""
_MOST_UNENDING = 1000
_BESIDE = " beside a training"


class _ServingPlace(NamedTuple):
    """Where a process computes."""

    device: str
    beside: bool = False
    """Beside a training."""


class Serving:
    """The processes of a service.

    Args:
        for_jobs: the settings with which names of models are resolved.
        memory: returns the bytes that are free on this machine.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        for_jobs: Settings,
        launcher: Launcher,
        store: Store,
        devices: Sequence[str],
        space: Space,
        memory: Callable[[], int] = available_memory,
    ) -> None:
        self._settings, self._for_jobs = settings, for_jobs
        self._launcher, self._store, self._devices, self._space = launcher, store, tuple(devices), space
        self._memory = memory
        self._directory = DataDir(settings.data_dir).serving
        self._python = str(settings.train_python) if settings.train_python else None
        self._processes: dict[tuple[ModelSource, str], ServingProcess] = {}
        self._placing = asyncio.Lock()
        self._chats: Counter[str] = Counter()
        self._unending: dict[tuple[ModelSource, str, str, bool], None] = {}
        """Models, with an adapter's files, whose chat template or tokenizer has ended their process in a chat, or
        without one: it would end every chat that others have with that base model, again and again."""

    def prepare(self) -> None:
        """Recreate the directory, and end what is left there of an earlier service."""
        self._launcher.sweep(self._directory, ())
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def close(self) -> None:
        """End the processes, and return when they have ended."""
        async with self._placing:
            for process in self._processes.values():
                process.end("the service stops")
            for process in self._processes.values():
                await process.ended()

    async def find(self, name: str) -> Served:
        """The model that a name stands for. Raises JobNotFound, InvalidRequest."""
        return await asyncio.to_thread(Served.find, name, self._for_jobs, self._store)

    @asynccontextmanager
    async def counted(self, caller: str) -> AsyncIterator[None]:
        """Count a chat for its caller while the block lasts. Raises LimitReached."""
        most = self._settings.max_chats
        if self._chats[caller] >= most:
            raise LimitReached(
                f"{most} chats of this caller are being answered, as many as max_chats allows: send this again", 5
            )
        self._chats[caller] += 1
        try:
            yield
        finally:
            self._chats[caller] -= 1

    async def answer(self, served: Served, request: ServeRequest) -> AsyncGenerator[Answer]:
        """The parts of the answer to a request, as they come. Raises NotServed: no process can answer now, or its
        device was needed; OSError: no process can be started, or the disk has no space for a copy of the adapter."""
        deadline = asyncio.get_running_loop().time() + self._settings.chat_timeout
        async with aclosing(self._answer(served, request)) as messages:
            while True:
                try:
                    # Each on its own: the parts of a stream may be requested by different tasks.
                    async with asyncio.timeout_at(deadline):
                        message = await anext(messages, None)
                except TimeoutError as error:
                    raise NotServed(
                        f"the answer took more than {self._settings.chat_timeout:g} s (chat_timeout of the service): "
                        "send fewer max_tokens, or send it again when fewer chats are answered"
                    ) from error
                if message is None:
                    return
                yield message

    async def _answer(self, served: Served, request: ServeRequest) -> AsyncGenerator[Answer]:
        written_by = (
            *served.key,
            "" if served.adapter is None else served.adapter.digest,
            request.messages is not None,
        )
        if written_by in self._unending:
            yield AnswerRefused(message=UNENDED, is_request=True)
            return
        for is_last in (False, True):
            process = await self._process_for(served)
            try:
                async with process.used(), aclosing(process.answer(request, served.adapter)) as messages:
                    async for message in messages:
                        yield message
                    return
            except ProcessEnded as end:
                if end.by_tokenizer:
                    self._unending[written_by] = None
                    if len(self._unending) > _MOST_UNENDING:
                        del self._unending[next(iter(self._unending))]
                    log.warning("the process that answered for %s has ended: %s", served.name, end.reason)
                    yield AnswerRefused(message=end.reason, is_request=True)
                    return
                # One that was idle may end while a request is on its way, and another device may be free.
                if end.unanswered and not is_last:
                    continue
                if end.gave_way:
                    raise NotServed(await self._why_busy(process.device)) from end
                log.warning("the process that answers for %s has ended: %s", served.name, end.reason)
                raise NotServed(
                    f"the process that answers for {served.name!r} has ended ({end.reason}): send this again", 1
                ) from end

    async def _process_for(self, served: Served) -> ServingProcess:
        async with self._placing:
            process = self._processes.get(served.key)
            if process is not None and not process.has_ended:
                if not await self._can_leave(process):
                    return process
                process.end("a device is free: it need not answer beside a training")
                await process.ended()
            place = await self._place(served)
            memory = await asyncio.to_thread(self._memory_beside, served) if place.beside else 0
            directory = self._directory / uuid4().hex[:12]
            spec = ServeSpec(
                source=served.source,
                adapters=directory / ADAPTERS,
                device=place.device.partition(":")[0],
                idle_seconds=self._settings.serving_idle_seconds,
                beside=place.beside,
            )
            slots = FairSlots(_AT_ONCE, _OF_CALLER if self._settings.credentials else _AT_ONCE)
            process = ServingProcess(self._launcher, directory, spec, place.device, self._space, slots, self._python)
            process.memory = memory
            self._processes[served.key] = process
            log.info("serving %s on %s%s", served.source.model, place.device, _BESIDE if place.beside else "")
            return process

    async def _place(self, served: Served) -> _ServingPlace:
        """A device that no job has, with room for one more process; or the CPU beside the training of the model. Raises
        NotServed: all are taken, or the memory does not suffice."""
        self._processes = {key: process for key, process in self._processes.items() if not process.has_ended}
        holders = await asyncio.to_thread(self._store.holders)
        free = self._free(holders)
        if not free:
            if served.training is None:
                raise NotServed(_why(self._devices, holders))
            free = [_ServingPlace("cpu", beside=True)]
        on = Counter(_ServingPlace(one.device, one.is_beside) for one in self._processes.values())
        place = min(free, key=lambda place: on[place])
        if on[place] >= self._settings.serving_processes:
            place = await self._emptied(free)
        return place

    def busy(self) -> Mapping[str, str]:
        """Device -> the job that has it, where trainings have all devices; empty: a model can answer."""
        holders = self._store.holders()
        found = {device: job for device in self._devices if (job := _holder(device, holders)) is not None}
        return found if len(found) == len(self._devices) else {}

    def _free(self, holders: Mapping[str, str]) -> list[_ServingPlace]:
        return [_ServingPlace(device) for device in self._devices if _holder(device, holders) is None]

    async def _can_leave(self, process: ServingProcess) -> bool:
        """Whether a process beside a training answers nothing now, and a device is free by now: it would answer slowly
        there as long as it is asked often enough."""
        if not process.is_beside or process.callers:
            return False
        return bool(self._free(await asyncio.to_thread(self._store.holders))) and not process.callers

    async def _emptied(self, places: Sequence[_ServingPlace]) -> _ServingPlace:
        """One of some places, of which a process that is answering nothing is ended, or one of several that another
        caller has for itself. Raises NotServed."""
        processes = [(one, _ServingPlace(one.device, one.is_beside)) for one in self._processes.values()]
        there = [(one, place) for one, place in processes if place in places]
        unused = [(one, place) for one, place in there if not one.callers] or self._of_one_caller(there)
        if not unused:
            raise NotServed(
                f"{len(self._processes)} other models are answering, as many as serving_processes allows: send this "
                "again when their answers have ended",
                5,
            )
        oldest, place = min(unused, key=lambda one: one[0].used_at)
        oldest.end("another caller's model needs its place")
        await oldest.ended()
        return place

    def _of_one_caller(
        self, processes: Sequence[tuple[ServingProcess, _ServingPlace]]
    ) -> list[tuple[ServingProcess, _ServingPlace]]:
        """Those that answer a caller alone who has several, where the caller of this request has none: otherwise one
        caller could keep every other model from answering."""
        if any(caller_name() in one.callers for one in self._processes.values()):
            return []
        alone = [(one, place) for one, place in processes if len(one.callers) == 1]
        count = Counter(next(iter(one.callers)) for one, _ in alone)
        return [(one, place) for one, place in alone if count[next(iter(one.callers))] > 1]

    def _memory_beside(self, served: Served) -> int:
        """Bytes that a process beside the training will need. Raises NotServed: they are not free."""
        try:
            needed = served.memory()
        except OSError as error:
            raise NotServed(
                f"the files of {served.name!r} cannot be read ({error.strerror}): send this again", 1
            ) from error
        # What others have not loaded yet is free now, and will not be.
        loading = sum(one.memory for one in self._processes.values() if not one.is_ready and not one.has_ended)
        free = max(0, self._memory() - loading)
        if needed is not None and needed <= free:
            return needed
        size = "an unknown amount of" if needed is None else f"{needed / 2**30:.1f} GiB of"
        raise NotServed(
            f"a training comes first: job {served.training!r} trains, and a process that answers beside it would need "
            f"{size} memory, of which {free / 2**30:.1f} GiB are free. Send this again when the job has ended; GET "
            "/v1/post-training/queue shows it"
        )

    async def _why_busy(self, device: str) -> str:
        return _why([device], await asyncio.to_thread(self._store.holders))


def _holder(device: str, holders: Mapping[str, str]) -> str | None:
    """The job that has a device, or a part of it."""
    parts = (place for place in holders if place == device or (device == "cpu" and place.startswith(CORE)))
    return next((holders[place] for place in parts), None)


def _why(devices: Sequence[str], holders: Mapping[str, str]) -> str:
    """Why a chat waits for a training."""
    named = [(device, _holder(device, holders)) for device in devices]
    held = ", ".join(f"job {job!r} has {device}" for device, job in named if job is not None)
    found = held or f"a training of another program has {', '.join(devices)}"
    return f"a training comes first: {found}. Send this again when it has ended; GET /v1/post-training/queue shows it"
