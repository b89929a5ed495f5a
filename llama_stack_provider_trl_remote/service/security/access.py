"""Roles, and the access to each route: declared on the route, enforced before its body is read.

A route of the service carries exactly one `Access` among its dependencies. `GuardedRoute` enforces it, shows it in the
OpenAPI document as `x-roles`, and cannot be constructed without one. No other module decides who may call which route.

No `from __future__ import annotations` here: FastAPI reads the annotations of a dependency's `__call__`.
"""

import hashlib
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, get_args

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.store.tokens import UNLIMITED, Role, TokenLimits
from llama_stack_provider_trl.system.offload import USER_HEADER, serving

from ..http.received import Bodies, Received, bounded
from ..settings import ServiceSettings
from .limits import Bucket
from .recording import Call, record, recorded

CALLER, BODY, ROUTE = "trl_caller", "trl_body", "trl_route"
"""Keys of an ASGI scope: the `Caller`, the `Body` that is being received, and the path template of the route."""
KIB, MIB = 1 << 10, 1 << 20
SMALL = 64 * KIB
"""Bytes of a body that names one thing, or of an unexpected one."""


REFUSALS = frozenset({401, 403, 429})
"""Statuses of refusals: this sender may not do this, or not now."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Refused(HTTPException):
    """Raised when a request is refused before its handler runs. FastAPI passes its own exceptions on from a body's
    reading."""


class Removed(Refused):
    """Raised when a call carries the credential of a node that was removed. -> 410"""

    def __init__(self, node: str, detail: str) -> None:
        self.node = node
        super().__init__(410, detail)


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request."""

    role: Role | None
    """None: no token that this service knows."""
    name: str = ""
    """Name for records and limits: `operator`, `local` where no token is needed, the name of a token, `node:NAME`."""
    node: str | None = None
    """The node whose own credential this is; None: any other token."""
    presented: bool = False
    """Whether the request carried a token at all."""
    unused_credential: str = ""
    """Hash of the node's credential, where this is the first call with it."""
    throttled: bool = False
    """The token was not compared: its address has tried too many wrong ones."""
    limits: TokenLimits = UNLIMITED
    bucket: Bucket | None = field(default=None, compare=False, repr=False)
    """Rate limit of this token; None: its requests are not limited."""
    session: str = field(default="", compare=False, repr=False)
    """Id of the browser's session; empty: the request carried a token, or needs none."""
    check: Callable[[], bool] | None = field(default=None, compare=False, repr=False)
    """Whether the token is still valid; None: it is for as long as the service runs. Cheap: called often."""

    @classmethod
    def of_node(cls, node: str, unused_credential: str = "") -> Self:
        """The caller with a node's own credential. No token can have its name, so that a node with the name of a token
        neither shares its limits nor is mistaken for it in records."""
        return cls("node", f"node:{node}", node, presented=True, unused_credential=unused_credential)

    def still_valid(self) -> bool:
        """Whether the token is still valid: false once it was revoked or has expired since the authentication."""
        return self.check is None or self.check()

    def take_request(self) -> None:
        """Count a request. Raises Refused: 429."""
        if self.bucket is not None and (seconds := self.bucket.take()):
            raise Refused(
                429,
                f"the token {self.name!r} is limited to {self.bucket.rate:g} requests per second: send this one again "
                f"in {math.ceil(seconds)} s",
                {"Retry-After": str(math.ceil(seconds))},
            )

    def require_known(self) -> None:
        """Refuse a caller without a known token. Raises Refused: 401, 429."""
        if self.throttled:
            raise Refused(
                429,
                "too many wrong tokens came from this address: wait a second, then send the right one",
                {"Retry-After": "1"},
            )
        if self.role is None:
            found = "is missing"
            if self.presented:
                found = "is not one that this service knows, or it has expired or was revoked"
            raise Refused(
                401,
                f"the token {found}: send `Authorization: Bearer TOKEN` with the token that the service was given",
                {"WWW-Authenticate": "Bearer"},
            )


