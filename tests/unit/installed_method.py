"""The source of a package with a method."""

from __future__ import annotations

METHOD = """
from pydantic import BaseModel, Field
from llama_stack_provider_trl.specs.custom import CustomMethod
class Inner(BaseModel):
    x: float = 1.0
class Fields(BaseModel):
    weight: float = Field(1.0, gt=0)
    inner: Inner = Inner()
def check(example, fields):
    return example.missing
def make(**changes):
    return CustomMethod(**{"title": "Mine", "rows": "pairs", "fields": Fields, "trainer": "gone:Trainer", **changes})
"""
