"""Builds that parse each other's job specifications have the same digest, and no others."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, create_model

from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec
from llama_stack_provider_trl.specs.schema import _reduced, schema_digest


def reduced(model: type[BaseModel]) -> Any:
    return _reduced(model.model_json_schema())


def test_the_digest_is_short_and_the_same_at_every_call() -> None:
    assert len(schema_digest()) == 16
    assert schema_digest() == schema_digest()


@pytest.mark.parametrize("field", ["added", "title", "description", "default", "format"])
def test_a_field_more_is_another_schema_whatever_its_name(field: str) -> None:
    longer: Any = create_model("JobSpec", __base__=JobSpec, **{field: (int, 1)})  # type: ignore[call-overload]
    attempt = create_model("AttemptSpec", __base__=AttemptSpec, job=(longer, ...))
    assert reduced(attempt) != reduced(AttemptSpec)


def test_other_bounds_choices_and_missing_defaults_are_another_schema() -> None:
    plain = create_model("M", a=(int, 1), b=(Literal["x"], "x"))
    others = [
        create_model("M", a=(int, Field(1, gt=0)), b=(Literal["x"], "x")),
        create_model("M", a=(int, 1), b=(Literal["x", "y"], "x")),
        create_model("M", a=(int, ...), b=(Literal["x"], "x")),
    ]
    assert [reduced(other) for other in others if reduced(other) == reduced(plain)] == []


def test_texts_defaults_and_the_order_of_fields_do_not_count() -> None:
    plain = create_model("M", a=(int, 1), b=(str, ...), c=(str, ...))
    documented = create_model("M", c=(str, ...), b=(str, Field(..., description="B")), a=(int, 2), __doc__="Text.")
    assert schema_text(plain) == schema_text(documented)
    assert _reduced({"const": "x", "type": "string"}) == _reduced({"const": "x", "enum": ["x"], "type": "string"})


def test_forms_of_earlier_releases_of_pydantic_are_the_same_schema() -> None:
    earlier = {"allOf": [{"$ref": "#/$defs/A"}], "minimum": 0.0}
    assert json.dumps(_reduced(earlier)) == json.dumps({"minimum": 0, "$ref": "#/$defs/A"})


def schema_text(model: type[BaseModel]) -> str:
    return json.dumps(reduced(model), sort_keys=True)
