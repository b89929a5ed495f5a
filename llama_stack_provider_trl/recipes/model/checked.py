"""Checks the files of all models of a job, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable

from ...specs.job import JobSpec
from .adapters import check_adapter, continues
from .loading import WeightStorage, check_weights, load_config
from .quantization import check_stored


def check_models(spec: JobSpec, warn: Callable[[str], None] = lambda _: None) -> None:
    """Return if the models and adapters of a job that are on this machine are whole, as far as their headers show.
    Raises JobFailure: invalid_model, as `check_weights`, `check_adapter` and `check_stored`."""
    check_weights(spec.source, is_reward=spec.trains_reward, warn=warn)
    check_stored(load_config(spec.source), spec.source.model, is_quantized=WeightStorage.of(spec).is_quantized)
    if spec.reference_source != spec.source:
        check_stored(load_config(spec.reference_source), spec.reference_source.model, is_quantized=False)
        check_weights(spec.reference_source, warn=warn)
    for reward in spec.method.reward_models:
        if reward.source is None or not reward.source.directory.is_dir():
            continue  # another job makes it
        check_weights(reward.model, is_reward=True, has_head=not reward.is_adapter, warn=warn)
        if reward.is_adapter:
            check_adapter(reward.source.directory, reward.model, is_reward=True)
    if spec.adapter is not None:
        check_adapter(spec.adapter.directory, spec.source, lora=spec.lora if continues(spec) else None)
    made = [one for one in spec.method.grading_models if one.made_by is None or one.directory.is_dir()]
    for further in (*spec.does.ensemble, *spec.does.judges, *made):
        if further.adapter is not None and further.adapter.made_by and not further.adapter.directory.is_dir():
            continue  # another job makes it
        check_weights(further.source, warn=warn)
        if further.adapter is not None:
            check_adapter(further.adapter.directory, further.source)
