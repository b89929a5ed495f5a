"""Resolves the fields of a job's data: format, loss, packing, validation, evaluations."""

from __future__ import annotations

import re
from typing import Any

from ..errors import InvalidRequest
from ..specs.chat_templates import NAMED, OF_TRL
from ..specs.evaluations import METRICS
from ..specs.job import Algorithm, EarlyStoppingSpec, SampleMessage, SamplesSpec, ShardSpec
from ..specs.methods import METHODS
from ..system.data_dir import DataDir
from .bodies import DataConfig, TrainingConfig
from .choices import nearest_choice
from .names import JOB_UUID_PATTERN
from .options import ProviderOptions
from .settings import Settings

DATASET_ID = "training_config.data_config.dataset_id"
TRAIN_SHARE = "training_config.data_config.train_split_percentage"
SHARDS = "provider_options.shard.count"
_OF_JOB = re.compile(f"job:({JOB_UUID_PATTERN[1:-1]})")


def rows_job_of(dataset_id: str) -> str | None:
    """The job whose rows a dataset id names, as `job:NAME`; None: it names a dataset."""
    found = _OF_JOB.fullmatch(dataset_id)
    return found and found[1]


def resolve_data(
    training: TrainingConfig,
    data: DataConfig,
    options: ProviderOptions,
    settings: Settings,
    algorithm: Algorithm,
    warnings: list[str],
) -> dict[str, Any]:
    is_sft = METHODS[algorithm].rows == "sft"
    return {
        "data_format": resolve_data_format(data, is_sft, warnings),
        "n_epochs": training.n_epochs,
        "max_steps_per_epoch": training.max_steps_per_epoch,
        "batch_size": data.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps or 1,
        "max_validation_steps": resolve_max_validation_steps(training, data, warnings),
        "shuffle": data.shuffle,
        "train_on_input": resolve_train_on_input(data, options, algorithm),
        "packed": resolve_packed(data, algorithm),
        "max_seq_length": options.max_seq_length or settings.max_seq_length,
        "max_seq_length_is_default": options.max_seq_length is None,
        "chat_template": resolve_chat_template(options),
        "token_cache": DataDir(settings.data_dir).tokens if options.token_cache else None,
        **resolve_evaluations(options, data, algorithm),
        "samples": resolve_samples(options),
    }


def resolve_data_config(training: TrainingConfig) -> DataConfig:
    if training.data_config is None:
        raise InvalidRequest("training_config.data_config", None, "name a dataset_id, a batch_size and shuffle")
    return training.data_config


def resolve_data_format(data: DataConfig, is_sft: bool, warnings: list[str]) -> str | None:
    if data.data_format is None or data.data_format in ("instruct", "dialog"):
        return data.data_format if is_sft else None
    if not is_sft and data.data_format == "preference":
        return None
    raise InvalidRequest(
        "training_config.data_config.data_format",
        data.data_format,
        "send 'instruct' or 'dialog', or leave it out: each row's columns determine its shape "
        "(docs/reference/data-formats.md)",
    )


def resolve_train_on_input(data: DataConfig, options: ProviderOptions, algorithm: Algorithm) -> bool:
    """Whether the loss of SFT covers every token."""
    field, is_sft = "training_config.data_config.train_on_input", METHODS[algorithm].rows == "sft"
    if data.train_on_input and not is_sft:
        raise InvalidRequest(field, True, f"{METHODS[algorithm].title} trains completions only; set false")
    for name in ("train_on", "reasoning"):
        value = getattr(options, name)
        if not is_sft and value != type(options).model_fields[name].default:
            hint = f"{METHODS[algorithm].title} trains whole answers, as its rows have them; leave it out"
            raise InvalidRequest(f"provider_options.{name}", value, hint)
    if data.train_on_input and options.train_on not in ("assistant", "all"):
        raise InvalidRequest(field, True, f"provider_options.train_on is {options.train_on!r}: send one of both")
    return bool(data.train_on_input) or options.train_on == "all"


def resolve_chat_template(options: ProviderOptions) -> str | None:
    """The text of the template, or its name in `OF_TRL`; None: that of the model."""
    given = options.chat_template
    if given is None or "{" in given:
        return given
    if given in OF_TRL:
        return given
    if given not in NAMED:
        hint = (
            f"{nearest_choice(given, [*NAMED, *OF_TRL])}, or the text of a template, which has {{{{ messages }}}} in it"
        )
        raise InvalidRequest("provider_options.chat_template", given, hint)
    return NAMED[given]


def resolve_packed(data: DataConfig, algorithm: Algorithm) -> bool:
    if data.packed and METHODS[algorithm].rows != "sft":
        method = METHODS[algorithm]
        hint = (
            f"{method.title} scores each {method.unit} on its own; set false: {method.unit}s are padded to the longest"
        )
        raise InvalidRequest("training_config.data_config.packed", True, f"{hint} of their batch")
    return bool(data.packed)


def resolve_max_validation_steps(training: TrainingConfig, data: DataConfig, warnings: list[str]) -> int | None:
    if _validates(data):
        return training.max_validation_steps
    if training.max_validation_steps is not None:  # not refused: some clients always send the schema's default
        warnings.append("training_config.max_validation_steps has no effect without a validation_dataset_id")
    return None


def _validates(data: DataConfig) -> bool:
    """Whether the job has rows to evaluate on."""
    return bool(data.validation_dataset_id) or (data.train_split_percentage or 1.0) < 1.0


def resolve_train_share(data: DataConfig) -> float:
    if data.validation_dataset_id and (data.train_split_percentage or 1.0) < 1.0:
        raise InvalidRequest(
            TRAIN_SHARE,
            data.train_split_percentage,
            f"validation_dataset_id names the rows to evaluate on, {data.validation_dataset_id!r}; send one of them",
        )
    return data.train_split_percentage or 1.0


def resolve_shard(options: ProviderOptions) -> ShardSpec | None:
    if options.shard is None:
        return None
    return ShardSpec(index=options.shard.index, count=options.shard.count)


def resolve_evaluations(options: ProviderOptions, data: DataConfig, algorithm: Algorithm) -> dict[str, Any]:
    for name in ("eval_steps", "early_stopping", "best_checkpoint"):
        if getattr(options, name) is not None and not _validates(data):
            value = options.model_dump()[name]
            raise InvalidRequest(
                f"provider_options.{name}", value, "there is nothing to evaluate on: name a validation_dataset_id"
            )
    early, best = options.early_stopping, options.best_checkpoint
    if early:
        metric = _metric("provider_options.early_stopping.metric", early.metric, algorithm)
    return {
        "early_stopping": early and EarlyStoppingSpec(**{**early.model_dump(), "metric": metric}),
        "best_checkpoint": best and _metric("provider_options.best_checkpoint", best, algorithm),
    }


def resolve_samples(options: ProviderOptions) -> SamplesSpec | None:
    given = options.samples
    if given is None:
        return None
    prompts = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in given.prompts]
    return SamplesSpec(
        prompts=tuple(tuple(SampleMessage(**message) for message in prompt) for prompt in prompts),
        max_new_tokens=given.max_new_tokens,
    )


def _metric(name: str, metric: str, algorithm: Algorithm) -> str:
    """A metric under the name that evaluations report; `eval_` may be left out."""
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    if full not in METRICS[algorithm]:
        raise InvalidRequest(name, metric, nearest_choice(full, METRICS[algorithm]))
    return full
