"""Templates whose masks are compared with TRL's."""

from __future__ import annotations

from tests.process.talks import END_OF_DIALOG, SMOLLM, THINKING, THINKING_WITH_TOOLS, TRIMMING
from tests.tiny import CHATML

TEMPLATES = {
    "chatml": CHATML,
    "smollm": SMOLLM,
    "thinking": THINKING,
    "thinking with tools": THINKING_WITH_TOOLS,
    "end of dialog": END_OF_DIALOG,
    "trimming": TRIMMING,
    "given": None,
}


COMPLETIONS = ["Two.", "  Two", "\n\nTwo,\n", "    return one + two\n", "1 + 1 = 2 😊", "Zwölf große Boxkämpfer"]
