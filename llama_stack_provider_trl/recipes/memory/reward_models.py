"""The memory of the reward models that reward a job's answers: each rank holds all of them."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch

from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ...specs.rewards import RewardModel
from ..model.configs import invalid_model
from ..model.loading import auto_class, load_config
from ..trainer.reward_models import storage_of


def reward_sizes(spec: JobSpec) -> list[int]:
    """Bytes of the weights of each, without its adapter. Raises JobFailure: invalid_model."""
    bytes_each = storage_of(spec.compute.dtype).dtype.itemsize
    return [_parameters(_source(model)) * bytes_each for model in spec.method.reward_models]


def _source(model: RewardModel) -> ModelSource:
    """What has the sizes of a reward model: its own files, once its job has written them, else what that began with."""
    if model.base is not None:
        return model.base
    if model.trained_from is None or (model.own.directory / "config.json").is_file():
        return model.own
    return ModelSource(**dict(model.trained_from))


@lru_cache(maxsize=16)
def _parameters(source: ModelSource) -> int:
    config = copy.deepcopy(load_config(source))
    auto, head = auto_class(config, is_reward=True)
    config.num_labels = head["num_labels"]
    try:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise invalid_model(source.model, "its config.json describes no reward model", error) from error
    return sum(weight.numel() for weight in model.parameters())
