"""Resumes a job from another job's step checkpoint: finds it, checks that it fits, and copies it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from ...errors import InvalidRequest, JobNotFound, StoreError
from ...specs.job import JobSpec
from ...specs.methods import VllmSpec
from ...system.data_dir import DataDir
from ...system.files import file_names, fsync_tree, is_whole, open_regular, resolve_under
from ..store.store import Store
from .row_parts import UNLIMITED, Allowance

FIELD = "provider_options.resume_from"
_PIECE = 1 << 20
"""Bytes of a file that are copied at a time."""

# A checkpoint's weights, optimizer, schedule and data position depend on these fields. Others, such as n_epochs, ranks,
# save_steps and the options that save memory, may differ.
_MUST_MATCH = (
    *(
        "algorithm",
        "model",
        "revision",
        "adapter",
        "lora",
        "qat",
        "method",
        "optimizer",
        "data_format",
        "train_on_input",
        "train_on",
        "reasoning",
        "chat_template",
        "packed",
    ),
    *("max_seq_length", "truncation_side", "shuffle", "seed", "max_steps_per_epoch"),
)


def copy_checkpoint(spec: JobSpec, store: Store, data_dir: Path, allowance: Allowance = UNLIMITED) -> JobSpec:
    """The job with the path of its own copy of the checkpoint that `resume_from` names.

    Hard links (or copies) in the job's own directory keep the checkpoint when the other job is deleted. A job without
    `resume_from` is returned unchanged.

    Every call makes a copy of its own, since a client may repeat a POST while the first one still copies.
    `discard_checkpoint` removes the copy if the job is not added. Raises InvalidRequest: the other job or its
    checkpoint does not exist, or the job cannot resume from it: names what differs; StoreError: the checkpoint cannot
    be linked or copied.

    Args:
        allowance: what the request may write, where files cannot be linked.
    """
    wanted = spec.resume_from
    if wanted is None:
        return spec
    requested = "/".join(filter(None, (wanted.job_uuid, wanted.checkpoint)))
    try:
        other = store.get(wanted.job_uuid).spec
    except JobNotFound as error:
        raise InvalidRequest(
            FIELD, requested, "this job does not exist: name one whose checkpoints are listed here"
        ) from error
    listed = [one.path for one in store.checkpoints(wanted.job_uuid) if one.kind == "step" and is_whole(one.path)]
    fitting = [path for path in listed if wanted.checkpoint in (None, path.name)]
    if not fitting:
        names = ", ".join(path.name for path in listed) or "none that is whole; `final` holds no optimizer"
        raise InvalidRequest(
            FIELD, requested, f"this step checkpoint does not exist: job {wanted.job_uuid!r} has {names}"
        )
    _refuse_differences(requested, other, spec)
    home = resolve_under(DataDir(data_dir).jobs, spec.job_uuid, "job_uuid")
    path = home / "resume" / uuid4().hex / fitting[-1].name
    try:
        path.parent.mkdir(parents=True)
        _refuse_links(requested, fitting[-1])
        with allowance.writing(path.parent) as written:
            for name in file_names(fitting[-1]):  # copytree would copy on after a failure, and hide its errno
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                _link(written, fitting[-1] / name, path / name)
        _refuse_links(requested, path)  # a file may have been replaced in the meantime
        if not is_whole(path):
            raise FileNotFoundError("it was removed meanwhile: send the request again")
        fsync_tree(path.parent.parent)
    except InvalidRequest:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise StoreError(f"checkpoint {fitting[-1]} cannot be kept for job {spec.job_uuid!r}: {error}") from error
    return spec.model_copy(update={"resume_from": wanted.model_copy(update={"checkpoint": path.name, "path": path})})


def discard_checkpoint(spec: JobSpec) -> None:
    """Remove the copy of `copy_checkpoint` for a job that was not added."""
    if spec.resume_from is not None and spec.resume_from.path is not None:
        shutil.rmtree(spec.resume_from.path.parent, ignore_errors=True)


def _refuse_links(requested: str, checkpoint: Path) -> None:
    """Refuse a checkpoint that holds anything but directories and regular files: its training may have put a symbolic
    link to other jobs' files there, or a FIFO, which blocks the process that opens it."""
    for found in list(checkpoint.rglob("*")):
        mode = found.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            continue
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        relative = str(found.relative_to(checkpoint))
        raise InvalidRequest(
            FIELD, requested, f"{relative!r} in that checkpoint is {kind}; a checkpoint holds regular files only"
        )


def _refuse_differences(requested: str, other: JobSpec, spec: JobSpec) -> None:
    one, another = _without_place_of_vllm(other), _without_place_of_vllm(spec)
    pairs = [(name, one.value(name), another.value(name)) for name in _MUST_MATCH]
    pairs.append(("dataset (its rows' sha256)", other.data.dataset.sha256, spec.data.dataset.sha256))
    pairs.append(("columns and roles", other.data.dataset.names, spec.data.dataset.names))
    pairs.append(("mixture (rows, names and share of each dataset)", _mixture(other), _mixture(spec)))
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise InvalidRequest(
                FIELD, requested, f"{name} is {_text(theirs)} in that job and {_text(ours)} in this one: send the same"
            )
    if other.rows_per_step != spec.rows_per_step:
        raise InvalidRequest(
            FIELD,
            requested,
            f"that job takes {other.rows_per_step} rows per optimizer step and this one {spec.rows_per_step}: choose "
            "batch_size x gradient_accumulation_steps x nproc_per_node / context_parallel_size = "
            f"{other.rows_per_step}",
        )


def _mixture(spec: JobSpec) -> list[object]:
    return [
        (one.dataset.sha256, one.dataset.names and one.dataset.names.model_dump(), one.share.model_dump())
        for one in spec.data.mixed
    ]


def _without_place_of_vllm(spec: JobSpec) -> JobSpec:
    """The job whatever interpreter has vLLM, wherever that answers, and however much memory it takes."""
    if (vllm := spec.method.answered_by_vllm) is None:
        return spec
    place = {"python", "mode", "tensor_parallel_size", "gpu_memory_utilization"}
    anywhere = VllmSpec(**vllm.model_dump(exclude=place))
    return spec.changed(method=spec.method.model_copy(update={"vllm": anywhere}))


def _text(value: object) -> str:
    return value.model_dump_json() if hasattr(value, "model_dump_json") else repr(value)


def _link(written: Callable[[int], None], source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        with open_regular(source) as file, open(target, "xb") as copy:
            while piece := file.read(_PIECE):
                written(len(piece))
                copy.write(piece)
