"""Routes are declared in one module and built where they are served."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute

from llama_stack_provider_trl_remote.service.http.declared_routes import Routes


def test_a_route_is_built_once_for_each_path_under_which_it_is_served() -> None:
    """FastAPI's own router would build it when it is declared, and each path again at the first call."""
    built: list[str] = []

    class Counted(APIRoute):
        def get_route_handler(self) -> Any:
            built.append(self.path)
            return super().get_route_handler()

    routes = Routes(Counted, prefix="/things", tags=["of a test"])

    @routes.get("/{name}", response_class=Response)
    async def named(name: str) -> Response:
        return Response(name)

    assert built == []
    app = FastAPI()
    served = [route.path for prefix in ("/v1", "/v2") for route in routes.serve(app, prefix)]
    sent: list[Any] = []

    async def call() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v2/things/a", "headers": [], "query_string": b""}
        await app(scope, lambda: asyncio.Event().wait(), send)  # type: ignore[arg-type,return-value]

    asyncio.run(call())
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"a")
    assert built == served == ["/v1/things/{name}", "/v2/things/{name}"]
    assert [call["get"]["tags"] for path, call in app.openapi()["paths"].items() if path in built] == [
        ["of a test"]
    ] * 2
