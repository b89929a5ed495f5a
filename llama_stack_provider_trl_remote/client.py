"""HTTP client of the training service: for the adapter inside Llama Stack, `trl-remote` and `TrlClient`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientConnectorSSLError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    TCPConnector,
)

from llama_stack_provider_trl.errors import JobNotFound, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.requests.names import JOB_UUID_PATTERN
from llama_stack_provider_trl.system.files import Blob
from llama_stack_provider_trl.system.offload import USER_HEADER

JOBS = "/v1/post-training/jobs"
_PAGES = 1000
"""Pages of a list that are requested at most."""
SUPERVISED_FINE_TUNE = "/v1/post-training/supervised-fine-tune"
PREFLIGHT = "/v1/post-training/preflight"
QUEUE = "/v1/post-training/queue"
PREVIEW = "/v1/post-training/preview"
CHAT = "/openai/v1/chat/completions"
PIPELINE = "/v1/post-training/pipelines"
PREFERENCE_OPTIMIZE = "/v1/post-training/preference-optimize"
SLOWEST_UPLOAD = 1 << 20
"""Lowest speed of an upload, in bytes per second."""
SLOWEST_DISK = 32 << 20
"""Lowest speed at which the service forces an upload to its disk before it answers, in bytes per second."""
log = logging.getLogger(__name__)
_CHUNK = 1 << 18
MIB = 1 << 20
_MOST_ERROR = MIB
"""Bytes of an answer that is an error."""
_MOST_DETAIL = 4096
"""Characters of its message."""
LONGEST_ANSWER = 3600.0
"""Seconds that a chat waits for the next part of its answer at most; the service ends it before (chat_timeout)."""
MOST_EVENT = 8 * MIB
"""Bytes of a server-sent event; the service sends 2 MiB at most."""
_VALUE_BYTES = 16
"""Bytes of JSON for each value, at the least, on average over an answer: an empty object has 3 and takes 64 in
memory."""
_BUSY = (502, 503, 504)
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}
"""OpenSSL's names, by version, for an answer in plain text."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: seconds before the first probe, seconds between two, and their number.

