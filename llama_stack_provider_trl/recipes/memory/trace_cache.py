"""A cache on disk of traces, which take longer than all else that a small job does before its first step.

`<data_dir>/tokens/traces/<key>.json` holds a `Traced`: the attempts of a job, later jobs of the same shape, and
preflights read it in place of tracing again. The key is a digest of all that a trace depends on: the job but for
`_UNREAD`, the configuration of each model and the dtype of its files, the batch, our code, every installed package, and
whether a GPU is visible. A file that is damaged or cannot be read is traced again; the files that were not used for
longest are removed beyond `KEEP_FILES`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from pydantic import TypeAdapter, ValidationError

from ... import specs
from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ...system.files import atomic_write, read_regular
from ...system.texts import json_digest
from ..fast.kept_attention import checkpoint_arguments
from ..fast.mlp import why_whole
from ..model.adapters import continues, has_reference_adapter
from ..model.files import stored_dtype
from ..model.fsdp import is_sharded, num_shards
from ..model.loading import load_config
from ..trainer.trl_patches import computes_in_torch
from .trace import Batch, Traced, trace_model

KEEP_FILES = 2000
"""Of 1 to 2 KiB each."""
_ABANDONED = 24 * 3600.0
"""Seconds after which the file of a killed writer is removed."""
_UNREAD = frozenset(
    {
        # Names and places.
        *("job_uuid", "output_name", "checkpoint_dir", "token_cache", "bases", "resume_from"),
        # Rows and their order: the batch has what a trace needs.
        *("dataset", "validation", "data_format", "train_on_input", "truncation_side", "shuffle", "seed"),
        *("dropped_turns", "duplicates", "train_on", "reasoning"),
        *("batch_size", "max_seq_length", "max_seq_length_is_default", "group_by_length", "dataloader_num_workers"),
        # Steps, and what is done between them.
        *("n_epochs", "max_steps_per_epoch", "max_validation_steps", "optimizer", "save_steps", "eval_steps"),
        *("early_stopping", "best_checkpoint", "samples", "keep_last", "logging_steps", "merge_adapter"),
        *("gradient_sync", "liger_kernels", "merge_micro_batches", "read_metrics_later"),  # move no peak of a batch
        "float8",  # which the estimate adds
        # When and where it runs.
        *("dtype_by_device", "device", "num_threads", "lifecycle"),
        *("preflight", "after", "cancel_with", "evaluation", "search", "pruning"),
    }
)
"""Fields of a job that no trace reads: tests/process/test_trace_cache.py records what is read."""
_IN_PART = frozenset({"model", "revision", "model_path", "adapter", "gradient_accumulation_steps", "ranks", "sharding"})
"""Fields of which `_inputs` or `_content` give what it reads."""
_ENVIRONMENT = ("PYTORCH_", "TRANSFORMERS_", "USE_HUB_KERNELS")
"""Beginnings of variables that the libraries read when they compute."""
_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".pth")
"""Ends of the entries that an installer creates with a package: with its version, or replaced."""


def _digest_of_code() -> str:
    directories = (Path(__file__).parents[1], Path(specs.__file__).parent)
    files = [path for directory in directories for path in sorted(directory.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _installed() -> list[str]:
    found = {f"{sys.version} {platform.machine()} {torch.__version__}"}
    for path in {path for path in sys.path if os.path.isdir(path)}:
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_INSTALLED):
                    with suppress(OSError):  # a link to nothing
                        found.add(f"{entry.name} {entry.stat().st_mtime_ns}")
                    if (source := _source_of(Path(entry.path))) is not None:
                        found.add(f"{entry.name} {_digest_of_source(source)}")
    return sorted(found)


def _source_of(distribution: Path) -> Path | None:
    """The directory that an editable package is imported from, where a `git pull` changes it; None: it is another one,
    or this project (`_CODE`)."""
    try:
        given = json.loads((distribution / "direct_url.json").read_bytes())
        url = urlsplit(given["url"])
        if not given["dir_info"]["editable"] or url.scheme != "file":
            return None
        source = Path(unquote(url.path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if Path(__file__).is_relative_to(source) else source


def _digest_of_source(directory: Path) -> str:
    """Digest of the names, sizes and times of the Python files below a directory, but for environments in it."""
    found = []
    for above, directories, names in os.walk(directory):
        directories[:] = [] if "pyvenv.cfg" in names else sorted(one for one in directories if not one.startswith("."))
        for name in sorted(name for name in names if name.endswith(".py") and "pyvenv.cfg" not in names):
            with suppress(OSError):
                status = os.stat(os.path.join(above, name))
                found.append([above, name, status.st_size, status.st_mtime_ns])
    return json_digest(found)


_TRACES: dict[str, Traced] = {}


def trace(spec: JobSpec, batch: Batch, device: str) -> Traced:
    """What is known of the job's model and one step of it, without its weights. Traced once per process, and kept where
    the job keeps tokenized rows. Raises JobFailure: invalid_model."""
    kind = device.partition(":")[0]
    inputs = _inputs(spec, batch, kind)
    key = json.dumps([inputs, *(source.model_dump(mode="json") for source in _sources(spec))])
    if key not in _TRACES:
        _TRACES[key] = _kept(spec, batch, kind, inputs)
    return _TRACES[key]


def _kept(spec: JobSpec, batch: Batch, kind: str, inputs: dict[str, Any]) -> Traced:
    directory = directory_of(spec)
    key = _key(spec, inputs) if directory else None
    if directory is None or key is None:
        return trace_model(spec, batch, kind)
    found = _read(directory / f"{key}.json")
    if found is None:
        found = trace_model(spec, batch, kind)
        _write(directory / f"{key}.json", found)
    return found


def directory_of(spec: JobSpec) -> Path | None:
    """Where a job's traces are kept; None: they are not."""
    return spec.data.token_cache / "traces" if spec.data.token_cache else None


