"""Reads tools and tool calls as datasets write them, into OpenAI's form. Needs only the stdlib.

Accepted are OpenAI's `tools`, `functions`, `tool_calls` and `function_call`, those of ShareGPT, xLAM and ToolACE (name
and arguments without an envelope, text or objects; parameters without a schema around them), Llama Stack's
(`tool_name`, `call_id`), and tools of Anthropic and MCP (`input_schema`, `inputSchema`). Arguments are decoded
once, to an object: what a chat template takes, an object or text, is decided where it is known (`recipes.data.forms`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidRows
from ..system.texts import beginning_of, parse_json

Refuse = Callable[[str, str, str], InvalidRows]
"""(where, what was found, what is expected) -> the error to raise."""
Tool = dict[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`."""
ToolCall = dict[str, Any]
"""`name`, `arguments` (an object), and `id` where the row has one."""

_ARGUMENTS = ("arguments", "parameters", "args", "input", "arguments_json")
_NAMES = ("name", "tool_name")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_JSON_TYPES = {
    **dict.fromkeys(("str", "string"), "string"),
    **dict.fromkeys(("int", "integer"), "integer"),
    **dict.fromkeys(("float", "number"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("list", "tuple", "set", "array"), "array"),
    **dict.fromkeys(("dict", "object"), "object"),
}
"""Types of parameters as xLAM writes them, in lower case."""
_OF_PARTS = re.compile(r"(\w+)\[(.*)\]")
_NO_ARGUMENTS = frozenset(("$defs", "definitions", "additionalProperties", "patternProperties"))
_IDS = ("id", "call_id", "tool_call_id")
_READ = frozenset((*_ARGUMENTS, *_NAMES, *_IDS, "type", "function", "index"))


def read_tools(value: Any, where: str, refuse: Refuse) -> list[Tool]:
    """The tools of a column: a list, one tool, or the JSON text of either. Raises InvalidRows: something in it is no
    tool."""
    value = _decoded(value, where, refuse, "a list of tools, or its JSON text")
    if value in (None, "", {}):
        return []
    tools = value if isinstance(value, list) else [value]
    return [_written(_tool(tool, at, refuse), at, refuse) for tool, at in _numbered(tools, f"{where}, tool")]


def _tool(value: Any, where: str, refuse: Refuse) -> Tool:
    expected = 'a tool: {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}'
    tool = _without_nulls(_decoded(value, where, refuse, expected), where, refuse)
    if not isinstance(tool, dict):
        raise refuse(where, beginning_of(value), expected)
    if tool.get("type", "function") != "function" and ("function" in tool or not {*tool} & {*_NAMES}):
        raise refuse(where, f"a tool of type {beginning_of(tool['type'])}", expected)
    function = tool["function"] if isinstance(tool.get("function"), dict) else dict(tool)
    name = next((function[key] for key in _NAMES if function.get(key)), None)
    if not isinstance(name, str) or not name.strip():
        raise refuse(where, "no name", expected)
    rest = {key: part for key, part in function.items() if key not in (*_NAMES, *_SCHEMAS, "type")}
    written = [key for key in _SCHEMAS if key in function]
    if len(written) > 1:
        raise refuse(f"{where} ({name})", " and ".join(written), "the schema once")
    at = f"{where} ({name}), {written[0] if written else 'parameters'}"
    parameters = _decoded(function[written[0]], at, refuse, "a JSON schema") if written else None
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise refuse(at, beginning_of(parameters), "a JSON schema")
        rest["parameters"] = _schema(parameters)
    description = {"description": rest.pop("description")} if "description" in rest else {}
    schema = {"parameters": rest.pop("parameters")} if "parameters" in rest else {}
    return {"type": "function", "function": {"name": name, **description, **schema, **rest}}


def _schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters without a schema around them as one: Llama Stack's (`param_type`, `required` at each), and xLAM's
    (types of Python, `, optional`, a `default`). Others as they are."""
    if not parameters or _is_schema(parameters):
        return parameters
    properties, required = {}, []
    for name, value in parameters.items():
        written = value.get("param_type", value.get("type"))
        is_optional = isinstance(written, str) and written.endswith(", optional")
        kind = {} if written is None else _type(written.removesuffix(", optional") if is_optional else written)
        rest = {key: part for key, part in value.items() if key not in ("param_type", "type")}
        is_required = "param_type" in value or not (is_optional or "default" in value)
        if isinstance(rest.get("required"), bool):
            is_required = rest.pop("required")
        properties[name] = kind | rest
        if is_required:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _is_schema(parameters: dict[str, Any]) -> bool:
    properties = parameters.get("properties")
    if isinstance(properties, dict) and not isinstance(properties.get("type"), str):
        return True
    return not _NO_ARGUMENTS.isdisjoint(parameters) or not all(
        isinstance(value, dict) and not {"param_type", "type", "description", "default"}.isdisjoint(value)
        for value in parameters.values()
    )


def _type(written: Any) -> dict[str, Any]:
    """A type of Python as JSON schema has it; others as they are."""
    if not isinstance(written, str):
        return {"type": written}
    name = written.strip()
    if known := _JSON_TYPES.get(name.lower()):
        return {"type": known}
    found = _OF_PARTS.fullmatch(name)
    kind = _JSON_TYPES.get(found[1].lower()) if found else None
    if found is None or kind not in ("array", "object"):
        return {"type": written}
    item = _JSON_TYPES.get(found[2].strip().lower()) if kind == "array" else None
    return {"type": kind, "items": {"type": item}} if item else {"type": kind}


def read_calls(value: Any, where: str, refuse: Refuse) -> list[ToolCall]:
    """The calls of a turn: a list, one call, or the JSON text of either. Raises InvalidRows: something in it is no
    call."""
    expected = "a list of tool calls, or its JSON text"
    value = _decoded(value, where, refuse, expected)
    if value in (None, "", {}):
        return []
    calls = value if isinstance(value, list) else [value]
    return [_written(_call(call, at, refuse), at, refuse) for call, at in _numbered(calls, f"{where}, call")]


def _call(value: Any, where: str, refuse: Refuse) -> ToolCall:
    expected = 'a call: {"type": "function", "function": {"name": ..., "arguments": an object or its JSON text}}'
    call = _decoded(value, where, refuse, expected)
    if not isinstance(call, Mapping):
        raise refuse(where, beginning_of(value), expected)
    call = {key: part for key, part in call.items() if part is not None}
    if call.get("type", "function") not in ("function", "function_call", "tool_call"):
        raise refuse(where, f"a call of type {beginning_of(call['type'])}", expected)
    function = call.get("function")
    parts = dict(call)
    if isinstance(function, Mapping):
        parts |= {key: part for key, part in function.items() if part is not None}
    if unknown := sorted(map(str, parts.keys() - _READ)):
        raise refuse(where, f"the keys {', '.join(unknown)}", f"{expected}; nothing else of a call is written")
    name = next((parts[key] for key in _NAMES if key in parts), None)
    if not isinstance(name, str) or not name.strip():
        raise refuse(where, "no name", expected)
    given = [key for key in _ARGUMENTS if key in parts]
    # Llama Stack has both, of which the second is the text of the first.
    named = given[:1] if given == ["arguments", "arguments_json"] else given
    if len(named) > 1:
        raise refuse(where, f"{' and '.join(named)}", "arguments once")
    arguments = _arguments(parts[named[0]] if named else None, f"{where} ({name})", refuse)
    found: ToolCall = {"name": name, "arguments": arguments}
    identifier = next((parts[key] for key in _IDS if parts.get(key) not in (None, "")), None)
    return found if identifier is None else {**found, "id": str(identifier)}


def _arguments(value: Any, where: str, refuse: Refuse) -> dict[str, Any]:
    expected = "arguments as an object, or its JSON text"
    decoded = _decoded(value, where, refuse, expected)
    if isinstance(decoded, str):  # encoded twice
        decoded = _decoded(decoded, where, refuse, expected)
    if decoded in (None, ""):
        return {}
    if not isinstance(decoded, Mapping):
        raise refuse(where, beginning_of(value), expected)
    # Tables merge the keys of all rows: what others have is null here. Text has only its own.
    return dict(decoded) if isinstance(value, str) else _without_nulls(dict(decoded), where, refuse)


def _numbered(values: Sequence[Any], where: str) -> Iterator[tuple[Any, str]]:
    return ((value, f"{where} {number}") for number, value in enumerate(values))


def _written(value: dict[str, Any], where: str, refuse: Refuse) -> dict[str, Any]:
    """The value, if a chat template can write it and a tokenizer read that."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
        found = next(_not_in_json(value), None)
    except UnicodeEncodeError as error:
        raise refuse(where, "half of a UTF-16 surrogate pair", "valid Unicode text") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(where, f"what is no JSON ({error})", "values of JSON") from error
    if found:
        key, number = found
        raise refuse(f"{where}, {key}", number, "a number that JSON has, or its text")
    return value


def _not_in_json(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The numbers in a value that JSON lacks, each with its key. Stored rows have `{"number": "inf"}` for infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, str(value)
    elif isinstance(value, Mapping):
        if value.get("number") in ("inf", "-inf") and len(value) == 1:
            yield key, str(value["number"])
        for name, part in value.items():
            yield from _not_in_json(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _not_in_json(part, f"{key}[{number}]")


def _decoded(value: Any, where: str, refuse: Refuse, expected: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        raise refuse(where, f"text that is not JSON ({error}): {beginning_of(value)}", expected) from error


def _without_nulls(value: Any, where: str, refuse: Refuse) -> Any:
    try:
        return without_nulls(value)
    except RecursionError as error:
        raise refuse(where, "values nested too deeply", "at most a few hundred levels") from error


def without_nulls(value: Any) -> Any:
    """The value without keys of objects whose value is null or NaN, at any depth: a table has each row's keys in all
    rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None and part == part}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def faults_of(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> Iterator[str]:
    """What is wrong with calls by the schemas of the tools, a few words for each."""
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for call in calls:
        if call["name"] not in known:
            yield "a tool that is not listed"
            continue
        schema = known[call["name"]]
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(required, list) and not {*map(str, required)} <= call["arguments"].keys():
            yield "a required argument missing"
        if isinstance(properties, dict) and not call["arguments"].keys() <= properties.keys():
            yield "an argument that is not in the schema"


def texts_of(arguments: Any) -> Iterator[str]:
    """The keys and texts in arguments, at any depth."""
    if isinstance(arguments, Mapping):
        for key, value in arguments.items():
            yield str(key)
            yield from texts_of(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from texts_of(value)
    elif isinstance(arguments, str):
        yield arguments


def as_text(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)
