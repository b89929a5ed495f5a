"""The models that graders of a request name: names of `openai.models` become local models, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..service.http.errors import OpenAIRefused
from ..service.openai_settings import OpenAIModel

type Json = dict[str, Any]
_ASKING = ("score_model", "label_model")
_FIELD = "method.reinforcement.grader"


def with_local_models(grader: Mapping[str, Any], models: Mapping[str, OpenAIModel]) -> tuple[Json, list[str]]:
    """A grader with local models in place of the names of `openai.models`, and the models as the request names them.
    Raises OpenAIRefused: 404, a name stands for nothing here.

    Args:
        grader: as a client has sent it: whatever is no grader stays as it is.
    """
    found, named = copy.deepcopy(dict(grader)), list[str]()
    for field, leaf in _asking(found):
        name = leaf["model"]
        named.append(name)
        if name in models:
            leaf["model"] = models[name].model
        elif not any(mark in name for mark in "/:"):  # as directories, model ids, job: and ft: have
            known = ", ".join(models) or "none is configured (the setting openai.models)"
            raise OpenAIRefused(
                f"the model {name[:200]!r} of a grader does not exist here: name one of {known}, a fine-tuned model "
                "(ft:...), a directory, or a model id",
                f"{_FIELD}.{field}model",
                "model_not_found",
                404,
            )
    return found, named


def with_named_models(grader: Json, named: Sequence[str]) -> Json:
    """A grader with the models as its request has named them."""
    for (_, leaf), name in zip(_asking(grader), named, strict=False):
        leaf["model"] = name
    return grader


def _asking(grader: Json) -> Iterator[tuple[str, Json]]:
    """The graders of one that ask a model, each with the beginning of its fields."""
    leaves: list[tuple[str, Any]] = [("", grader)]
    if grader.get("type") == "multi":
        below = grader.get("graders")
        several = below if isinstance(below, dict) else {}
        if isinstance(several.get("type"), str):  # a single one, without a name of its own in the formula
            several = {str(several.get("name")): several}
        leaves = [(f"graders.{name}.", leaf) for name, leaf in several.items()]
    for field, leaf in leaves:
        if isinstance(leaf, dict) and leaf.get("type") in _ASKING and isinstance(leaf.get("model"), str):
            yield field, leaf
