"""Graders that ask a model."""

from __future__ import annotations

from typing import Any

TEXT = "{{sample.output_text}}"
ASK = {"role": "user", "content": f"Is {TEXT} {{{{item.answer}}}}?"}
SCORE: dict[str, Any] = {"type": "score_model", "name": "score", "model": "judge", "input": [ASK]}
LABEL: dict[str, Any] = {
    **{"type": "label_model", "name": "label", "model": "judge", "input": [ASK]},
    **{"labels": ["Good", "bad", "1"], "passing_labels": ["Good", "1"]},
}
