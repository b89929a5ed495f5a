"""Merges a trained adapter into the base model of a job before it trains.

The result is a model's directory, beside the job's checkpoints: an adapter that is trained on it loads with it, and
sharding, quantization and a reference find a model like any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ...specs.bases import MERGED_BASE
from ...specs.job import JobSpec
from ...system.files import is_whole, put_in_place, write_manifest
from ..distributed import ranks
from ..model.adapters import check_adapter, fitting_adapter
from ..model.loading import DTYPES, load_adapter, load_job_tokenizer
from ..model.saving import write_configuration
from .weights import export_bytes, write_weights


def with_merged_base(
    spec: JobSpec, require_space: Callable[[int], None], heartbeat: Callable[[], None] = lambda: None
) -> JobSpec:
    """The job whose base model has the job's adapter merged in: `<checkpoint_dir>/merged-base`, written by rank 0 in
    the first attempt. Another job is returned unchanged. A collective. Raises JobFailure: invalid_model, where the
    adapter does not fit the base model; OSError: the disk is, or would be, full."""
    if spec.adapter is None or spec.adapter.use != "merge":
        return spec
    target = spec.checkpoint_dir / MERGED_BASE
    ranks.on_all_ranks(lambda: _merge(spec, target, require_space, heartbeat) if ranks.rank() == 0 else None)
    return spec.changed(model=str(target), path=None, revision=None)


def discard_merged_base(spec: JobSpec) -> None:
    """Remove what `with_merged_base` has written, of a job that nothing is trained on."""
    shutil.rmtree(spec.checkpoint_dir / MERGED_BASE, ignore_errors=True)


def _merge(spec: JobSpec, target: Path, require_space: Callable[[int], None], heartbeat: Callable[[], None]) -> None:
    assert spec.adapter is not None
    if is_whole(target):
        return
    check_adapter(spec.adapter.directory, spec.source)
    with fitting_adapter(spec.adapter.directory, spec.source):
        model = load_adapter(spec, spec.adapter.directory)
    dtype = DTYPES[spec.compute.dtype]
    require_space(export_bytes(model, dtype))
    staging = target.with_name(f"{MERGED_BASE}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        plain = model.get_base_model()
        write_configuration(plain, staging, dtype)
        write_weights(model, staging, dtype, heartbeat)
        load_job_tokenizer(spec).save_pretrained(staging)
        write_manifest(staging)
        put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
