"""Which answers of an online method are reported, for readers of a training, and their prompts as events have them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...specs.event_fields import MAX_CALLS, MAX_ROLLOUT
from ...specs.events import RolledOut, RolloutAnswer, RolloutCall, RolloutTurn
from ...specs.rows import Message

_MOST = 100
"""Steps of a job whose answers are reported, beside the first and the last one."""


def is_reported(step: int, total: int) -> bool:
    """Whether the answers of an optimizer step are: of the first, the last, and at most 100 at even distances."""
    return step in (1, total) or step % max(1, -(-total // _MOST)) == 0


def rolled_out(
    step: int, epoch: float, row: int, prompt: Sequence[Message], answers: Sequence[RolloutAnswer]
) -> RolledOut:
    """The answers to a prompt, as they are reported."""
    return RolledOut(
        step=step,
        epoch=round(epoch, 6),
        row=row,
        prompt=turns_of(prompt),
        earlier_turns=max(0, len(prompt) - MAX_ROLLOUT),
        answers=[*answers[:MAX_ROLLOUT]],
        further_answers=max(0, len(answers) - MAX_ROLLOUT),
    )


def turns_of(prompt: Sequence[Message]) -> list[RolloutTurn]:
    return [
        RolloutTurn(
            role=turn["role"],
            content=turn["content"],
            reasoning=turn.get("reasoning") or "",
            calls=[
                RolloutCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
                for call in (turn.get("tool_calls") or ())[:MAX_CALLS]
            ],
        )
        for turn in prompt[-MAX_ROLLOUT:]
    ]
