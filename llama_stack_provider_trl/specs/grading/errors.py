"""Why a grader gives an answer no reward."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal[
    "formula_parse_error",
    "invalid_variable_error",
    "model_grader_parse_error",
    "model_grader_server_error",
    "other_error",
    "python_grader_runtime_error",
    "python_grader_server_error",
    "sample_parse_error",
]
"""As OpenAI's answer names them."""
MOST_SENTENCE = 500


class GradingError(Exception):
    """Raised when a grader gives an answer no reward: what was found, in a sentence."""

    def __init__(self, kind: ErrorKind, sentence: str) -> None:
        self.kind, self.sentence = kind, sentence[:MOST_SENTENCE]
        super().__init__(self.sentence)


class NotInTimeError(GradingError):
    """Raised when a grader has not ended in time: those behind it are not tried."""
