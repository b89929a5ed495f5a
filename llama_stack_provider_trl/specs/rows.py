"""Parses dataset rows as users write them into the examples that the recipes train on. Needs only the stdlib.

The accepted shapes are the table `ROW_SHAPES`; a test compares docs/reference/data-formats.md with it. Rules for all:

- None, NaN and a missing key are one thing, *absent*: rows may have made a round trip through pandas.
- A number or a boolean where text is expected is read as its JSON text, and the report counts it.
- The first bad row ends the reading with `InvalidRows`, which names the row (from 0), the column, what was found and
  what was expected. No row is skipped silently.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..errors import InvalidRows
from ..system.json_rows import STAND_INS
from ..system.texts import DuplicateKey, parse_json
from .job import DataFormat, RowUse
from .methods import METHODS

Message = dict[str, str]
"""One turn: `role` (system, user, assistant or tool) and `content`."""

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
}
"""Role names as found in chat and ShareGPT datasets -> the four that chat templates know."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that some chat templates render beside `content`."""
_TOOLS = ("tools", "functions")
"""Columns with the tools that a conversation may call, which some chat templates render."""
_NO_TOOLS = ("[]", "{}", "null")
"""No tools, as the text that tables have."""
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from)['"]\s*:""")
_LIKELY_PROMPTS = ("question", "instruction", "input", "query", "context", "user", "prompts", "problem", "post")
"""Columns in which other datasets of pairs have the prompt."""
_SPEAKERS = re.compile(r"\s*(human|user|system|assistant)\s*:", re.IGNORECASE)
_NAMES_SHOWN = 12
UNREAD = "columns never read: "
"""How the warning about these begins."""


@dataclass(frozen=True, slots=True)
class SftExample:
    """One supervised example: a conversation or a plain text, never both."""

    messages: list[Message] | None
    prompt_turns: int | None
    """Leading messages that are context only, the loss is on the rest; None: the loss is on every assistant turn."""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """One preference pair: the prompt stands once, `chosen` and `rejected` are assistant turns."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


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

    scalars: Counter[str] = field(default_factory=Counter)
    message_keys: set[str] = field(default_factory=set)
    identical: int = 0
    repeating: int = 0
    """Rows with an answer whose text begins with that of its prompt."""


class _Row:
    """One row without its absent values. Turns columns into text and messages, or raises InvalidRows."""

    __slots__ = ("index", "notes", "values")

    def __init__(self, index: int, values: Mapping[str, Any], notes: _Notes) -> None:
        self.index, self.values, self.notes = index, values, notes

    def refuse(self, where: str, found: str, expected: str) -> InvalidRows:
        return InvalidRows(f"column {where}: found {found}, expected {expected}", row=self.index)

    def text(self, column: str) -> str:
        """The column's text; blank text is refused."""
        text = self.plain(self.values[column], column, column)
        if not text or text.isspace():
            raise self.refuse(column, "blank text", "text")
        return text

    def turns(self, column: str, role: str) -> list[Message]:
        """A column that holds text (one turn of `role`) or a list of messages, possibly as JSON text."""
        value = self.values[column]
        if isinstance(value, list) or (isinstance(value, str) and _LOOKS_LIKE_MESSAGES.match(value)):
            return self.messages(column)
        return [{"role": role, "content": self.text(column)}]

    def messages(self, column: str) -> list[Message]:
        """A column that holds a list of messages, or its JSON text."""
        value = self.values[column]
        if isinstance(value, str):
            value = self._parsed(column, value)
        if not isinstance(value, list):
            raise self.refuse(column, _kind(value), "a list of {role, content} messages")
        if not value:
            raise self.refuse(column, "an empty list", "at least one message")
        return [_ordinary(message) or self._message(message, column, turn) for turn, message in enumerate(value)]

    def plain(self, value: Any, column: str, where: str) -> str:
        """`value` as text: text as it stands, a number or a boolean as JSON writes it."""
        if not isinstance(value, str):
            if not isinstance(value, (int, float)) or value in (math.inf, -math.inf) or value != value:
                expected = "text" if _stand_in(value) is None else "text: write the value as text"
                raise self.refuse(where, _kind(value), expected)
            self.notes.scalars[column] += 1
            # pandas makes floats of a column of integers with gaps: 42 arrives as 42.0.
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            return json.dumps(int(value) if whole else value)
        if not value.isascii() and not _is_unicode(value):
            raise self.refuse(where, "half of a UTF-16 surrogate pair", "valid Unicode text")
        return value

    def _parsed(self, column: str, text: str) -> Any:
        try:
            return parse_json(text)
        except DuplicateKey as error:
            raise self.refuse(column, f"JSON text in which {error}", "each key once") from error
        except (ValueError, RecursionError) as error:  # a number of 4301 digits is a ValueError
            at = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                at = f"{error.msg} at character {error.pos}"
            found = f"text that is not JSON ({at})"
            expected = "a list of {role, content} messages, or its JSON text (json.dumps, not str)"
            raise self.refuse(column, found, expected) from error

    def _message(self, message: Any, column: str, turn: int) -> Message:
        where = f"{column}, turn {turn}"
        if not isinstance(message, Mapping):
            raise self.refuse(where, _kind(message), "an object with role and content")
        message = {key: value for key, value in message.items() if not _absent(value)}
        role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
        self._note_extra_keys(message, {role_key, content_key}, where)
        role = self._role(message, role_key, where)
        content = self._content(message.get(content_key), column, f"{where} ({role})")
        if role in ("user", "assistant") and (not content or content.isspace()):
            raise self.refuse(f"{where} ({role})", "blank text", "text")
        return {"role": role, "content": content}

    def _note_extra_keys(self, message: Mapping[str, Any], read: set[str], where: str) -> None:
        for key in ("tool_calls", "function_call"):
            if message.get(key):
                raise self.refuse(where, f"{key}, which no recipe renders", "the call written out as text in content")
        for key in _REASONING:
            if message.get(key):
                raise self.refuse(where, f"{key}, which no recipe renders", "the reasoning as text in content, or none")
        weight = message.get("weight")
        if weight is not None and (weight != 1 or isinstance(weight, bool)):
            expected = (
                "1, or no weight: the loss is on every assistant turn of a conversation; write the turns that are "
            )
            expected += "context only as a prompt (prompt and completion)"
            raise self.refuse(where, f"weight {_shown(weight)}", expected)
        self.notes.message_keys |= {key for key in message if key not in read}

    def _role(self, message: Mapping[str, Any], key: str, where: str) -> str:
        role = message.get(key)
        if isinstance(role, str) and role in ROLES:
            return ROLES[role]
        found = f"no {key}" if role is None else f"{key} {_shown(role)}"
        like = role.strip().lower() if isinstance(role, str) else ""
        raise self.refuse(where, found, f"{like!r}" if like in ROLES else f"one of {', '.join(ROLES)}")

    def _content(self, content: Any, column: str, where: str) -> str:
        if _absent(content):
            raise self.refuse(where, "null content", "text")
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, list):
            return "".join(self._part(part, column, where) for part in content)
        return self.plain(content, column, where)

    def _part(self, part: Any, column: str, where: str) -> str:
        if isinstance(part, Mapping) and part.get("type") == "text":
            part = part.get("text")
        if isinstance(part, str):
            return self.plain(part, column, where)
        named = isinstance(part, Mapping) and "type" in part
        found = f"a content part of type {_shown(part['type'])}" if named else _kind(part)
        raise self.refuse(where, found, 'text, or parts {"type": "text", "text": ...}')


