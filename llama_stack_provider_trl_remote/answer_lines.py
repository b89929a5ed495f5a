"""Reads the answers of jobs that answer prompts, line by line: they may be more than fits in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable

from .client import ServiceClient, job_path

_MOST_LINE = 32 << 20
"""Bytes of an answer to a prompt, which is a row of at most 16 MiB and its answer."""
_PAUSES = (0.25, 0.5, 1.0, 2.0)
"""Seconds before each further try that has received nothing."""


async def answer_lines(client: ServiceClient, job_uuid: str) -> AsyncGenerator[bytes, None]:
    """The lines of a job's answers, as they are stored. Close it where it is not read to its end. Raises
    ServiceRefusal: 404, the job has none; 409, it has not ended, or the answers are other ones than those of the lines
    before."""
    rest = b""
    async with aclosing(_pieces(client, job_path(job_uuid, "/answers"))) as pieces:
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n") if b"\n" in piece else (rest + piece,)
            if len(rest) > _MOST_LINE:
                raise client.endless(f"an answer to a prompt of more than {_MOST_LINE >> 20} MiB")
            for line in lines:
                yield line


async def _pieces(client: ServiceClient, path: str) -> AsyncGenerator[bytes, None]:
    """A file; a connection that breaks is followed by another one, which begins where it broke, in the same file.
    Raises ServiceRefusal: there is another file now."""
    received, failures, etag = 0, 0, ""
    while True:
        before = received
        try:
            async with client.download(path, received, etag) as (begin, pieces, found):
                if received and found != etag:  # the first lines are handed out already
                    raise ServiceRefusal(
                        client.url, 409, "the answers have changed while they were read: read them again"
                    )
                etag = found
                known = received - begin
                async for piece in pieces:
                    new, known = piece[known:], max(0, known - len(piece))
                    received += len(new)
                    yield new
            return
        except ServiceUnreachable:
            failures = 0 if received > before else failures + 1
            if failures > len(_PAUSES):
                raise
            await asyncio.sleep(_PAUSES[max(failures, 1) - 1])
