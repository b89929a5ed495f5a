"""Request bodies of chats and completions, in OpenAI's form. What is not here is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.names import CheckedElsewhere, CheckedNames, FreeText
from llama_stack_provider_trl.specs.serving import MOST_LOGPROBS, MOST_STOP, MOST_STOPS

_MOST_TOKENS = 10**6
MOST_ANSWERS = 4
_READ = frozenset({"role", "content"})
_MORE_READ = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"tool_call_id", "name"}),
}
"""Role -> keys of a message that are read, beside `_READ`."""
Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]


class StreamOptions(Documented, CheckedNames):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    """Send a last event with the numbers of tokens."""


class JsonSchema(Documented, CheckedNames):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    """Of the schema; nothing reads it."""
    description: Annotated[str | None, FreeText()] = Field(None, max_length=10_000)
    """Of the schema; the model does not see it."""
    schema_: Annotated[dict[str, Any], FreeText()] = Field(alias="schema")
    """The JSON schema, at most 64 KiB."""
    strict: bool | None = None
    """The answer is kept within the schema either way."""


class ResponseFormat(Documented, CheckedNames):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    """text: nothing constrains the answer. json_object: it is a JSON object. json_schema: it is JSON that a schema
    describes."""
    json_schema: JsonSchema | None = None
    """With `json_schema`."""


class AnswerBody(Documented, CheckedNames):
    """What chats and completions have in common."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1)
    """ft:JOB (the result of a job), job:JOB/CHECKPOINT, or a base model as jobs name it."""
    stream: bool = False
    """Send the answer as it is computed, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Divides the logits; 0: the most likely token each time. Left out: 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """A token is chosen among the most likely ones whose probabilities together reach this. Left out: 1."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """The same seed gives the same answer; left out: another one each time."""
    stop: Annotated[Stop | list[Stop] | None, FreeText()] = None
    """Texts that end the answer and are not in it, at most 4."""
    response_format: ResponseFormat | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": ..., "schema":
    {...}}}: each token is one that can continue such JSON."""

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MOST_STOPS:
            raise ValueError(f"expected at most {MOST_STOPS} texts")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(AnswerBody):
    messages: Annotated[list[dict[str, Any]], CheckedElsewhere()] = Field(min_length=1)
    """The conversation, in OpenAI's form, text only. The model's chat template renders it."""
    tools: Annotated[list[dict[str, Any]] | None, CheckedElsewhere()] = None
    """Functions that the chat template describes to the model. Calls that it writes are in `tool_calls` where the
    template writes them as <tool_call>JSON</tool_call>, else in the answer's content."""
    tool_choice: Literal["auto", "none"] | None = None
    """none: `tools` are not described."""
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    """Answers, each with random numbers of its own. They count as so many chats. Left out: 1."""
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    """Tokens of the answer at most; left out: as many as the model has positions for."""
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    """Report the log-probability of each token."""
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """Most likely tokens to report in each place. Only with `logprobs`."""

    @property
    def described_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" else self.tools


class VoteBody(Documented, CheckedNames):
    """Which of two answers to the same messages is better."""

    model_config = ConfigDict(extra="forbid")
    dataset_id: str = Field(min_length=1, max_length=512)
    """Name of the dataset that gets the vote."""
    messages: Annotated[list[dict[str, Any]], CheckedElsewhere()] = Field(min_length=1)
    """The conversation before the answers, as chats have it."""
    tools: Annotated[list[dict[str, Any]] | None, CheckedElsewhere()] = None
    """As chats have them."""
    chosen: Annotated[str, FreeText()] = Field(min_length=1)
    """The better answer."""
    rejected: Annotated[str, FreeText()] = Field(min_length=1)
    """The other one."""


class CompletionBody(AnswerBody):
    prompt: Annotated[str, FreeText()]
    """The text to continue, as it is: no chat template renders it."""
    n: Literal[1] | None = None
    """Answers: 1."""
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    """Tokens of the answer at most. Left out: 16."""
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """Report the log-probability of each token, and of so many most likely ones in its place."""


def refuse_unknown_keys(messages: Sequence[Mapping[str, Any]]) -> None:
    """Return if every key of the messages is read. Raises InvalidRequest: names the message and the key."""
    for number, message in enumerate(messages):
        read = _READ | _MORE_READ.get(str(message.get("role")), frozenset())
        for key, value in message.items():
            if key not in read and value is not None:
                hint = f"messages of this role have {', '.join(sorted(read))}: leave it out"
                raise InvalidRequest(f"messages.{number}.{key}", value, hint)