def _ordinary(message: Any) -> Message | None:
    """The message if it is plain text under a known role, as nearly all are; the general way is 3 times slower."""
    if type(message) is not dict or len(message) != 2:
        return None
    if "from" in message:
        role, content = message["from"], message.get("value")
    else:
        role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in ROLES or type(content) is not str or not content or content.isspace():
        return None
    return {"role": ROLES[role], "content": content} if content.isascii() or _is_unicode(content) else None


def _read_prompt_completion(row: _Row) -> SftExample:
    prompt = _prompt(row, "prompt")
    return _prompted(prompt, _completion(row, prompt))


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


def _completion(row: _Row, prompt: list[Message]) -> list[Message]:
    completion = _without_prompt(prompt, row.turns("completion", "assistant"))
    row.notes.repeating += _repeats(prompt, completion)
    return _answer(row, "completion", completion)


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
        return SftExample(messages, None)

    return read


def _read_text(row: _Row) -> SftExample:
    return SftExample(None, None, row.text("text"))


def _read_preference(row: _Row) -> PreferenceExample:
    prompt = _prompt(row, "prompt")
    chosen = _without_prompt(prompt, row.turns("chosen", "assistant"))
    rejected = _without_prompt(prompt, row.turns("rejected", "assistant"))
    shared = _shared_turns(chosen, rejected)
    if shared[-len(prompt) :] == prompt:  # the conversations carry more context, such as a system turn
        return _pair(row, shared, chosen[len(shared) :], rejected[len(shared) :])
    if shared and shared[0]["role"] == "assistant" and shared[-1]["role"] != "assistant":  # and more turns
        return _pair(row, prompt + shared, chosen[len(shared) :], rejected[len(shared) :])
    return _pair(row, prompt, chosen, rejected)


