"""How a job runs: its place in the queue, checkpoints, logging, memory check, retries, limits."""

from __future__ import annotations

from typing import Any

from .options import PRIORITIES, ProviderOptions
from .settings import Settings


def resolve_lifecycle(options: ProviderOptions, settings: Settings) -> dict[str, Any]:
    return {
        "priority": PRIORITIES[options.priority or settings.priority],
        "preflight": options.preflight,
        "logging_steps": options.logging_steps,
        "save_steps": options.save_steps or settings.save_steps,
        "keep_last": options.keep_last or settings.keep_last,
        "min_free_bytes": settings.min_free_disk_mb << 20,
        "retries": settings.retries if options.retries is None else options.retries,
        "retry_backoff": settings.retry_backoff,
        "oom_retry": settings.oom_retry if options.oom_retry is None else options.oom_retry,
        "failover": options.failover,
        "max_duration": options.max_duration or settings.max_duration,
    }
