"""Declares routes in one module and builds them where they are served.

FastAPI's own router builds a route when it is declared, which nothing answers with, and again for each prefix under
which it is included, at the first call: its parameters, its body and its answer each with a validator. A service
with its routes built twice or three times takes some MiB more, and its first call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.routing import APIRoute


class _Declared(NamedTuple):
    method: str
    path: str
    endpoint: Callable[..., Any]
    options: dict[str, Any]


class Routes:
    """Routes of a module, by decorators as those of FastAPI's router.

    Args:
        tags: under which the OpenAPI document lists them.
    """

    def __init__(
        self,
        route_class: type[APIRoute],
        prefix: str = "",
        tags: Sequence[str] = (),
        include_in_schema: bool = True,
    ) -> None:
        self._route_class, self._prefix, self._tags, self._shown = route_class, prefix, tags, include_in_schema
        self._declared: list[_Declared] = []

    def _declare(self, method: str, path: str, **options: Any) -> Callable[..., Any]:
        """Declare a route. Options: those of FastAPI's decorators."""

        def declare[Endpoint: Callable[..., Any]](endpoint: Endpoint) -> Endpoint:
            self._declared.append(_Declared(method, path, endpoint, options))
            return endpoint

        return declare

    get = partialmethod(_declare, "GET")
    head = partialmethod(_declare, "HEAD")
    post = partialmethod(_declare, "POST")
    put = partialmethod(_declare, "PUT")
    delete = partialmethod(_declare, "DELETE")

    def serve(self, app: FastAPI, prefix: str, dependencies: Sequence[Any] = ()) -> Iterator[APIRoute]:
        """Build the routes for an application, in the order in which they were declared; returns them one by one.

        Args:
            dependencies: of each, before its own.
        """
        for method, path, endpoint, options in self._declared:
            given = {**options, "dependencies": [*dependencies, *options.get("dependencies", ())]}
            given |= {"include_in_schema": self._shown and options.get("include_in_schema", True)}
            app.router.add_api_route(
                f"{prefix}{self._prefix}{path}",
                endpoint,
                methods=[method],
                tags=list(self._tags),
                route_class_override=self._route_class,
                **given,
            )
            built = app.router.routes[-1]
            assert isinstance(built, APIRoute)
            yield built
