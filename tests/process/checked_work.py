"""Evaluations whose answers are checked."""

from __future__ import annotations

from typing import Any

from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.work import CheckedAnswering, EvaluateSpec

TEXT = "{{sample.output_text}}"
HAS_LETTER = {
    "type": "string_check",
    "name": "letter",
    "operation": "ilike",
    "input": TEXT,
    "reference": "{{item.wanted}}",
}
SHORT = {
    "type": "python",
    "name": "short",
    "source": "def grade(sample, item):\n    return 1 - len(item['wanted']) / 10",
}


def work(*checks: dict[str, Any], **changes: Any) -> EvaluateSpec:
    fields = {"max_new_tokens": 48, "temperature": 0.0, "top_p": 1.0, "seed": 42, "samples_per_prompt": 1, **changes}
    found = tuple(AnswerCheck.model_validate(check) for check in checks)
    return EvaluateSpec(answers=CheckedAnswering.model_validate({**fields, "checks": found}))
