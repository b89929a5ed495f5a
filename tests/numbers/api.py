"""The public API of the training service as one document, without what a release changes by itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

RECORDED = Path(__file__).with_name("openapi.json")
_TWINS = ("/v1alpha/", "/v1beta/")
"""Beginnings of paths whose calls are those below /v1: the routes list them, the document does not."""


def document() -> dict[str, Any]:
    """The OpenAPI document, and every route, those of pages too."""
    settings = ServiceSettings.model_validate({"api_token": "a"})
    app = make_app(MagicMock(settings=settings, node_name="head", node_token="n"))
    found = app.openapi()
    del found["info"]["version"]
    found["paths"] = {path: calls for path, calls in found["paths"].items() if not path.startswith(_TWINS)}
    _share_errors(found)
    routes = [route for route in app.routes if hasattr(route, "methods")]
    return {"openapi": found, "routes": sorted(f"{route.path} {','.join(sorted(route.methods))}" for route in routes)}


def _share_errors(found: dict[str, Any]) -> None:
    """Write each error that several calls answer once, so that a change of it is one difference."""
    calls = [call for path in found["paths"].values() for call in path.values()]
    given = Counter(json.dumps(answer, sort_keys=True) for call in calls for answer in call["responses"].values())
    shared: dict[str, str] = {}
    for call in calls:
        for status, answer in call["responses"].items():
            written = json.dumps(answer, sort_keys=True)
            if status >= "400" and given[written] > 1:
                name = shared.setdefault(written, f"{status}-{sum(one.startswith(status) for one in shared.values())}")
                call["responses"][status] = {"$ref": f"#/components/responses/{name}"}
    found["components"]["responses"] = {name: json.loads(written) for written, name in shared.items()}


def text() -> str:
    """The document as it is committed."""
    return json.dumps(document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
