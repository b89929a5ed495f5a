"""What graders are: their fields as OpenAI's API has them, and what is refused of them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..bases import Frozen
from ..names import MOST_NAME, CheckedNames, FreeText
from .formula import MOST_FORMULA, parsed
from .templates import MOST_TEMPLATE, Path, names_of

MOST_GRADERS, MOST_SOURCE = 32, 256 << 10
"""Graders of one of type multi, and characters of the source of one of type python."""
MOST_MESSAGES, MOST_PARTS, MOST_LABELS = 32, 16, 100
"""Messages of a grader's model, parts of a message, and labels."""
MOST_SCORE = 1e9
"""Of a range; the least is its negative."""
TYPES = ("string_check", "text_similarity", "score_model", "label_model", "python", "multi")
_NOT_HERE = {"endpoint": "a grader at an address of its own is not supported"}
_USE = f"use one of {', '.join(TYPES)}"
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
Label = Annotated[str, Field(min_length=1, max_length=512)]
_TEXTS = ("input_text", "output_text")


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


def _refuse_other_parts(value: Any) -> Any:
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str) and kind not in _TEXTS:
            raise ValueError(
                f"a part has the type {kind[:80]!r}: the model reads texts, expected {' or '.join(_TEXTS)}"
            )
    return value


class MessageText(Frozen, CheckedNames):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: Annotated[Template, FreeText()]
    """A template."""

    @field_validator("text")
    @classmethod
    def _is_template(cls, value: str) -> str:
        names_of(value)
        return value


Parts = Annotated[tuple[MessageText, ...], Field(min_length=1, max_length=MOST_PARTS)]


class ModelMessage(Frozen, CheckedNames):
    """A message that a grader's model reads."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    """developer: as system."""
    content: Annotated[Template | MessageText | Parts, FreeText(), BeforeValidator(_refuse_other_parts)]
    """A template, or parts with one each."""

    @field_validator("content")
    @classmethod
    def _is_template(cls, value: str | MessageText | Parts) -> str | MessageText | Parts:
        if isinstance(value, str):
            names_of(value)
        return value

    @property
    def templates(self) -> list[str]:
        """Those of its parts."""
        parts = self.content if isinstance(self.content, tuple) else (self.content,)
        return [part if isinstance(part, str) else part.text for part in parts]


class SamplingParams(Frozen, CheckedNames):
    """How a grader's model answers."""

    temperature: float | None = Field(None, ge=0, le=2)
    """None: 0, the most likely token each time."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """What random numbers follow from; None: 0."""
    max_completions_tokens: int | None = Field(None, gt=0, le=10**5)
    """Of an answer; None: 256."""
    reasoning_effort: Annotated[str | None, Field(max_length=64)] = None
    """Refused: the model thinks as its chat template has it."""

    @field_validator("reasoning_effort")
    @classmethod
    def _thinks_as_it_does(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("the model thinks as its chat template has it: leave it out")
        return value

    @model_validator(mode="after")
    def _is_not_ignored(self) -> SamplingParams:
        if not self.temperature and self.top_p not in (None, 1.0):
            raise ValueError(
                f"top_p is {self.top_p:g} and temperature 0, at which every token is the most likely one: leave top_p "
                "out, or set temperature"
            )
        return self


class _ModelGrader(_Grader):
    model: str = Field(min_length=1, max_length=MOST_NAME)
    """What answers: a model id, a directory of a model or an adapter, `job:NAME`, `job:NAME/CHECKPOINT` or `ft:...`;
    in OpenAI's API also a name of `openai.models`."""
    input: tuple[ModelMessage, ...] = Field(min_length=1, max_length=MOST_MESSAGES)
    """What it reads."""
    sampling_params: SamplingParams | None = None


class ScoreModel(_ModelGrader):
    """Has a model score an answer: the number that it writes, within a range."""

    type: Literal["score_model"]
    range: tuple[float, float] | None = None
    """The least and the largest score; None: 0 and 1. A number beyond them counts as the nearest of them."""

    @field_validator("range")
    @classmethod
    def _is_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not -MOST_SCORE <= value[0] < value[1] <= MOST_SCORE:
            raise ValueError(f"expected the least and the largest score, [0, 10] for example, within {MOST_SCORE:g}")
        return value

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest score."""
        return (0.0, 1.0) if self.range is None else self.range


class LabelModel(_ModelGrader):
    """Has a model choose a label for an answer: 1 for one that passes, else 0."""

    type: Literal["label_model"]
    labels: tuple[Label, ...] = Field(min_length=1, max_length=MOST_LABELS)
    """Without regard to case, no two are equal."""
    passing_labels: tuple[Label, ...] = Field(min_length=1, max_length=MOST_LABELS)

    @field_validator("labels")
    @classmethod
    def _are_different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        plain = [label.strip().casefold() for label in value]
        if twice := [label for label, one in zip(value, plain, strict=True) if not one or plain.count(one) > 1]:
            raise ValueError(f"{twice[0]!r} is empty, or there twice: give each label a text of its own")
        return value

    @model_validator(mode="after")
    def _passing_ones_are_labels(self) -> LabelModel:
        if unknown := [label for label in self.passing_labels if label not in self.labels]:
            raise ValueError(
                f"passing_labels has {unknown[0]!r}, expected some of the labels: {list(self.labels)!r:.300}"
            )
        return self


def _refuse_others(value: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(kind := value.get("type"), str) and kind not in TYPES:
        raise ValueError(f"the type is {kind[:80]!r}: {_NOT_HERE.get(kind, 'there is no such grader')}; {_USE}")
    return value


Leaf = Annotated[
    Annotated[StringCheck | TextSimilarity | PythonGrader | ScoreModel | LabelModel, Field(discriminator="type")],
    BeforeValidator(_refuse_others),
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
    Annotated[
        StringCheck | TextSimilarity | PythonGrader | ScoreModel | LabelModel | MultiGrader, Field(discriminator="type")
    ],
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
        elif isinstance(leaf, _ModelGrader):
            yield from (template for message in leaf.input for template in message.templates)


def paths_of(grader: Grader) -> list[Path]:
    """What its templates name, each once."""
    return [*dict.fromkeys(path for template in templates_of(grader) for path in names_of(template))]


def asking_of(grader: Grader) -> dict[str, ScoreModel | LabelModel]:
    """The graders that a model answers for, as `leaves_of`."""
    return {name: leaf for name, leaf in leaves_of(grader).items() if isinstance(leaf, ScoreModel | LabelModel)}


def field_of(grader: Grader, name: str) -> str:
    """The field of a grader that has one of its leaves, before that leaf's own fields: empty, or with a dot at its
    end."""
    return f"graders.{name}." if isinstance(grader, MultiGrader) else ""


def uses_python(grader: Grader) -> bool:
    """Whether source of a request runs for it."""
    return any(isinstance(leaf, PythonGrader) for leaf in leaves_of(grader).values())
