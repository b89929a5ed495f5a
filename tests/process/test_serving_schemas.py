"""An answer is kept within a JSON schema, whatever the model would write, and a hostile schema stops nobody."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import jsonschema
import pytest
import torch

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.serving import grammar
from llama_stack_provider_trl.recipes.serving.grammar import SchemaMatcher, check_schema, tokenizer_of
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.process
WITH_LIBRARY = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the extra `schemas`")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["capital", "harbour"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "kind", "people", "tags"],
    "additionalProperties": False,
}


@WITH_LIBRARY
def test_random_tokens_within_a_schema_are_json_that_it_describes() -> None:
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    known, schema = tokenizer_of(tokenizer, ends), json.dumps(SCHEMA)
    check_schema(schema)
    for seed in range(5):
        generator, matcher, tokens = torch.Generator().manual_seed(seed), SchemaMatcher(known, schema), list[int]()
        while not tokens or tokens[-1] not in ends:
            # The model has more logits than the tokenizer has tokens.
            scores: Any = torch.rand(1, len(tokenizer) + 24, generator=generator)
            tokens.append(int(matcher.masked(scores).argmax()))
            matcher.add(tokens[-1])
            assert len(tokens) < 500
        jsonschema.validate(json.loads(str(tokenizer.decode(tokens[:-1]))), SCHEMA)


@WITH_LIBRARY
def test_random_tokens_of_any_object_begin_and_end_with_its_braces() -> None:
    tokenizer = tiny_tokenizer()
    matcher, tokens = (
        SchemaMatcher(tokenizer_of(tokenizer, [tokenizer.eos_token_id]), '{"type": "object"}'),
        list[int](),
    )
    generator = torch.Generator().manual_seed(0)
    while not tokens or tokens[-1] != tokenizer.eos_token_id:
        scores: Any = torch.rand(1, len(tokenizer), generator=generator)
        scores[0, tokenizer("}")["input_ids"]] += 0.5  # an end comes
        tokens.append(int(matcher.masked(scores).argmax()))
        matcher.add(tokens[-1])
        assert len(tokens) < 500
    text = str(tokenizer.decode(tokens[:-1]))
    assert (text[0], text[-1]) == ("{", "}")
    assert isinstance(json.loads(text), dict)


@WITH_LIBRARY
@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"allOf": [{"type": "string", "pattern": f"[a-z]*{n}[a-z]*"} for n in range(30)]}, "takes more than 2 s or"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, 'Unimplemented keys: ["dependentSchemas"]'),
        ({"$ref": "http://127.0.0.1:9/x.json"}, "does not fetch resources"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error"),
    ],
)
def test_a_schema_that_cannot_be_compiled_within_limits_is_refused(schema: Any, sentence: str) -> None:
    with pytest.raises(JobFailure) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.message.startswith("response_format: ")
    assert sentence in caught.value.message
    assert caught.value.reason == "invalid_request"


def test_without_the_library_a_schema_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_PACKAGE", "no_such_package")
    with pytest.raises(JobFailure, match=r"it needs the package no_such_package .*llama_stack_provider_trl\[schemas\]"):
        check_schema("{}")
