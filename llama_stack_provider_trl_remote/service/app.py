"""Builds the HTTP application: routes, errors, and the checks before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Security
from fastapi.security import HTTPBearer
from starlette.types import Receive, Scope, Send

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.system.data_dir import DataDir

from ..openai.routes import router as fine_tuning
from .cluster.credentials import NodeCredentials
from .context import Dashboard, Service
from .http.declared_routes import Routes
from .http.errors import describe, handle_errors
from .metrics.registry import Latency
from .pages import (
    answer_pages,
    call_pages,
    compare_pages,
    data_pages,
    job_pages,
    list_pages,
    login,
    new_job_pages,
    node_pages,
    playground_pages,
    static_files,
)
from .routes import agents, datasets, graders, job_files, jobs, live, nodes, openai, tokens
from .routes.service import pages
from .routes.service import router as service_router
from .security.access import CALLER, Caller
from .security.audit import Refusals
from .security.auth import AnyOf, Authenticate, Authenticator, ConfiguredTokens, Gate
from .security.sessions import KnownTokens, Sessions
from .security.streams import add_streams
from .settings import ServiceSettings

_TITLE = "llama-stack-provider-trl training service"
_TEXT = (
    "Post-training (SFT, DPO) as Llama Stack serves it, and what its calls leave out. "
    "docs/reference/service.md explains it."
)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return describe(super().openapi())


def make_app(service: Service) -> FastAPI:
    """Build the application of a service; starts nothing."""
    # Only documents the token: `access.GuardedRoute` checks it, before any of the body is read.
    token = [Security(HTTPBearer(auto_error=False))] if service.settings.credentials else []
    app = _application(service)
    for prefix in ("/v1", "/v1alpha"):
        _include(app, jobs.router, prefix, dependencies=token)
        _include(app, live.router, prefix, dependencies=token)
        _include(app, job_files.router, prefix, dependencies=token)
    for prefix in ("/v1", "/v1beta"):
        _include(app, datasets.router, prefix, dependencies=token)
    _include(app, datasets.blobs, "/v1", dependencies=token)
    _include(app, datasets.readings, "/v1", dependencies=token)
    _include(app, nodes.router, "/v1", dependencies=token)
    _include(app, agents.router, "/v1", dependencies=token)
    _include(app, nodes.pool_router, "/v1", dependencies=token)
    _include(app, tokens.router, "/v1", dependencies=token)
    _include(app, tokens.audit, "/v1", dependencies=token)
    _include(app, tokens.logs, "/v1", dependencies=token)
    _include(app, openai.router, "", dependencies=token)
    _include(app, fine_tuning, "", dependencies=token)
    _include(app, graders.router, "", dependencies=token)
    for prefix in ("/v1", ""):
        _include(app, service_router, prefix)
    for router in (
        pages,
        playground_pages.calls,
        data_pages.calls,
        *(
            each.router
            for each in (
                static_files,
                login,
                list_pages,
                job_pages,
                answer_pages,
                node_pages,
                data_pages,
                compare_pages,
                new_job_pages,
                call_pages,
                playground_pages,
            )
        ),
    ):
        _include(app, router, "")
    own = {service.node_token: Caller.of_node(service.node_name)}
    configured = ConfiguredTokens(service.settings, own)
    # Without a configured token none is needed. If a created token changed that, any call from this machine could lock
    # out every other client.
    known = AnyOf(configured, service.tokens, NodeCredentials(service.store)) if configured else None
    _guarded(app, known, (configured, service.tokens), service.refusals)
    # The last one added is the first to receive a call: refusals are measured too.
    app.add_middleware(Latency, latencies=service.metrics.latencies)
    return app


def make_dashboard(dashboard: Dashboard) -> FastAPI:
    """Build the pages of jobs that another process supervises, with what they read; starts nothing."""
    app = _application(dashboard)
    for router in (live.router, job_files.router):
        _include(app, router, "/v1")
    own_pages = (list_pages, job_pages, answer_pages, compare_pages)
    for router in (static_files.router, login.router, *(each.router for each in own_pages)):
        _include(app, router, "")
    configured = ConfiguredTokens(dashboard.settings)
    return _guarded(app, configured or None, (configured,), None)


def _application(service: Service | Dashboard) -> FastAPI:
    # One way to write each path: a redirect would carry the token along, to the host in the Host header.
    app = _Application(title=_TITLE, description=_TEXT, version=__version__, redirect_slashes=False, openapi_url=None)
    app.state.service = service
    app.state.methods = []
    handle_errors(app)
    return app


def _guarded(
    app: FastAPI, known: Authenticate | None, with_sessions: Iterable[KnownTokens], refusals: Refusals | None
) -> FastAPI:
    """The application with the checks before its routes, which have all been added.

    Args:
        known: None: no token is needed.
        with_sessions: tokens that open sessions of browsers.
    """
    settings: ServiceSettings = app.state.service.settings
    app.router.default = _unknown_path
    add_streams(app.state, settings.max_streams)
    app.state.sessions = Sessions(DataDir(settings.data_dir).sessions, with_sessions)
    app.state.authenticator = Authenticator(known, app.state.sessions)
    app.add_middleware(Gate, settings=settings, authenticator=app.state.authenticator, refusals=refusals)
    return app


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    caller: Caller = scope[CALLER]
    caller.require_known()
    caller.take_request()
    raise HTTPException(404)


def _include(app: FastAPI, routes: Routes, prefix: str, dependencies: Sequence[Any] = ()) -> None:
    app.state.methods += [(route.path_regex, route.methods) for route in routes.serve(app, prefix, dependencies)]