class Body:
    """The body of one request as it is received: counted, and refused where it is too large.

    A limit of 0 holds until a route has set its own.
    """

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        announced = headers.get("content-length", "")
        self.announced = int(announced[:19]) if announced.isdecimal() else 0
        """Bytes; 0: the sender does not say."""
        self.waits_for_continue = headers.get("expect", "").lower() == "100-continue"
        """Whether the sender waits for a reply before it sends the body."""
        self.count = 0
        self.whole = False
        self._limit = 0
        self._hint = ""

    def set_limit(self, limit: int, hint: str) -> None:
        """Set the limit. Raises Refused: 413, the body is announced to be larger."""
        self._limit, self._hint = limit, hint
        if self.announced > limit:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        self.count += len(message.get("body", b""))
        self.whole = not message.get("more_body")
        if self.count > self._limit:
            raise self._too_large()
        return message

    async def discard(self) -> int:
        """Receive the next part and drop it. Returns its length."""
        message = await self._receive()
        self.whole = message["type"] != "http.request" or not message.get("more_body")
        return len(message.get("body", b""))

    def _too_large(self) -> Refused:
        size = f"{self._limit // MIB} MiB" if self._limit >= MIB else f"{self._limit // KIB} KiB"
        return Refused(413, f"the body is larger than {size}{self._hint}", {"Connection": "close"})


@dataclass(frozen=True)
class Access:
    """The callers and the body that a route accepts.

    Args:
        roles: of the callers; empty: anyone, without a token.
        body: `json`: nothing or a JSON document; `bytes`: anything; `form`: the fields of a form of our own pages;
            `file`: a file that a script of our own pages sends, with the form token in a header.
        limit: bytes of the body, or the name of the setting that holds its MiB.
        own_node: of the callers with the role node, only the node that the path parameter `name` names.
        join_token: of the callers with the role node, only those with the token of agents, and no node.
        needs_task: of the callers with the role node, only one that takes part in the current attempt of a job which
            this path parameter names, or whose rows it names.
        polls: whether a call counts as a poll of the node that the path parameter `name` names, which are limited.
        record: whether calls that are no reads are in the audit log. Refusals always are.
    """

    roles: frozenset[Role]
    body: Literal["json", "bytes", "form", "file"] = "json"
    limit: int | str = SMALL
    own_node: bool = False
    join_token: bool = False
    needs_task: Literal["job_uuid", "sha256"] | None = None
    polls: bool = False
    record: bool = True

    async def __call__(self) -> None:
        """Do nothing: `GuardedRoute` has called `check` before the body was read."""

    def check(self, scope: Scope, settings: ServiceSettings) -> None:
        """Check caller, content type and announced size of a request. Raises Refused: 400, 401, 403, 413 or 429;
        StoreError."""
        caller: Caller = scope[CALLER]
        if self.roles:
            caller.require_known()
            caller.take_request()
            if caller.role not in self.roles:
                raise Refused(403, _wrong_role(caller.role, self.roles))
            if caller.role == "node" and self.join_token:
                if caller.node is not None:
                    raise Refused(403, "a node's own credential does not open this: send the token of agents")
            elif caller.role == "node" and (self.own_node or self.needs_task):
                self._check_node(caller, scope["path_params"], scope["app"].state.service.store)
            if self.polls and (seconds := scope["app"].state.service.polls.take(scope["path_params"]["name"])):
                raise Refused(
                    429,
                    f"node {scope['path_params']['name'][:64]!r} polls too often: send this one again in "
                    f"{math.ceil(seconds)} s",
                    {"Retry-After": str(math.ceil(seconds))},
                )
        headers = Headers(scope=scope)
        _check_encoding(headers)
        if self.body == "form":
            _check_form(scope["method"], headers)
        elif self.body == "file":
            _check_file(headers)
        elif caller.session and scope["method"] not in _READS:
            raise Refused(403, "the session of a browser only reads here: send `Authorization: Bearer TOKEN`")
        elif self.body == "json":
            _check_content_type(scope["method"], headers)
        hint = ""
        if isinstance(self.limit, str):
            hint = ": upload rows with PUT /v1/blobs/SHA256, or raise" if self.limit == "max_body_mb" else ": raise"
            hint += f" {self.limit} in the service's configuration"
        scope[BODY].set_limit(self.bytes(settings), hint)

    def bytes(self, settings: ServiceSettings) -> int:
        """The limit of the body in bytes."""
        return getattr(settings, self.limit) * MIB if isinstance(self.limit, str) else self.limit

    def _check_node(self, caller: Caller, path: Mapping[str, str], store: Store) -> None:
        """Refuse a node that calls for another, or reads data that its tasks do not need. Raises Refused: 403."""
        if caller.node is None:
            raise Refused(
                403,
                "the token of agents opens nothing but a join: join first (POST /v1/nodes), then send the credential "
                "of its answer as `Authorization: Bearer CREDENTIAL`",
            )
        if self.own_node and caller.node != path["name"]:
            raise Refused(403, f"this credential is another node's: only {path['name'][:64]!r} itself may call this")
        if self.needs_task == "job_uuid" and not store.tasks.has_current_of_job(caller.node, path["job_uuid"]):
            raise Refused(
                403, f"node {caller.node!r} takes part in no current attempt of this job: it reads only those"
            )
        if self.needs_task == "sha256" and not store.tasks.has_current_with_rows(caller.node, path["sha256"]):
            raise Refused(403, f"node {caller.node!r} takes part in no current attempt of a job with these rows")


