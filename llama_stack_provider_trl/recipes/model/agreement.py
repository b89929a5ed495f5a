"""Has a model's tokenizer and configuration agree with the model, as far as nothing is lost by that.

What a trainer copies from a tokenizer into the configuration of a model is exported with it, and read when the
export is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource

_FIRST = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
"""Values that decide whether others may be there."""
_LONGEST = 1000
"""Members of a list that are tried one by one."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_ABSENT = object()
"""A file that is not there."""


class GenerationValues(NamedTuple):
    """A generation configuration that can be written."""

    config: GenerationConfig
    warning: str
    """What of the model's file was changed for that; empty: nothing."""


def complete(tokenizer: PreTrainedTokenizerBase, source: ModelSource, warn: Callable[[str], None]) -> None:
    """Give a tokenizer a padding token where it has none, and take a chat template from it that is blank. Raises
    JobFailure: invalid_model, where it has no token that ends texts."""
    if tokenizer.eos_token is None:
        raise JobFailure(
            Reason.invalid_model,
            f"the tokenizer of {source.model!r} has no eos_token, so a model could never learn to stop. "
            "Set `eos_token` in its tokenizer_config.json.",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(tokenizer.chat_template, str) and not tokenizer.chat_template.strip():
        configured = (_read(source, _TOKENIZER_CONFIG) or {}).get("chat_template")
        is_other = isinstance(configured, str) and bool(configured.strip())
        tokenizer.chat_template = configured if is_other else None
        instead = f"the one in {_TOKENIZER_CONFIG} is used" if is_other else "it is trained as one without a template"
        warn(f"the chat template of {source.model!r} is empty: {instead}")


def untie(model: PreTrainedModel, source: ModelSource, warn: Callable[[str], None]) -> None:
    """Have the configuration of a loaded model name its weights untied where they are.

    transformers does not tie weights that are both in the files with other values, whatever the configuration names.
    Left as it is, the exported one would have others tie them: they would compute with the embeddings in their place.
    """
    named = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not named or model.all_tied_weights_keys.keys() & named.keys():
        return
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "tie_word_embeddings", False):
            part.config.tie_word_embeddings = False
    name, tied = next(iter(named.items()))
    warn(
        f"config.json of {source.model!r} has tie_word_embeddings true, and in its files {name} differs from {tied}: "
        "it is trained as weights of its own, and a whole model that is exported has tie_word_embeddings false"
    )


def refuse_padding(text: Any, size: Any, model: str) -> None:
    """Raise JobFailure, invalid_model, if a model cannot be built, since it has no embedding for its padding token."""
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and isinstance(size, int) and size > 0 and not -size <= pad < size:
        raise JobFailure(
            Reason.invalid_model,
            f"model {model!r}: config.json has pad_token_id {pad}, and the model has {size} embeddings. Set it "
            "to the id of a token that the model has, such as eos_token_id.",
        )


def pad_within_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: Any, embeddings: int, model: str, warn: Callable[[str], None]
) -> None:
    """Replace a padding token that the model has no embedding for. Padding is masked, so any other serves."""
    pad, token = tokenizer.pad_token_id, tokenizer.pad_token
    if pad is None or pad < embeddings or embeddings == 0:  # a model without any is refused when it is loaded
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
    """The generation configuration of a model as transformers loads it, but for the values that it could not write.

    transformers reads values that contradict each other, such as a temperature without do_sample, and refuses to write
    them when anything has changed, such as a token id that a trainer copies. A few others it refuses to read.
    """
    name, warning = GENERATION_CONFIG_NAME, ""
    values = _read(source, name)
    if not isinstance(values, dict):
        if values is not _ABSENT:
            warning = f"{name} of {source.model!r} holds no values: what is exported has those of {CONFIG_NAME}"
        name, values = CONFIG_NAME, _read(source, CONFIG_NAME)
    values = values if isinstance(values, dict) else {}
    try:
        loaded = GenerationConfig.from_model_config(dict(values)) if name == CONFIG_NAME else GenerationConfig(**values)
        loaded.validate(strict=True)
        _check_ids(loaded.to_dict())
    except Exception:  # of transformers, for values of any type
        config, changes = _repaired(values, only_known=name == CONFIG_NAME)
        problem = (
            f"{name} of {source.model!r} has values that transformers cannot write beside the others: what is exported "
            f"{'; '.join(changes)}"
        )
        return GenerationValues(config, f"{warning}; {problem}" if warning else problem)
    return GenerationValues(loaded, warning)


def _read(source: ModelSource, name: str) -> Any:
    """What is in a JSON file of a model; None: it cannot be read; _ABSENT: there is none."""
    try:
        found = cached_file(source.location, name, revision=source.revision)
        content = Path(str(found)).read_text(encoding="utf-8")
    except OSError:
        return _ABSENT
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _repaired(values: dict[str, Any], *, only_known: bool) -> tuple[GenerationConfig, list[str]]:
    """As much of the values as can be written, and what was changed.

    A file without do_sample whose other values are those of sampling gets it: its author meant them.

    Args:
        only_known: pass over values that no generation configuration has.
    """
    if only_known:
        known = GenerationConfig().to_dict()
        values = {name: value for name, value in values.items() if name in known}
    values = {name: value for name, value in values.items() if value is not None}
    changes, kept = [], _writable(values)
    if "do_sample" not in values:
        sampling = _writable({**values, "do_sample": True})
        if needing := [name for name in values if sampling.get(name) == values[name] != kept.get(name)]:
            kept = sampling
            changes.append(f"has do_sample true for {_listed(needing, values)}")
    lacking = [name for name in values if name not in kept]
    shortened = [name for name in values if name in kept and kept[name] != values[name]]
    changes += [f"has {name} {_shown(kept[name])} for {_shown(values[name])}" for name in shortened]
    if lacking:
        changes.append(f"lacks {_listed(lacking, values)}")
    return GenerationConfig(**kept), changes


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    """As many of the values as can be written together; of a list those members that can."""
    kept: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: (name not in _FIRST, name)):
        value = values[name]
        if isinstance(value, list) and len(value) <= _LONGEST and not _can_write({**kept, name: value}):
            value = [one for one in value if _can_write({**kept, name: [one]})]
            if not value:
                continue
        if _can_write({**kept, name: value}):
            kept[name] = value
    return kept


def _can_write(values: dict[str, Any]) -> bool:
    try:
        _check_ids(values)
        GenerationConfig(**values).validate(strict=True)
    except Exception:  # of transformers, for values of any type
        return False
    return True


def _check_ids(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name.endswith("_token_id") and not all(_is_id(one) for one in _several(value)):
            raise ValueError(f"{name} is no token id")


def _is_id(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _listed(names: list[str], values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(values[name])}" for name in sorted(names))


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    return repr(value)[:60]
