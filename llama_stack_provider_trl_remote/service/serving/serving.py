"""Answers requests with processes that are started on demand, at most a few on each device.

A process is started where no job has the device, and its runner gives the device up when a training wants it. It ends
when it is idle, when another model needs its place, and with the service. Nothing of it survives a restart.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from uuid import uuid4

from llama_stack_provider_trl.errors import LimitReached, NotServed
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.devices import CORE
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.serving import ADAPTERS, Answer, ServeRequest, ServeSpec
from llama_stack_provider_trl.system.data_dir import DataDir

from ..settings import ServiceSettings
from ..space import Space
from .process import ProcessEnded, ServingProcess
from .served import Served

log = logging.getLogger(__name__)
_AT_ONCE = 4
"""Answers that one process computes in turns."""


class Serving:
    """The processes of a service.

    Args:
        for_jobs: the settings with which names of models are resolved.
        devices: of this machine.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        for_jobs: Settings,
        launcher: Launcher,
        store: Store,
        devices: Sequence[str],
        space: Space,
    ) -> None:
        self._settings, self._for_jobs = settings, for_jobs
        self._launcher, self._store, self._devices, self._space = launcher, store, tuple(devices), space
        self._directory = DataDir(settings.data_dir).serving
        self._python = str(settings.train_python) if settings.train_python else None
        self._processes: dict[tuple[ModelSource, str], ServingProcess] = {}
        self._placing = asyncio.Lock()
        self._chats: Counter[str] = Counter()

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
        """The parts of the answer to a request, as they come.

        Raises:
            NotServed: no process can answer now, or its device was needed.
            OSError: no process can be started, or the disk has no space for a copy of the adapter.
        """
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
        for is_last in (False, True):
            process = await self._process_for(served)
            try:
                async with process.used(), aclosing(process.answer(request, served.adapter)) as messages:
                    async for message in messages:
                        yield message
                    return
            except ProcessEnded as end:
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
                return process
            device = await self._device()
            directory = self._directory / uuid4().hex[:12]
            spec = ServeSpec(
                source=served.source,
                adapters=directory / ADAPTERS,
                device=device.partition(":")[0],
                idle_seconds=self._settings.serving_idle_seconds,
                at_once=_AT_ONCE,
            )
            process = ServingProcess(self._launcher, directory, spec, device, self._space, self._python)
            self._processes[served.key] = process
            log.info("serving %s on %s", served.source.model, device)
            return process

    async def _device(self) -> str:
        """A device that no job has, with room for one more process. Raises NotServed."""
        self._processes = {key: process for key, process in self._processes.items() if not process.has_ended}
        holders = await asyncio.to_thread(self._store.holders)
        free = [device for device in self._devices if _holder(device, holders) is None]
        if not free:
            raise NotServed(_why(self._devices, holders))
        on = Counter(process.device for process in self._processes.values())
        device = min(free, key=lambda device: on[device])
        if on[device] < self._settings.serving_processes:
            return device
        unused = [process for process in self._processes.values() if not process.users and process.device in free]
        if not unused:
            raise NotServed(
                f"{len(self._processes)} other models are answering, as many as serving_processes allows: send this "
                "again when their answers have ended",
                5,
            )
        oldest = min(unused, key=lambda process: process.used_at)
        oldest.end("another model needs its place")
        await oldest.ended()
        return oldest.device

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
