"""What the model of a grader of type score_model or label_model reads of an answer, and how its reply is read.

The model gets the messages of the grader, and behind them the form of a reply: JSON with `result`. OpenAI has its
models write that by a format of the API, which a prompt therefore does not ask for. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..judging import VERDICT_TOKENS
from .errors import GradingError
from .graders import LabelModel, ScoreModel
from .templates import Values, rendered

type Asking = ScoreModel | LabelModel
THINK, END_THINK = "<think>", "</think>"
"""Around the thoughts of a model."""
_RESULT = "result"
_MARKUP = "*_`\"'.,;:! \t\r\n"
"""What may stand around a reply that is no JSON."""
_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][+-]?\d{1,3})?", re.ASCII)
_SHOWN = 100
"""Characters of a reply in a message."""


class Replying(NamedTuple):
    """How the tokens of a reply are chosen."""

    temperature: float
    top_p: float
    most: int
    """Tokens of a reply."""


class Question(NamedTuple):
    """What a model is asked about an answer."""

    messages: list[dict[str, Any]]
    """Turns of a chat: role and content."""
    seed: str
    """What random numbers follow from: the seed of the grader and the messages. So equal
    messages have the same numbers; in bf16 the reply may still depend on what is computed beside it."""


class Reply(NamedTuple):
    """What a model has written."""

    text: str
    """With the `THINK` before it that the prompt ends with, if it does."""
    complete: bool
    """Whether it ended its text; False: it has as many tokens as it may have."""


def replying_of(grader: Asking) -> Replying:
    """How the model of a grader replies."""
    given = grader.sampling_params
    if given is None:
        return Replying(0.0, 1.0, VERDICT_TOKENS)
    top_p = 1.0 if given.top_p is None else given.top_p
    return Replying(given.temperature or 0.0, top_p, given.max_completions_tokens or VERDICT_TOKENS)


def question_of(grader: Asking, values: Values) -> Question:
    """What the model of a grader reads of an answer and its row. Raises MissingValue, ValueError: as `rendered`."""
    messages = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": "\n".join(rendered(template, values) for template in message.templates),
        }
        for message in grader.input
    ]
    form = form_of(grader)
    if messages[-1]["role"] == "user":  # many chat templates have one turn of the user after another only
        messages[-1]["content"] += f"\n\n{form}"
    else:
        messages.append({"role": "user", "content": form})
    seed = 0 if grader.sampling_params is None else grader.sampling_params.seed or 0
    digest = hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
    return Question(messages, f"{seed}/{digest}")


def form_of(grader: Asking) -> str:
    """The sentence that says how to reply."""
    if isinstance(grader, ScoreModel):
        least, most = grader.bounds
        return f'Reply with JSON, {{"result": NUMBER}}, with a number from {least:g} to {most:g} in place of NUMBER.'
    labels = ", ".join(json.dumps(label, ensure_ascii=False) for label in grader.labels)
    return f'Reply with JSON, {{"result": LABEL}}, with one of these in place of LABEL: {labels}.'


def score_of(grader: Asking, reply: Reply) -> float:
    """The reward in a reply: its number, within the range, or whether its label passes.

    It is `result` of the JSON in the reply, or the whole reply. What precedes a `</think>` is thoughts, and so is what
    follows a `<think>` that has none. Raises GradingError: it has no number, or no label.
    """
    text = reply.text.rpartition(END_THINK)[2]
    found = None if THINK in text else _result_of(text)
    if found is None and reply.complete and THINK not in text:
        found = text
    if isinstance(grader, ScoreModel):
        number = _number_of(found)
        if number is not None:
            least, most = grader.bounds
            return min(max(number, least), most)
        expected = "a number"
    else:
        if (label := _label_of(grader, found)) is not None:
            return float(label in grader.passing_labels)
        expected = "one of the labels"
    cut = "" if reply.complete else f", which ends after {replying_of(grader).most} tokens"
    raise GradingError(
        "model_grader_parse_error",
        f"the model replied {reply.text[:_SHOWN]!r}{cut}: expected {expected}, as `result` of JSON or alone",
    )


def _result_of(text: str) -> Any:
    """`result` of the JSON in a text; None: there is none."""
    begin, end = text.find("{"), text.rfind("}")
    found = _json_of(text[begin : end + 1]) if 0 <= begin < end else None
    if found is None and (at := text.rfind(f'"{_RESULT}"')) >= 0:  # behind other JSON
        begin, end = text.rfind("{", 0, at), text.find("}", at)
        found = _json_of(text[begin : end + 1]) if 0 <= begin < end else None
    return found.get(_RESULT) if found is not None else None


def _json_of(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _RESULT in found else None


def _number_of(value: Any) -> float | None:
    if isinstance(value, str):
        marks = _MARKUP.replace(".", "")  # a number may begin with one
        found = _NUMBER.fullmatch(value.strip(marks).rstrip(".").strip(marks))
        value = float(found[0]) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _label_of(grader: LabelModel, value: Any) -> str | None:
    """The label that a value is, else the one that it is without case, marks and spaces around; None: it is none."""
    text = json.dumps(value) if isinstance(value, bool | int | float) else value
    if not isinstance(text, str):
        return None
    for plain in (str.strip, _plain):
        if found := [label for label in grader.labels if plain(label) == plain(text)]:
            return found[0]
    return None


def _plain(text: str) -> str:
    return text.strip(_MARKUP).casefold() or text.strip()
