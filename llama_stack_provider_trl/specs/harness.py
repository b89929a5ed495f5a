"""Tasks of lm-evaluation-harness that an `evaluate` job measures a model on, and which of them can be used.

A task is a YAML file in a directory that the operator names. The process that serves requests reads these files without
the library, and the recipe as the library has read them: both refuse the same tasks, by the functions here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .bases import Frozen
from .events import Finished, parse_event

LINES = "harness.jsonl"
"""File in the checkpoint directory of such a job: what each name of the request has been measured to be."""
IGNORED = frozenset({"__pycache__", ".ipynb_checkpoints"})
"""Directories in which the library looks for no task files."""
MOST_TASKS = 1000
"""Tasks of a job."""
_LONGEST = 128
"""Characters of a task's name, which is a part of the names of its measures."""
_MOST_VISITS = 10 * MOST_TASKS
"""Tasks and groups that a name leads to, however often each."""
_DEPTH = 16
"""Of groups within groups."""
_READERS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `dataset_path` that read files which the task names."""
_STRUCTURE = ("group", "task", "tag", "include", "task_list")
"""Keys of a group that are not settings of its tasks."""

PROBLEM = "\0problem"
"""Key of a configuration that was read here, for why no task can be measured by it; no file has such a key."""
_OF_GENERATION = ("max_gen_toks", "max_new_tokens", "max_tokens", "num_beams", "temperature", "top_k", "top_p")
"""Numbers of a task's `generation_kwargs`."""


class HarnessSpec(Frozen):
    """How tasks are measured. What is None is the library's own default."""

    tasks: tuple[str, ...]
    """Names of tasks, groups and tags."""
    roots: tuple[Path, ...] = ()
    """Directories of task files."""
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    seed: int | None = None


class TaskEntry(NamedTuple):
    """A name that a request may give."""

    kind: Literal["task", "group", "tag"]
    config: Mapping[str, Any]
    """Of a task or a group: its file, with what that includes, and the texts of its functions."""
    members: tuple[str, ...] = ()
    """Of a tag: its tasks."""


class Unusable(ValueError):
    """A task cannot be measured here: one sentence."""


def tasks_of(name: str, index: Mapping[str, TaskEntry]) -> dict[str, Mapping[str, Any]]:
    """The tasks that a name stands for, with their settings, as the library would make them. Raises Unusable: there is
    no such name, its groups contain each other, or lead to too many."""
    if name not in index:
        raise Unusable(f"no task file has {name!r}; {_those_known(index)}")
    return dict(_Walk(index).tasks(name, {}, 0))


