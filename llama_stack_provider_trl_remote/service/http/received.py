"""Bounds the bytes of request bodies that are held in memory, and parses them.

A body of JSON takes up to 50 times its size as objects. So the values of a small one are counted before it is parsed.
A body with rows goes to a file and is parsed by a process of its own (`registration`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llama_stack_provider_trl.errors import Shortage, StoreError, shortage_behind, shortage_of, trouble_of
from llama_stack_provider_trl.system.offload import CallThreads, storing, to_its_end
from llama_stack_provider_trl.system.texts import DuplicateKey, parse_json

log = logging.getLogger(__name__)
MIB = 1 << 20
SMALL = 64 << 10
"""Bytes of a body that never waits for others."""
_IN_MEMORY = MIB
"""Bytes of rows that are parsed in this process. Another process takes a third of a second to start."""
_VALUES_PER_MIB = 20_000
MAX_DEPTH = 64
TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep: flatten it"
_TOTAL = 32 * MIB
_WAITING = 100
"""Requests that may wait for memory. Each may have 64 KiB in the buffers of its connection."""
_PATIENCE = 10.0
"""Seconds that a request waits for memory, unread."""
_SHARE = 4
"""Part of the memory, and of the waiting requests, that one caller may have."""
_GRACE, _BYTES_PER_SECOND = 30.0, 64 << 10
"""Seconds within which a body with reserved memory has to come, and bytes that prolong them by one second."""
_BUSY = (
    "the service is receiving as many large bodies as it has memory for, in all or of this caller: send it again in a "
    "few seconds"
)


class BodyMemory:
    """Bytes of bodies that may be held at a time, and a quarter of them by one caller."""

    def __init__(self, total: int = _TOTAL, patience: float = _PATIENCE) -> None:
        self._free = self._total = total
        self._patience = patience
        self._changed = asyncio.Condition()
        self._held: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def reserved(self, size: int, caller: str = "") -> AsyncIterator[None]:
        """Reserve memory for a body, for as long as the block lasts. Raises HTTPException: 503, memory was not free in
        time."""
        size = min(size, self._total)
        await self._take(size, caller)
        try:
            yield
        finally:
            async with self._changed:
                self._free += size
                _subtract(self._held, caller, size)
                self._changed.notify_all()

    async def _take(self, size: int, caller: str) -> None:
        if self._waiting.total() >= _WAITING or self._waiting[caller] >= _WAITING // _SHARE:
            raise busy()
        self._waiting[caller] += 1
        try:
            async with asyncio.timeout(self._patience), self._changed:
                await self._changed.wait_for(lambda: self._has_room(size, caller))
                self._free -= size
                self._held[caller] += size
        except TimeoutError:
            raise busy() from None
        finally:
            _subtract(self._waiting, caller, 1)

    def _has_room(self, size: int, caller: str) -> bool:
        held = self._held[caller]
        # A single body may be larger than the share of its caller.
        return self._free >= size and (not held or held + size <= self._total // _SHARE)


def _subtract(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]


class RowParser(Protocol):
    """Parses bodies with too many rows for this process."""

    def spool(self, size: int, caller: str) -> AbstractAsyncContextManager[BinaryIO]:
        """A file to write a body of at most `size` bytes to; one of few at a time. Raises HTTPException."""

    async def parse(self, file: Path) -> tuple[Any, Any]:
        """Parse a spooled body. Returns it without its rows, and the location of these. Raises HTTPException."""


class Received(Request):
    """A request whose body is bounded.

    Args:
        limit: bytes of its body.
        rows: parses large bodies; None: bodies are never large.
        stack: closed when the request has been answered.
    """

    def __init__(
        self,
        request: Request,
        caller: str,
        limit: int,
        memory: BodyMemory,
        parser: CallThreads,
        rows: RowParser | None,
    ) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._caller = caller
        self._limit, self._memory, self._parser, self._rows = limit, memory, parser, rows
        self.stack = AsyncExitStack()
        self._spooled: Path | None = None

    async def body(self) -> bytes:
        """Receive the whole body. Raises HTTPException: 408, 503, 507."""
        with _answered():
            return await self._whole()

    async def json(self) -> Any:
        """The body as objects; the bytes are dropped.

        Raises:
            HTTPException: it holds too many values, or too deep ones; 408, 503, 507.
            ValueError: it is not JSON.
        """
        with _answered():
            return await self._parsed()

    async def _whole(self) -> bytes:
        if not hasattr(self, "_body"):
            size = self._size if self._rows is None else min(self._size, _IN_MEMORY)
            if size > SMALL:
                await self.stack.enter_async_context(self._memory.reserved(size, self._caller))
                self._body = await self._receive_in_time()
            else:
                self._body = await self._receive_all(lambda count: None)
        return self._body

    @property
    def _size(self) -> int:
        """Bytes that the body may have: as announced, or the limit."""
        announced = self.headers.get("content-length", "")
        return min(int(announced[:19]), self._limit) if announced.isdecimal() else self._limit

    async def _parsed(self) -> Any:
        data = await self._whole()
        if self._spooled is None and self._rows is not None and _values(data) > _VALUES_PER_MIB:
            with storing():
                file = await self.stack.enter_async_context(self._rows.spool(len(data), self._caller))
                await to_its_end(_fill, file, data)
            self._spooled = Path(file.name)
        self._body = b""
        if self._spooled is not None:
            assert self._rows is not None
            found, self.state.rows = await self._rows.parse(self._spooled)
            return found
        most = _VALUES_PER_MIB * max(1, self._limit // MIB)
        if len(data) <= SMALL:
            return parse(data, most)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, data, most)

    async def _receive_in_time(self) -> bytes:
        """As `_receive_all`, within `_GRACE` seconds and one more for every `_BYTES_PER_SECOND` that were received.
        Raises HTTPException: 408."""
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(_GRACE) as bound:
                return await self._receive_all(
                    lambda count: bound.reschedule(begun + _GRACE + count / _BYTES_PER_SECOND)
                )
        except TimeoutError:
            if not bound.expired():
                raise
            raise HTTPException(
                408,
                f"the body came too slowly: expected {_BYTES_PER_SECOND >> 10} KiB per second after {_GRACE:.0f} s; "
                "send it again over a faster connection, or a smaller one",
                {"Connection": "close"},
            ) from None

    async def _receive_all(self, note: Callable[[int], None]) -> bytes:
        """Receive the body. One that is too large for memory goes to a file, and a byte stands for it. `note` is called
        with the number of bytes received so far."""
        data = bytearray()
        count = 0
        file: BinaryIO | None = None
        async for piece in self.stream():
            data += piece
            count += len(piece)
            note(count)
            if self._rows is not None and len(data) > _IN_MEMORY:
                with storing():
                    if file is None:
                        file = await self.stack.enter_async_context(self._rows.spool(self._size, self._caller))
                    await to_its_end(file.write, bytes(data))
                data.clear()
        if file is None:
            return bytes(data)
        with storing():
            await to_its_end(_fill, file, bytes(data))
        self._spooled = Path(file.name)
        return b" "


class Bodies:
    """The limits that all bodies of a service share."""

    def __init__(self, rows: RowParser | None = None) -> None:
        self._rows = rows
        # Apart, so that clients cannot keep nodes from reporting.
        self._of_users, self._of_nodes = BodyMemory(), BodyMemory()
        self._parser = CallThreads(1, "trl-json")

    def receive(self, request: Request, caller: str, limit: int, *, of_node: bool, has_rows: bool) -> Received:
        """A request with a body of at most `limit` bytes."""
        memory = self._of_nodes if of_node else self._of_users
        return Received(request, caller, limit, memory, self._parser, self._rows if has_rows else None)

    def close(self) -> None:
        self._parser.shutdown(wait=False)


def bounded(
    handler: Callable[[Request], Awaitable[Response]], received: Callable[[Request], Received]
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler that gets its request as `Received`."""

    async def handle(request: Request) -> Response:
        found = received(request)
        async with found.stack:
            return await handler(found)

    return handle


