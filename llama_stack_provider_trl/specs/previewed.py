"""Sentences on previewed rows, for terminals and pages. Each takes what the API answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def composition_sentence(row: Mapping[str, Any]) -> str:
    """The turns of a row, and what it has beside them; empty: it is a text."""
    if not row["roles"]:
        return ""
    counted = [
        *([f"{row['tools']} tools"] if row["tools"] else []),
        *([f"{row['tool_calls']} tool calls"] if row["tool_calls"] else []),
        *([f"{row['thoughts_kept']} of {row['thoughts']} thoughts kept"] if row["thoughts"] else []),
        *([f"{row['untrained_answers']} answers of weight 0"] if row["untrained_answers"] else []),
    ]
    return "; ".join([" ".join(map(str, row["roles"])), *counted])


def turn_sentence(turn: Mapping[str, Any]) -> str:
    """Whether a trained turn is what inference renders."""
    part = "" if turn["part"] == "sequence" else f" ({turn['part']})"
    outcome = {
        "equal": "as at inference",
        "cut": "as at inference, but its row is cut or dropped",
        "unasked": "before any question, which inference does not begin with",
        "different": f"not as at inference: {turn['reason'] or 'as in rows before it'}",
    }
    return f"turn {turn['turn']}{part}: {outcome.get(turn['outcome'], turn['outcome'])}"


def inference_sentence(counts: Mapping[str, Any]) -> str:
    """How many trained turns are what inference renders."""
    cut = f", {counts['cut']} more are in rows that are cut or dropped" if counts["cut"] else ""
    unasked = f", {counts['unasked']} are before any question" if counts["unasked"] else ""
    left = f", {counts['not_compared']} were not compared" if counts["not_compared"] else ""
    equal = f"{counts['equal']} of {counts['turns']} trained turns are as at inference"
    return f"{equal}, {counts['different']} differ{cut}{unasked}{left}"
