"""The block `harness` of a request for an evaluation: tasks of lm-evaluation-harness in place of a dataset."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from ..documented import Documented
from ..errors import InvalidRequest
from ..specs.harness import HarnessSpec
from ..specs.names import CheckedNames, FreeText

TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.|+-]{0,127}$")]


class Harness(Documented, CheckedNames):
    """Tasks of lm-evaluation-harness, and how they are measured."""

    model_config = ConfigDict(extra="forbid")

    tasks: list[TaskName] = Field(min_length=1, max_length=64)
    """Names of tasks, groups or tags in the operator's task files."""
    num_fewshot: int | None = Field(None, ge=0, le=1000)
    """Examples before each row. Default: that of the task, else 0."""
    limit: float | None = Field(None, gt=0, le=10**9)
    """Rows of each task at most, the first ones; below 1: the share of them. Default: all."""
    apply_chat_template: bool = False
    """Each prompt is a conversation in the model's chat template; else plain text."""
    fewshot_as_multiturn: bool = True
    """With a chat template: the examples are turns; else they are a part of the user's turn."""
    system_instruction: Annotated[str | None, FreeText()] = Field(None, min_length=1, max_length=16384)
    """Text before each prompt; with a chat template its system turn."""
    seed: int | None = Field(None, ge=0, lt=2**31)
    """Decides which examples are chosen, and what tasks draw. Default: the library's, 0 for Python's random numbers and
    1234 for others."""

    def spec(self) -> HarnessSpec:
        """How the tasks are measured. Raises InvalidRequest: a value that would be ignored, or read otherwise."""
        if self.limit is not None and self.limit > 1 and not self.limit.is_integer():
            hint = "a number of rows is a whole number, and a share of them is below 1"
            raise InvalidRequest("harness.limit", self.limit, hint)
        if "fewshot_as_multiturn" in self.model_fields_set and not self.apply_chat_template:
            hint = "without a chat template a prompt has no turns: leave it out, or set apply_chat_template"
            raise InvalidRequest("harness.fewshot_as_multiturn", self.fewshot_as_multiturn, hint)
        if len(set(self.tasks)) < len(self.tasks):
            raise InvalidRequest("harness.tasks", self.tasks, "a task is measured once: name each once")
        return HarnessSpec(**{**self.model_dump(), "tasks": tuple(self.tasks)})
