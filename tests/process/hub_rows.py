"""Rows of a dataset that is read from elsewhere."""

from __future__ import annotations

ROWS = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(5)]
