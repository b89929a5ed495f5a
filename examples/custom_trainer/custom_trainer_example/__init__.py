"""What a service needs of the methods: their fields, and the check of their rows. Imports no torch."""

from pydantic import BaseModel, Field

from llama_stack_provider_trl.specs.custom import CustomMethod
from llama_stack_provider_trl.specs.rows import PreferencePair


class RobustFields(BaseModel):
    beta: float = Field(2.0, gt=0)
    """Factor on the margin."""
    flip_rate: float = Field(0.1, ge=0, lt=0.5)
    """Share of the pairs that are the wrong way round."""


class FocalFields(BaseModel):
    gamma: float = Field(2.0, ge=0)
    """0: the cross entropy. The higher, the less a token counts that the model is sure of."""


def check_pair(pair: PreferencePair, fields: RobustFields) -> str | None:
    if pair.chosen == pair.rejected:
        return "chosen and rejected are the same answer, of which nothing can be learned: leave the row out"
    return None


ROBUST = CustomMethod(
    title="Robust preferences",
    rows="pairs",
    fields=RobustFields,
    trainer="custom_trainer_example.trainers:RobustTrainer",
    check_row=check_pair,
)
FOCAL = CustomMethod(
    title="Focal loss",
    rows="conversations",
    fields=FocalFields,
    trainer="custom_trainer_example.trainers:FocalTrainer",
)
