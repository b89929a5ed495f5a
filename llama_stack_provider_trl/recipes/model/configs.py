"""Reads the configuration of a model, whose numbers decide how much is built: a billion layers are built for days."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, cached_file

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource
from ...system.model_damage import CONFIG_FILES
from .files import check_files

DAMAGE = (OSError, ValueError, LookupError, TypeError, ImportError, AttributeError, ArithmeticError, AssertionError)
"""What transformers raises for files of a model that are damaged, or describe none."""
_MOST_BYTES = 8 << 20
"""Of the file. The largest of known models have 100 KB."""
_MOST_VALUES = 100_000
_MOST_NUMBER = 1 << 32
_MOST_PARTS = 10_000
"""Of layers, blocks or experts, which are built one by one. The deepest known model has some hundred."""
_COUNT = re.compile(r"(num|n)_.*(layer|block|expert|depth)|(.*_)?(layers?|blocks?|experts|depths?)")
"""Keys of such numbers: `num_hidden_layers`, `n_layer`, `encoder_layers`, `n_routed_experts`; not `block_size` or
`shared_expert_intermediate_size`."""


def read_config(source: ModelSource, arguments: dict[str, Any]) -> Any:
    """The configuration of a model; `arguments` are those of `from_pretrained`. Raises JobFailure: invalid_model, it is
    missing or damaged, or a number in it is beyond any model."""
    check_files(source, CONFIG_FILES)
    try:
        _check_numbers(source)
        return AutoConfig.from_pretrained(source.location, **arguments)
    except (JobFailure, MemoryError):
        raise
    except Exception as error:  # of transformers, of huggingface_hub's dataclasses, and of each model's own class
        raise invalid_model(source.model, "its config.json cannot be read", error) from error


def _check_numbers(source: ModelSource) -> None:
    found = _file(source)
    if found is None:
        return  # loading reports it
    size = found.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"it has {size >> 20} MiB, at most {_MOST_BYTES >> 20} are supported")
    count = 0
    for key, value in _values(json.loads(found.read_text(encoding="utf-8"))):
        if (count := count + 1) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        is_count = (
            _COUNT.match(key) is not None if key.startswith(("num_", "n_")) else _COUNT.fullmatch(key) is not None
        )
        if abs(value) > (_MOST_PARTS if is_count else _MOST_NUMBER):
            least = f"a number of parts up to {_MOST_PARTS}" if is_count else f"numbers up to {_MOST_NUMBER}"
            raise ValueError(f"{key[:100]} is {str(value)[:40]}, expected {least}")


def _file(source: ModelSource) -> Path | None:
    """As it is on this machine; a call of the hub costs a second, and is made where it is not."""
    for local in (True, False):
        where: dict[str, Any] = {"revision": source.revision, "local_files_only": local}
        try:
            found = cached_file(source.location, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **where)
        except (OSError, ValueError):
            continue
        if found is not None:
            return Path(found)
    return None


def _values(document: Any) -> Iterator[tuple[str, Any]]:
    """All values with the keys that they are under."""
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((key, one) for one in value)


def invalid_model(model: str, problem: str, error: BaseException) -> JobFailure:
    """The error of a library that reads the files of a model, with the model and what is expected."""
    detail = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError) or not detail:  # whose text is the key alone
        detail = f"{type(error).__name__} {detail}".rstrip()
    if "trust_remote_code" in detail:
        return JobFailure(
            Reason.invalid_model,
            f"model {model!r} comes with code of its own, which is not run: the operator can allow it by naming the "
            "model (a directory, or ORG/NAME@REVISION) in trust_remote_code of the provider's configuration.",
        )
    return JobFailure(
        Reason.invalid_model,
        f"model {model!r}: {problem}: {detail[:500]}. Expected a directory written by save_pretrained (config.json, "
        "weights, tokenizer) or a model id that this machine can reach.",
    )