class GuardedRoute(APIRoute):
    """A route that enforces its `Access`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        given = [found.dependency for found in options.get("dependencies") or ()]
        accesses = [found for found in given if isinstance(found, Access)]
        if len(accesses) != 1:
            raise TypeError(f"the route {path} declares {len(accesses)} Access dependencies, expected exactly one")
        self.access = accesses[0]
        extra = {**(options.pop("openapi_extra", None) or {}), "x-roles": sorted(self.access.roles)}
        if self.access.own_node or self.access.needs_task:
            extra["x-node"] = "itself" if self.access.own_node else "with a current task"
        super().__init__(path, recorded(endpoint), openapi_extra=extra, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return bounded(super().get_route_handler(), self._received)

    def _received(self, request: Request) -> Received:
        service = request.app.state.service
        limit = self.access.bytes(service.settings)
        bodies: Bodies = service.bodies
        caller: Caller = request.scope[CALLER]
        of_node, has_rows = "node" in self.access.roles, self.access.limit == "max_body_mb"
        return bodies.receive(request, caller.name, limit, of_node=of_node, has_rows=has_rows)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope[CALLER]
        work, of_node = scope["app"].state.service.work, caller.role == "node"
        with serving(work, caller.name, of_node=of_node, user="" if of_node else _user(scope)):
            await self._handle(caller, scope, receive, send)

    async def _handle(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self.path
        if scope["method"] not in (self.methods or ()):
            if self.access.roles:
                caller.require_known()  # before the answer names the methods of a path
                caller.take_request()
            return await super().handle(scope, receive, send)
        call = self._call(scope)
        try:
            self.access.check(scope, scope["app"].state.service.settings)
        except Refused as refusal:
            if call is not None and refusal.status_code not in REFUSALS:
                await call.end(refusal.status_code)
            raise
        if call is None:
            return await super().handle(scope, receive, send)
        await record(call, scope, receive, send, super().handle)

    def _call(self, scope: Scope) -> Call | None:
        """None: it is not recorded."""
        service = scope["app"].state.service
        audit = service.audit
        if audit is None or not self.access.record or scope["method"] in _READS:
            return None
        about = {**sender(scope), "method": scope["method"], "route": scope[ROUTE]}
        is_admins = self.access.roles == {"admin"}
        return Call(audit, about, scope.get("path_params", {}), is_admins, service.store.state_of)


def _user(scope: Scope) -> str:
    """A short name for the user behind the token of a request; empty: the request names none."""
    named = Headers(scope=scope).get(USER_HEADER, "")
    return hashlib.sha256(named.encode("latin-1")).hexdigest()[:16] if named else ""


def sender(scope: Scope) -> dict[str, Any]:
    """Sender and address of a request, as fields of the audit log."""
    caller: Caller = scope.get(CALLER) or Caller(None)
    address = (scope.get("client") or ("",))[0]
    return {"caller": caller.name, "role": caller.role, "node": caller.node, "address": address}


_USERS: frozenset[Role] = frozenset({"submit", "admin"})
READER_ROLES: frozenset[Role] = _USERS | {"read"}
"""Of the callers that have pages."""


def _access(roles: frozenset[Role], **body: Any) -> Dependency:
    dependency: Dependency = Depends(Access(roles, **body))
    return dependency


ANYONE = _access(frozenset())
"""Needs no token."""
USERS = _access(_USERS)
USERS_JOB = _access(_USERS, limit=MIB)
"""The body of a job."""
USERS_ROWS = _access(_USERS, limit="max_body_mb")
"""A body that may hold rows."""
USERS_UPLOAD = _access(_USERS, body="bytes", limit="max_upload_mb")
USERS_PART = _access(_USERS, body="bytes", limit=65 * MIB)
"""A part of 64 MiB in a form."""
READERS = _access(READER_ROLES)
"""What reads, and has no effect: it stores nothing and starts no work that outlives the answer."""
METRICS = _access(READER_ROLES | {"metrics"})
"""Numbers of jobs and machines, without rows, models, logs and names of users."""
ADMINS = _access(frozenset({"admin"}))
LOGIN_FORM = _access(frozenset(), body="form", record=False)
"""Needs no session: it opens one. The handler records it."""
LOGOUT_FORM = _access(READER_ROLES, body="form")
USERS_FORM = _access(_USERS, body="form")
USERS_JOB_FORM = _access(_USERS, body="form", limit=4 * MIB)
"""A job's request of 1 MiB, whose quotes and line breaks a form writes as three characters each."""
USERS_FILE = _access(_USERS, body="file", limit="max_upload_mb")
"""Rows that a page sends as the file that a reader has dropped on it."""
USERS_CHAT_FORM = _access(_USERS, body="form", limit=MIB)
"""A chat, or a vote, in a field of a form."""
ADMINS_FORM = _access(frozenset({"admin"}), body="form")
TASK_JOB = _access(READER_ROLES | {"node"}, needs_task="job_uuid")
"""What is read of a job; also for the nodes that it runs on."""
TASK_ROWS = _access(READER_ROLES | {"node"}, needs_task="sha256")
_NODES: frozenset[Role] = frozenset({"node", "admin"})
"""Calls of agents, and of callers with access to everything."""
JOIN = _access(_NODES, limit=MIB)
NODES = _access(_NODES, own_node=True, limit=4 * MIB)
NODES_READ = _access(_NODES, own_node=True)
NODES_POLL = _access(_NODES, own_node=True, limit=4 * MIB, polls=True, record=False)
NODES_EVENTS = _access(_NODES, own_node=True, body="bytes", limit=4 * MIB, record=False)
NODES_ANSWERS = _access(_NODES, own_node=True, body="bytes", limit=MIB, record=False)
NODES_LOG = _access(_NODES, own_node=True, body="bytes", limit=MIB, record=False)
READING_UPLOAD = _access(_NODES, body="bytes", limit="max_upload_mb", join_token=True)
"""Rows that a request waits for; the handler compares the id of the reading."""
NODES_UPLOAD = _access(_NODES, own_node=True, body="bytes", limit="max_upload_mb", record=False)