def parse(data: bytes, most: int) -> Any:
    """JSON as objects.

    Args:
        most: values that it may hold.

    Raises:
        HTTPException: it has more, or more than `MAX_DEPTH` levels, or an object with a key twice; it is not UTF-8.
        json.JSONDecodeError: it is not JSON.
    """
    if _values(data) > most:
        raise HTTPException(400, f"the body holds more than {most} values: send a smaller one")
    try:
        found = parse_json(data)
    except RecursionError:
        raise HTTPException(400, TOO_DEEP) from None
    except DuplicateKey as error:
        raise HTTPException(400, f"in the body {error}") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise HTTPException(400, f"the body cannot be read: {error}") from None
    if is_too_deep(found):
        raise HTTPException(400, TOO_DEEP)
    return found


def is_too_deep(parsed: Any) -> bool:
    """Whether what was parsed has more than `MAX_DEPTH` levels."""
    level, depth = [parsed], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        level = [item for value in level for item in _items(value)]
    return False


def busy() -> HTTPException:
    """The answer to a request for which no memory is free."""
    return HTTPException(503, _BUSY, {"Retry-After": "5", "Connection": "close"})


@contextmanager
def _answered() -> Iterator[None]:
    """Raise HTTPException in place of an error of storage or of the system: FastAPI would answer 400, as if the body
    were wrong."""
    try:
        yield
    except Exception as error:
        trouble = shortage_behind(error) if isinstance(error, StoreError) else trouble_of(error)
        if trouble is None:
            raise
        log.warning("a body is not received: %s", error, exc_info=None if shortage_of(error) else error)
        raise unstored(error, trouble) from error


def unstored(error: Exception, shortage: Shortage | None = None) -> HTTPException:
    """The answer to a body that the disk does not take."""
    shortage = shortage or shortage_behind(error)
    return HTTPException(shortage.status, shortage.described(error), {**shortage.headers, "Connection": "close"})


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _values(data: bytes) -> int:
    """Upper bound for the number of values in a JSON text: what is in strings counts too."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _fill(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
