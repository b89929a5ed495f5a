"""Resolves request, options and configuration into a JobSpec. Fields that would be ignored are refused by name.

`resolve` checks everything that needs no data, so a bad field is refused before a single row is read;
`Resolution.spec` then adds the datasets. Each module of this package resolves fields of one kind and names them; an
option that needs neither a decision nor a refusal is carried into the field of its name. A new field changes nothing
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..specs.job import ComputeSpec, DatasetRef, DataSpec, JobSpec, RowNames, ShardSpec, TrainSpec
from .answering import check_answers
from .averaging import resolve_averaging
from .bases import NamedJob, model_of, resolve_trained
from .checks import refuse_infinite, refuse_unknown, refuse_unsupported
from .data import DATASET_ID, resolve_data, resolve_data_config, resolve_shard, resolve_train_share
from .engines import resolve_vllm_in_job
from .lifecycle import resolve_lifecycle
from .method import jobs_named_by, resolve_method
from .mixture import NamedDataset, resolve_datasets, with_margins, with_rows
from .options import ProviderOptions
from .paths import resolve_paths
from .placement import on_reserved_cores, resolve_context_parallel, resolve_placement, with_sharding
from .preference import check_step
from .settings import Request, Settings
from .trackers import TrackerChoice, resolve_trackers
from .training import resolve_training

_CARRIED = [
    name
    for part in (DataSpec, ComputeSpec, TrainSpec)
    for name in part.model_fields
    if name in ProviderOptions.model_fields
]
"""Options that a job has under the same name, as they are where no module of this package resolves them."""


@dataclass(frozen=True)
class Resolution:
    """A valid request; only its data is missing."""

    datasets: tuple[NamedDataset, ...]
    """To train on, at least one."""
    validation_dataset_id: str | None
    fields: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    trackers: tuple[TrackerChoice, ...] = ()
    """They get the job's points."""
    train_share: float = 1.0
    """Share of the rows to train on; the others are held out for validation."""
    shard: ShardSpec | None = None
    """The part of the rows that the job has; None: all."""
    names: RowNames | None = None
    """What the rows of `validation_dataset_id` are read by; None: by the names of shapes and roles."""
    rows_field: str = DATASET_ID
    """The field of the request that names the first of `datasets`."""

    def spec(
        self, dataset: DatasetRef, validation: DatasetRef | None, *others: tuple[DatasetRef, DatasetRef | None]
    ) -> JobSpec:
        """The job.

        Args:
            validation: rows of `validation_dataset_id`, or held out of `dataset`; None: none.
            others: the other datasets of a mixture, each with what is held out of it.
        """
        rows = with_rows(self.datasets, [(dataset, validation), *others], self.names)
        return JobSpec.of(**self.fields, **rows)


def resolve(
    request: Request,
    options: ProviderOptions,
    settings: Settings,
    named: NamedJob | None = None,
) -> Resolution:
    """Decide everything about a job that trains and that does not depend on its rows. Raises InvalidRequest: names the
    field, its value and the nearest supported one.

    Args:
        named: the job that the request names as its base (`bases.base_job_of`).
    """
    training = request.training_config
    refuse_unknown(request)
    refuse_infinite(request, "")
    refuse_infinite(options, "provider_options.")
    refuse_unsupported(request, sharded=settings.sharding is not None)
    settings = with_sharding(options, settings)
    options = on_reserved_cores(options, settings)
    trackers = resolve_trackers(request.logger_config, settings.trackers, request.job_uuid)
    data = resolve_data_config(training)
    warnings: list[str] = []
    base = resolve_trained(model_of(request), options, settings, named)
    method = resolve_method(request, options, settings, warnings, base)
    algorithm, has_adapters = method["method"].algorithm, method["lora"] is not None
    fields = {
        **{name: getattr(options, name) for name in _CARRIED},
        **base.fields,
        **method,
        **resolve_paths(request, options, settings),
        **resolve_data(training, data, options, settings, algorithm, warnings),
        **resolve_training(training, options, settings, algorithm, has_adapters=has_adapters),
        **resolve_lifecycle(request, options, settings, base, jobs_named_by(method)),
        **resolve_placement(request, options, settings, base, method, warnings),
    }
    fields |= resolve_averaging(options, settings, fields)
    fields |= resolve_context_parallel(options, settings, fields)
    check_step(fields)
    check_answers(fields, data)
    fields |= resolve_vllm_in_job(fields, options, settings)
    share, shard = resolve_train_share(data), resolve_shard(options)
    datasets = resolve_datasets(data, options, algorithm)
    names = options.row_names
    if method["method"].has_margins:
        names, datasets = with_margins(names), tuple(one._replace(names=with_margins(one.names)) for one in datasets)
    return Resolution(datasets, data.validation_dataset_id, fields, warnings, trackers, share, shard, names)