def calls_of(app: FastAPI, caller: Caller) -> frozenset[str]:
    """The calls that an application has and a caller's role may make, such as `POST /jobs/{job_uuid}/cancel`."""
    return frozenset(
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, GuardedRoute) and (caller.role in route.access.roles or not route.access.roles)
        for method in route.methods or ()
    )


async def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


CurrentCaller = Annotated[Caller, Depends(_caller)]
"""A parameter of a handler: the authenticated caller."""


def _wrong_role(role: Role | None, roles: frozenset[Role]) -> str:
    return (
        f"this call needs a token with the role {one_of(roles)}, yours has the role {role}: use another, or ask the "
        "operator"
    )


def one_of(roles: frozenset[Role]) -> str:
    """Roles in a sentence, the one that may do least first."""
    *others, last = sorted(roles, key=get_args(Role).index)
    return f"{', '.join(others)} or {last}" if others else last


def _check_encoding(headers: Mapping[str, str]) -> None:
    """Refuse a packed body: unpacked it may take a thousand times its size."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise Refused(400, f"the Content-Encoding is {encoding[:100]!r}, expected none: send the body as it is")


def _check_content_type(method: str, headers: Mapping[str, str]) -> None:
    """Require JSON: a page of any origin can post a form here with every other type, but cannot PUT one."""
    if method != "POST":
        return
    if not (headers.get("content-length", "0") != "0" or "transfer-encoding" in headers or "content-type" in headers):
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(400, f"the Content-Type is {kind[:100] or 'missing'!r}, expected application/json: send JSON")


def _check_form(method: str, headers: Mapping[str, str]) -> None:
    """Require a form that a page of this service sent."""
    if method != "POST":
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(
            400,
            f"the Content-Type is {kind[:100] or 'missing'!r}, expected application/x-www-form-urlencoded: this call "
            "is for the forms of the dashboard, programs send JSON to the calls below /v1",
        )
    _require_origin(headers, "form")


def _check_file(headers: Mapping[str, str]) -> None:
    """Require a file that a script of a page of this service sent: no form of any site can send this type, and a script
    of another one needs an answer to its preflight request first, which it does not get."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/octet-stream":
        raise Refused(
            400,
            f"the Content-Type is {kind[:100] or 'missing'!r}, expected application/octet-stream: this call is for the "
            "page of datasets, programs send rows with PUT /v1/blobs/SHA256",
        )
    _require_origin(headers, "file")


def _require_origin(headers: Mapping[str, str], what: str) -> None:
    if "origin" not in headers:  # `auth.Gate` has compared one that is there
        raise Refused(
            403, f"the Origin header is missing, expected that of this service: send the {what} from its page"
        )
