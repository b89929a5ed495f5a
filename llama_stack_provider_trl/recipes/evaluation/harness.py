"""Measures a model on tasks of lm-evaluation-harness: the recipe of `evaluate` jobs with `harness`.

Each name of the request is measured by itself, with random numbers of its own, and its measures are appended to a file.
So an attempt that continues after any end of the one before it measures the names that are left, and finds what an
undisturbed one does. Nothing is fetched: tasks read files of this machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, closing, contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import datasets
import torch

from ... import faults
from ...errors import JobFailure
from ...specs.events import Evaluated, EventWriter, Finished, Prepared, Reason, Warned
from ...specs.harness import IGNORED, LINES, HarnessSpec, TaskEntry, Unusable, check_tasks, final_event, tasks_of
from ...specs.job import AttemptSpec, JobSpec
from ...specs.work import EvaluateSpec
from ...system.bounded_yaml import check_files
from ..answers.generate import AnswerFile, begin, pauses, report_steps
from ..data import templates
from ..distributed.heartbeat import heartbeat
from ..distributed.ranks import check_world_size
from ..distributed.replicas import ALONE
from ..failures import classify
from ..model.adapters import load_to_infer
from ..model.loading import DTYPES, load_config, load_job_tokenizer, outline, parameter_counts

BOOTSTRAP = 1000
"""Samples from which the error of a measure is estimated that has no formula for it."""
_SEED, _OTHER_SEED = 0, 1234
"""The library's defaults: of Python's random numbers, and of all others."""
_MOST_MEASURES, _LONGEST = 256, 256
"""Of a point of a job's curves, and characters of the name of one."""


class LoadedTasks(NamedTuple):
    """The tasks that a name stands for, ready to be measured."""

    name: str
    directory: Path
    """To which paths in their files are relative."""
    tasks: dict[str, Any]
    """As the library's `TaskManager.load` returns them."""
    rows: int
    files: str
    """Digest of what their task files have."""


def measure_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Measure the model on the tasks that earlier attempts have not, and report their measures. Raises JobFailure: a
    failure that the user can correct; any other exception is a bug or a limit of the machine."""
    check_world_size(1)
    assert isinstance(attempt.job.work, EvaluateSpec)
    work = attempt.job.work.harness
    assert work is not None
    device = begin(attempt, writer)
    with closing(AnswerFile(attempt.job.checkpoint_dir / LINES, 1, len(work.tasks), fault="measuring")) as lines:
        _check_recorded(lines, work)
        # The library computes errors of measures in one process per core else.
        with _own_cache(attempt.run_dir), patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            if not _measure_all(attempt, work, lines, device, writer):
                return
        result = _result(list(lines.lines()))
        finished = _finished(result, len(work.tasks), lines.path)
    _report(result, len(work.tasks), writer)
    faults.reach("finishing")
    writer.write(finished, durable=True)


def _measure_all(
    attempt: AttemptSpec, work: HarnessSpec, lines: AnswerFile, device: torch.device, writer: EventWriter
) -> bool:
    """Measure what is left. Returns False: the attempt is paused."""
    spec, total = attempt.job, len(work.tasks)
    left = work.tasks[lines.count :]
    with heartbeat(writer):
        # Tasks before weights: a faulty task is found in a second, a large model takes minutes to load.
        tasks = [*_load_tasks(work, left, {line["name"]: line["files"] for line in lines.lines()})] if left else []
        model = _MeasuredModel(spec, work, device) if left else None
        shown = model.model if model else outline(spec.source, load_config(spec.source), DTYPES[spec.compute.dtype])
    writer.write(
        Prepared(
            total_steps=total,
            start_step=lines.count,
            num_rows=sum(_rows_of(line) for line in lines.lines()) + sum(one.rows for one in tasks),
            trainable_parameters=0,
            total_parameters=parameter_counts(shown)[1],
            effective={"model_class": type(shown).__name__, "weights_dtype": spec.compute.dtype, "lm_eval": _version()},
        )
    )
    faults.reach("prepared")
    for loaded in tasks:
        assert model is not None
        if pauses(attempt, writer, lines.count, ALONE):
            return False
        with heartbeat(writer):
            lines.append([{"name": loaded.name, "files": loaded.files, **model.measures(loaded)}])
        report_steps(lines.count, total, {}, writer)
        faults.reach(f"step-{lines.count}")
    return True


def _check_recorded(lines: AnswerFile, work: HarnessSpec) -> None:
    """Refuse measures of earlier attempts that are damaged, or of other tasks. Raises JobFailure: names the line."""
    number, found = 1, lines.lines()
    try:
        for name in work.tasks[: lines.count]:
            line = next(found)
            if line["name"] != name:
                raise ValueError(f"it is of {line['name']!r}, expected {name!r}")
            if not isinstance(line["files"], str):
                raise ValueError(f"files is {line['files']!r}, expected the digest of its task files")
            _result([line])
            number += 1
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise JobFailure(
            Reason.invalid_dataset,
            f"line {number} in {lines.path} cannot be read as the measures of a task ({error}). Another program has "
            "changed the file: remove it, and submit the job again under another job_uuid",
        ) from error


def _load_tasks(work: HarnessSpec, names: Sequence[str], measured: Mapping[str, str]) -> Iterator[LoadedTasks]:
    """The tasks of some names, with their rows. Raises JobFailure: names the one that cannot be read, or whose files
    were changed after it was measured.

    Args:
        measured: name that an earlier attempt has measured -> digest of its task files.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise JobFailure(
            Reason.launch_failed,
            f"lm_eval cannot be imported in the environment that trains: {error}. Install it there: pip install "
            "'llama_stack_provider_trl[harness]'",
        ) from error
    files = (path for root in work.roots for path in root.glob("**/*.yaml") if not IGNORED.intersection(path.parts))
    try:  # the library reads all of them
        check_files(files)
    except ValueError as error:
        refused = f"harness.tasks: {error}. The operator removes it from the configured harness_roots"
        raise JobFailure(Reason.invalid_request, refused) from error
    manager = TaskManager(include_path=[*work.roots], include_defaults=False)
    entries = {name: _entry(found) for name, found in manager.task_index.items()}
    try:
        check_tasks(work, entries)
    except Unusable as error:
        raise JobFailure(Reason.invalid_request, f"harness.tasks: {error}") from error
    if changed := [name for name, files in measured.items() if files != _digest(name, entries)]:
        raise JobFailure(
            Reason.invalid_request,
            f"harness.tasks: the files of {changed[0]!r} were changed after an earlier attempt of the job had measured "
            "it: submit the job again under another job_uuid",
        )
    for name in names:
        members = entries[name].members or (name,)
        roots = [_root_of(manager.task_index[member].yaml_path, work.roots) for member in members]
        _seed(work)
        found: dict[str, Any] = {"tasks": {}, "groups": {}}
        for member, root in zip(members, roots, strict=True):
            with _named(name, root), _known_metrics():
                loaded = manager.load([member])
                found["tasks"] |= loaded["tasks"]
                found["groups"] |= loaded.get("groups", {})
        with _named(name, roots[0]):
            rows = sum(_set_up(task, work) for task in found["tasks"].values())
        yield LoadedTasks(name, roots[0], found, rows, _digest(name, entries))


