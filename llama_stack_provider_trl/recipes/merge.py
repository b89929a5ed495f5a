"""Merges models or adapters: the recipe of `merge` jobs.

`python -m llama_stack_provider_trl.recipes.merge SPEC RESULT` reads a MergeSpec and writes one JSON object to RESULT:
what was written, or `reason` and `message` of the failure.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from .. import faults
from ..specs.events import CheckpointSaved, EventWriter, Finished, Prepared, Started
from ..specs.job import AttemptSpec
from ..specs.merge import MergeSpec
from ..specs.work import MERGING, MergeWork
from ..system.files import fsync_tree, put_in_place, write_manifest
from .imports import quick_imports
from .results import write_result


def main(argv: list[str]) -> int:
    return write_result(argv, lambda text: _merged(MergeSpec.model_validate_json(text)))


def merge_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Merge models as a job, into its checkpoint `final`. An attempt begins at the first weight. Raises JobFailure: as
    `merge`."""
    from .distributed.heartbeat import heartbeat

    job, work = attempt.job, attempt.job.work
    assert isinstance(work, MergeWork)
    writer.write(Started(pid=os.getpid(), device="cpu", versions={}))
    faults.reach("started")
    job.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    final = job.checkpoint_dir / "final"
    for left in (*job.checkpoint_dir.glob(f"*{MERGING}*"), final):  # of an attempt that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    writer.write(Prepared(total_steps=1, num_rows=len(work.merge.inputs), trainable_parameters=0, total_parameters=0))
    output = job.checkpoint_dir / MERGING
    with heartbeat(writer):
        found = _merged(work.merge.model_copy(update={"output": output}))
        faults.reach("merging-final")
        write_manifest(output)
        fsync_tree(output)
        put_in_place(output, final)
    faults.reach("exported-final")
    writer.write(CheckpointSaved(kind="final", step=1, epoch=1, path=final, train_loss=None), durable=True)
    writer.write(Finished(step=1, result=found), durable=True)


def _merged(spec: MergeSpec) -> dict[str, Any]:
    with quick_imports():
        from .checkpoint.merge import merge
    return merge(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
