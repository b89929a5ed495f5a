"""What a model that judges answers reads, and how its verdict is read. Imports no torch.

The judge gets one user turn: a template in which `{prompt}`, `{answer}` and `{reference}` are replaced, once, so that
an answer cannot bring placeholders of its own. Its verdict is a number of a scale, or yes (1) or no (0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import InvalidRequest

MAX_TEMPLATE = 16384
"""Characters of a template."""
MOST_PLACEHOLDERS = 16
"""Of a template. A text may have 16 MiB."""
MOST_SCORE = 1e9
"""Of a scale; the least is its negative."""
VERDICT_TOKENS = 256
"""Of a verdict at most, by default."""
_PLACEHOLDER = re.compile(r"\{(prompt|answer|reference)\}")
_MARKUP = "*_`\"'"
_AROUND = f"{_MARKUP}.,;:!() \t\r"
"""What may stand around a verdict."""
_MARKED = re.compile(rf"[#> \t{_MARKUP}]{{0,9}}verdict[{_MARKUP}]{{0,4}}[ \t]{{0,9}}[:=]", re.IGNORECASE)
_NUMBER = re.compile(r"([+-]?\d{1,10}(?:\.\d{1,10})?)(?:(?:/| out of )(\d{1,10}(?:\.\d{1,10})?))?", re.ASCII)
_WORDS = {"yes": 1.0, "no": 0.0}

Scale = tuple[float, float]


def default_template(scale: Scale | None, *, has_reference: bool) -> str:
    """The template of a check that brings none.

    Args:
        scale: the least and the largest score; None: yes or no.
        has_reference: the judge compares the answer with one.
    """
    correct = "agree with the reference" if has_reference else "do what the prompt asks, correctly and completely"
    question = f"Does the answer {correct}?"
    form = 'Reply with one line, "Verdict: yes" or "Verdict: no".'
    if scale is not None:
        least, most = (f"{value:g}" for value in scale)
        question = f"How well does the answer {correct}? Give it a score from {least} (worst) to {most} (best)."
        # Without a number: a judge that repeats the sentence gives none.
        form = 'Reply with one line, "Verdict: SCORE", with the score in place of SCORE.'
    parts = ["Prompt:\n{prompt}", "Answer:\n{answer}", *(["Reference:\n{reference}"] if has_reference else [])]
    return "\n\n".join(["Judge the answer of an assistant to a prompt.", *parts, f"{question} {form}"])


def reads_reference(template: str | None) -> bool:
    """Whether a template of the request has a place for a reference."""
    return template is not None and "{reference}" in template


def refuse_unusable_judge(
    field: str, *, model: str | None, template: str | None, scale: Scale | None, at_least: float | None, given: bool
) -> None:
    """Refuse a judge that cannot give a verdict. Raises InvalidRequest: names the field of the check.

    Args:
        given: the check brings a reference for all rows, or names the column with that of each.
    """
    if not model:
        hint = "a check of type judge needs the model that reads the answers: a model id, a directory, or job:NAME"
        raise InvalidRequest(f"{field}.model", model, hint)
    _refuse_template(f"{field}.template", template, given=given)
    if scale is None:
        if at_least is not None:
            hint = "without a scale the verdict is yes or no, and yes passes: leave it out, or send a scale"
            raise InvalidRequest(f"{field}.at_least", at_least, hint)
        return
    least, most = scale
    if not -MOST_SCORE <= least < most <= MOST_SCORE:
        hint = f"expected the least and the largest score, [1, 10] for example, within {MOST_SCORE:g}"
        raise InvalidRequest(f"{field}.scale", list(scale), hint)
    if at_least is None or not least <= at_least <= most:
        hint = f"it is the least score that passes: with this scale a number from {least:g} to {most:g}"
        raise InvalidRequest(f"{field}.at_least", at_least, hint)


def _refuse_template(field: str, template: str | None, *, given: bool) -> None:
    if template is None:
        return
    needed = ["{prompt}", "{answer}", *(["{reference}"] if given else [])]
    if missing := [name for name in needed if name not in template]:
        hint = f"it has no {missing[0]}: it needs {', '.join(needed)}, which are replaced by their texts"
        raise InvalidRequest(field, template, hint)
    if (count := len(_PLACEHOLDER.findall(template))) > MOST_PLACEHOLDERS:
        hint = f"it names texts {count} times, at most {MOST_PLACEHOLDERS} are supported: each is written out"
        raise InvalidRequest(field, template, hint)


def filled(template: str, prompt: Sequence[dict[str, str]], answer: str, reference: str | None) -> str:
    """What the judge reads of an answer.

    Args:
        prompt: turns of the prompt; a single one stands without its role.
    """
    turns = [turn["content"] if len(prompt) == 1 else f"{turn['role']}: {turn['content']}" for turn in prompt]
    texts = {"prompt": "\n\n".join(turns), "answer": answer, "reference": reference or ""}
    return _PLACEHOLDER.sub(lambda found: texts[found[1]], template)


def read_verdict(text: str, scale: Scale | None, *, is_complete: bool = True) -> float | None:
    """The score in what a judge has written; None: it is unreadable.

    It is that of the last line which begins with `Verdict:`, which has nothing else, or of a text that is nothing but
    the verdict. A number may be written `7/10` or `7 out of 10` where 10 is the largest score. What precedes a
    `</think>` is thoughts, and so is what follows a `<think>` that has none.

    Args:
        is_complete: the judge ended its text; else a line counts where it is followed by another one.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    if not is_complete:
        text = text.rpartition("\n")[0]
    lines = text.split("\n")
    marked = [line[found.end() :] for line in lines if (found := _MARKED.match(line))]
    if not marked and not is_complete:
        return None
    verdict = (marked[-1] if marked else text.strip()).strip(_AROUND)
    if scale is None:
        return _WORDS.get(verdict.casefold())
    number = _NUMBER.fullmatch(verdict)
    if number is None or (number[2] is not None and float(number[2]) != scale[1]):
        return None
    score = float(number[1])
    return score if scale[0] <= score <= scale[1] else None
