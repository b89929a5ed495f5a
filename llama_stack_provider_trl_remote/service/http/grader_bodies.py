"""Bodies and answers of the calls on graders, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.specs.grading.graders import Grader
from llama_stack_provider_trl.specs.names import CheckedNames, FreeText


class GraderValidateBody(Documented, CheckedNames):
    """A grader to check."""

    model_config = ConfigDict(extra="forbid")
    grader: Grader
    """Of type string_check, text_similarity, score_model, label_model, python or multi."""


class GraderRunBody(GraderValidateBody):
    """A grader, and an answer that it grades."""

    model_sample: Annotated[str, FreeText()]
    """The answer: `sample.output_text`, and `sample.output_json` where it is JSON."""
    item: Annotated[dict[str, Any], FreeText()] = Field({})
    """The row: its columns."""


class GraderErrors(BaseModel):
    """What went wrong."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_server_error_details: str | None = None


class GraderRunMetadata(BaseModel):
    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    """Seconds."""
    scores: dict[str, float]
    """Of the graders that it is made of, or its own."""
    token_usage: int | None = None
    """Of the models that were asked; null: none was."""
    sampled_model_name: str | None = None
    """Of one of type score_model or label_model."""


class GraderRunAnswer(BaseModel):
    """A reward of an answer; 0 where there was an error."""

    reward: float
    metadata: GraderRunMetadata
    sub_rewards: dict[str, float]
    """Of the graders of one of type multi."""
    model_grader_token_usage_per_model: dict[str, int]
    """Tokens of prompts and replies, by the model as the grader names it."""


class GraderValidateAnswer(BaseModel):
    grader: dict[str, Any]
    """As it is read."""
