"""Identifies the build of the specifications: two builds of one release may differ in what a spec.json holds."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

from .job import AttemptSpec

_TEXTS = {"title", "description", "default", "format", "examples", "discriminator"}
"""Keys of a JSON schema that do not decide what is parsed. Releases of pydantic differ in some of them."""


@cache
def schema_digest() -> str:
    """Digest of the JSON schema of AttemptSpec. Builds with the same one can parse each other's specs."""
    schema = json.dumps(_reduced(AttemptSpec.model_json_schema()), sort_keys=True)
    return hashlib.sha256(schema.encode()).hexdigest()[:16]


def _reduced(schema: Any) -> Any:
    """A JSON schema without texts and defaults, in a form that releases of pydantic share (2.8, 2.11 and 2.14 do)."""
    if isinstance(schema, list):
        return [_reduced(one) for one in schema]
    if not isinstance(schema, dict):
        return int(schema) if isinstance(schema, float) and schema.is_integer() else schema
    found = {key: _reduced(value) for key, value in schema.items() if key not in _TEXTS}
    for names in ("properties", "$defs"):  # whose keys are names, and may be those of texts
        if names in schema:
            found[names] = {name: _reduced(one) for name, one in schema[names].items()}
    if len(found.get("allOf", ())) == 1:
        found |= found.pop("allOf")[0]
    if "const" in found:
        found["enum"] = [found.pop("const")]
    if "required" in found:
        found["required"] = sorted(schema["required"])
    return found
