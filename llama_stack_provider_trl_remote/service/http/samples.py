"""The answers of a job's `samples`, as the API lists them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel


class PromptMessage(BaseModel):
    role: str
    content: str


class SampleAnswer(BaseModel):
    text: str
    tokens: int
    complete: bool
    """Whether the model ended it; false: it has `max_new_tokens`."""


class SampleSet(BaseModel):
    kind: Literal["before", "checkpoint", "after"]
    """after: of the weights in `final`."""
    step: int
    epoch: float
    time: datetime
    answers: list[SampleAnswer]
    """In the order of the prompts."""


class SamplesResponse(BaseModel):
    prompts: list[list[PromptMessage]]
    """Empty: the job was submitted without the provider option `samples`."""
    data: list[SampleSet]
    """In the order in which they were taken."""
    total: int
    """Sets without `limit` and `offset`."""
