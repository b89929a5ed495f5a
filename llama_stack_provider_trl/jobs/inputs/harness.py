"""What an evaluation on tasks of lm-evaluation-harness needs of this machine: task files, and the library."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ... import __version__
from ...errors import InvalidRequest
from ...requests.settings import Settings
from ...specs.harness import Unusable, check_tasks
from ...specs.work import Work
from ...system.installed import version_for
from .task_files import read_task_files

FIELD = "harness"
MODULE, _FIRST = "lm_eval", (0, 4, 13)
"""The library, and the first release that `recipes.evaluation.harness` was written for; later ones of its minor fit."""


def with_task_files(work: Work, settings: Settings) -> Work:
    """What a job does, with the directories of its tasks; of a job without any, the same. Raises InvalidRequest: no
    directory is configured, the library is not installed, or a task cannot be measured."""
    if work.tasks is None:
        return work
    harness = work.tasks.model_copy(update={"roots": settings.harness_roots})
    names = list(harness.tasks)
    if not harness.roots:
        hint = "no directory of task files is configured here: the operator names them in the setting harness_roots"
        raise InvalidRequest(FIELD, names, hint)
    if problem := _library_problem(settings.train_python):
        raise InvalidRequest(FIELD, names, problem)
    try:
        check_tasks(harness, read_task_files(harness.roots))
    except Unusable as error:
        raise InvalidRequest(f"{FIELD}.tasks", names, str(error)) from error
    return work.model_copy(update={"harness": harness})


def _library_problem(python: Path | None) -> str | None:
    """Why the library cannot be used in the environment that trains; None: it can."""
    trains = f"{python or sys.executable}, which trains,"
    install = f"run there: pip install 'llama_stack_provider_trl[harness]=={__version__}'"
    try:
        found = version_for(python, MODULE)
    except OSError as error:
        return f"{trains} cannot be started: {error}"
    if found is None:
        return f"{trains} has no {MODULE}; {install}"
    numbers = tuple(map(int, re.findall(r"\d+", found)[:3]))
    if numbers[:2] == _FIRST[:2] and numbers >= _FIRST:
        return None
    return f"{trains} has {MODULE} {found}, and {'.'.join(map(str, _FIRST))} or a later 0.4 is needed; {install}"