def _read_implicit_preference(row: _Row) -> PreferenceExample:
    for column in ("chosen", "rejected"):
        value = row.values[column]
        if isinstance(value, str) and not _LOOKS_LIKE_MESSAGES.match(value):
            expected = "a conversation as a list of messages, since there is no column prompt"
            raise row.refuse(column, _kind(value), expected + _likely_prompt(row))
    chosen, rejected = row.messages("chosen"), row.messages("rejected")
    shared = _shared_turns(chosen, rejected)
    if not shared:
        expected = "the same leading turns in both (they are the prompt), or a prompt column"
        found = "a first turn that differs from that of rejected"
        raise row.refuse("chosen", found, expected + _likely_prompt(row))
    _refuse_open_answer(row, "chosen", shared)
    return _pair(row, shared, chosen[len(shared) :], rejected[len(shared) :])


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
    return SftExample(prompt + completion, len(prompt))


def _prompt(row: _Row, column: str) -> list[Message]:
    prompt = row.turns(column, "user")
    _refuse_open_answer(row, column, prompt)
    return prompt


def _refuse_open_answer(row: _Row, column: str, prompt: list[Message]) -> None:
    if prompt[-1]["role"] == "assistant":
        raise row.refuse(column, "a prompt that ends in an assistant turn", "one that asks for an answer")


def _answer(row: _Row, column: str, turns: list[Message]) -> list[Message]:
    """Return the turns if all are assistant turns: only those may be trained as an answer."""
    other = next((turn["role"] for turn in turns if turn["role"] != "assistant"), None)
    if other is not None:
        expected = "assistant turns that follow the prompt (its own turns may be repeated in front, unchanged)"
        raise row.refuse(column, f"{_article(other)} turn", expected)
    return turns


