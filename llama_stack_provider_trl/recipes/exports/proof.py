"""Compares an export with the model that it was made of: prompts, stop tokens, logits and greedy answers.

A reader is a program that loads the export as its users do. What it finds is compared with what the trained model gave
before anything was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.exports import GgufType
from ...specs.rows import Message
from .reference import Expected

BOUNDS: dict[GgufType, float] = {"f32": 0.005, "f16": 0.01, "bf16": 0.05, "q8_0": 0.1}
"""Up to which fraction of their own scale the logits of an export in this type may differ, in the median over the
tokens of an answer."""
_LARGEST = 4
"""Times the bound of the median: that of every single token, of its logits and of the choice between two tokens."""


class AnsweredToken(NamedTuple):
    token: int
    ids: list[int]
    logprobs: list[float]
    """Of `ids`, by the softmax over the whole vocabulary. Both are empty where the reader does not say."""


class Reader(Protocol):
    """An export that is loaded."""

    name: str
    """What reads it, with its release."""

    def rendered(self, messages: list[Message]) -> str:
        """The prompt that the export's chat template writes."""

    def tokens(self, text: str, *, is_rendered: bool) -> list[int]:
        """Its tokens; of a rendered prompt, special ones by their texts."""

    def ends(self) -> list[int]:
        """Tokens that the export says an answer ends with, sorted."""

    def answer(self, ids: list[int], most: int) -> list[AnsweredToken]:
        """A greedy answer of at most so many tokens."""

    def close(self) -> None:
        """Release the export."""


