"""Chat templates that a request can name."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Turns between `<|im_start|>` and `<|im_end|>`, which the model's vocabulary should have as tokens."""
NAMED = {"chatml": CHATML}