def _pair(row: _Row, prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> PreferenceExample:
    row.notes.identical += chosen == rejected
    row.notes.repeating += _repeats(prompt, chosen) or _repeats(prompt, rejected)
    return PreferenceExample(prompt, _answer(row, "chosen", chosen), _answer(row, "rejected", rejected))


def _repeats(prompt: list[Message], answer: list[Message]) -> bool:
    """Whether an answer's text begins with the text of its prompt's last turn, and has more."""
    last, text = prompt[-1]["content"].strip(), answer[0]["content"].lstrip() if answer else ""
    return bool(last) and text.startswith(last) and len(text) > len(last)


def _without_prompt(prompt: list[Message], turns: list[Message]) -> list[Message]:
    return turns[len(prompt) :] if len(turns) > len(prompt) and turns[: len(prompt)] == prompt else turns


def _shared_turns(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The leading turns that both have; the last turn of each is never shared, so that something is left to compare."""
    count = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        count += 1
    return chosen[:count]


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
        "text or message lists; chosen and rejected may repeat the prompt's turns in front",
        _read_preference,
    ),
    RowShape(
        ("chosen", "rejected"),
        "dpo",
        None,
        "two conversations; the turns they have in common at the start are the prompt",
        _read_implicit_preference,
    ),
    RowShape(
        ("prompt", "completion", "label"),
        "kto",
        None,
        "text or message lists, and whether the completion is desirable: true or false",
        _read_labelled,
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
    RowShape(("input",), "prompts", None, "text: a user turn", _prompt_reader("input")),
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
COLUMNS = frozenset(column for shape in ROW_SHAPES for column in (*shape.columns, *shape.optional))
"""All columns that are read."""


def parse_row(row: Mapping[str, Any], index: int, use: RowUse, data_format: DataFormat | None = None) -> Example:
    """Read one row.

    Args:
        index: the row's number, from 0, for the error message.
        data_format: which shape to read where the row fits an instruct and a dialog shape; ignored for pairs.

    Raises:
        InvalidRows: the row fits no shape, or one of its columns cannot be read.
    """
    return _parse(row, index, use, data_format, _Notes())[2]


def check_rows(rows: Iterable[Mapping[str, Any]], use: RowUse, data_format: DataFormat | None = None) -> RowsReport:
    """Read every row, keep none: a stream is checked in constant memory (10,000 rows take about 0.1 s).

    Raises:
        InvalidRows: at the first bad row, or if there is no row at all.
    """
    notes, seen = _Notes(), _Seen()
    for index, row in enumerate(rows):
        shape, columns, _ = _parse(row, index, use, data_format, notes)
        seen[shape, columns] += 1
    if not seen:
        raise InvalidRows("the dataset is empty: expected at least one row")
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
    for column in _TOOLS:
        if values.get(column) and values[column] not in _NO_TOOLS:
            found = f"column {column}: found {_kind(values[column])}, which no recipe renders"
            raise InvalidRows(f"{found}: write the tools out as text in a system message", row=index)
    columns = frozenset(values)
    shape = _choose(columns, use, data_format)
    if shape is None:
        raise InvalidRows(_no_shape(row, columns, use), row=index)
    return shape, columns, shape.read(_Row(index, values, notes))


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
    rest = [
        set(shape.columns) - columns
        for shape in ROW_SHAPES
        if shape.use == _rows_of(use) and not columns.isdisjoint(shape.columns)
    ]
    lacking = dict.fromkeys(column for missing in rest if len(missing) == 1 for column in missing)
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
    if shape is None:
        return ""
    renamed = [f"{column!r} to {name}" for column, name in meant.items() if name != column and name in shape.columns]
    return f". Rename {', '.join(sorted(renamed))}"


_Seen = Counter[tuple[RowShape, frozenset[str]]]
"""Rows per shape and set of columns that have a value."""


def _warnings(seen: _Seen, notes: _Notes, use: RowUse, data_format: DataFormat | None) -> list[str]:
    warnings = []
    unread = {column for shape, columns in seen for column in columns.difference(shape.columns, shape.optional)}
    if unread and use != "grpo":  # rewards get whole rows
        warnings.append(f"{UNREAD}{_listed(unread)}")
    if notes.message_keys:
        warnings.append(f"message keys never read: {_listed(notes.message_keys)}")
    if _rows_of(use) == "sft" and data_format is not None:
        warnings += _format_warnings(seen, data_format)
    if notes.scalars:
        counts = _listed(f"{column} ({count})" for column, count in notes.scalars.items())
        warnings.append(f"numbers or booleans where text is expected, read as their JSON text: {counts}")
    if notes.repeating:
        warnings.append(
            f"{notes.repeating} of {seen.total()} rows have an answer that begins with its prompt's text, which is "
            "then there twice and trained: leave it out of the answers, unless they quote it"
        )
    if notes.identical:
        warnings.append(
            f"{notes.identical} of {seen.total()} pairs have identical chosen and rejected answers: no signal"
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
    return name if value is None or value == [] else f"{name} {_shown(value)}"


def _stand_in(value: Any) -> str | None:
    """The text of an object that stands for a value that JSON lacks (`system.json_rows`); None: it is another value."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, text),) = value.items()
    return text if kind in STAND_INS and isinstance(text, str) else None


def _shown(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def _listed(items: Iterable[str]) -> str:
    # JSON can carry half of a surrogate pair, which can be neither stored nor sent as UTF-8.
    names = sorted(item.encode("utf-8", "backslashreplace").decode() or "''" for item in items)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