def _digest(name: str, entries: Mapping[str, TaskEntry]) -> str:
    """Identifies what the task files of a name have: not their rows, and not the code of their functions."""
    text = json.dumps(tasks_of(name, entries), default=str, skipkeys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(found: Any) -> TaskEntry:
    kind = found.kind.name.removeprefix("PY_").lower()
    return TaskEntry(kind, found.cfg or {}, tuple(sorted(found.tags)) if kind == "tag" else ())


def _root_of(path: Path, roots: Sequence[Path]) -> Path:
    """The directory of `harness_roots` that has a task file, the innermost."""
    above = [root for root in roots if path.resolve().is_relative_to(root.resolve())]
    return max(above, key=lambda root: len(root.parts), default=path.parent)


def _set_up(task: Any, work: HarnessSpec) -> int:
    """Set what the request has for a task; returns the number of its rows."""
    if work.num_fewshot is not None:
        task.set_config(key="num_fewshot", value=work.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_OTHER_SEED if work.seed is None else work.seed)
    rows = len(task.eval_docs)
    if work.limit is None:
        return rows
    return min(rows, math.ceil(rows * work.limit) if work.limit < 1 else int(work.limit))


class _MeasuredModel:
    """The model, as the library measures it. Raises JobFailure: it cannot be used."""

    def __init__(self, spec: JobSpec, work: HarnessSpec, device: torch.device) -> None:
        from lm_eval.models.huggingface import HFLM

        self._work = work
        tokenizer = load_job_tokenizer(spec)
        if work.apply_chat_template and not tokenizer.chat_template:
            raise JobFailure(
                Reason.invalid_model,
                f"harness.apply_chat_template: the tokenizer of {spec.source.model!r} has no chat template. Leave it "
                "out, or name a model with one",
            )
        templates.limit(tokenizer)
        in_4_bits = spec.lora is not None and spec.lora.quantize_base
        self.model = load_to_infer(spec, device, in_4_bits=in_4_bits)
        self._lm = HFLM(pretrained=self.model, tokenizer=tokenizer, batch_size=spec.data.batch_size)

    def measures(self, loaded: LoadedTasks) -> dict[str, Any]:
        """Measure the model on the tasks of a name. Raises JobFailure: they fail."""
        from lm_eval.evaluator import evaluate

        work = self._work
        _seed(work)
        with _named(loaded.name, loaded.directory):
            found: Any = evaluate(
                lm=self._lm,
                task_dict=loaded.tasks,
                limit=work.limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                system_instruction=work.system_instruction,
                apply_chat_template=work.apply_chat_template,
                fewshot_as_multiturn=work.fewshot_as_multiturn,
            )
        return _line(found, loaded.tasks["groups"])


def _line(found: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the library's results."""
    left_out: list[str] = []
    measures = {name: _numbers(name, one, left_out) for name, one in found["results"].items()}
    tasks = [name for name in measures if name not in groups]
    return {
        "tasks": {name: measures[name] for name in tasks},
        "groups": {name: measures[name] for name in groups if measures.get(name)},
        "details": {
            name: {
                "rows": int(found["n-samples"][name]["effective"]),
                "num_fewshot": int(found["n-shot"][name]),
                "version": str(found["versions"][name]),
            }
            for name in tasks
        },
        "left_out": left_out,
    }


def _numbers(task: str, found: Mapping[str, Any], left_out: list[str]) -> dict[str, float | None]:
    """Measures by name, with that of their filter where there is one. None: it is no finite number."""
    numbers: dict[str, float | None] = {}
    for key, value in found.items():
        name, is_measure, filtered = key.partition(",")
        if not is_measure or value == "N/A":  # names and counts; the error of a measure that has none
            continue
        name = name if filtered == "none" else f"{name}_{filtered}"
        if isinstance(value, Real) and len(name) <= _LONGEST:
            numbers[name] = float(value) if math.isfinite(value) else None
        else:
            left_out.append(f"{task}: {name[:_LONGEST]}")
    return numbers


def _rows_of(line: Mapping[str, Any]) -> int:
    return sum(int(one["rows"]) for one in line["details"].values())


def _result(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"tasks": {}, "groups": {}, "details": {}}
    left_out: list[str] = []
    for line in lines:
        for part, of_part in merged.items():
            of_part |= line[part]
        left_out += line["left_out"]
    return {
        "rows": sum(map(_rows_of, lines)),
        **merged,
        **({"left_out": left_out} if left_out else {}),
        "lm_eval": _version(),
    }


def _finished(result: dict[str, Any], step: int, path: Path) -> Finished:
    """The final event. Raises JobFailure: it would not be read, and the result lost."""
    try:
        return final_event(result, step)
    except Unusable as error:
        found = f"harness.tasks: {error}. All measures are in {path}; name fewer tasks in a job"
        raise JobFailure(Reason.invalid_request, found) from error


def _report(result: Mapping[str, Any], step: int, writer: EventWriter) -> None:
    """Write the measures as a point of the job's curves, without their errors, and a warning of those without one."""
    if left_out := result.get("left_out"):
        writer.write(Warned(message=f"these measures are no numbers, and left out: {', '.join(left_out)}"))
    metrics = {
        f"eval_{task}_{name}": value
        for task, found in {**result["groups"], **result["tasks"]}.items()
        for name, value in found.items()
        if value is not None and "_stderr" not in name
    }
    kept = [name for name in metrics if len(name) <= _LONGEST][:_MOST_MEASURES]
    if len(kept) < len(metrics):
        writer.write(
            Warned(message=f"the curves have {len(kept)} of {len(metrics)} measures; the result has all of them")
        )
    writer.write(Evaluated(step=step, epoch=1.0, metrics={name: metrics[name] for name in kept}))


def _seed(work: HarnessSpec) -> None:
    """Set all random numbers, as the library does before a measurement."""
    import numpy as np
    from lm_eval.utils import set_torch_seed

    other = _OTHER_SEED if work.seed is None else work.seed
    random.seed(_SEED if work.seed is None else work.seed)
    np.random.seed(other)
    set_torch_seed(other)


@contextmanager
def _named(name: str, directory: Path) -> Iterator[None]:
    """Name the task in errors of its files and their code, and have relative paths begin in a directory. Raises
    JobFailure: the task fails."""
    try:
        with chdir(directory):
            yield
    except Exception as error:
        is_import = isinstance(error, ImportError)
        if isinstance(error, JobFailure) or (classify(error).reason is not Reason.rank_failed and not is_import):
            raise
        text = " ".join(str(error).split())[:500]
        raise JobFailure(
            Reason.invalid_request,
            f"harness.tasks: {name!r} cannot be measured ({type(error).__name__}: {text}). Correct its files in "
            f"{directory}, or leave it out",
        ) from error


@contextmanager
def _known_metrics() -> Iterator[None]:
    """While this is open, the library does not look for a metric that it does not know in the hub, whose code it would
    run."""
    from lm_eval.api import task
    from lm_eval.api.registry import metric_registry

    before = task.get_metric

    def known(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in metric_registry:
            raise ValueError(f"lm_eval has no metric {name!r}")
        return before(name)

    with patch.object(task, "get_metric", known):
        yield


@contextmanager
def _own_cache(run_dir: Path) -> Iterator[None]:
    """While this is open, rows that are read are kept in the run directory: no other job reads or writes them."""
    cache = run_dir / "harness"
    try:
        with patch.object(datasets.config, "HF_DATASETS_CACHE", cache):
            yield
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _version() -> str:
    return importlib.metadata.version("lm_eval")
