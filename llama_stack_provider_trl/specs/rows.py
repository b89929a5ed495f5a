"""Parses dataset rows as users write them into the examples that the recipes train on. Needs only the stdlib.

The accepted shapes are the table `ROW_SHAPES`; a test compares docs/reference/data-formats.md with it. Rules for all:

- None, NaN and a missing key are one thing, *absent*: rows may have made a round trip through pandas.
- A number or a boolean where text is expected is read as its JSON text, and the report counts it.
- The first bad row ends the reading with `InvalidRows`, which names the row (from 0), the column, what was found and
  what was expected. No row is skipped silently.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

from ..errors import InvalidRows
from ..system.json_rows import STAND_INS
from ..system.texts import DuplicateKey, beginning_of, parse_json
from . import images as of_images
from .job import DataFormat, RowNames, RowUse
from .methods import METHODS
from .tool_calls import Tool, faults_of, read_calls, read_tools

Message = dict[str, Any]
"""One turn: `role` (system, user, assistant or tool) and `content`, text. Where the row has them: of an assistant turn
`reasoning` (text), `tool_calls` (`tool_calls.ToolCall`) and `weight` (0: no loss); of a tool's result `tool_call_id`
and `name`; of the first turn `tools`, which the conversation may call; of a user's turn `images`, the bytes of each,
for which `images.MARK` stands in the content."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Role names as found in chat and ShareGPT datasets -> the four that chat templates know."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles of ShareGPT whose text is a call."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message with what the model thinks before its answer."""
_CALLS = ("tool_calls", "function_call")
_OF_RESULTS = {"tool_call_id": "call_id", "name": "tool_name"}
"""Keys of a tool's result -> those of Llama Stack."""
_PARTS = ("text", "image", "image_url", "audio", "input_audio", "video", "video_url", "file")
"""Types of the parts of a content."""
_WEIGHTS = ("weight", "train")
TOOLS = ("tools", "functions")
"""Columns with the tools that a conversation may call."""
SYSTEM = "system"
"""Column with the text of a system turn before the conversation."""
_AROUND = (SYSTEM, *TOOLS)
_MORE_KEYS = frozenset(("reasoning", "tool_calls", "weight", "tool_call_id", "name", "tools", "images"))
_UNSEEN = ("audio", "input_audio", "video", "video_url")
"""Types of parts that no method reads."""
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from)['"]\s*:""")
_LIKELY_PROMPTS = ("question", "instruction", "input", "query", "context", "user", "prompts", "problem", "post")
"""Columns in which other datasets of pairs have the prompt."""
_SPEAKERS = re.compile(r"\s*(human|user|system|assistant)\s*:", re.IGNORECASE)
_DIALOG_IN_TEXT = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""Begins a turn in Nectar's prompts, of which the last one is the assistant's and empty."""
_TOOL_NAME = re.compile(r"""(["'])name\1\s*:\s*\1([^"'\\]+)\1""")
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?")
_COMPLETION_SCORES = ("overall_score", "fine-grained_score", "fine_grained_score")
"""Keys with the score of an answer in UltraFeedback: the first one that all answers of a row have is read."""
MARGIN = "margin"
"""Column with the margin of a pair, or a list of those of several, which reward models are trained with by option."""
_GREATEST_MARGIN = 1e6
_NAMES_SHOWN = 12
_MESSAGES = "a list of {role, content} messages"
UNREAD = "columns never read: "
"""How the warning about these begins."""


@dataclass(frozen=True, slots=True)
class SftExample:
    """One supervised example: a conversation or a plain text, never both."""

    messages: list[Message] | None
    prompt_turns: int | None
    """Leading messages that are context only, the loss is on the rest; None: the loss is on every assistant turn."""
    text: str | None = None
    unread_image: str | None = None
    """Why the row's column of images cannot be read, where nothing else in the row refers to it: a text model does not
    need it, and one that reads images refuses the row. None: there is no such column, or its images are read."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One preference pair: the prompt stands once, `chosen` and `rejected` are assistant turns."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """The preference pairs of a row, which have the same prompt."""

    prompt: list[Message]
    answers: list[list[Message]]
    """Assistant turns of each answer, each answer once."""
    pairs: list[tuple[int, int]]
    """Chosen and rejected, as indexes into `answers`. None: no answer of the row is better than another."""
    margins: list[float] | None = None
    """Of each pair; None: the rows are read without margins."""
    unread_image: str | None = None
    """As that of `SftExample`."""

    @classmethod
    def of(
        cls,
        prompt: list[Message],
        chosen: list[Message],
        *rejected: list[Message],
        margins: list[float] | None = None,
    ) -> PreferenceExample:
        """One answer that is better than others."""
        return cls(prompt, [chosen, *rejected], [(0, number) for number in range(1, len(rejected) + 1)], margins)

    def written_out(self) -> Iterator[PreferencePair]:
        """Each pair on its own."""
        for chosen, rejected in self.pairs:
            yield PreferencePair(self.prompt, self.answers[chosen], self.answers[rejected])


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A conversation that asks for an answer."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class LabelledExample:
    """An answer that is desirable or not."""

    prompt: list[Message]
    completion: list[Message]
    label: bool


Example = SftExample | PreferenceExample | LabelledExample | PromptExample


@dataclass(frozen=True, slots=True)
class RowsReport:
    """The result of `check_rows` for a dataset that can be trained on."""

    num_rows: int
    shapes: dict[str, int]
    """Rows per shape, keyed by `RowShape.name`."""
    warnings: list[str]


@dataclass(slots=True)
class _Notes:
    """Counts for warnings, over all rows."""

    names: RowNames | None = None
    columns: dict[str, str] = field(init=False)
    """Column of a shape -> column of the dataset."""
    system: str = field(init=False)
    """Text of a system turn for rows that have none; empty: there is none."""
    margins: bool = field(init=False)
    """Whether each pair has a margin."""
    roles: dict[str, str] = field(init=False)
    """Role in messages -> one of the four."""
    call_roles: frozenset[str] = field(init=False)
    """Roles of turns whose content is a call; none that `names` has for something else."""
    named: set[str] = field(default_factory=set)
    """Columns of `columns` that some row has."""
    used_roles: set[str] = field(default_factory=set)
    """Roles of `names` that some message has."""
    scalars: Counter[str] = field(default_factory=Counter)
    message_keys: set[str] = field(default_factory=set)
    pairs: int = 0
    identical: int = 0
    """Pairs with the same answer twice."""
    equal_scores: int = 0
    """Rows whose chosen answer has the score of a rejected one."""
    pairless: int = 0
    """Rows of which no answer is better than another."""
    repeating: int = 0
    """Rows with an answer whose text begins with that of its prompt."""
    unanswered: int = 0
    """Conversations of SFT that end in a user turn."""
    weighted: Counter[str] = field(default_factory=Counter)
    """Turns by role that a row has weighted, though none of their role is trained."""
    listed: int = 0
    """Rows whose system turn lists the tools that they have beside it."""
    conversations: int = 0
    """Rows that a chat template writes."""
    own_system: int = 0
    """Those with a system turn of their own, where `names` has one for all."""
    images: int = 0
    """In all rows."""
    unread_images: set[str] = field(default_factory=set)
    """Columns of images that have something else in some row (`SftExample.unread_image`)."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that do not fit the schemas of their tools, by what is wrong."""

    def __post_init__(self) -> None:
        self.columns = self.names.columns if self.names else {}
        self.system = (self.names and self.names.system) or ""
        self.margins = bool(self.names and self.names.margins)
        self.roles = {**ROLES, **self.names.roles} if self.names else ROLES
        self.call_roles = frozenset(CALL_ROLES) - (self.names.roles.keys() if self.names else frozenset())


class _Row:
    """One row without its absent values. Turns columns into text and messages, or raises InvalidRows."""

    __slots__ = ("index", "notes", "null_images", "values")

    def __init__(self, index: int, values: Mapping[str, Any], notes: _Notes, null_images: str | None = None) -> None:
        self.index, self.values, self.notes, self.null_images = index, values, notes, null_images

    def refuse(self, where: str, found: str, expected: str) -> InvalidRows:
        return InvalidRows(f"column {where}: found {found}, expected {expected}", row=self.index)

    def text(self, column: str) -> str:
        """The column's text; blank text is refused."""
        return self.text_of(self.values[column], column)

    def text_of(self, value: Any, where: str) -> str:
        """A value as text; blank text is refused."""
        text = self.plain(value, where, where)
        if not text or text.isspace():
            raise self.refuse(where, "blank text", "text")
        return text

    def turns(self, column: str, role: str) -> list[Message]:
        """A column that holds text (one turn of `role`) or a list of messages, possibly as JSON text."""
        return self.turns_of(self.values[column], column, role)

    def turns_of(self, value: Any, where: str, role: str) -> list[Message]:
        """Text (one turn of `role`) or a list of messages, possibly as JSON text."""
        if isinstance(value, list) or (isinstance(value, str) and _LOOKS_LIKE_MESSAGES.match(value)):
            return self.messages_of(value, where)
        return [{"role": role, "content": self.text_of(value, where)}]

    def messages(self, column: str) -> list[Message]:
        """A column that holds a list of messages, or its JSON text."""
        return self.messages_of(self.values[column], column)

    def messages_of(self, value: Any, where: str) -> list[Message]:
        """A list of messages, or its JSON text."""
        value = self.parsed(value, where, _MESSAGES)
        if not isinstance(value, list):
            raise self.refuse(where, _kind(value), _MESSAGES)
        if not value:
            raise self.refuse(where, "an empty list", "at least one message")
        own = self.notes.names is None or not self.notes.names.roles
        return [
            (own and _ordinary(message)) or self._message(message, where, turn) for turn, message in enumerate(value)
        ]

    def parsed(self, value: Any, where: str, expected: str) -> Any:
        """The value, or what its JSON text has."""
        return self._parsed(where, value, expected) if isinstance(value, str) else value

    def items(self, column: str, what: str) -> list[Any]:
        """A column that holds a list, or its JSON text."""
        value = self.parsed(self.values[column], column, f"a list of {what}")
        if not isinstance(value, list):
            raise self.refuse(column, _kind(value), f"a list of {what}")
        return value

    def number(self, value: Any, where: str) -> float:
        """A number, or its text, as cells of CSV files are."""
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            return float(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, float) and math.isfinite(value)):
            raise self.refuse(where, _kind(value), "a number")
        if abs(cast(float, value)) > sys.float_info.max:
            raise self.refuse(where, _kind(value), "a number below 1e308")
        return cast(float, value)

    def plain(self, value: Any, column: str, where: str) -> str:
        """`value` as text: text as it stands, a number or a boolean as JSON writes it."""
        if not isinstance(value, str):
            if not isinstance(value, (int, float)) or value in (math.inf, -math.inf) or value != value:
                expected = "text" if _stand_in(value) is None else "text: write the value as text"
                raise self.refuse(where, _kind(value), expected)
            self.notes.scalars[column.partition(",")[0]] += 1
            # pandas makes floats of a column of integers with gaps: 42 arrives as 42.0.
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            return json.dumps(int(value) if whole else value)
        if not value.isascii() and not _is_unicode(value):
            raise self.refuse(where, "half of a UTF-16 surrogate pair", "valid Unicode text")
        return value

    def _parsed(self, column: str, text: str, expected: str) -> Any:
        try:
            return parse_json(text)
        except DuplicateKey as error:
            raise self.refuse(column, f"JSON text in which {error}", "each key once") from error
        except (ValueError, RecursionError) as error:  # a number of 4301 digits is a ValueError
            at = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                at = f"{error.msg} at character {error.pos}"
            found = f"text that is not JSON ({at})"
            raise self.refuse(column, found, f"{expected}, or its JSON text (json.dumps, not str)") from error

    def _message(self, message: Any, column: str, turn: int) -> Message:
        where = f"{column}, turn {turn}"
        if not isinstance(message, Mapping):
            raise self.refuse(where, _kind(message), "an object with role and content")
        message = {key: value for key, value in message.items() if not _absent(value)}
        role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
        role = self._role(message, role_key, where)
        where = f"{where} ({role})"
        self._note_extra_keys(message, {role_key, content_key}, role, where, turn == 0)
        found: Message = {"role": role, "content": ""}
        if message[role_key] in self.notes.call_roles:
            found["tool_calls"] = read_calls(message.get(content_key), where, self.refuse)
            message = {key: value for key, value in message.items() if key != content_key}
        found |= self._beside(message, role, where)
        if turn == 0 and (tools := read_tools(message.get("tools"), f"{where}, tools", self.refuse)):
            found["tools"] = tools  # of rows that a job has generated
        content = message.get(content_key)
        if role == "tool" and isinstance(content, (Mapping, list)) and not _is_parts(content):
            try:
                found["content"] = self.plain(json.dumps(content, ensure_ascii=False, allow_nan=False), column, where)
            except (TypeError, ValueError, RecursionError) as error:
                raise self.refuse(where, f"a result that is no JSON ({error})", "text, or values of JSON") from error
        elif not (found.get("tool_calls") and (_absent(content) or content == [])):
            content, images = self._without_images(content, role, where)
            found["content"] = self.content(content, column, where)
            if images:
                found["images"] = images
        needs_text = role == "user" or (role == "assistant" and not found.get("tool_calls"))
        if needs_text and (not found["content"] or found["content"].isspace()):
            raise self.refuse(where, "blank text", "text")
        return found

    def _beside(self, message: Mapping[str, Any], role: str, where: str) -> Message:
        """What a message has beside its role and content."""
        found: Message = {}
        if role == "assistant":
            for key in _CALLS:
                if calls := read_calls(message.get(key), f"{where}, {key}", self.refuse):
                    if "tool_calls" in found:
                        raise self.refuse(where, f"{key} beside tool_calls", "the calls once")
                    found["tool_calls"] = calls
            thoughts = {key: message[key] for key in _REASONING if message.get(key)}
            for key, value in thoughts.items():
                if not isinstance(value, str):
                    raise self.refuse(f"{where}, {key}", _kind(value), "text")
            texts = {self.plain(text, key, f"{where}, {key}") for key, text in thoughts.items()}
            if len(texts) > 1:
                raise self.refuse(where, f"different texts in {' and '.join(thoughts)}", "the reasoning once")
            if texts and not (text := texts.pop()).isspace():
                found["reasoning"] = text
        elif role == "tool":
            for key, other in _OF_RESULTS.items():
                texts = {
                    self.plain(message[name], name, f"{where}, {name}")
                    for name in (key, other)
                    if message.get(name) not in (None, "")
                }
                if len(texts) > 1:
                    raise self.refuse(where, f"different texts in {key} and {other}", "one of them")
                if texts:
                    found[key] = texts.pop()
        for key in _WEIGHTS:
            if key in message and self._weight(message[key], key, role, where) == 0 and role == "assistant":
                found["weight"] = 0
        return found

    def _weight(self, value: Any, key: str, role: str, where: str) -> int:
        is_right = value in (0, 1) and (key == "train" or not isinstance(value, bool))
        if not is_right:
            expected = "0, no loss on this turn, or 1" if key == "weight" else "true, or false: no loss on this turn"
            raise self.refuse(where, f"{key} {beginning_of(value)}", expected)
        if value and role != "assistant":
            self.notes.weighted[role] += 1
        return int(value)

    def _note_extra_keys(
        self, message: Mapping[str, Any], read: set[str], role: str, where: str, is_first: bool
    ) -> None:
        read = {*read, *_WEIGHTS, *(("tools",) if is_first else ())}
        if role == "assistant":
            read |= {*_CALLS, *_REASONING}
        if role == "tool":
            read |= {*_OF_RESULTS, *_OF_RESULTS.values()}
        for key in () if role == "assistant" else _CALLS:
            if message.get(key):
                raise self.refuse(where, key, "calls in assistant turns")
        self.notes.message_keys |= {key for key in message if key not in read}

    def _role(self, message: Mapping[str, Any], key: str, where: str) -> str:
        role = message.get(key)
        if isinstance(role, str) and role in self.notes.roles:
            self.notes.used_roles.add(role)
            return self.notes.roles[role]
        found = f"no {key}" if role is None else f"{key} {beginning_of(role)}"
        like = role.strip().lower() if isinstance(role, str) else ""
        raise self.refuse(where, found, f"{like!r}" if like in ROLES else f"one of {', '.join(ROLES)}")

    def content(self, content: Any, column: str, where: str) -> str:
        """The text of a message: text, or parts."""
        if _absent(content):
            raise self.refuse(where, "null content", "text")
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, list):
            return "".join(self._part(part, column, where) for part in content)
        return self.plain(content, column, where)

    def _without_images(self, content: Any, role: str, where: str) -> tuple[Any, list[bytes | int | None]]:
        """A content with a mark in place of each image, and the images: a number is that of one in the column, None the
        next one there."""
        parts = [content] if isinstance(content, Mapping) else content
        if not isinstance(parts, list) or not any(map(of_images.is_image, parts)):
            return content, []
        if role != "user":
            raise self.refuse(where, f"an image in {_article(role)} turn", "images in turns of users")
        images, kept = list[bytes | int | None](), []
        for number, part in enumerate(parts):
            if of_images.is_image(part):
                image = of_images.image_of(part, f"{where}, part {number}", self.refuse)
                self.notes.message_keys.update(of_images.unread_keys(part))
                index = part.get("index") if isinstance(part, Mapping) else None
                if index is not None and (image is not None or type(index) is not int):
                    expected = "the number of an image in the column images"
                    raise self.refuse(f"{where}, part {number}, index", beginning_of(index), expected)
                images.append(index if image is None else image)
                part = of_images.MARK
            kept.append(part)
        return kept, images

    def images(self) -> tuple[str | None, list[bytes]]:
        """The column of images that the row has, and its images, none where it is null or blank; None: it has none."""
        found = [column for column in of_images.COLUMNS if column in self.values]
        if not found:
            return self.null_images, []
        if len(found) > 1:
            raise self.refuse("image", "it beside the column images", "one of them")
        value = self.values[found[0]]
        listed = value if isinstance(value, list) else [value] if value != "" else []
        read = of_images.read_image
        images = [read(one, f"{found[0]}, image {n}", self.refuse) for n, one in enumerate(listed)]
        for one in listed:
            self.notes.message_keys.update(of_images.unread_keys_of_object(found[0], one))
        return found[0], images

    def _part(self, part: Any, column: str, where: str) -> str:
        if isinstance(part, Mapping) and part.get("type") == "text":
            unread = (key for key, value in part.items() if key not in ("type", "text") and value is not None)
            self.notes.message_keys.update(f"text.{key}" for key in unread)
            part = part.get("text")
        if isinstance(part, str):
            return self.plain(part, column, where)
        named = isinstance(part, Mapping) and "type" in part
        found = f"a content part of type {beginning_of(part['type'])}" if named else _kind(part)
        if named and part["type"] in _UNSEEN:
            raise self.refuse(where, found, "text or images: audio and video are not supported")
        raise self.refuse(where, found, 'text, or parts {"type": "text", "text": ...}')


def _is_parts(content: Any) -> bool:
    """Whether a tool's result consists of parts, or of one, as multimodal messages have them. A list of texts does not:
    it is what the tool has returned."""
    parts = content if isinstance(content, list) else [content]
    typed = [isinstance(part, Mapping) and part.get("type") in _PARTS for part in parts]
    return any(typed) and all(is_typed or isinstance(part, str) for is_typed, part in zip(typed, parts, strict=True))


def _ordinary(message: Any) -> Message | None:
    """The message if it is plain text under a known role, as nearly all are; the general way is 3 times slower."""
    if type(message) is not dict or len(message) != 2:
        return None
    if "from" in message:
        role, content = message["from"], message.get("value")
    else:
        role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in ROLES or role in CALL_ROLES:
        return None
    if type(content) is not str or not content or content.isspace():
        return None
    return {"role": ROLES[role], "content": content} if content.isascii() or _is_unicode(content) else None


def _read_prompt_completion(row: _Row) -> SftExample:
    prompt = _prompt(row, "prompt")
    return _prompted(prompt, _completion(row, prompt, "tool"))


def _read_labelled(row: _Row) -> LabelledExample:
    prompt = _prompt(row, "prompt")
    return LabelledExample(prompt, _completion(row, prompt), _label(row))


def _label(row: _Row) -> bool:
    label = row.values["label"]
    if isinstance(label, bool):
        return label
    text = label.strip().lower() if isinstance(label, str) else label
    if text in ("true", "false"):  # cells of CSV files are text
        return bool(text == "true")
    hint = ": a number is no boolean, write 1 as true and 0 as false" if text in (0, 1, "0", "1", "0.0", "1.0") else ""
    raise row.refuse("label", _kind(label), f"true (desirable) or false{hint}")


def _read_labelled_conversation(row: _Row) -> LabelledExample:
    messages = row.messages("messages")
    turns = len(messages)
    while turns and messages[turns - 1]["role"] == "assistant":
        turns -= 1
    if turns == len(messages):
        found = f"a conversation that ends in {_article(messages[-1]['role'])} turn"
        raise row.refuse("messages", found, "assistant turns at its end, which the label is about")
    if not turns:
        raise row.refuse("messages", "assistant turns only", "a turn before them that asks for an answer")
    prompt, completion = messages[:turns], messages[turns:]
    row.notes.repeating += _repeats(prompt, completion)
    return LabelledExample(prompt, completion, _label(row))


def _completion(row: _Row, prompt: list[Message], *others: str) -> list[Message]:
    completion = _without_prompt(prompt, row.turns("completion", "assistant"))
    row.notes.repeating += _repeats(prompt, completion)
    return _answer(row, "completion", completion, *others)


def _read_instruction(row: _Row) -> SftExample:
    return _single_turn(row, _instruction(row), row.text("output"))


def _read_instruction_prompt(row: _Row) -> PromptExample:
    return PromptExample([{"role": "user", "content": _instruction(row)}])


def _instruction(row: _Row) -> str:
    prompt = row.text("instruction")
    extra = row.plain(row.values["input"], "input", "input") if "input" in row.values else ""
    return f"{prompt}\n\n{extra}" if extra and not extra.isspace() else prompt


def _prompt_reader(column: str) -> Callable[[_Row], PromptExample]:
    return lambda row: PromptExample(_prompt(row, column))


def _conversation_prompt_reader(column: str) -> Callable[[_Row], PromptExample]:
    def read(row: _Row) -> PromptExample:
        messages = row.messages(column)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise row.refuse(column, "assistant turns only", "a turn that asks for an answer")
        return PromptExample(messages)

    return read


def _read_input_output(row: _Row) -> SftExample:
    return _single_turn(row, row.text("input"), row.text("output"))


def _read_question_answer(row: _Row) -> SftExample:
    return _single_turn(row, row.text("question"), row.text("answer"))


def _read_chat_completion_input(row: _Row) -> SftExample:
    prompt = row.messages("chat_completion_input")
    _refuse_open_answer(row, "chat_completion_input", prompt)
    completion = [{"role": "assistant", "content": row.text("expected_answer")}]
    row.notes.repeating += _repeats(prompt, completion)
    return _prompted(prompt, completion)


def _conversation_reader(column: str) -> Callable[[_Row], SftExample]:
    def read(row: _Row) -> SftExample:
        messages = row.messages(column)
        if not any(message["role"] == "assistant" for message in messages):
            raise row.refuse(column, "no assistant turn", "at least one, since that is what is trained")
        row.notes.unanswered += messages[-1]["role"] == "user"
        return SftExample(messages, None)

    return read


def _read_text(row: _Row) -> SftExample:
    return SftExample(None, None, row.text("text"))


_Answer = tuple[str, list[Message]]
"""Where an answer is, for messages, and its turns."""


def _read_preference(row: _Row) -> PreferenceExample:
    prompt = _prompt(row, "prompt")
    chosen = ("chosen", _without_prompt(prompt, row.turns("chosen", "assistant")))
    rejected = [
        (where, _without_prompt(prompt, row.turns_of(value, where, "assistant"))) for where, value in _rejected(row)
    ]
    differences = _score_differences(row, len(rejected))
    shared = _shared_turns([turns for _, turns in (chosen, *rejected)])
    if shared[-len(prompt) :] == prompt:  # the conversations carry more context, such as a system turn
        return _behind(row, shared, shared, chosen, rejected, differences)
    if shared and shared[0]["role"] == "assistant" and shared[-1]["role"] != "assistant":  # and more turns
        return _behind(row, prompt + shared, shared, chosen, rejected, differences)
    return _better(row, prompt, chosen, rejected, differences)


def _read_implicit_preference(row: _Row) -> PreferenceExample:
    of_rejected = _rejected(row)
    for where, value in (("chosen", row.values["chosen"]), *of_rejected):
        if isinstance(value, str) and not _LOOKS_LIKE_MESSAGES.match(value):
            expected = "a conversation as a list of messages, since there is no column prompt"
            raise row.refuse(where, _kind(value), expected + _likely_prompt(row))
    chosen = ("chosen", row.messages("chosen"))
    rejected = [(where, row.messages_of(value, where)) for where, value in of_rejected]
    differences = _score_differences(row, len(rejected))
    shared = _shared_turns([turns for _, turns in (chosen, *rejected)])
    if not shared:
        expected = f"the same leading turns in {'both' if len(rejected) == 1 else 'all'} (they are the prompt)"
        found = "a first turn that differs from that of rejected"
        raise row.refuse("chosen", found, f"{expected}, or a prompt column{_likely_prompt(row)}")
    _refuse_open_answer(row, "chosen", shared)
    return _behind(row, shared, shared, chosen, rejected, differences)


def _rejected(row: _Row) -> list[tuple[str, Any]]:
    """The rejected answers: text, a list of messages, or a list of several such."""
    value = row.values["rejected"]
    if not isinstance(value, list) or not value or any(isinstance(one, Mapping) for one in value):
        return [("rejected", value)]
    return [(f"rejected, answer {number}", one) for number, one in enumerate(value)]


class _Differences(NamedTuple):
    """By how much the score of an answer is above those of others."""

    columns: str
    """That the row has the scores in."""
    values: list[float]


def _score_differences(row: _Row, count: int) -> _Differences | None:
    """By how much the chosen answer's score is above that of each rejected one; None: there are no scores. Scores by
    which a rejected answer is the better one are refused."""
    if "score_chosen" not in row.values or "score_rejected" not in row.values:
        return None
    chosen, value = row.number(row.values["score_chosen"], "score_chosen"), row.values["score_rejected"]
    values = value if isinstance(value, list) else [value]
    if len(values) != count:
        raise row.refuse("score_rejected", f"{len(values)} scores", f"{count}, one for each rejected answer")
    scores = [row.number(score, "score_rejected") for score in values]
    best = max(scores)
    if best > chosen:
        expected = "a score that is not below that of a rejected answer: swap the answers, or correct the scores"
        raise row.refuse(
            "score_chosen", f"{beginning_of(chosen)} where score_rejected is {beginning_of(best)}", expected
        )
    row.notes.equal_scores += best == chosen
    return _Differences("score_chosen, score_rejected", [chosen - score for score in scores])


def _read_openai_preference(row: _Row) -> PreferenceExample:
    prompt = _openai_prompt(row)
    chosen, *rejected = ((name, row.messages(name)) for name in ("preferred_output", "non_preferred_output"))
    return _better(row, prompt, chosen, rejected)


def _openai_prompt(row: _Row) -> list[Message]:
    expected = "an object with messages"
    given = row.parsed(row.values["input"], "input", expected)
    if not isinstance(given, Mapping) or _absent(given.get("messages")):
        raise row.refuse("input", _kind(given), expected)
    read = {"messages", "parallel_tool_calls", *TOOLS}
    row.notes.message_keys |= {f"input.{key}" for key, value in given.items() if key not in read and not _absent(value)}
    prompt = row.messages_of(given["messages"], "input.messages")
    _refuse_open_answer(row, "input.messages", prompt)
    if tools := _tools(row, given, "input."):
        give_tools(row, prompt, tools)
    return prompt


def _read_input_prompt(row: _Row) -> PromptExample:
    value = row.values["input"]
    return PromptExample(_openai_prompt(row) if isinstance(value, Mapping) else _prompt(row, "input"))


def _read_ultrafeedback(row: _Row) -> PreferenceExample:
    """Answers in objects, each with its score."""
    found = _answer_objects(row, "completions", "response")
    objects = [one for _, one in found]
    key = next((key for key in _COMPLETION_SCORES if all(not _absent(one.get(key)) for one in objects)), None)
    if key is None:
        expected = f"a score of each answer, under the same key: {' or '.join(_COMPLETION_SCORES)}"
        raise row.refuse("completions", "answers without a score", expected)
    _note_unread(row, objects, {"response", *_COMPLETION_SCORES})
    scores = [row.number(one[key], f"{where}, {key}") for where, one in found]
    prompt = [{"role": "user", "content": row.text("instruction")}]
    return _best_of(row, prompt, [(where, one["response"]) for where, one in found], scores, f"completions, {key}")


def _read_nectar(row: _Row) -> PreferenceExample:
    """Answers in objects, each with its rank."""
    found = _answer_objects(row, "answers", "answer")
    _note_unread(row, [one for _, one in found], {"answer", "rank"})
    ranks = [row.number(one.get("rank"), f"{where}, rank") for where, one in found]
    prompt = _dialog_in_text(row, "prompt") or _prompt(row, "prompt")
    answers = [(where, one["answer"]) for where, one in found]
    return _best_of(row, prompt, answers, [-rank for rank in ranks])


def _dialog_in_text(row: _Row, column: str) -> list[Message] | None:
    """The turns of a text such as "Human: Hi\n\nAssistant: "; None: it has another form."""
    text = row.values[column]
    if not isinstance(text, str):
        return None
    before, *parts = _DIALOG_IN_TEXT.split(text.strip())
    speakers, contents = parts[::2], parts[1::2]
    if before or speakers[:1] != ["Human"] or speakers[-1:] != ["Assistant"] or contents[-1].strip():
        return None
    turns = [
        {"role": "user" if speaker == "Human" else "assistant", "content": content.strip()}
        for speaker, content in zip(speakers[:-1], contents[:-1], strict=True)
    ]
    return row.messages_of(turns, column)


def _ranked_reader(column: str, sign: int) -> Callable[[_Row], PreferenceExample]:
    """Of rows with two lists: the answers, and numbers, of which the highest (sign 1) or lowest (-1) is the best."""

    def read(row: _Row) -> PreferenceExample:
        answers, numbers = row.items("responses", "answers"), row.items(column, "numbers")
        if len(numbers) != len(answers):
            raise row.refuse(column, f"{len(numbers)} numbers", f"{len(answers)}, one for each of responses")
        values = [sign * row.number(value, f"{column}, number {number}") for number, value in enumerate(numbers)]
        found = [(f"responses, answer {number}", answer) for number, answer in enumerate(answers)]
        return _best_of(row, _prompt(row, "prompt"), found, values, column if sign > 0 else "")

    return read


def _answer_objects(row: _Row, column: str, key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects of a column that holds a list of answers, and where each is."""
    found = [(f"{column}, answer {number}", one) for number, one in enumerate(row.items(column, "objects"))]
    for where, one in found:
        if not isinstance(one, Mapping) or _absent(one.get(key)):
            raise row.refuse(where, _kind(one), f"an object with {key}")
    return found


def _note_unread(row: _Row, objects: Sequence[Mapping[str, Any]], read: set[str]) -> None:
    row.notes.message_keys |= {
        key for one in objects for key, value in one.items() if key not in read and not _absent(value)
    }


def _best_of(
    row: _Row,
    prompt: list[Message],
    given: Sequence[tuple[str, Any]],
    values: Sequence[float],
    columns: str = "",
) -> PreferenceExample:
    """The best of several answers, the first of those that are equally good, against each that is less good.

    Args:
        given: where each answer is, and its text or messages.
        values: how good each is.
        columns: with scores, whose differences mean something; empty: the values are ranks.
    """
    answers = [(where, _without_prompt(prompt, row.turns_of(value, where, "assistant"))) for where, value in given]
    best = max(values, default=0.0)
    worse = [answer for answer, value in zip(answers, values, strict=True) if value < best]
    if worse:
        below = [best - value for value in values if value < best]
        differences = _Differences(columns, below) if columns else None
        return _better(row, prompt, answers[values.index(best)], worse, differences)
    row.notes.pairless += 1
    return PreferenceExample(prompt, [], [])


def _likely_prompt(row: _Row) -> str:
    """The end of the message about a pair without a prompt: its likely cause."""
    named = next((column for column in _LIKELY_PROMPTS if isinstance(row.values.get(column), str | list)), None)
    if named:
        return f": was the column {named} meant as the prompt? Rename it to prompt"
    if isinstance(row.values["chosen"], str) and _SPEAKERS.match(row.values["chosen"]):
        return ": it looks like a dialog in one text: write each turn as {role, content}"
    return ": these are answers whose prompt is missing: add it as the column prompt"


def _single_turn(row: _Row, prompt: str, completion: str) -> SftExample:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    row.notes.repeating += _repeats(turns[:1], turns[1:])
    return SftExample(turns, 1)


def _prompted(prompt: list[Message], completion: list[Message]) -> SftExample:
    return SftExample([*prompt, *completion], len(prompt))


def _prompt(row: _Row, column: str) -> list[Message]:
    prompt = row.turns(column, "user")
    _refuse_open_answer(row, column, prompt)
    return prompt


def _refuse_open_answer(row: _Row, column: str, prompt: list[Message]) -> None:
    if prompt[-1]["role"] == "assistant":
        raise row.refuse(column, "a prompt that ends in an assistant turn", "one that asks for an answer")


def _answer(row: _Row, column: str, turns: list[Message], *others: str) -> list[Message]:
    """Return the turns if all are assistant turns: only those may be trained as an answer.

    Args:
        others: roles of turns that may stand between them.
    """
    roles = [turn["role"] for turn in turns]
    other = next((role for role in roles if role != "assistant" and role not in others), None)
    other = other or (roles[-1] if roles and roles[-1] != "assistant" else None)
    if other is not None:
        expected = "assistant turns that follow the prompt (its own turns may be repeated in front, unchanged)"
        raise row.refuse(column, f"{_article(other)} turn", expected)
    return turns


def _behind(
    row: _Row,
    prompt: list[Message],
    shared: list[Message],
    chosen: _Answer,
    rejected: Sequence[_Answer],
    differences: _Differences | None,
) -> PreferenceExample:
    """As `_better`, of answers that begin with turns that they share."""
    first, *others = ((where, turns[len(shared) :]) for where, turns in (chosen, *rejected))
    return _better(row, prompt, first, others, differences)


def _better(
    row: _Row,
    prompt: list[Message],
    chosen: _Answer,
    rejected: Sequence[_Answer],
    differences: _Differences | None = None,
) -> PreferenceExample:
    """An answer that is better than others.

    Args:
        differences: of its score and theirs; None: they have none.
    """
    first, *others = (_answer(row, where, turns) for where, turns in (chosen, *rejected))
    row.notes.pairs += len(others)
    row.notes.identical += others.count(first)
    row.notes.repeating += _repeats(prompt, first) or any(_repeats(prompt, answer) for answer in others)
    margins = _margins(row, len(others), differences) if row.notes.margins else None
    return PreferenceExample.of(prompt, first, *others, margins=margins)


def _margins(row: _Row, count: int, differences: _Differences | None) -> list[float]:
    """The margin of each pair of a row."""
    value, most = row.values.get(MARGIN), f"{_GREATEST_MARGIN:.0f}"
    if value is not None:
        values = value if isinstance(value, list) else [value]
        if len(values) != count:
            raise row.refuse(MARGIN, f"{len(values)} margins", f"{count}, one for each rejected answer")
        margins = [row.number(one, MARGIN) for one in values]
        for margin in margins:
            if not 0 <= margin <= _GREATEST_MARGIN:
                raise row.refuse(MARGIN, beginning_of(margin), f"a number from 0 to {most}")
        return margins
    if differences is None:
        expected = "column margin, or scores of both answers, since the job is trained with margins"
        raise row.refuse(MARGIN, "neither a margin nor scores", expected)
    if (greatest := max(differences.values, default=0.0)) > _GREATEST_MARGIN:
        expected = f"at most {most}, since the job is trained with margins: send smaller scores, or a column margin"
        raise row.refuse(differences.columns, f"scores that differ by {beginning_of(greatest)}", expected)
    return differences.values


def _repeats(prompt: list[Message], answer: list[Message]) -> bool:
    """Whether an answer's text begins with the text of its prompt's last turn, and has more."""
    last, text = prompt[-1]["content"].strip(), answer[0]["content"].lstrip() if answer else ""
    return bool(last) and text.startswith(last) and len(text) > len(last)


def _without_prompt(prompt: list[Message], turns: list[Message]) -> list[Message]:
    return turns[len(prompt) :] if len(turns) > len(prompt) and turns[: len(prompt)] == prompt else turns


def _shared_turns(answers: Sequence[list[Message]]) -> list[Message]:
    """The leading turns that all have; the last turn of each is never shared, so that something is left to compare."""
    first, *others = answers
    most = min(map(len, answers)) - 1
    count = 0
    while count < most and all(other[count] == first[count] for other in others):
        count += 1
    return first[:count]


def _reads_images(use: RowUse) -> bool:
    return use != "prompts" and METHODS[use].reads_images


@dataclass(frozen=True, slots=True, eq=False)
class RowShape:
    """One way to write a row. Columns beside those of the shape are allowed, not read, and reported."""

    columns: tuple[str, ...]
    use: RowUse
    """What its rows are read for; other methods may read them too (`specs.methods.Method.rows`)."""
    data_format: DataFormat | None
    meaning: str
    """One line for docs/reference/data-formats.md."""
    read: Callable[[_Row], Example]
    optional: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " + ".join(self.columns)

    @property
    def read_beside(self) -> tuple[str, ...]:
        """Columns that are read where a row has them; a plain text is written by no chat template."""
        if self.columns == ("text",):
            return self.optional
        images = of_images.COLUMNS if _reads_images(self.use) else ()
        margin = (MARGIN,) if self.use == "dpo" else ()
        return (*self.optional, *images, *margin, *_AROUND)


ROW_SHAPES: tuple[RowShape, ...] = (
    RowShape(
        ("chat_completion_input", "expected_answer"),
        "sft",
        "instruct",
        "Llama Stack's instruct rows: a message list, and the answer's text",
        _read_chat_completion_input,
    ),
    RowShape(
        ("dialog",),
        "sft",
        "dialog",
        "Llama Stack's dialog rows: a message list, every turn of it",
        _conversation_reader("dialog"),
    ),
    RowShape(
        ("prompt", "completion"),
        "sft",
        "instruct",
        "text (a user turn, an assistant turn) or message lists",
        _read_prompt_completion,
    ),
    RowShape(
        ("instruction", "output"),
        "sft",
        "instruct",
        "Alpaca: the prompt is instruction, a blank line, input; or instruction alone",
        _read_instruction,
        ("input",),
    ),
    RowShape(("input", "output"), "sft", "instruct", "text: a user turn, an assistant turn", _read_input_output),
    RowShape(("question", "answer"), "sft", "instruct", "text: a user turn, an assistant turn", _read_question_answer),
    RowShape(("messages",), "sft", "dialog", "a message list, every turn of it", _conversation_reader("messages")),
    RowShape(
        ("conversations",),
        "sft",
        "dialog",
        "ShareGPT: a list of {from, value}, every turn of it",
        _conversation_reader("conversations"),
    ),
    RowShape(("text",), "sft", None, "plain text without a chat template, every token trained", _read_text),
    RowShape(
        ("prompt", "chosen", "rejected"),
        "dpo",
        None,
        "text or message lists, rejected also a list of several; all may repeat the prompt's turns in front",
        _read_preference,
        ("score_chosen", "score_rejected"),
    ),
    RowShape(
        ("chosen", "rejected"),
        "dpo",
        None,
        "conversations, rejected also a list of several; the turns that all have in common at the start are the prompt",
        _read_implicit_preference,
        ("score_chosen", "score_rejected"),
    ),
    RowShape(
        ("input", "preferred_output", "non_preferred_output"),
        "dpo",
        None,
        "OpenAI's: input is {messages}, the outputs are lists of assistant messages",
        _read_openai_preference,
    ),
    RowShape(
        ("instruction", "completions"),
        "dpo",
        None,
        "UltraFeedback's: a list of {response, overall_score or fine-grained_score}",
        _read_ultrafeedback,
    ),
    RowShape(
        ("prompt", "answers"),
        "dpo",
        None,
        "Nectar's: a list of {answer, rank}, rank 1 is the best",
        _read_nectar,
    ),
    RowShape(
        ("prompt", "responses", "scores"),
        "dpo",
        None,
        "a list of texts or message lists, and a number for each, the highest is the best",
        _ranked_reader("scores", 1),
    ),
    RowShape(
        ("prompt", "responses", "ranks"),
        "dpo",
        None,
        "a list of texts or message lists, and a number for each, the lowest is the best",
        _ranked_reader("ranks", -1),
    ),
    RowShape(
        ("prompt", "completion", "label"),
        "kto",
        None,
        "text or message lists, and whether the completion is desirable: true or false",
        _read_labelled,
    ),
    RowShape(
        ("messages", "label"),
        "kto",
        None,
        "a message list, and whether the assistant turns at its end are desirable; those before them are the prompt",
        _read_labelled_conversation,
    ),
    RowShape(
        ("chat_completion_input",),
        "prompts",
        None,
        "Llama Stack's message list",
        _prompt_reader("chat_completion_input"),
    ),
    RowShape(("prompt",), "prompts", None, "text (a user turn) or a message list", _prompt_reader("prompt")),
    RowShape(
        ("instruction",),
        "prompts",
        None,
        "Alpaca's prompt: instruction, a blank line, input; or instruction alone",
        _read_instruction_prompt,
        ("input",),
    ),
    RowShape(("input",), "prompts", None, "text: a user turn; or OpenAI's {messages}", _read_input_prompt),
    RowShape(("question",), "prompts", None, "text: a user turn", _prompt_reader("question")),
    *(
        RowShape(
            (column,),
            "prompts",
            None,
            "a message list; assistant turns at its end are left out",
            _conversation_prompt_reader(column),
        )
        for column in ("messages", "dialog", "conversations")
    ),
)
"""Every accepted shape. A row that fits several is read by the first of the requested `data_format`, else the first."""
COLUMNS = frozenset(column for shape in ROW_SHAPES for column in (*shape.columns, *shape.read_beside))
"""All columns that are read."""


def parse_row(
    row: Mapping[str, Any],
    index: int,
    use: RowUse,
    data_format: DataFormat | None = None,
    names: RowNames | None = None,
) -> Example:
    """Read one row. Raises InvalidRows: the row fits no shape, or one of its columns cannot be read.

    Args:
        index: the row's number, from 0, for the error message.
        data_format: which shape to read where the row fits an instruct and a dialog shape; ignored for pairs.
        names: of its columns and roles, where they are not those of shapes.
    """
    return _parse(row, index, use, data_format, _Notes(names))[2]


def check_rows(
    rows: Iterable[Mapping[str, Any]],
    use: RowUse,
    data_format: DataFormat | None = None,
    names: RowNames | None = None,
) -> RowsReport:
    """Read every row, keep none: a stream is checked in constant memory (10,000 rows take about 0.1 s). Raises
    InvalidRows: at the first bad row, or if there is no row at all."""
    notes, seen = _Notes(names), _Seen()
    for index, row in enumerate(rows):
        shape, columns, _ = _parse(row, index, use, data_format, notes)
        seen[shape, columns] += 1
    if not seen:
        raise InvalidRows("the dataset is empty: expected at least one row")
    if lacking := {*notes.columns.values()} - notes.named:
        raise InvalidRows(f"no row has the column {_listed(lacking)}, which the option columns names: correct it")
    if notes.system and not notes.conversations:
        hint = "which the option system_prompt is for: leave it out, or send rows with a prompt or messages"
        raise InvalidRows(f"the rows are plain text, and none is a conversation, {hint}")
    shapes: Counter[str] = Counter()
    for (shape, _), count in seen.items():
        shapes[shape.name] += count
    return RowsReport(seen.total(), dict(shapes), _warnings(seen, notes, use, data_format))


def _parse(
    row: Mapping[str, Any], index: int, use: RowUse, data_format: DataFormat | None, notes: _Notes
) -> tuple[RowShape, frozenset[str], Example]:
    if not isinstance(row, Mapping):
        raise InvalidRows(f"found {_kind(row)}, expected an object with named columns", row=index)
    values = {column: value for column, value in row.items() if not _absent(value)}
    if notes.columns:
        values = _renamed(values, index, notes)
    columns = frozenset(values)
    shape = _choose(columns, use, data_format)
    if shape is None:
        lacking = sorted({*notes.columns.values()} - {column for column, value in row.items() if not _absent(value)})
        hint = f". This row lacks {_listed(lacking)}, which the option columns names" if lacking else ""
        raise InvalidRows(_no_shape(values if notes.columns else row, columns, use) + hint, row=index)
    reader = _Row(index, values, notes, _null_images(row, notes))
    example = shape.read(reader)
    if notes.system or not columns.isdisjoint(_AROUND):
        example = _with_around(reader, example, shape)
    example = _with_images(reader, example, use, columns)
    _refuse_weights(reader, example)
    return shape, columns, example


def _null_images(row: Mapping[str, Any], notes: _Notes) -> str | None:
    """The column of images that is null in a row; None: none is."""
    for own in of_images.COLUMNS:
        name = notes.columns.get(own, own)
        is_read = own in notes.columns or name not in notes.columns.values()
        if is_read and name in row and _absent(row[name]):
            return own
    return None


def _with_images(row: _Row, example: Example, use: RowUse, columns: frozenset[str]) -> Example:
    """The example with its images in place: of pairs in their prompt, which both answers share."""
    talks = _conversations(example)
    in_turns = any("images" in turn for talk in talks for turn in talk)
    if row.null_images is None and columns.isdisjoint(of_images.COLUMNS) and not in_turns:
        return example
    if not _reads_images(use):
        named = [column for column in of_images.COLUMNS if of_images.holds_images(row.values.get(column))]
        if named or in_turns:
            title = "prompts" if use == "prompts" else METHODS[use].title
            *readers, last = (method.title for method in METHODS.values() if method.reads_images)
            expected = f"text alone: {title} reads no images, {', '.join(readers)} and {last} do"
            raise row.refuse((named or ["messages"])[0], "images", expected)
        return example
    if not talks or not isinstance(example, SftExample | PreferenceExample):
        return example  # a plain text
    talk, where = talks[0], "messages" if isinstance(example, SftExample) else "prompt"
    try:
        column, images = row.images()
    except InvalidRows as error:
        named = [column for column in of_images.COLUMNS if column in row.values]
        if in_turns or of_images.has_placeholder(talk) or any(of_images.holds_images(row.values[one]) for one in named):
            raise
        row.notes.unread_images.update(named)
        return replace(example, unread_image=error.hint)
    of_images.place_images(talk, column, images, row.refuse, where)
    row.notes.images += of_images.count_images(talk)
    return example


def _conversations(example: Example) -> list[list[Message]]:
    """The turns of a row; of a pair or a labelled answer, those of its parts."""
    if isinstance(example, PreferenceExample):
        return [example.prompt, *example.answers]
    if isinstance(example, LabelledExample):
        return [example.prompt, example.completion]
    return [] if example.messages is None else [example.messages]


def _refuse_weights(row: _Row, example: Example) -> None:
    if isinstance(example, PreferenceExample):
        answers = example.answers
    else:
        answers = [example.completion] if isinstance(example, LabelledExample) else []
    if any("weight" in turn for answer in answers for turn in answer):
        expected = "no weight: answers of pairs and labelled ones are trained whole"
        raise row.refuse("of an answer", "weight 0", expected)


def _renamed(values: dict[str, Any], index: int, notes: _Notes) -> dict[str, Any]:
    """The row under the names of shapes. A column that is read under another name keeps no name of its own."""
    theirs = {*notes.columns.values()}
    notes.named |= theirs & values.keys()
    renamed = {column: value for column, value in values.items() if column not in theirs}
    for own, name in notes.columns.items():
        if name not in values:
            continue
        if own in renamed:
            found = f"it is there beside column {name}, which the option columns reads as {own}"
            raise InvalidRows(f"column {own}: {found}: leave one of them out", row=index)
        renamed[own] = values[name]
    return renamed


def _with_around(row: _Row, example: Example, shape: RowShape) -> Example:
    """The example with the system turn and the tools that are columns of their own."""
    tools = _tools(row, row.values)
    system = _system(row) if SYSTEM in shape.read_beside and SYSTEM in row.values else ""
    if isinstance(example, SftExample) and example.messages is None:
        if tools:
            raise row.refuse("tools", "tools beside a plain text", "messages, which a chat template writes with them")
        return example
    messages = example.prompt if isinstance(example, PreferenceExample | LabelledExample) else example.messages
    assert messages is not None
    row.notes.conversations += 1
    if row.notes.system and (messages[0]["role"] == "system" or (system and not system.isspace())):
        row.notes.own_system += 1
    elif row.notes.system:
        system = row.notes.system
    if system and not system.isspace():
        if messages[0]["role"] != "system":
            # Tools that lie beside the messages stay with the first turn.
            tools_beside = {key: messages[0][key] for key in ("tools",) if key in messages[0]}
            messages[0] = {key: value for key, value in messages[0].items() if key not in tools_beside}
            messages.insert(0, {"role": "system", "content": system, **tools_beside})
            if isinstance(example, SftExample) and example.prompt_turns is not None:
                example = replace(example, prompt_turns=example.prompt_turns + 1)
        elif messages[0]["content"] != system:
            raise row.refuse(SYSTEM, "another text than that of the first turn, a system turn", "the system turn once")
    if tools:
        give_tools(row, messages, tools)
    return example


def _system(row: _Row) -> str:
    value = row.values[SYSTEM]
    if isinstance(value, str) or (value and _is_parts(value)):
        return row.content(value, SYSTEM, SYSTEM)
    expected = "the text of the system turn, or its parts: give the column another name if it is none"
    raise row.refuse(SYSTEM, _kind(value), expected)


def _tools(row: _Row, values: Mapping[str, Any], within: str = "") -> list[Tool]:
    """The tools of a row, or of an object in it, whose name and a dot are `within`."""
    found: list[Tool] = []
    for column in TOOLS:
        if not _absent(values.get(column)):
            tools = read_tools(values[column], f"{within}{column}", row.refuse)
            if tools and found and tools != found:
                raise row.refuse(f"{within}{column}", f"other tools than those in {within}tools", "the tools once")
            found = found or tools
    return found


def give_tools(row: _Row, messages: list[Message], tools: list[Tool]) -> None:
    """Put the tools of a conversation where renderers find them, unless its system turn lists them.

    Calls that do not fit them are counted.
    """
    if messages[0].get("tools", tools) != tools:
        raise row.refuse("tools", "other tools than those beside the messages", "the tools once")
    if _lists_tools(messages[0], tools):
        row.notes.listed += 1
    else:
        messages[0] = {**messages[0], "tools": tools}
    for message in messages:
        row.notes.calls.update(faults_of(message.get("tool_calls", ()), tools))


def _lists_tools(message: Message, tools: list[Tool]) -> bool:
    """Whether a turn is a system turn with the names of all tools, as JSON or Python writes them (Hermes, ToolACE)."""
    if message["role"] != "system":
        return False
    named = {name for _, name in _TOOL_NAME.findall(message["content"])}
    return named.issuperset(tool["function"]["name"] for tool in tools)


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether no turn has more than a role and a content."""
    return all(_MORE_KEYS.isdisjoint(message) for message in messages)


def holds_pairs(row: Mapping[str, Any]) -> bool:
    """Whether a row has preference pairs, by its columns. One that SFT reads, too, has `chosen` and `rejected`."""
    columns = frozenset(column for column, value in row.items() if not _absent(value))
    is_pair = _choose(columns, "dpo", None) is not None
    return is_pair and ({"chosen", "rejected"} <= columns or _choose(columns, "sft", None) is None)


def _rows_of(use: RowUse) -> RowUse:
    """The use whose shapes a row may have: several methods read the same ones."""
    return "prompts" if use == "prompts" else METHODS[use].rows


@lru_cache(maxsize=256)
def _choose(columns: frozenset[str], use: RowUse, data_format: DataFormat | None) -> RowShape | None:
    rows = _rows_of(use)
    fitting = [shape for shape in ROW_SHAPES if shape.use == rows and columns.issuperset(shape.columns)]
    wanted = [shape for shape in fitting if shape.data_format == data_format]
    return next(iter(wanted if data_format else fitting), None) or next(iter(fitting), None)


def _no_shape(row: Mapping[str, Any], columns: frozenset[str], use: RowUse) -> str:
    found = ", ".join(f"{column} (null)" if column not in columns else column for column in row)
    expected = "; ".join(shape.name for shape in ROW_SHAPES if shape.use == _rows_of(use))
    title = "prompts" if use == "prompts" else METHODS[use].title
    hint = _list_within(row, use) or ("" if use == "prompts" else _other_use(columns, use))
    hint = hint or _misspelt(columns, use) or _lacking(columns, use)
    if not hint and columns and use != "prompts":
        hint = ". Rename them, or tell a training what they are by the option `columns`"
    return f"found the columns {found or 'of an empty object'}, expected for {title} one of: {expected}{hint}"


def _list_within(row: Mapping[str, Any], use: RowUse) -> str:
    """What to do with an object that has the rows under one of its keys; empty: it has none."""
    for column, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if column not in COLUMNS and isinstance(first, Mapping) and _choose(frozenset(first), use, None):
            return f". The list in {column!r} has such rows: write them alone, one per line or as a list"
    return ""


def _lacking(columns: frozenset[str], use: RowUse) -> str:
    """Which column a row lacks where it has all others of a shape; empty: it lacks more."""
    lacks_one = [
        shape
        for shape in ROW_SHAPES
        if shape.use == _rows_of(use)
        and not columns.isdisjoint(shape.columns)
        and len(set(shape.columns) - columns) == 1
    ]
    # The longest ones have the most in common with the row.
    longest = max((len(shape.columns) for shape in lacks_one), default=0)
    lacking = dict.fromkeys(
        column
        for shape in lacks_one
        if len(shape.columns) == longest
        for column in shape.columns
        if column not in columns
    )
    return f". Missing or empty in this row: {' or '.join(lacking)}" if lacking else ""


def _other_use(columns: frozenset[str], use: RowUse) -> str:
    """What to do with rows of another method; empty: they are of none."""
    of = {name: _choose(columns, name, None) is not None for name in ("sft", "dpo", "kto")}
    rows = _rows_of(use)
    if rows == "kto" and of["dpo"]:
        return (
            ". These are preference pairs: write each as two rows, prompt with completion and label, of which chosen "
            "has the label true and rejected false; or train on the pairs with the type dpo"
        )
    if rows == "kto" and of["sft"]:
        return ". These rows lack a label: true where the completion is desirable, else false"
    if rows == "dpo" and of["kto"]:
        return ". These are labelled answers: was the type kto meant?"
    other = "sft" if rows == "dpo" else "dpo"
    call = "preference-optimize" if other == "dpo" else "supervised-fine-tune"
    if of[other]:
        return f". These columns are {other.upper()}'s: was POST /v1/post-training/{call} meant?"
    return ""


def _misspelt(columns: frozenset[str], use: RowUse) -> str:
    """Why no column of a table is known, where its header shows it; empty: it does not."""
    if len(columns) == 1:
        (header,) = columns
        for separator in (";", "\t", "|"):
            if _choose(frozenset(header.split(separator)), use, None):
                return f". The cells are separated by {separator!r}: separate them by ','"
    meant = {column: re.sub(r"[\s-]+", "_", column.strip().lower()) for column in columns}
    shape = _choose(frozenset(meant.values()), use, None)
    if shape is None and len(columns) <= _COMPARED:
        known = {column for shape in ROW_SHAPES if shape.use == _rows_of(use) for column in shape.columns} - columns
        pairs = itertools.product(sorted(columns - COLUMNS), sorted(known - {*meant.values()}))
        alike = [(_likeness(meant[column][:_COMPARED], name), column, name) for column, name in pairs]
        left = columns - COLUMNS
        for likeness, column, name in sorted(alike, reverse=True):  # `prompts` before `prompt_id`
            if likeness >= _ALIKE and column in left and name in known:
                meant[column], left, known = name, left - {column}, known - {name}
        shape = _choose(frozenset(meant.values()), use, None)
    if shape is None:
        return ""
    renamed = [f"{column!r} to {name}" for column, name in meant.items() if name != column and name in shape.columns]
    return f". Rename {', '.join(sorted(renamed))}"


def _likeness(one: str, other: str) -> float:
    """From 0 to 1; 0 also where it is below `_ALIKE`."""
    compared = difflib.SequenceMatcher(None, one, other)
    return compared.ratio() if compared.quick_ratio() >= _ALIKE else 0.0


_COMPARED = 100
"""Columns, and characters of one, that are compared with known names: a caller does not decide how long that takes."""
_ALIKE = 0.8
"""Of 1: equal characters in both names."""

_Seen = Counter[tuple[RowShape, frozenset[str]]]
"""Rows per shape and set of columns that have a value."""


def _warnings(seen: _Seen, notes: _Notes, use: RowUse, data_format: DataFormat | None) -> list[str]:
    warnings = []
    unread = {column for shape, columns in seen for column in columns.difference(shape.columns, shape.read_beside)}
    if not _reads_images(use):  # a method that reads the same rows may
        unread |= {column for _, columns in seen for column in columns.intersection(of_images.COLUMNS)}
    if not notes.margins:
        unread |= {MARGIN for _, columns in seen if MARGIN in columns}
    unread |= notes.unread_images
    if unread and use != "grpo":  # rewards get whole rows
        warnings.append(f"{UNREAD}{_listed(unread)}")
    if notes.message_keys:
        warnings.append(f"message keys never read: {_listed(notes.message_keys)}")
    if notes.names and (unused := notes.names.roles.keys() - notes.used_roles):
        warnings.append(f"the option roles names roles that no message has: {_listed(unused)}")
    if notes.system and (plain := seen.total() - notes.conversations):
        warnings.append(f"{plain} of {seen.total()} rows are plain text, which gets no system_prompt")
    if notes.own_system:
        warnings.append(
            f"{notes.own_system} of {seen.total()} rows have a system turn of their own, which stands in place of the "
            "option system_prompt"
        )
    if _rows_of(use) == "sft" and data_format is not None:
        warnings += _format_warnings(seen, data_format)
    if notes.scalars:
        counts = _listed(f"{column} ({count})" for column, count in notes.scalars.items())
        warnings.append(f"numbers or booleans where text is expected, read as their JSON text: {counts}")
    if notes.calls:
        counts = _listed(f"{fault} ({count})" for fault, count in notes.calls.items())
        warnings.append(f"tool calls that do not fit their tools: {counts}")
    if notes.weighted:
        counts = _listed(f"{role} ({count})" for role, count in notes.weighted.items())
        warnings.append(f"weight 1, or train true, of turns that are not assistant's has no effect: {counts}")
    if notes.listed:
        warnings.append(
            f"{notes.listed} of {seen.total()} rows list their tools in the system turn, too: they are trained as "
            "it has them, and the chat template gets none. Take them out of that turn if the template is to write them"
        )
    if notes.repeating:
        warnings.append(
            f"{notes.repeating} of {seen.total()} rows have an answer that begins with its prompt's text, which is "
            "then there twice and trained: leave it out of the answers, unless they quote it"
        )
    if notes.unanswered:
        warnings.append(
            f"{notes.unanswered} of {seen.total()} rows end in a user turn, behind the last answer: it is trained only "
            "where the loss covers every token. Add its answer, or leave the turn out"
        )
    if notes.identical:
        warnings.append(
            f"{notes.identical} of {notes.pairs} pairs have identical chosen and rejected answers: no signal"
        )
    if notes.equal_scores:
        warnings.append(
            f"{notes.equal_scores} of {seen.total()} rows have the same score for chosen and rejected answers: no "
            "preference is known, and they are trained as the columns have it"
        )
    if notes.pairless:
        warnings.append(
            f"{notes.pairless} of {seen.total()} rows make no pair: no preference, since no answer is better"
        )
    return warnings


def _format_warnings(seen: _Seen, data_format: DataFormat) -> list[str]:
    other = Counter[str]()
    for (shape, _), count in seen.items():
        if shape.data_format not in (None, data_format):
            other[shape.name] += count
    if not other:
        return []
    found = f"{other.total()} of {seen.total()} rows have only {_listed(other)}"
    return [f"data_format is {data_format!r}, but {found}: read as they are"]


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _is_unicode(text: str) -> bool:
    """Whether a tokenizer can take it: JSON can carry half of a surrogate pair, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """The JSON type of a value, with its beginning."""
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    name = "null" if value is None else names.get(type(value), f"a value of type {type(value).__name__}")
    if (text := _stand_in(value)) is not None:
        return f"a {next(iter(value))} ({text[:60]})"
    return name if value is None or value == [] else f"{name} {beginning_of(value)}"


def _stand_in(value: Any) -> str | None:
    """The text of an object that stands for a value that JSON lacks (`system.json_rows`); None: it is another value."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, text),) = value.items()
    return text if kind in STAND_INS and isinstance(text, str) else None


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def _listed(items: Iterable[str]) -> str:
    # JSON can carry half of a surrogate pair, which can be neither stored nor sent as UTF-8.
    names = sorted(item.encode("utf-8", "backslashreplace").decode() or "''" for item in items)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
