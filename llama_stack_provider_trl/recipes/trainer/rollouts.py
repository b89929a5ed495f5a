"""Which answers of an online method are reported, for readers of a training, and their prompts as events have them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...specs.event_fields import MAX_CALLS, MAX_ROLLOUT
from ...specs.events import RolloutCall, RolloutTurn
from ...specs.rows import Message

_MOST = 100
"""Steps of a job whose answers are reported, beside the first and the last one."""


def is_reported(step: int, total: int) -> bool:
    """Whether the answers of an optimizer step are: of the first, the last, and at most 100 at even distances.

    Args:
        step: from 1.
        total: steps of the job.
    """
    return step in (1, total) or step % max(1, -(-total // _MOST)) == 0


def turns_of(prompt: Sequence[Message]) -> list[RolloutTurn]:
    """The last turns of a prompt."""
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
