"""Jobs of distillation from a teacher with another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.methods import DistillationSpec, UldSpec
from tests.process import distillation_jobs as same
from tests.tiny import VOCABULARY, tiny_tokenizer

LINES = (
    "Paris is France's capital, and the flour is not the salt's; first the capital, then the mixture.",
    "Rather not: would the others mix salted flour? Zwölf would, rather. The Frenchman is in Paris, he is.",
)


FEWER = 330
"""Tokens of the teacher: most words are several of them."""


def teacher_tokenizer() -> Any:
    """That of the teacher: a part of its tokens are the student's, too."""
    return tiny_tokenizer(vocabulary=FEWER, lines=LINES)


def teacher_model(root: Path, **options: Any) -> Path:
    """That of the test of distillation, with another vocabulary, which has a third of the tiny model's tokens."""
    return same.teacher_model(root, rows=FEWER - VOCABULARY, tokenizer=teacher_tokenizer(), **options)


def method_of(teacher: Path, beta: float = 0.5, **how: Any) -> DistillationSpec:
    return same.method_of(teacher, beta=beta, max_completion_length=16, uld=UldSpec(**how))


TEXTS = ("The capital of France is Paris.", "Zwölf 😊", "I would rather not.", "first, mix the flour and the salt")


@cache
def student_tokenizer() -> Any:
    return tiny_tokenizer()


def given_answers(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Answers that follow from the prompts, which have an end."""
    tokenizer = student_tokenizer()
    return [tokenizer(TEXTS[sum(prompt) % len(TEXTS)])["input_ids"] + [tokenizer.eos_token_id] for prompt in prompts]
