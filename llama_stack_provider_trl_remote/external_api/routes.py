"""Maps calls to paths, as marks on a protocol class or as a router: the server reads one of them."""

import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Body, Request, Response
from fastapi.routing import APIRoute

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.choices import no_such_field
from llama_stack_provider_trl.stack.external import DATASET_LEVELS, OWN_DATASETS, request_context, webmethod

from ..service.http.errors import answer_to


class Route(NamedTuple):
    call: str
    """Name of the provider's method."""
    method: str
    path: str
    """Path below each of the levels, with parameters in braces. The other parameters of a POST are in the body, those
    of other methods in the query."""
    levels: tuple[str, ...] = ("v1", "v1alpha")


ROUTES = (
    Route("supervised_fine_tune", "POST", "/post-training/supervised-fine-tune"),
    Route("preference_optimize", "POST", "/post-training/preference-optimize"),
    Route("get_training_jobs", "GET", "/post-training/jobs"),
    Route("get_training_job_status", "GET", "/post-training/job/status"),
    Route("get_training_job_status", "GET", "/post-training/jobs/{job_uuid}/status"),
    Route("cancel_training_job", "POST", "/post-training/job/cancel"),
    Route("cancel_training_job", "POST", "/post-training/jobs/{job_uuid}/cancel"),
    Route("get_training_job_artifacts", "GET", "/post-training/job/artifacts"),
    Route("get_training_job_artifacts", "GET", "/post-training/jobs/{job_uuid}/artifacts"),
)
DATASET_ROUTES = (
    Route("register_dataset", "POST", "/datasets", DATASET_LEVELS),
    Route("list_datasets", "GET", "/datasets", DATASET_LEVELS),
    Route("get_dataset", "GET", "/datasets/{dataset_id:path}", DATASET_LEVELS),
    Route("delete_dataset", "DELETE", "/datasets/{dataset_id:path}", DATASET_LEVELS),
)
"""Message where the server's own datasets cannot be trained on, or it has none."""


def _declared(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    async def call(self: Any) -> None:
        """The provider's own method of this name documents the request and the answer."""

    call.__name__ = name
    for route in ROUTES:
        if route.call == name and webmethod is not None:
            for level in route.levels:
                call = webmethod(route=route.path, method=route.method, level=level)(call)
    return call


PostTrainingApi = type("PostTrainingApi", (), {route.call: _declared(route.call) for route in ROUTES})
"""The protocol: the methods that a provider of this API must have."""


class _Route(APIRoute):
    """Answers errors like our service, `{"detail": ...}`. Other errors are left to the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        fields = {field.alias for field in self.dependant.body_params} - {"body"}

        async def handler(request: Request) -> Response:
            try:
                with request_context(request.headers, request.scope):
                    if fields:
                        await _refuse_others(request, fields)
                    return await handle(request)
            except Exception as error:
                answer = await answer_to(request, error)
                if answer is None:
                    raise
                return answer

        return handler


async def _refuse_others(request: Request, fields: set[str]) -> None:
    """Refuse unknown fields: FastAPI drops them, and a misspelt field would have no effect. Raises InvalidRequest:
    naming the first."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return  # FastAPI reports it
    for name in body if isinstance(body, dict) else ():
        if name not in fields and body[name] is not None:
            raise InvalidRequest(name, body[name], no_such_field(name, sorted(fields)))


def create_router(impl: Any) -> APIRouter:
    """The routes of a provider, for servers from 0.7 on."""
    router = APIRouter(route_class=_Route, tags=["post-training"])
    for route in (*ROUTES, *(DATASET_ROUTES if OWN_DATASETS else ())):
        endpoint = _endpoint(getattr(impl, route.call), route)
        for level in route.levels:
            code = 204 if route.method == "DELETE" else 200
            router.add_api_route(f"/{level}{route.path}", endpoint, methods=[route.method], status_code=code)
    return router


def _endpoint(call: Callable[..., Coroutine[Any, Any, Any]], route: Route) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A provider's method with annotations that put its parameters into the body, as in Llama Stack up to 0.6."""

    async def endpoint(**fields: Any) -> Any:
        return await call(**fields)

    signature = inspect.signature(call)
    parameters = [
        parameter.replace(annotation=Annotated[parameter.annotation, Body(embed=True)])
        if route.method == "POST" and f"{{{name}}}" not in route.path and name != "body"
        else parameter
        for name, parameter in signature.parameters.items()
    ]
    endpoint.__name__, endpoint.__doc__ = route.call, call.__doc__
    endpoint.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return endpoint
