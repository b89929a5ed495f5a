"""Errors of commands in the words of the command line: commands in place of HTTP calls, and the name that was meant."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from llama_stack_provider_trl.errors import JobNotFound, ServiceRefusal, ServiceUnreachable, TrlError

if TYPE_CHECKING:
    from ..client import ServiceClient

_NEAR = 0.65
"""Likeness from which on a name may be the one that was meant."""
_MOST_NAMES = 1000
_END = r"(?![\w/-])"
"""Behind it the path goes on: another call, which the command does not do."""
_METHOD = "--method {0} (for the request of a file --algorithm {0})"
_CALLS = tuple(
    (re.compile(call), command)
    for call, command in (
        (r"GET /v1/post-training/(?:jobs|queue) lists the jobs of this provider", "trl-remote jobs list shows them"),
        (rf"GET /v1/post-training/(?:jobs|queue){_END}", "trl-remote jobs list"),
        (r"DELETE /v1/post-training/jobs/", "trl-remote jobs delete "),
        (rf"POST /v1/post-training/(generate|evaluate|merge|export){_END}", r"the kind \1"),
        (r"POST /v1/post-training/supervised-fine-tune meant", f"{_METHOD.format('sft')} meant"),
        (r"POST /v1/post-training/preference-optimize meant", f"{_METHOD.format('dpo')} meant"),
        (rf"POST /v1/post-training/(supervised-fine-tune|preference-optimize){_END}", r"\1"),
        (rf"GET /v1/datasets{_END}", "trl-remote datasets list"),
        (r"DELETE /v1/datasets/", "trl-remote datasets delete "),
        (rf"POST /v1/datasets{_END}", "trl-remote datasets add"),
        (
            r"(?:upload rows|send them) with PUT /v1/blobs/\w+(?: and register that)?",
            "use trl-remote datasets add FILE",
        ),
        (rf"GET /v1/nodes{_END}", "trl-remote nodes list"),
        (r"DELETE /v1/nodes/", "trl-remote nodes remove "),
        (r"join first \(POST /v1/nodes\)", "trl-remote agent joins it"),
        (rf"GET /v1/tokens{_END}", "trl-remote tokens list"),
        (r"DELETE /v1/tokens/", "trl-remote tokens revoke "),
        (r"send `Authorization: Bearer TOKEN` with the token", "set TRL_SERVICE_TOKEN to the token"),
        (r" answered \d{3}: ", " refuses this: "),
        (r" has not answered (?:GET|HEAD|POST|PUT|DELETE) \S+ within", " has not answered within"),
        (r" broke off (?:GET|HEAD|POST|PUT|DELETE) \S+ \(", " broke off the connection ("),
        (r" is something else: /?\S+ gives \d{3}", " is something else"),
        (r" is something else: (?:GET )?\S+ gives ", " is something else: it answers "),
    )
)
"""What messages have for programs -> the same for a shell."""


def in_a_shell(text: str) -> str:
    """A message of the service, or of its client, without words of HTTP."""
    for call, command in _CALLS:
        text = call.sub(command, text)
    return text


async def with_the_name_meant(
    command: Callable[[ServiceClient, Namespace], Coroutine[Any, Any, int]], client: ServiceClient, options: Namespace
) -> int:
    """Run a command. Where the service does not know a name of its words, the error names the one that is most like it.
    Raises What the command raises."""
    try:
        return await command(client, options)
    except (ServiceRefusal, JobNotFound) as error:
        named = await error_with_the_name_meant(client, options, error)
        if named is error:
            raise
        raise named from error


async def error_with_the_name_meant(client: ServiceClient, options: Namespace, error: TrlError) -> TrlError:
    """The error of a command, with the known name that is most like the one which the service does not know."""
    is_unknown = error.status == 404 if isinstance(error, ServiceRefusal) else isinstance(error, JobNotFound)
    near = await _nearest(client, options, str(error)) if is_unknown else None
    return error if near is None else ServiceRefusal(client.url, 404, f"{error}; was {near} meant?")


async def _nearest(client: ServiceClient, options: Namespace, detail: str) -> str | None:
    """The known name that is most like the one which the service does not know; None: there is none like it."""
    for field, fetch in _KNOWN.items():
        given = getattr(options, field, None)
        for name in given if isinstance(given, list) else [given]:
            if isinstance(name, str) and repr(job := _job_of(name)) in detail:
                try:
                    names = await fetch(client)
                except (ServiceRefusal, ServiceUnreachable):
                    return None
                # What is known is there: something of it is missing.
                return None if job in names else next(iter(difflib.get_close_matches(job, names, 1, _NEAR)), None)
    return None


def _job_of(name: str) -> str:
    """A name as the service's sentences have it: of a model of a job, the job's."""
    for prefix in ("ft:", "job:"):
        if name.startswith(prefix):
            return name.removeprefix(prefix).partition("/")[0]
    return name


async def names_of_jobs(client: ServiceClient) -> list[str]:
    found = await client.get("/v1/post-training/queue", limit=_MOST_NAMES, offset=0, sort="-created")
    return [one["job_uuid"] for one in found["data"]]


async def _datasets(client: ServiceClient) -> list[str]:
    return [one["identifier"] for one in (await client.get_all("/v1/datasets"))["data"]]


async def _nodes(client: ServiceClient) -> list[str]:
    return [one["node"] for one in (await client.get_all("/v1/nodes"))["data"]]


async def _tokens(client: ServiceClient) -> list[str]:
    return [one["name"] for one in (await client.get_all("/v1/tokens"))["data"]]


_KNOWN = {
    **dict.fromkeys(("job_uuid", "job_uuids", "model", "against"), names_of_jobs),
    "dataset_id": _datasets,
    "node": _nodes,
    "name": _tokens,
}
"""Option of a command that names something -> the names that the service knows."""