def key_of(spec: JobSpec, batch: Batch, device: str) -> str | None:
    """Digest of all that a trace depends on; None: code decides that is none of an installed library. Raises
    JobFailure: invalid_model."""
    return _key(spec, _inputs(spec, batch, device.partition(":")[0]))


def _key(spec: JobSpec, inputs: dict[str, Any]) -> str | None:
    models = _content(spec)
    return None if models is None else json_digest({**inputs, "models": models, **_surroundings()})


def _inputs(spec: JobSpec, batch: Batch, kind: str) -> dict[str, Any]:
    """What a trace depends on, but for the models and what is installed."""
    job = {name: value for name, value in spec.flat().items() if name not in _UNREAD | _IN_PART}
    if reference := job["method"].get("reference"):
        job["method"]["reference"] = {"precompute": reference["precompute"]}
    return {
        "job": job,
        "accumulates": spec.train.gradient_accumulation_steps > 1,
        # Where parts are when they are not used, and when they are gathered, moves no peak of a step.
        "is_sharded": is_sharded(spec),
        # These depend on the ranks that run, too, and those of an installed method on its package.
        "shards": num_shards(spec),
        "adapters": [continues(spec), has_reference_adapter(spec)],
        "method": [spec.has_pairs, spec.trains_reward, spec.sequences_per_row],
        "batch": asdict(batch),
        "on_cuda": kind == "cuda",
        # By the longest rows that a job may have, whose number moves nothing else.
        "tiles": not why_whole(spec, kind),
        "keeps_attention": "context_fn" in checkpoint_arguments(spec, kind),
        "computes_in_torch": computes_in_torch(),
        "dtype": str(torch.get_default_dtype()),
        # Libraries choose kernels for GPUs where one is visible, whatever the job's device is.
        "sees_cuda": torch.cuda.is_available(),
    }


def _sources(spec: JobSpec) -> list[ModelSource]:
    """The models that are traced: that of the job, and another one that is its reference."""
    return [spec.source, *([spec.reference_source] if spec.reference and spec.reference.source else [])]


def _content(spec: JobSpec) -> list[Any] | None:
    """What a trace reads of the files of its models; None: code of their own decides, too."""
    models = []
    for source in _sources(spec):
        config = load_config(source)
        if source.trust_remote_code or not type(config).__module__.startswith("transformers."):
            return None
        declared = getattr(config, "dtype", None)
        stored = stored_dtype(source.location, source.revision, declared or torch.float32)
        values = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
        models.append([type(config).__qualname__, json.dumps(values, default=str), str(declared), str(stored)])
    return models


def _surroundings() -> dict[str, Any]:
    """The libraries that are used, and which others transformers would use where they are installed."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)}
    return {"code": _CODE, "installed": _PACKAGES, "variables": variables}


def _read(path: Path) -> Traced | None:
    """The trace in a file; None where there is none, or it is damaged."""
    try:
        stored = json.loads(read_regular(path))
        if stored["sha256"] != json_digest(stored["trace"]):
            return None
        found = TypeAdapter(Traced).validate_python(stored["trace"])
        if not _is_possible(stored["trace"]):
            return None
    except (OSError, ValueError, KeyError, TypeError, ValidationError, RecursionError):
        return None
    with suppress(OSError):  # of a disk that has become read-only
        os.utime(path)
    return found


def _is_possible(values: Any) -> bool:
    """Whether all numbers are finite and none is below 0: a training that writes others would make later jobs fail."""
    if isinstance(values, dict | list):
        return all(map(_is_possible, values.values() if isinstance(values, dict) else values))
    return not isinstance(values, int | float) or 0 <= values < math.inf


def _write(path: Path, found: Traced) -> None:
    """Keep a trace, where the disk takes it."""
    values = json.loads(json.dumps(asdict(found)))
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"trace": values, "sha256": json_digest(values)}).encode())
        _tidy(path.parent)


def _tidy(directory: Path) -> None:
    """Remove the files that were not used for longest, and what killed writers left."""
    kept, now = [], time.time()
    for path in directory.iterdir():
        with suppress(OSError):  # another process has removed it
            used = path.lstat().st_mtime
            if path.suffix == ".json":
                kept.append((used, path))
            elif now - used > _ABANDONED:
                path.unlink()
    for _, path in sorted(kept)[: max(0, len(kept) - KEEP_FILES)]:
        with suppress(OSError):
            path.unlink()


# At import, so that both are of the code that runs; and behind all that they call.
_CODE = _digest_of_code()
_PACKAGES = _installed()