Some answers take the service an hour. A service whose machine is gone is noticed after half a minute."""


class Timeouts(NamedTuple):
    """Timeouts in seconds; `TrlRemoteConfig` documents them."""

    connect: float = 5.0
    read: float = 60.0
    total: float = 120.0
    submit: float = 900.0


class ServerEvent(NamedTuple):
    kind: str
    """Empty where the service names none: an event of the job."""
    id: str
    data: str


class ServiceAnswer(NamedTuple):
    """A complete answer."""

    status: int
    content_type: str
    body: bytes
    offset: str | None = None
    """Header Upload-Offset: bytes that the service has of a file that is sent in parts."""


def json_of(body: bytes, most: int) -> Any:
    """A JSON document that another program has sent.

    Args:
        most: bytes that such a document has at most.

    Raises:
        ValueError: it is none.
        OverflowError: it would take more memory than its bytes suggest; says what it is.
    """
    values = most // _VALUE_BYTES
    if sum(map(body.count, (b",", b"[", b"{"))) > values:  # each takes memory of its own
        raise OverflowError(f"a document of more than {values} values")
    try:
        return json.loads(body)
    except RecursionError as error:
        raise OverflowError("a document of too many levels") from error


class ServiceClient:
    """Calls the service.

    Every request has a connection of its own. So nothing is bound to an event loop (Llama Stack closes the one in which
    it creates its providers), nothing has to be closed, and no connection is stale.

    A request that can be repeated without harm is repeated after a lost connection or an answer of 502 to 504, once for
    each of `pauses`. A refused connection sent nothing, so every request is repeated then. A timeout is not: the caller
    has waited long enough. The exception is `submit`, since the service may have a large dataset to check.

    Nothing that the service sends is received without a limit, since another program may listen in its place.

    Args:
        url: address of the service, as `address.checked_url` returns it.
        token: sent as a bearer token.
        pauses: seconds before each repetition.
        tls: trusted certificates for an https address; None: those of the system.
        user: returns the name of the user for whom it calls; empty: not known. The service gets its digest.
    """

    most_answer = 64 * MIB
    """Bytes of an answer; files and streams have limits of their own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (a tuple)
        pauses: Sequence[float] = (0.25, 0.5, 1.0),
        tls: ssl.SSLContext | None = None,
        user: Callable[[], str] = str,
    ) -> None:
        self.url = url
        self._user = user
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeouts = timeouts
        self._pauses = tuple(pauses)
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._identified = False

    async def submit(self, path: str, body: dict[str, Any]) -> Any:
        """POST a job. Its job_uuid makes it one job, however often it is sent. Where the service checks a large dataset
        before it answers, the POST is repeated, and the service continues the check that it has begun."""
        began = time.monotonic()
        while True:
            try:
                return self._json_of(await self._call("POST", path, repeat=True, json=body))
            except ServiceUnreachable as error:
                waited = time.monotonic() - began
                if not _fell_silent(error) or waited >= self._timeouts.submit:
                    raise
                await self.get("/v1/health")  # fails where the service is gone
                notice = "%s has not answered a POST for %.0f s (checking a large dataset takes long): repeating it"
                log.warning(notice, self.url, waited)

    async def get(self, path: str, **params: Any) -> Any:
        """GET a JSON document; parameters that are None are left out."""
        return self._json_of(await self._call("GET", path, repeat=True, params=_given(params)))

    async def get_all(self, path: str, **params: Any) -> Any:
        """GET all pages of a list as one document."""
        answer = page = await self.get(path, **params)
        for _ in range(_PAGES):
            following = page.get("next") if isinstance(page, dict) else None
            if following is None or not page.get("data"):
                break
            page = await self.get(path, **{**params, "after": following})
            answer["data"] += page["data"]
        return answer

    async def get_text(self, path: str, **params: Any) -> str:
        answer = await self._call("GET", path, repeat=True, params=_given(params))
        return answer.body.decode(errors="replace")

    async def post(self, path: str, body: Any = None) -> Any:
        """POST a request that must not be repeated."""
        # Without a body aiohttp would declare application/octet-stream, which the service refuses.
        return self._json_of(await self._call("POST", path, json={} if body is None else body))

    async def delete(self, path: str) -> None:
        await self._call("DELETE", path)

    async def status(self, job_uuid: str, config: bool = True) -> Any:
        """The status of a job; without `config` lacks the effective configuration, which is most of it."""
        return await self.get("/v1/post-training/job/status", job_uuid=job_uuid, config=config or None)

    async def artifacts(self, job_uuid: str) -> Any:
        return await self.get("/v1/post-training/job/artifacts", job_uuid=job_uuid)

    async def cancel(self, job_uuid: str) -> None:
        await self.post("/v1/post-training/job/cancel", {"job_uuid": job_uuid})

    async def has_blob(self, sha256: str) -> bool:
        try:
            await self._call("HEAD", f"/v1/blobs/{sha256}", repeat=True)
        except ServiceRefusal as error:
            if error.status == 404:
                return False
            raise
        return True

    async def put_blob(self, sha256: str, file: Path, path: str = "/v1/blobs") -> None:
        """Upload a file in parts.

        Args:
            path: takes it, followed by its digest.
        """
        size = file.stat().st_size
        total, read = self._timeouts.total + size / SLOWEST_UPLOAD, self._timeouts.read + size / SLOWEST_DISK
        # 100-continue: a body that is too large is refused before it is sent, so the refusal always arrives.
        more = {"headers": {"Content-Type": "application/x-ndjson"}, "expect100": True, "total": total, "read": read}
        await self._call("PUT", f"{path}/{sha256}", repeat=True, file=file, **more)

    async def upload_rows(self, blob: Blob) -> None:
        """Upload stored rows, unless the service has them."""
        if not await self.has_blob(blob.sha256):
            await self.put_blob(blob.sha256, blob.path)

    async def holds(self, job_uuid: str) -> bool:
        """Whether the service has a job of this name."""
        try:
            await self.status(job_uuid)
        except ServiceRefusal as error:
            if error.status == 404:
                return False
            raise
        return True

    @asynccontextmanager
    async def download(
        self, path: str, start: int = 0, etag: str = ""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes], str]]:
        """A file from byte `start` on: (the byte at which the service begins, the bytes, the ETag of the file). It may
        begin at 0 again, and does so where the file is no longer that of `etag`."""
        await self._identify()
        headers = {"Range": f"bytes={start}-", **({"If-Range": etag} if etag else {})} if start else {}
        # 0 is no limit: the time for a file depends on disk and network.
        async with self._open("GET", path, total=0, headers=headers) as response:
            if response.status not in (200, 206):
                raise self._refusal(path, await self._read(response))
            begin = start if response.status == 206 else 0
            yield begin, response.content.iter_chunked(_CHUNK), response.headers.get("ETag", "")

    async def stream(self, path: str, after: str = "") -> AsyncGenerator[ServerEvent, None]:
        """Server-sent events behind the one with the id `after`, as they arrive, until the service closes the stream.

        Close it where it is not read to its end: it holds a connection. Nothing is repeated: the caller continues with
        the last id that it has received.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        # The service sends a comment where it has had nothing else for 15 s.
        async with aclosing(self._events("GET", path, headers=headers)) as events:
            async for event in events:
                yield event

    async def stream_answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[ServerEvent, None]:
        """The events of an answer that is streamed to a POST, as `stream`. The first one may be awaited long: the
        model may have to be loaded, and other answers to come first."""
        async with aclosing(self._events("POST", path, read=LONGEST_ANSWER, json=body)) as events:
            async for event in events:
                yield event

    async def _events(self, method: str, path: str, **request: Any) -> AsyncGenerator[ServerEvent, None]:
        await self._identify()
        # 0 is no limit.
        async with self._open(method, path, total=0, **request) as response:
            if response.status != 200:
                raise self._refusal(path, await self._read(response))
            async for event in _server_events(response.content.iter_any()):
                if event is None:
                    raise self.endless(f"an event of more than {MOST_EVENT // MIB} MiB")
                yield event

    async def _call(self, method: str, path: str, *, repeat: bool = False, **request: Any) -> ServiceAnswer:
        """Send a request until its answer is no error, as often as the request permits."""
        await self._identify()
        return await self._tries(method, path, repeat=repeat, **request)

    async def _tries(self, method: str, path: str, *, repeat: bool, **request: Any) -> ServiceAnswer:
        for pause in (*self._pauses, None):
            try:
                answer = await self._once(method, path, **request)
                if answer.status < 300:
                    return answer
                error: Exception = self._refusal(path, answer)
                # A request over a rate limit had no effect, so every request can be repeated.
                again = (repeat and answer.status in _BUSY) or answer.status == 429
            except ServiceUnreachable as unreachable:
                error = unreachable
                again = _refused_connection(unreachable) or (repeat and not _timed_out(unreachable))
            if pause is None or not again:
                raise error
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _once(self, method: str, path: str, *, file: Path | None = None, **request: Any) -> ServiceAnswer:
        if file is None:
            async with self._open(method, path, **request) as response:
                return await self._read(response)
        with open(file, "rb") as body:
            async with self._open(method, path, data=body, **request) as response:
                return await self._read(response)

    async def _read(self, response: ClientResponse) -> ServiceAnswer:
        most = self.most_answer if response.status < 300 else _MOST_ERROR
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK):
            body += chunk
            if len(body) > most:
                raise self.endless(f"an answer of more than {most // MIB} MiB")
        offset = response.headers.get("Upload-Offset")
        return ServiceAnswer(response.status, response.content_type, bytes(body), offset)

    def parsed(self, body: bytes, most: int | None = None, kind: str = "something else") -> Any:
        """A JSON document that the service has sent. Raises ServiceUnreachable: it is none, or would take more memory
        than its bytes suggest.

        Args:
            most: bytes that such a document has at most; None: those of an answer.
            kind: of the content, for the error.
        """
        try:
            return json_of(body, self.most_answer if most is None else most)
        except OverflowError as error:
            raise self.endless(str(error)) from error
        except ValueError as error:
            found = f"answered {kind} where JSON was expected"
            raise ServiceUnreachable(self.url, found, "check that TRL_SERVICE_URL is its address") from error

    def endless(self, what: str) -> ServiceUnreachable:
        """The error of something that no service sends."""
        advice = "check that TRL_SERVICE_URL is its address"
        return ServiceUnreachable(self.url, f"sends {what}, which no service does", advice)

    def _json_of(self, answer: ServiceAnswer) -> Any:
        """The JSON document of an answer; None: it is empty."""
        return self.parsed(answer.body, kind=answer.content_type) if answer.body else None

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, *, total: float | None = None, read: float | None = None, **request: Any
    ) -> AsyncIterator[ClientResponse]:
        """Send one request; every failure to receive its answer becomes a ServiceUnreachable."""
        connect, usual_read, usual, _ = self._timeouts
        read = usual_read if read is None else read
        began = time.monotonic()
        timeout = ClientTimeout(total=usual if total is None else total, sock_connect=connect, sock_read=read)
        user = self._user()
        on_behalf = {USER_HEADER: hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()} if user else {}
        try:
            async with (
                ClientSession(
                    # Nothing is unpacked: a few KiB may become GiB.
                    headers={**self._headers, **on_behalf, "Accept-Encoding": "identity"},
                    auto_decompress=False,
                    timeout=timeout,
                    connector=TCPConnector(socket_factory=_watched_socket),
                ) as session,
                # Redirects would carry the token to the host that they name.
                session.request(method, self.url + path, allow_redirects=False, ssl=self._tls, **request) as response,
            ):
                log.debug("%s %s: %d after %.3f s", method, path, response.status, time.monotonic() - began)
                yield response
        except ConnectionTimeoutError as error:
            raise ServiceUnreachable(self.url, f"accepted no connection within {connect:g} s") from error
        except TimeoutError as error:
            advice = "repeat it (a repeated POST of a job is the same job), or raise the timeouts of remote::trl_remote"
            found = f"has not answered {method} {path} within {min(read, timeout.total or read):g} s"
            raise ServiceUnreachable(self.url, found, advice) from error
        except ClientConnectorCertificateError as error:
            found = f"has a certificate that is not trusted here ({error.certificate_error})"
            raise ServiceUnreachable(self.url, found, _advice_about(error.certificate_error)) from error
        except ClientConnectorSSLError as error:
            if getattr(error.os_error, "reason", None) in _NO_TLS:
                found = f"speaks no TLS ({_reason(error)})"
                raise ServiceUnreachable(
                    self.url, found, "name it with http://, or give it tls_cert and tls_key"
                ) from error
            found, advice = f"accepts no TLS connection ({_reason(error)})", "compare the TLS settings of both machines"
            raise ServiceUnreachable(self.url, found, advice) from error
        except ClientConnectorError as error:
            raise ServiceUnreachable(self.url, f"accepts no connection ({_reason(error)})") from error
        except ClientError as error:
            found, advice = f"broke off {method} {path} ({_reason(error)})", "read its log; it may be restarting"
            if not self._identified and self.url.lower().startswith("http://"):
                # A server with TLS closes the connection on a request in plain text.
                advice += ", or it may want https://"
            raise ServiceUnreachable(self.url, found, advice) from error

    async def _identify(self) -> None:
        """Check once that a training service is listening.

        Llama Stack serves some of its paths too, and an adapter with the URL of its own Llama Stack would call itself
        forever."""
        if self._identified:
            return
        answer = await self._tries("GET", "/v1/health", repeat=True)
        health = self._json_of(answer)
        if not isinstance(health, dict) or "version" not in health:
            raise self._stranger(f"GET /v1/health gives {str(health)[:80]}")
        self._identified = True

    def _refusal(self, path: str, answer: ServiceAnswer) -> Exception:
        detail = _detail(answer)
        if answer.status < 400 or (answer.status == 404 and detail == "Not Found"):
            return self._stranger(f"{path} gives {answer.status}")
        return ServiceRefusal(self.url, answer.status, detail or f"no reason given ({path})")

    def _stranger(self, found: str) -> ServiceUnreachable:
        return ServiceUnreachable(
            self.url,
            f"is something else: {found}",
            "set TRL_SERVICE_URL, or the url of remote::trl_remote, to the service's address (port 8322 by default)",
        )


def _advice_about(problem: Exception) -> str:
    """What to do about a certificate that is refused. Nothing is sent to a service that has one."""
    match getattr(problem, "verify_code", None):
        case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
            return "name the service as its certificate does, or give it a certificate with this name (subjectAltName)"
        case 9 | 10:  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
            return "give the service a new tls_cert and start it again, or set the clock of this machine"
    return "set SSL_CERT_FILE to the file of that certificate, or have its authority trusted on this machine"


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """TCP keepalive for an entry of getaddrinfo, on Linux. macOS has another name for the first option, and keeps its
    two hours."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def job_path(job_uuid: str, rest: str = "") -> str:
    """Path of a job's own resource. Raises JobNotFound: no job can have this name."""
    if not re.fullmatch(JOB_UUID_PATTERN, job_uuid):
        raise JobNotFound(job_uuid)
    return f"{JOBS}/{quote(job_uuid)}{rest}"


