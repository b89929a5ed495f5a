"""The answers of a job's `samples`, as the API lists them, and the lines of files of answers."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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


class GradedAnswer(BaseModel):
    """What a grader gives an answer."""

    reward: float
    error: str | None = None


class JudgedAnswer(BaseModel):
    """What a judge gives an answer."""

    score: float | None = None
    """None: the verdict is unreadable."""


class AnswerLine(BaseModel):
    """A line of the file of answers that a generate job, or an evaluation with checks, leaves."""

    model_config = ConfigDict(extra="ignore")

    row: int
    sample: int = 0
    prompt: list[dict[str, Any]]
    text: str
    tokens: int
    complete: bool
    passed: dict[str, bool] = {}
    timed_out: list[str] = []
    expected: dict[str, str] = {}
    """Check that fails -> the text, or the pattern, that it expects."""
    graded: dict[str, GradedAnswer] = {}
    judged: dict[str, JudgedAnswer] = {}
