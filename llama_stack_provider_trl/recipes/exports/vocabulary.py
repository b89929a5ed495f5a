"""A tokenizer as GGUF has it.

llama.cpp knows two kinds that the mapped architectures use. `gpt2` is BPE over bytes: its merges are in the file, and a
name stands for the regular expression that divides a text beforehand. `llama` is the BPE of SentencePiece: tokens with
scores, the highest of which is merged first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...errors import JobFailure
from ...specs.events import Reason

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""`tokenizer.ggml.token_type`."""
_BYTES = "ByteLevel"
_DIGITS = "Digits, ByteLevel"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PRE_TOKENIZERS = {
    _BYTES: "gpt-2",
    _DIGITS: "smollm",
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _WORDS % r"\p{N}": "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ): "tekken",
}
"""How a text is divided before it is merged -> llama.cpp's name for it."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Of these llama.cpp takes a word that is a token as it is (`ignore_merges`)."""
_UNREACHED = -1e6
"""Score of a token that no merge makes."""
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class Vocabulary(NamedTuple):
    model: str
    """gpt2, llama."""
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    """Of `llama`: of each token."""
    merges: list[str] | None
    """Of `gpt2`: two tokens with a space between them."""
    adds_bos: bool
    adds_space: bool
    """Whether a text gets a space before it."""
    strips_right: bool
    """Whether its special tokens take the spaces behind them."""


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer. Raises JobFailure: invalid_model, with the part of the tokenizer that is not
    mapped.

    Args:
        rows: of the model's embeddings; those without a token get one that is marked as unused.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unmapped(f"its tokenizer {type(tokenizer).__name__} has no tokenizer.json")
    described = json.loads(backend.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        raise unmapped(f"its tokenizer is of the type {model.get('type')}, and BPE alone is mapped")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise unmapped(f"its tokenizer sets {name}")
    added = described.get("added_tokens") or []
    tokens, types = _tokens(model["vocab"], added, rows)
    merges = [_pair(merge) for merge in model["merges"]]
    common: dict[str, Any] = {"tokens": tokens, "types": types, "strips_right": _strips_right(added)}
    common["adds_bos"] = adds_bos(tokenizer)
    if model.get("byte_fallback"):
        return _sentencepiece(described, merges, common)
    pre = _pre_tokenizer(described)
    if (pre in _WHOLE_WORDS) is not bool(model.get("ignore_merges")):
        found = bool(model.get("ignore_merges"))
        raise unmapped(f"its tokenizer has ignore_merges {found}, where llama.cpp's {pre} has {not found}")
    return Vocabulary(
        model="gpt2",
        pre=pre,
        scores=None,
        merges=[f"{one} {other}" for one, other in merges],
        adds_space=False,
        **common,
    )


def _tokens(vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], rows: int) -> tuple[list[str], list[int]]:
    by_id = {number: (token, NORMAL) for token, number in vocab.items()}
    for one in added:
        by_id[one["id"]] = (one["content"], CONTROL if one.get("special") else USER_DEFINED)
    if by_id and max(by_id) >= rows:
        raise unmapped(f"its tokenizer has a token {max(by_id)}, and its embeddings have {rows} rows")
    found = [by_id.get(number, (f"[PAD{number}]", UNUSED)) for number in range(rows)]
    return [token for token, _ in found], [kind for _, kind in found]


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    one, other = merge.split(" ", 1) if isinstance(merge, str) else merge
    return one, other


def _strips_right(added: Sequence[Mapping[str, Any]]) -> bool:
    for one in added:
        if one.get("lstrip") or one.get("single_word"):
            raise unmapped(f"its token {one['content']!r} sets lstrip or single_word, which GGUF has no place for")
    return any(one.get("rstrip") for one in added if one.get("special"))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer writes its first token before every text. Raises JobFailure: it writes one behind it."""
    ids = list(tokenizer("a")["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]:
        raise unmapped("its tokenizer writes the token that ends an answer behind every text")
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    normalizer = described.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise unmapped(f"its tokenizer has the normalizer {normalizer.get('type')}")
    steps = _steps(described.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if last.get("type") != _BYTES or last.get("add_prefix_space"):
        raise unmapped("its tokenizer divides texts by other means than bytes without a space before them")
    key = ", ".join(str(one.get("type")) for one in steps)
    if len(steps) == 2 and steps[0].get("type") == "Split" and not last.get("use_regex"):
        split = steps[0]
        key = (split.get("pattern") or {}).get("Regex") or key
        if split.get("behavior") != "Isolated" or split.get("invert"):
            key = f"Split ({split.get('behavior')})"
    elif not last.get("use_regex") or (len(steps) == 2 and not steps[0].get("individual_digits")):
        key = f"{key} (other settings)"
    if key not in _PRE_TOKENIZERS:
        raise unmapped(f"its tokenizer divides texts by {key[:120]!r}, which has no name in llama.cpp")
    return _PRE_TOKENIZERS[key]


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part.get("type") == "Sequence" else [part]


def _sentencepiece(described: Mapping[str, Any], merges: list[tuple[str, str]], common: dict[str, Any]) -> Vocabulary:
    """The earlier a token is merged, the higher its score. SentencePiece's own file has the same order."""
    unknown = described["model"].get("unk_token")
    tokens, types = common["tokens"], common["types"]
    by_token: dict[str, float] = {}
    for rank, (one, other) in enumerate(merges):
        by_token.setdefault(one + other, -float(rank))
    for number, token in enumerate(tokens):
        if token == unknown:
            types[number] = UNKNOWN
        elif types[number] == NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[number] = BYTE
        elif types[number] == USER_DEFINED:
            tokens[number] = token.replace(_SPACE, " ")
    scores = [
        by_token.get(token, _UNREACHED) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)
    ]
    return Vocabulary(
        model="llama", pre="default", scores=scores, merges=None, adds_space=_adds_space(described), **common
    )


def _adds_space(described: Mapping[str, Any]) -> bool:
    prepends = False
    for step in _steps(described.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == _SPACE:
            prepends = True
        elif kind != "Replace" or step.get("content") != _SPACE or (step.get("pattern") or {}).get("String") != " ":
            raise unmapped(f"its tokenizer has the normalizer {kind}")
    for step in _steps(described.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == _SPACE:
            # `first`: before the text alone, not behind a special token, which every prompt of a chat begins with.
            prepends = prepends or step.get("prepend_scheme") == "always"
        elif step.get("type") != "Split" or (step.get("pattern") or {}).get("String") != " ":
            raise unmapped(f"its tokenizer divides texts by {step.get('type')}")
    return prepends


def unmapped(found: str) -> JobFailure:
    """The refusal of a model that has no mapping to GGUF."""
    return JobFailure(
        Reason.invalid_model,
        f"the model cannot be exported to GGUF: {found}. Nothing was written; export it to safetensors, or another "
        "model (docs/how-to/export.md lists those that are mapped).",
    )
