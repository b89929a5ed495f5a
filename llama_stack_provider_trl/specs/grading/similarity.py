"""How similar two texts are, from 0 to 1, by the libraries of the extra `graders`.

ROUGE is counted here, as rouge-score (which has had no release since 2022) does it without stems: words are runs of
a-z and 0-9 in lower case, and the result is the F-measure.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

MOST_CHARACTERS, MOST_METEOR_WORDS = 100_000, 2000
"""Of each text. METEOR compares each word with all others."""
_NOT_WORDS = re.compile(r"[^a-z0-9]+")
_LIBRARIES = {
    "fuzzy_match": "rapidfuzz",
    "bleu": "sacrebleu",
    "gleu": "nltk",
    "meteor": "nltk",
    "rouge_l": "rapidfuzz",
}
"""By metric; those that are not here need none."""


def problem_of_metric(metric: str) -> str:
    """Why a metric cannot be used in this environment; empty: it can."""
    library = _LIBRARIES.get(metric)
    if library is not None and find_spec(library) is None:
        return f"{metric} needs {library}, which is not installed: install the extra `graders` of this package"
    if metric == "meteor":
        try:
            _wordnet()
        except LookupError:
            return "meteor needs WordNet, which nltk does not find: python -m nltk.downloader wordnet, or use gleu"
    return ""


def load_libraries() -> None:
    """Import what metrics need, where it is installed."""
    for library in dict.fromkeys(_LIBRARIES.values()):
        if find_spec(library) is not None:
            importlib.import_module("nltk.translate.gleu_score" if library == "nltk" else library)


def similarity(metric: str, text: str, reference: str) -> float:
    """From 0 to 1. Raises ValueError: a text is too long, or the metric cannot be used here."""
    for one in (text, reference):
        if len(one) > MOST_CHARACTERS:
            raise ValueError(f"found {len(one)} characters, at most {MOST_CHARACTERS} are compared")
    if problem := problem_of_metric(metric):
        raise ValueError(problem)
    return min(1.0, max(0.0, float(_METRICS[metric](text, reference))))


def _fuzzy(text: str, reference: str) -> float:
    from rapidfuzz import fuzz

    return float(fuzz.ratio(text, reference)) / 100


def _bleu(text: str, reference: str) -> float:
    return float(_sacrebleu().sentence_score(text, [reference]).score) / 100


@cache
def _sacrebleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=True)  # of sentences: those of one word have no pairs of words


def _gleu(text: str, reference: str) -> float:
    from nltk.translate.gleu_score import sentence_gleu

    return float(sentence_gleu([reference.split()], text.split())) if text.split() else 0.0


def _meteor(text: str, reference: str) -> float:
    from nltk.translate.meteor_score import meteor_score

    words = text.split(), reference.split()
    if (most := max(map(len, words))) > MOST_METEOR_WORDS:
        raise ValueError(f"found {most} words, at most {MOST_METEOR_WORDS} are compared by meteor")
    return float(meteor_score([words[1]], words[0]))


@cache
def _wordnet() -> Any:
    """Raises LookupError: it is not there."""
    from nltk.corpus import wordnet

    wordnet.ensure_loaded()
    return wordnet


def _words(text: str) -> list[str]:
    return _NOT_WORDS.sub(" ", text.lower()).split()


def _rouge(length: int) -> Callable[[str, str], float]:
    def measured(text: str, reference: str) -> float:
        one, other = (_runs(_words(each), length) for each in (text, reference))
        return _f_measure((one & other).total(), one.total(), other.total())

    return measured


def _runs(words: Sequence[str], length: int) -> Counter[Hashable]:
    return Counter(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def _rouge_l(text: str, reference: str) -> float:
    from rapidfuzz.distance import LCSseq

    one, other = _words(text), _words(reference)
    return _f_measure(LCSseq.similarity(one, other), len(one), len(other))


def _f_measure(common: int, found: int, expected: int) -> float:
    return 2 * common / (found + expected) if common else 0.0


_METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": _fuzzy,
    "bleu": _bleu,
    "gleu": _gleu,
    "meteor": _meteor,
    **{f"rouge_{length}": _rouge(length) for length in range(1, 6)},
    "rouge_l": _rouge_l,
}
