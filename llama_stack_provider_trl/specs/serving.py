"""What the service and a process that answers chats exchange: its specification, and messages over a Unix socket.

Each connection has one request, a line of JSON, and the answer to it, lines of JSON. The first connection is the
lease: it has the request `LEASE`, no answer, and the process ends with it. So nothing is served without a service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from .bases import Frozen
from .event_fields import Message
from .model_source import ModelSource

SOCKET = "serve.sock"
"""Name of the socket in the run directory."""
RUN, ADAPTERS = "run", "adapters"
"""Directories beside each other: the run directory, and that of copies of the adapters that are named in requests. The
process can write the first alone: what it puts there is not to be followed."""
LEASE = b'{"lease": true}\n'
MOST_REQUEST = 4 << 20
"""Bytes of a request."""
MOST_LINE = 1 << 20
"""Bytes of a line of an answer."""
MOST_STOPS, MOST_STOP = 4, 1000
"""Texts that end an answer, and characters of each."""
MOST_LOGPROBS = 20
MOST_SCHEMA = 64 << 10
"""Bytes of a JSON schema."""
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""Around the JSON of a call, in the chat templates of Hermes and Qwen."""


class ServeSpec(Frozen):
    """A process that answers chats with one base model, and with adapters of it."""

    source: ModelSource
    device: str
    """`cpu`, `cuda` or `mps`: the process sees the one that it has."""
    adapters: Path
    """Directory of the adapters."""
    idle_seconds: float
    """Seconds without a request after which it ends."""
    beside: bool = False
    """A training computes on this machine meanwhile: it has the processor, and the memory, first."""


class ServeRequest(Frozen):
    """A text to complete."""

    adapter: str | None = None
    """Name of a directory in `adapters`; None: the base model."""
    messages: list[dict[str, Any]] | None = None
    """A chat, as `specs.rows` reads it; None: `prompt` is completed."""
    prompt: str | None = None
    max_tokens: int | None = None
    """Tokens of the answer; None: as many as the model has positions for."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: str
    """What the random numbers follow from."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are not a part of it."""
    json_schema: str | None = None
    """A JSON schema that the answer is kept within; None: nothing constrains it."""
    logprobs: int | None = None
    """Most likely tokens to report beside the chosen one; None: no log-probabilities."""


class TokenLogprob(Frozen):
    """The log-probability of a token, without temperature and top_p."""

    token: str
    """Its text; of one that holds a part of a character `bytes:` and its bytes, such as `bytes:\\xe4\\xbd`."""
    bytes: tuple[int, ...] | None
    """None: they are not known."""
    logprob: float


class ChosenToken(TokenLogprob):
    """The token of an answer."""

    top: tuple[TokenLogprob, ...]
    """The most likely ones in its place."""


class AnswerReading(Frozen):
    """The model is this request's now: its adapter is loaded, and its prompt written by the chat template."""

    kind: Literal["reading"] = "reading"


class AnswerBegun(Frozen):
    """The prompt was read."""

    kind: Literal["begun"] = "begun"
    prompt_tokens: int
    has_call_tags: bool = False
    """Whether the chat template writes calls of tools as `<tool_call>JSON</tool_call>`, as those of Hermes and Qwen."""
    opens_thought: bool = False
    """Whether the prompt ends with `<think>`, as some chat templates have it: the answer begins within a thought."""


class AnswerPart(Frozen):
    """The next part of the answer."""

    kind: Literal["part"] = "part"
    text: str
    """May be empty: a character, or a stop text, may take several tokens."""
    tokens: tuple[ChosenToken, ...] = ()


class AnswerEnd(Frozen):
    """The end of the answer."""

    kind: Literal["ended"] = "ended"
    reason: Literal["stop", "length"]
    """stop: the model ended it, or a stop text did. length: it has `max_tokens`, or all positions."""
    tokens: int


class AnswerRefused(Frozen):
    """The request, or the model, cannot be used."""

    kind: Literal["refused"] = "refused"
    message: Message
    is_request: bool
    """Whether the request is at fault, or the model that it names; else the machine, such as its memory."""


Answer = Annotated[AnswerReading | AnswerBegun | AnswerPart | AnswerEnd | AnswerRefused, Field(discriminator="kind")]
ANSWER: TypeAdapter[AnswerReading | AnswerBegun | AnswerPart | AnswerEnd | AnswerRefused] = TypeAdapter(Answer)
