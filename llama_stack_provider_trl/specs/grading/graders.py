"""What graders are: their fields as OpenAI's API has them, and what is refused of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ..bases import Frozen
from ..names import CheckedNames, FreeText
from .formula import MOST_FORMULA, parsed
from .templates import MOST_TEMPLATE, Path, names_of

MOST_GRADERS, MOST_SOURCE = 32, 256 << 10
"""Graders of one of type multi, and characters of the source of one of type python."""
TYPES = ("string_check", "text_similarity", "python", "multi")
_NOT_HERE = {
    "score_model": "a model that scores answers is not supported as a grader",
    "label_model": "a model that labels answers is not supported as a grader",
    "endpoint": "a grader at an address of its own is not supported",
}
_USE = f"use one of {', '.join(TYPES)}; an evaluation has checks of type judge, with a model of your own"
COSINE = "the metric cosine needs an embedding model, which there is none of here: use another one"
Operation = Literal["eq", "ne", "like", "ilike"]
Metric = Literal[
    "cosine",
    "fuzzy_match",
    "bleu",
    "gleu",
    "meteor",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Template = Annotated[str, FreeText(), Field(max_length=MOST_TEMPLATE)]


class _Grader(Frozen, CheckedNames):
    name: Name
    """In results."""


class _Comparison(_Grader):
    input: Annotated[Template, FreeText()]
    """What is graded: a template, such as `{{sample.output_text}}`."""
    reference: Annotated[Template, FreeText()]
    """What it is compared with: a template, such as `{{item.answer}}`."""

    @field_validator("input", "reference")
    @classmethod
    def _is_template(cls, value: str) -> str:
        names_of(value)
        return value


class StringCheck(_Comparison):
    """Compares two texts: 1 or 0."""

    type: Literal["string_check"]
    operation: Operation
    """eq, ne: they are equal, or not. like: the input has the reference in it. ilike: the same, without case."""


class TextSimilarity(_Comparison):
    """Measures how similar two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    evaluation_metric: Metric

    @field_validator("evaluation_metric")
    @classmethod
    def _is_supported(cls, value: str) -> str:
        if value == "cosine":
            raise ValueError(COSINE)
        return value


class PythonGrader(_Grader):
    """Calls `grade(sample, item)`, which its source defines, in a process without files and network."""

    type: Literal["python"]
    source: Annotated[str, FreeText(), Field(min_length=1, max_length=MOST_SOURCE)]
    image_tag: Annotated[str | None, Field(max_length=128)] = None
    """Of OpenAI's containers: refused, there is one environment."""

    @field_validator("image_tag")
    @classmethod
    def _has_no_image(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("source runs in the one environment that there is, without images: leave it out")
        return value


def _refuse_others(value: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(kind := value.get("type"), str) and kind not in TYPES:
        raise ValueError(f"the type is {kind[:80]!r}: {_NOT_HERE.get(kind, 'there is no such grader')}; {_USE}")
    return value


Leaf = Annotated[
    Annotated[StringCheck | TextSimilarity | PythonGrader, Field(discriminator="type")], BeforeValidator(_refuse_others)
]


class MultiGrader(_Grader):
    """Combines the rewards of graders by a formula."""

    type: Literal["multi"]
    graders: dict[Name, Leaf] = Field(min_length=1, max_length=MOST_GRADERS)
    """By the names that the formula has. A single grader has its own name there."""
    calculate_output: Annotated[str, FreeText(), Field(min_length=1, max_length=MOST_FORMULA)]
    """The formula: numbers, names, + - * / **, parentheses, min max abs floor ceil exp sqrt log."""

    @field_validator("graders", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("type"), str) and isinstance(value.get("name"), str):
            value = {value["name"]: value}
        if isinstance(value, Mapping):
            for name, one in value.items():
                if isinstance(one, Mapping) and one.get("type") == "multi":
                    raise ValueError(f"{name!r} is of type multi: write its graders and its formula into this one")
        return value

    @field_validator("calculate_output")
    @classmethod
    def _is_formula(cls, value: str) -> str:
        parsed(value)
        return value


Grader = Annotated[
    Annotated[StringCheck | TextSimilarity | PythonGrader | MultiGrader, Field(discriminator="type")],
    BeforeValidator(_refuse_others),
]


def problem_of(grader: Grader) -> tuple[str, str] | None:
    """The field that makes a grader unusable, and why; None: none does."""
    if isinstance(grader, MultiGrader):
        names = parsed(grader.calculate_output).names
        if unknown := [name for name in names if name not in grader.graders]:
            has = ", ".join(sorted(grader.graders))[:300]
            return "calculate_output", f"it names {unknown[0]!r}, expected one of its graders: {has}"
    return None


def leaves_of(grader: Grader) -> dict[str, Leaf]:
    """The graders that one is made of, by their names in its formula; by its own name where it has none."""
    return dict(grader.graders) if isinstance(grader, MultiGrader) else {grader.name: grader}


def templates_of(grader: Grader) -> Iterator[str]:
    """Its templates, and those of its graders."""
    for leaf in leaves_of(grader).values():
        if isinstance(leaf, _Comparison):
            yield from (leaf.input, leaf.reference)


def paths_of(grader: Grader) -> list[Path]:
    """What its templates name, each once."""
    return [*dict.fromkeys(path for template in templates_of(grader) for path in names_of(template))]


def uses_python(grader: Grader) -> bool:
    """Whether source of a request runs for it."""
    return any(isinstance(leaf, PythonGrader) for leaf in leaves_of(grader).values())
