"""What a job does in place of training: a kind is a spec here, a check at POST (`requests.kinds`) and a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .beginnings import Frozen

ANSWERS, ROWS = "answers.jsonl", "rows.jsonl"
"""Files in the checkpoint directory of a `generate` job: every answer with its row, and the dataset made of them."""


class GenerateSpec(Frozen):
    """Answers the prompts of the job's dataset."""

    kind: Literal["generate"] = "generate"
    output_dataset_id: str
    """The dataset that the answers become."""
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(ge=0)
    """0: the most likely token each time."""
    top_p: float = Field(gt=0, le=1)
    """Each token is chosen among the most likely ones whose probabilities together reach this."""
    seed: int
    samples_per_prompt: int = Field(gt=0)


class EvaluateSpec(Frozen):
    """Evaluates the job's model on its dataset: SFT's measures, or DPO's against the reference."""

    kind: Literal["evaluate"] = "evaluate"


Work = GenerateSpec | EvaluateSpec
