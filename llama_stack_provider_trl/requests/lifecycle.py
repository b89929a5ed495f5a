"""How a job runs: its place in the queue, checkpoints, logging, memory check, retries, limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidRequest
from ..specs.job import LifecycleSpec
from .bases import Base
from .data import rows_job_of
from .names import JOB_UUID_PATTERN
from .options import PRIORITIES, ProviderOptions
from .settings import Request, Settings


def resolve_lifecycle(
    request: Request, options: ProviderOptions, settings: Settings, base: Base, makers: Sequence[str] = ()
) -> dict[str, Any]:
    """Resolve the fields of this module. Raises InvalidRequest: names the field.

    Args:
        makers: jobs that make its other models: those of a merge or an ensemble, reward models, a teacher.
    """
    data = request.training_config.data_config
    return {
        "lifecycle": resolve_tries(options, settings),
        "preflight": options.preflight,
        "metadata": options.metadata,
        "save_steps": options.save_steps or settings.save_steps,
        "keep_last": options.keep_last or settings.keep_last,
        "evaluation": None if options.evaluate is None else evaluation_name(request.job_uuid),
        **resolve_after(request.job_uuid, None if data is None else data.dataset_id, options, base, makers),
    }


def resolve_tries(options: ProviderOptions, settings: Settings, *, in_smaller_parts: bool = True) -> LifecycleSpec:
    """When a job is tried again, and when it ends.

    Args:
        in_smaller_parts: whether it can be tried again with smaller batches.
    """
    oom_retry = settings.oom_retry if options.oom_retry is None else options.oom_retry
    return LifecycleSpec(
        retries=settings.retries if options.retries is None else options.retries,
        retry_backoff=settings.retry_backoff,
        oom_retry=oom_retry and in_smaller_parts,
        failover=options.failover,
        max_duration=options.max_duration or settings.max_duration,
        priority=PRIORITIES[options.priority or settings.priority],
        min_free_bytes=settings.min_free_disk_mb << 20,
    )


def evaluation_name(job_uuid: str) -> str:
    """The job that evaluates another one's result."""
    return f"{job_uuid}-evaluation"


def resolve_after(
    job_uuid: str, dataset_id: str | None, options: ProviderOptions, base: Base, makers: Sequence[str] = ()
) -> dict[str, Any]:
    """The jobs before this one; whether they exist is checked when the job is stored."""
    after = options.after or []
    rows_of = None if dataset_id is None else rows_job_of(dataset_id)
    before = [*(job.job_uuid for job in base.jobs), *makers, *([rows_of] if rows_of else [])]
    if options.cancel_with and not after and not before:
        raise InvalidRequest("provider_options.cancel_with", True, "it belongs to `after`: name the jobs there")
    for number, name in enumerate(after):
        if not re.fullmatch(JOB_UUID_PATTERN, name):
            hint = f"{name!r} is no name of a job: send the job_uuid of jobs of this provider"
        elif name == job_uuid:
            hint = "a job cannot come after itself: leave its own name out"
        elif name in after[:number]:
            hint = f"job {name!r} is named twice: name each job once"
        else:
            continue
        raise InvalidRequest("provider_options.after", after, hint)
    implied = tuple(name for name in dict.fromkeys(before) if name not in after)
    return {"after": (*implied, *after), "cancel_with": options.cancel_with}
