"""Request + options + configuration -> JobSpec. Whatever would be ignored is refused here, by name.

`resolve` looks at everything that needs no data, so a bad field is refused before a single row is read;
`Resolution.spec` then adds the datasets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidRequest
from ..specs.job import (
    Algorithm,
    DatasetRef,
    JobSpec,
)
from .bodies import (
    SupervisedFineTuneRequest,
)
from .checks import refuse_infinite, refuse_unknown, refuse_unsupported
from .data import (
    resolve_data_config,
    resolve_data_format,
    resolve_evaluations,
    resolve_max_validation_steps,
    resolve_packed,
    resolve_train_on_input,
    resolve_train_share,
)
from .method import refuse_dpo_options, resolve_dpo, resolve_dpo_lora, resolve_qat, resolve_sft_lora
from .options import PRIORITIES, ProviderOptions
from .paths import resolve_checkpoint_dir, resolve_job_uuid, resolve_names, resolve_resume_from, resolve_trust
from .placement import resolve_device, resolve_ranks, resolve_resources
from .settings import Request, Settings
from .training import resolve_activations, resolve_dtype, resolve_optimizer

# TRL's defaults for full fine-tuning; adapters start from zero and take ten times as much (TRL's documentation).
LEARNING_RATES = {("sft", False): 2e-5, ("sft", True): 2e-4, ("dpo", False): 1e-6, ("dpo", True): 1e-5}


@dataclass(frozen=True)
class Resolution:
    """A request that can be honoured; lacks only its data."""

    dataset_id: str
    validation_dataset_id: str | None
    fields: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    train_share: float = 1.0
    """Share of the rows to train on; the others are held out for validation."""

    def spec(self, dataset: DatasetRef, validation: DatasetRef | None) -> JobSpec:
        return JobSpec(dataset=dataset, validation=validation, **self.fields)


def resolve(request: Request, options: ProviderOptions, settings: Settings) -> Resolution:
    """Decide everything about a job that does not depend on its rows.

    Raises:
        InvalidRequest: naming the field, its value and the nearest thing that works.
    """
    training = request.training_config
    refuse_unknown(request)
    refuse_infinite(request, "")
    refuse_infinite(options, "provider_options.")
    refuse_unsupported(request, sharded=settings.sharding is not None)
    data = resolve_data_config(training)
    warnings: list[str] = []
    is_sft = isinstance(request, SupervisedFineTuneRequest)
    lora = (
        resolve_sft_lora(request, options)
        if isinstance(request, SupervisedFineTuneRequest)
        else resolve_dpo_lora(options)
    )
    qat = resolve_qat(request) if isinstance(request, SupervisedFineTuneRequest) else None
    dpo = None if isinstance(request, SupervisedFineTuneRequest) else resolve_dpo(request, options, settings, warnings)
    algorithm: Algorithm = "sft" if is_sft else "dpo"
    if is_sft:
        refuse_dpo_options(options)
    if options.merge_adapter and lora is None:
        raise InvalidRequest(
            "provider_options.merge_adapter", True, "there is no adapter without LoRA; ask for LoRA, or leave it out"
        )
    fields = {
        "job_uuid": resolve_job_uuid(request.job_uuid),
        "algorithm": algorithm,
        **(names := resolve_names(request, settings)),
        **resolve_trust(names["model"], settings),
        "checkpoint_dir": resolve_checkpoint_dir(request, settings),
        "data_format": resolve_data_format(data, is_sft, warnings),
        "n_epochs": training.n_epochs,
        "max_steps_per_epoch": training.max_steps_per_epoch,
        "batch_size": data.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps or 1,
        "max_validation_steps": resolve_max_validation_steps(training, data, warnings),
        "shuffle": data.shuffle,
        "train_on_input": resolve_train_on_input(data, is_sft),
        "packed": resolve_packed(data, is_sft),
        "max_seq_length": options.max_seq_length or settings.max_seq_length,
        "max_seq_length_is_default": options.max_seq_length is None,
        "truncation_side": options.truncation_side,
        "dtype": resolve_dtype(training, options.device or settings.devices[0]),
        **resolve_activations(training, settings, options.device or settings.devices[0]),
        "optimizer": resolve_optimizer(training, options, LEARNING_RATES[algorithm, lora is not None]),
        "lora": lora,
        "qat": qat,
        "dpo": dpo,
        "merge_adapter": options.merge_adapter,
        "save_steps": options.save_steps or settings.save_steps,
        **resolve_evaluations(options, data, algorithm),
        "keep_last": options.keep_last or settings.keep_last,
        "retries": settings.retries if options.retries is None else options.retries,
        "retry_backoff": settings.retry_backoff,
        "oom_retry": settings.oom_retry if options.oom_retry is None else options.oom_retry,
        "max_duration": options.max_duration or settings.max_duration,
        "priority": PRIORITIES[options.priority or settings.priority],
        "min_free_bytes": settings.min_free_disk_mb << 20,
        "logging_steps": options.logging_steps,
        "seed": options.seed,
        "preflight": options.preflight,
        "device": resolve_device(options, settings),
        "resume_from": resolve_resume_from(options),
        **resolve_ranks(request, options, settings, resources := resolve_resources(options, settings, names["model"])),
        "resources": resources,
    }
    return Resolution(data.dataset_id, data.validation_dataset_id, fields, warnings, resolve_train_share(data))
