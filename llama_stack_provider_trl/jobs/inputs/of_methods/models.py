"""Finds all models that a method reads beside its own."""

from __future__ import annotations

from typing import Any

from ....requests.options import ProviderOptions
from ....requests.settings import Settings
from ...store.store import Store
from .grading_models import with_grading_models
from .reward_models import with_reward_models
from .teachers import with_teacher


def with_models(
    fields: dict[str, Any], options: ProviderOptions, settings: Settings, store: Store | None
) -> dict[str, Any]:
    """The fields of a job with what its teacher is, and the models that reward and grade its answers.

    Args:
        store: the jobs that there are; None: there are none.

    Raises:
        InvalidRequest: one of them cannot be used.
    """
    fields = with_reward_models(fields, options, settings, store)
    return with_teacher(with_grading_models(fields, settings, store), settings, store)
