"""The templates of graders: text in which `{{item.x}}` and `{{sample.output_text}}` are replaced. No code, no jinja.

Texts are replaced once, so that an answer or a row cannot bring names of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MOST_TEMPLATE, MOST_NAMES = 16384, 64
"""Characters of a template, and names in it: each is written out."""
MOST_RENDERED = 1 << 20
"""Characters of a rendered template."""
OF_SAMPLE = ("output_text", "output_json", "output_tools")
_PLACE = re.compile(r"\{\{([^{}]*)\}\}")
"""No name has braces. Linear: `.*?` reads the rest of a text again for each `{{` without an end."""
_NAME = re.compile(r"(item|sample)((?:\.[A-Za-z0-9_-]+)+)", re.ASCII)

Path = tuple[str, ...]
Values = Mapping[str, Any]
"""`item`, the row, and `sample`, the answer: the values of each by their names."""


class MissingValue(ValueError):
    """Raised when a row or an answer lacks what a template names."""


def names_of(template: str) -> list[Path]:
    """What a template names, in its order: ("item", "x", "y") for `{{ item.x.y }}`. Raises ValueError: it names
    something that there is not, or is too long."""
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"it has {len(template)} characters, at most {MOST_TEMPLATE} are supported")
    found = [_path(place[1]) for place in _PLACE.finditer(template)]
    if len(found) > MOST_NAMES:
        raise ValueError(f"it has {len(found)} names in braces, at most {MOST_NAMES} are supported")
    rest = _PLACE.sub("", template)
    if "{{" in rest:
        raise ValueError("it has {{ without }}: write {{item.NAME}} or {{sample.output_text}}")
    return found


def _path(text: str) -> Path:
    name = _NAME.fullmatch(text.strip())
    if name is None:
        raise ValueError(
            f"found {{{{{text[:80]}}}}}, expected {{{{item.NAME}}}} or {{{{sample.output_text}}}}: letters, digits, "
            "_ and - between dots, and nothing else"
        )
    path = (name[1], *name[2][1:].split("."))
    if path[0] == "sample" and path[1] not in OF_SAMPLE:
        raise ValueError(f"found {{{{{text.strip()[:80]}}}}}, expected one of sample.{', sample.'.join(OF_SAMPLE)}")
    if path[:2] == ("sample", "output_text") and len(path) > 2:
        raise ValueError(f"found {{{{{text.strip()[:80]}}}}}: the text of an answer has no parts")
    return path


def value_at(path: Path, values: Values) -> Any:
    """The value that a path names. Raises MissingValue: a sentence about what there is."""
    found: Any = values[path[0]]
    for number, name in enumerate(path[1:], start=1):
        before = ".".join(path[:number])
        if isinstance(found, list) and name.isdecimal() and len(name) < 7 and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            has = ", ".join(sorted(map(str, found)))[:300] if isinstance(found, Mapping) else type(found).__name__
            raise MissingValue(f"{before} has no {name!r}: it has {has or 'nothing'}")
    if found is None:
        raise MissingValue(f"{'.'.join(path)} is null, expected a value")
    return found


def rendered(template: str, values: Values) -> str:
    """A template with the values that it names: text as it is, anything else as JSON. What JSON lacks, such as a date,
    is its text. Raises MissingValue: a value is not there; ValueError: the text is too long."""
    parts, length = list[str](), 0
    for part in _rendered(template, values):
        parts.append(part)
        length += len(part)
        if length > MOST_RENDERED:
            raise ValueError(f"with its values it has more than {MOST_RENDERED} characters, the most supported")
    return "".join(parts)


def _rendered(template: str, values: Values) -> Iterator[str]:
    end, texts = 0, dict[Path, str]()
    for place in _PLACE.finditer(template):
        yield template[end : place.start()]
        path = _path(place[1])
        if path not in texts:
            value = value_at(path, values)
            is_json = isinstance(value, Mapping | list | tuple | int | float)
            texts[path] = json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
        yield texts[path]
        end = place.end()
    yield template[end:]
