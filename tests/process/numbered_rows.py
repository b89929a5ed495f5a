"""Rows whose templates number their turns."""

from __future__ import annotations

from tests.tiny import CHATML

NUMBERED = "{{ 'Turns: ' + messages | length | string + '\n' }}" + CHATML
"""Writes at the front what depends on the whole conversation."""