async def _server_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[ServerEvent | None]:
    """Events out of the bytes of a stream, without comments; None: one has no end.

    Not by aiohttp's `readline`, which refuses lines of 128 KiB; an event may have 2 MiB."""
    rest = b""
    async for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        if len(rest) > MOST_EVENT:
            yield None
            return
        for block in blocks:
            lines = (line.partition(": ") for line in block.decode(errors="replace").split("\n"))
            fields = {name: value for name, _, value in lines}
            if "data" in fields:
                yield ServerEvent(fields.get("event", ""), fields.get("id", ""), fields["data"])


def _detail(answer: ServiceAnswer) -> str:
    """The message of an error answer; the beginning of its text where it has none."""
    try:
        body = json.loads(answer.body)
        detail = body["detail"] if "detail" in body else body["error"]["message"]  # the second: of OpenAI's calls
        return (detail if isinstance(detail, str) else json.dumps(detail))[:_MOST_DETAIL]
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(answer.body.decode(errors="replace").split())[:200]


def _given(params: dict[str, Any]) -> dict[str, str]:
    shown = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in params.items()}
    return {name: shown[name] for name, value in params.items() if value is not None}


def _refused_connection(error: ServiceUnreachable) -> bool:
    return isinstance(error.__cause__, ClientConnectorError)


def _fell_silent(error: ServiceUnreachable) -> bool:
    """Whether the service accepted the connection and then sent nothing."""
    return _timed_out(error) and not isinstance(error.__cause__, ConnectionTimeoutError)


def _timed_out(error: ServiceUnreachable) -> bool:
    return isinstance(error.__cause__, TimeoutError)


def _reason(error: ClientError) -> str:
    cause = getattr(error, "os_error", error)
    if isinstance(cause, ssl.SSLError) and cause.reason:
        # Its errno is not the system's: 1 would be "Operation not permitted".
        return cause.reason.replace("_", " ").lower()
    number = getattr(cause, "errno", None) or 0
    # asyncio's own text is "Connect call failed"; errors of name resolution have negative numbers and clear texts.
    text = os.strerror(number) if number > 0 else getattr(cause, "strerror", None) or str(cause)
    return text or type(cause).__name__