def compared(
    expected: Sequence[Expected],
    ends: Sequence[int],
    reader: Reader,
    kind: GgufType,
    decode: Callable[[list[int]], str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compare an export, and return the report. Raises JobFailure: export_failed, with what differs.

    Args:
        ends: tokens that end an answer of the trained model.
        kind: the precision of the export's weights.
    """
    found_ends = reader.ends()
    if found_ends != sorted(ends):
        wanted, given = (
            ", ".join(f"{end} ({decode([end])!r})" for end in part) or "none" for part in (ends, found_ends)
        )
        raise failed(f"its stop tokens are {given}, and the trained model's are {wanted}")
    report: dict[str, Any] = {
        "read_by": reader.name,
        "prompts": len(expected),
        "prompt_tokens": sum(len(one.prompt.ids) for one in expected),
        "stop_tokens": [{"id": end, "text": decode([end])} for end in sorted(ends)],
        "logits_bound": BOUNDS[kind],
    }
    medians, largest, tokens, differing = list[float](), list[float](), 0, list[dict[str, Any]]()
    for number, one in enumerate(expected):
        _check_prompt(number, one, reader, decode)
        steps = reader.answer(one.prompt.ids, len(one.tokens))
        median, most = _check_logits(number, one, steps, BOUNDS[kind])
        medians.append(median)
        largest.append(most)
        same = _same_tokens(one, steps)
        tokens += same
        if same < len(one.tokens):
            differing.append(_check_choice(number, one, steps, same, BOUNDS[kind], decode))
        progress(number + 1, len(expected))
    return {
        **report,
        "logits_difference": max(medians),
        "largest_logits_difference": max(largest),
        "greedy_tokens": sum(len(one.tokens) for one in expected),
        "equal_greedy_tokens": tokens,
        "differing": differing,
    }


def _check_prompt(number: int, one: Expected, reader: Reader, decode: Callable[[list[int]], str]) -> None:
    prompt = one.prompt
    if prompt.messages is not None and (text := reader.rendered(prompt.messages)) != prompt.text:
        at = next((at for at, pair in enumerate(zip(text, prompt.text, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(text), len(prompt.text)) if at is None else at
        raise failed(
            f"its chat template writes prompt {number} otherwise from character {at} on: "
            f"{text[at : at + 40]!r} in place of {prompt.text[at : at + 40]!r}"
        )
    ids = reader.tokens(prompt.text, is_rendered=prompt.messages is not None)
    if ids != prompt.ids:
        at = next((at for at, pair in enumerate(zip(ids, prompt.ids, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(ids), len(prompt.ids)) if at is None else at
        one_is, other_is = (f"{part[at : at + 3]} ({decode(part[at : at + 3])!r})" for part in (ids, prompt.ids))
        raise failed(
            f"its tokenizer writes prompt {number} otherwise from token {at} on: {one_is} in place of {other_is}"
        )


def _same_tokens(one: Expected, steps: Sequence[AnsweredToken]) -> int:
    pairs = enumerate(zip(one.tokens, steps, strict=False))
    return next((at for at, (token, step) in pairs if token != step.token), min(len(one.tokens), len(steps)))


def _check_logits(number: int, one: Expected, steps: Sequence[AnsweredToken], bound: float) -> tuple[float, float]:
    """The median and the largest difference over the tokens of an answer, up to the first one that is another. Raises
    JobFailure: the median is beyond the bound, or a token beyond `_LARGEST` times the bound."""
    found, places = list[float](), list[int]()
    for at in range(min(_same_tokens(one, steps) + 1, len(steps), len(one.tokens))):
        logits = one.logits[at]
        step = steps[at]
        if not step.ids:
            continue
        given = torch.tensor(step.logprobs, dtype=torch.float32)
        wanted = torch.log_softmax(logits, dim=-1)[step.ids]
        spread = float(logits.std(correction=0))
        found.append(float((given - wanted).pow(2).mean().sqrt()) / max(spread, 1e-6))
        places.append(at)
    if not found:
        raise failed(f"it answers prompt {number} with no token")
    median = sorted(found)[len(found) // 2]
    if not median <= bound:  # nor a NaN
        raise failed(
            f"it gives other logits than the trained model for prompt {number}: they differ by {median:.2g} of their "
            f"scale, where its precision explains {bound:g}"
        )
    for at, value in zip(places, found, strict=True):
        if not value <= _LARGEST * bound:
            raise failed(
                f"it gives other logits than the trained model for prompt {number}: those of token {at} differ by "
                f"{value:.2g} of their scale, where its precision explains {_LARGEST * bound:g}"
            )
    return median, max(found)


def _check_choice(
    number: int,
    one: Expected,
    steps: Sequence[AnsweredToken],
    at: int,
    bound: float,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The first token that differs, with both probabilities. Raises JobFailure: rounding does not explain it."""
    logprobs = torch.log_softmax(one.logits[at], dim=-1)
    spread = float(one.logits[at].std(correction=0))
    if at >= len(steps):
        raise failed(
            f"its answer to prompt {number} ends after {at} tokens, and the trained model's has {len(one.tokens)}"
        )
    wanted, step = one.tokens[at], steps[at]
    by_export = dict(zip(step.ids, step.logprobs, strict=True))

    def described(token: int) -> dict[str, Any]:
        given = by_export.get(token)
        return {
            "id": token,
            "text": decode([token]),
            "probability": math.exp(float(logprobs[token])),
            "probability_in_export": None if given is None else math.exp(given),
        }

    report: dict[str, Any] = {
        "prompt": number,
        "token": at,
        "trained": described(wanted),
        "export": described(step.token),
    }
    gap = float(logprobs[wanted] - logprobs[step.token])
    if gap > _LARGEST * bound * spread:
        raise failed(
            f"its greedy answer to prompt {number} has {decode([step.token])!r} in place of {decode([wanted])!r} as "
            f"token {at}, which the trained model gives probabilities of {report['export']['probability']:.3g} and "
            f"{report['trained']['probability']:.3g}"
        )
    return report


def failed(found: str) -> JobFailure:
    """The failure of an export that is not what was trained."""
    return JobFailure(
        Reason.export_failed,
        f"the export was written, read back and thrown away: {found}. The job that trained the model and its "
        "checkpoints are untouched.",
    )