class _Walk:
    """Goes through the groups and tags of a name."""

    def __init__(self, index: Mapping[str, TaskEntry]) -> None:
        self._index, self._visits = index, 0

    def tasks(self, name: str, settings: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Those that a name of the index stands for, with settings of the groups above it."""
        entry = self._index[name]
        if entry.kind == "task":
            self._visit(name)
            yield name, {**entry.config, **settings}
        elif entry.kind == "tag":
            for member in sorted(entry.members):
                yield from self.tasks(member, settings, depth)
        else:
            yield from self._of_group(name, entry.config, settings, depth)

    def _of_group(
        self, name: str, config: Mapping[str, Any], settings: Mapping[str, Any], depth: int
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        self._visit(name)
        if depth == _DEPTH:
            raise Unusable(f"group {name!r} has more than {_DEPTH} groups within each other, or contains itself")
        of_all = {**_settings(config), **settings}
        members = config.get("task")
        for member in members if isinstance(members, list) else ():
            given: Mapping[str, Any] = member if isinstance(member, Mapping) else {"task": member}
            child = str(given.get("group", given.get("task")))
            if child in self._index:
                yield from self.tasks(child, {**of_all, **_settings(given)}, depth + 1)
            elif "group" in given:
                yield from self._of_group(f"{name}::{child}", given, of_all, depth + 1)
            else:  # without a file of its own: the group has all its settings
                self._visit(name)
                yield f"{name}::{child}", {**of_all, **_settings(given)}

    def _visit(self, name: str) -> None:
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise Unusable(f"group {name!r} is one of more than {_MOST_VISITS} groups and tasks: name fewer at once")


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _STRUCTURE}


def check_tasks(spec: HarnessSpec, index: Mapping[str, TaskEntry]) -> None:
    """Return if all tasks of a job can be measured. Raises Unusable: one is unknown, named twice, or cannot be measured
    here; names it, and what to do."""
    found: dict[str, str] = {}
    for name in spec.tasks:
        for task, config in tasks_of(name, index).items():
            if task in found:
                raise Unusable(f"{found[task]!r} and {name!r} both have the task {task!r}: leave one of them out")
            found[task] = name
            if len(found) > MOST_TASKS:
                raise Unusable(f"they are more than {MOST_TASKS} tasks: send several jobs")
            if problem := _problem_of(spec, task, config):
                raise Unusable(f"task {task!r} {problem}")
        if name not in found.values():
            raise Unusable(f"{name!r} has no tasks")


def final_event(result: dict[str, Any], step: int) -> Finished:
    """The event that ends a job with its result. Raises Unusable: the result is larger than one that is read."""
    try:
        event = Finished(step=step, result=result)
        parse_event(event.model_dump_json().encode())
    except ValueError as error:
        reason = " ".join(str(error).split())[:500]
        raise Unusable(f"the measures of its {step} names are more than a job's result can have ({reason})") from error
    return event


def _problem_of(spec: HarnessSpec, task: str, config: Mapping[str, Any]) -> str | None:
    """Why a task cannot be measured; None: it can be."""
    if len(task) > _LONGEST:
        return f"has a name of more than {_LONGEST} characters"
    if problem := config.get(PROBLEM):
        return str(problem)
    if field := _boolean_as_number(config):
        return f"has a boolean as {field} in its file, which is a number: send the number itself"
    if config.get("unsafe_code"):
        return "runs code that the model writes, which is not supported"
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        return "has images or sound, which is not supported"
    if spec.num_fewshot is not None and config.get("num_fewshot") == 0:
        return "has num_fewshot 0 in its file, which the library keeps: leave num_fewshot out"
    if _fetches_metrics(config):
        return "has a metric with hf_evaluate, whose code would be fetched: name one of the library's, or a function"
    return _problem_of_rows(config)


def _boolean_as_number(config: Mapping[str, Any]) -> str | None:
    """A number of a task that YAML reads as a boolean, as it does `yes` and `on`; None: there is none."""
    generation = config.get("generation_kwargs")
    numbers = {name: config.get(name) for name in ("num_fewshot", "repeats")}
    if isinstance(generation, Mapping):
        numbers |= {f"generation_kwargs.{name}": generation.get(name) for name in _OF_GENERATION}
    return next((name for name, value in numbers.items() if isinstance(value, bool)), None)


def _fetches_metrics(config: Mapping[str, Any]) -> bool:
    metrics = None if config.get("process_results") else config.get("metric_list")
    return any(
        isinstance(metric, Mapping) and metric.get("hf_evaluate") is True
        for metric in (metrics if isinstance(metrics, list) else ())
    )


def _problem_of_rows(config: Mapping[str, Any]) -> str | None:
    if config.get("class") or config.get("custom_dataset"):
        return None  # code that the operator trusts reads its rows
    path, given = config.get("dataset_path"), config.get("dataset_kwargs")
    kwargs: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if isinstance(path, str) and path.startswith("/"):
        return None
    if path in _READERS:
        files = [*_texts(kwargs.get("data_files")), *_texts(kwargs.get("data_dir"))]
        if files and not any("://" in file for file in files):
            return None
    found = f"the dataset {path!r}" if path else "no dataset"
    return (
        f"reads {found}, and only files of this machine are read: give it dataset_path {', '.join(_READERS)} with "
        "data_files in dataset_kwargs, or the absolute path of a directory"
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in the paths of a task, which are one, a list, or those of each split."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _those_known(index: Mapping[str, TaskEntry]) -> str:
    names = sorted(index)
    if not names:
        return "there is none in the configured harness_roots"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"there are {', '.join(names[:20])}{more}"
