"""Has a model's tokenizer and generation configuration agree with the model, as far as nothing is lost by that.

What a trainer copies from a tokenizer into the configuration of a model is exported with it, and read when the
export is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from ...specs.model_source import ModelSource

_FIRST = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
"""Values that decide whether others may be there."""


class GenerationValues(NamedTuple):
    """A generation configuration that can be written."""

    config: GenerationConfig
    warning: str
    """What the model's file has beyond that; empty: nothing."""


def pad_within_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: Any, embeddings: int, model: str, warn: Callable[[str], None]
) -> None:
    """Replace a padding token that the model has no embedding for. Padding is masked, so any other serves.

    Args:
        config: of the model.
        model: its name, for the warning.
    """
    pad, token = tokenizer.pad_token_id, tokenizer.pad_token
    if pad is None or pad < embeddings:
        return
    text = config.get_text_config()
    candidates = (getattr(text, "pad_token_id", None), tokenizer.eos_token_id, getattr(text, "eos_token_id", None), 0)
    replacement = next(one for one in candidates if isinstance(one, int) and 0 <= one < embeddings)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(replacement)
    warn(
        f"the tokenizer of {model!r} pads with {token!r} (id {pad}), and the model has {embeddings} embeddings: rows "
        f"are padded with {tokenizer.pad_token!r} (id {replacement}), and what is exported names that"
    )


def read_generation_config(source: ModelSource) -> GenerationValues:
    """The generation configuration of a model as transformers loads it, without the values that it could not write.

    transformers reads values that contradict each other, such as a temperature without do_sample, and refuses to write
    them when anything has changed, such as a token id that a trainer copies. A few others it refuses to read.
    """
    name, values = _document(source)
    if not isinstance(values, dict):
        problem = f"{name} of {source.model!r} is no JSON object: what is exported has transformers' defaults"
        return GenerationValues(GenerationConfig(), problem)
    try:
        loaded = GenerationConfig.from_model_config(dict(values)) if name == CONFIG_NAME else GenerationConfig(**values)
        loaded.validate(strict=True)
        _check_ids(loaded.to_dict())
    except Exception:  # of transformers, for values of any type
        config, left_out = _writable(values, only_known=name == CONFIG_NAME)
        which = ", ".join(f"{key} {_shown(value)}" for key, value in sorted(left_out.items()))
        return GenerationValues(
            config,
            f"{name} of {source.model!r} has values that transformers cannot write beside the others: {which}. They "
            "are left out of what is exported",
        )
    return GenerationValues(loaded, "")


def _document(source: ModelSource) -> tuple[str, Any]:
    """The file that transformers reads, and what is in it."""
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        try:
            found = cached_file(source.location, name, revision=source.revision)
            values = json.loads(Path(str(found)).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        return name, values
    return GENERATION_CONFIG_NAME, {}


def _writable(values: dict[str, Any], *, only_known: bool) -> tuple[GenerationConfig, dict[str, Any]]:
    """As many of the values as can be written together, and the others.

    Args:
        only_known: pass over values that no generation configuration has.
    """
    kept: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    known = GenerationConfig().to_dict()
    for name in sorted(values, key=lambda name: (name not in _FIRST, name)):
        if values[name] is None or (only_known and name not in known):
            continue
        together = {**kept, name: values[name]}
        try:
            _check_ids(together)
            GenerationConfig(**together).validate(strict=True)
        except Exception:  # as above
            left_out[name] = values[name]
        else:
            kept = together
    return GenerationConfig(**kept), left_out


def _check_ids(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name.endswith("_token_id") and not all(isinstance(one, int | None) for one in _several(value)):
            raise ValueError(f"{name} is no token id")


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    return repr(value)[:60]
