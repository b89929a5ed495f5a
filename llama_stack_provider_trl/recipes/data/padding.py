"""How much of the batches of a job is padding, before it trains."""

from __future__ import annotations

import torch

from ...specs.job import JobSpec
from ...specs.methods import METHODS

_LEAST_ROWS = 100
"""Fewer rows are trained in no time, padded or not."""
_MOST = 0.5


def padding_share(lengths: torch.Tensor, rows: int) -> float:
    """Share of padding that batches of rows are expected to have, which are drawn without regard to their length.

    The longest of `rows` lengths, drawn one by one from n sorted ones, is the i-th with probability
    (i / n) ** rows - ((i - 1) / n) ** rows.

    Args:
        lengths: in tokens, shape (n,), n > 0.
        rows: of a batch.
    """
    ordered = lengths.double().sort().values
    below = torch.linspace(0, 1, len(ordered) + 1, dtype=torch.float64) ** rows
    longest = float((ordered * below.diff()).sum())
    return 1 - float(ordered.mean()) / longest if longest else 0.0


def problem_of_padding(spec: JobSpec, lengths: torch.Tensor) -> str | None:
    """A warning where most tokens of the batches would be padding; None: they are not.

    Args:
        spec: with the batches that its model can be trained on.
        lengths: of the rows that are trained on, in tokens, shape (rows,).
    """
    data, rows = spec.data, spec.data.batch_size
    several = spec.ranks * spec.train.gradient_accumulation_steps > 1
    if data.packed or spec.compute.padding_free or (data.group_by_length and several):
        return None
    if rows == 1 or len(lengths) < _LEAST_ROWS or METHODS[spec.algorithm].rows == "prompts":
        return None
    share = padding_share(lengths, rows)
    if share < _MOST:
        return None
    packed = "pack the rows (packed), or " if spec.algorithm == "sft" else ""
    return (
        f"about {share:.0%} of the tokens of a batch are padding: the rows have {float(lengths.double().mean()):.0f} "
        f"tokens on average, and {rows} of them are padded to the longest one, of up to {int(lengths.max())}. To train "
        f"the same in less time, {packed}take smaller batches with more gradient_accumulation_steps, which are made of "
        "rows of like length; padding_free avoids all of it where the model can do without (effective_config)"
    )
