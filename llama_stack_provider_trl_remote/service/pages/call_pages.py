"""The page of calls: the description of the API without a script of anyone."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ..http.declared_routes import Routes
from ..security.access import READERS
from .rendering import page
from .route import PageRoute

router = Routes(PageRoute, include_in_schema=False)

_METHODS = ("get", "head", "put", "post", "delete")


@router.get("/docs", dependencies=[READERS])
async def calls_page(request: Request) -> Response:
    """Every call with its roles, parameters, body and answers."""
    document: dict[str, Any] = request.app.openapi()
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, calls in document["paths"].items():
        for method in _METHODS:
            if method in calls:
                call = calls[method]
                groups.setdefault(call.get("tags", ["other"])[0], []).append(_call(method, path, call))
    return page(request, "calls.html", groups=groups, schemas=_schemas(document))


def _call(method: str, path: str, call: dict[str, Any]) -> dict[str, Any]:
    contents = call.get("requestBody", {}).get("content", {})
    return {
        "method": method.upper(),
        "path": path,
        "text": call.get("description", ""),
        "roles": ", ".join(call["x-roles"]) or "anyone",
        "node": call.get("x-node", ""),
        "parameters": [
            {**parameter, "kind": _kind(parameter.get("schema", {})), "text": parameter.get("description", "")}
            for parameter in call.get("parameters", ())
        ],
        "bodies": [(media, _kind(content.get("schema", {}))) for media, content in contents.items()],
        "answers": [(code, answer.get("description", "")) for code, answer in sorted(call["responses"].items())],
    }


def _schemas(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies that calls name."""
    return [
        {
            "name": name,
            "text": schema.get("description", ""),
            "fields": [
                {
                    "name": field,
                    "kind": _kind(found),
                    "text": found.get("description", ""),
                    "required": field in schema.get("required", ()),
                }
                for field, found in schema.get("properties", {}).items()
            ],
        }
        for name, schema in document["components"]["schemas"].items()
    ]


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value in words: `array of string`, `JobStatus`, `integer or null`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for choices in ("anyOf", "oneOf", "allOf"):
        if choices in schema:
            return " or ".join(dict.fromkeys(_kind(choice) for choice in schema[choices]))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = str(schema.get("type", "any value"))
    return f"array of {_kind(schema['items'])}" if kind == "array" and "items" in schema else kind
