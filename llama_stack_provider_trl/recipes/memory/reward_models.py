"""The memory of the models that reward a job's answers, reward models and those that graders ask: each rank holds all
of them."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch

from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ...specs.rewards import RewardModel
from ..model.configs import invalid_model
from ..model.loading import DTYPES, auto_class, load_config
from ..trainer.reward_models import storage_of


def reward_sizes(spec: JobSpec) -> list[int]:
    """Bytes of the weights of each, without its adapter. A grader's model that another job has not written yet is left
    out: it is there when the job starts. Raises JobFailure: invalid_model."""
    bytes_each = storage_of(spec.compute.dtype).dtype.itemsize
    found = [_parameters(_source(model), is_reward=True) * bytes_each for model in spec.method.reward_models]
    own_bytes = DTYPES[spec.compute.dtype].itemsize
    for model in spec.method.grading_models:
        if model.made_by is None or (model.directory / "config.json").is_file():
            found.append(_parameters(model.source, is_reward=False) * own_bytes)
    return found


def _source(model: RewardModel) -> ModelSource:
    """What has the sizes of a reward model: its own files, once its job has written them, else what that began with."""
    if model.base is not None:
        return model.base
    if model.trained_from is None or (model.own.directory / "config.json").is_file():
        return model.own
    return ModelSource(**dict(model.trained_from))


@lru_cache(maxsize=16)
def _parameters(source: ModelSource, *, is_reward: bool) -> int:
    config = copy.deepcopy(load_config(source))
    auto, head = auto_class(config, is_reward=is_reward)
    if is_reward:
        config.num_labels = head["num_labels"]
    try:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise invalid_model(
            source.model, f"its config.json describes no {'reward' if is_reward else 'language'} model", error
        ) from error
    return sum(weight.numel() for weight in model.parameters())
