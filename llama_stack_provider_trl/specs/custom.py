"""Training methods of installed packages: entry points of the group `llama_stack_provider_trl.trainers`.

An entry point names a `CustomMethod`: the model of its request fields, the rows that it reads, and its trainer by name.
The processes that serve requests import the first part and no torch; `recipes.trainer.custom` imports the trainer.
docs/how-to/custom-trainers.md is for the authors of such packages.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ..errors import InvalidRows, MethodUnavailable
from .custom_imports import Imports, first_problem, reported, without_training_libraries
from .job import DataFormat, DatasetRef, RowUse
from .methods import METHODS, CustomSpec, MethodSpec
from .names import problem_of_name
from .plugins import damaged_packages, package_of, points_of
from .row_files import parse_line
from .rows import Example, PreferenceExample, PreferencePair, parse_row

log = logging.getLogger(__name__)
GROUP = "llama_stack_provider_trl.trainers"
Rows = Literal["pairs", "conversations"]
ALGORITHMS: dict[Rows, Literal["custom_pairs", "custom_rows"]] = {
    "pairs": "custom_pairs",
    "conversations": "custom_rows",
}
"""The algorithm of the jobs whose method reads these rows."""
_RESERVED = {*METHODS, "lora", "qat"}
"""Names with a meaning of their own in `algorithm_config.type`."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_TRAINER = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class CustomMethod:
    """What an entry point names. The module that makes it imports none of `TRAINING_LIBRARIES`."""

    title: str
    """Its name in messages."""
    rows: Rows
    """pairs: preference pairs, as DPO reads them. conversations: conversations and texts, as SFT reads them."""
    fields: type[BaseModel]
    """Its fields in `algorithm_config`, beside `type`, with their defaults and bounds."""
    trainer: str
    """`package.module:Class`, a subclass of one in `recipes.trainer.custom`; imported where a job is trained."""
    check_row: Callable[[Any, Any], str | None] | None = None
    """From an SftExample or a PreferencePair (`specs.rows`) and the fields, why the row cannot be trained on; None: it
    can. A ValidationError of pydantic refuses the row, too. For what the shape of a row does not show."""


@dataclass(frozen=True)
class InstalledMethod:
    """A method that can be used in this process."""

    name: str
    package: str
    version: str
    """Of the package when its module was imported."""
    method: CustomMethod

    def parameters(self, given: Mapping[str, Any]) -> BaseModel:
        """Its fields. Raises ValidationError, or MethodUnavailable where its model fails otherwise."""
        what = f"method {self.name!r} of {self.package} {self.version} failed on its fields"
        with reported(what, names_fields=True), without_training_libraries():
            return self.method.fields.model_validate(dict(given))

    def written(self, parameters: BaseModel) -> dict[str, Any]:
        """The fields as JSON values, which `parameters` reads again. Raises MethodUnavailable."""
        what = f"method {self.name!r} of {self.package} {self.version} cannot write its fields as JSON"
        with reported(what), without_training_libraries():
            return parameters.model_dump(mode="json")


_imports: Imports[InstalledMethod] = Imports()
"""By name and value of the entry point."""


def custom_names() -> list[str]:
    """Names of the methods that installed packages add, usable or not; none of those of this project."""
    return sorted(name for name in _found().keys() - _RESERVED if not problem_of_name(name))


def find_method(name: str, *, tries_first: bool = True) -> InstalledMethod:
    """The method of an installed package. Raises MethodUnavailable: there is none of this name, or its package cannot
    be used: one sentence.

    Args:
        tries_first: its module is imported by another process first, which it may end. Not where a job trains: that
            process may end, too.
    """
    points = _found().get(name, [])
    if not points:
        raise MethodUnavailable(f"no installed package adds the method {name!r}; {_those_installed()}")
    packages = ", ".join(map(package_of, points))
    if name in _RESERVED or _NAME.fullmatch(name) is None:
        why = "is taken by this project" if name in _RESERVED else f"does not match {_NAME.pattern}"
        raise MethodUnavailable(f"{packages}: the name {name!r} of its method {why}; its author has to choose another")
    if len(points) > 1:
        raise MethodUnavailable(f"several packages add a method {name!r}: {packages}; uninstall all but one")
    (point,) = points
    if point.pattern.match(point.value) is None:
        raise MethodUnavailable(
            f"method {name!r} of {packages}: its entry point is {point.value[:100]!r}, expected module:object; its "
            "author has to correct that"
        )
    what = f"method {name!r} of {packages}"
    return _imports.get((name, point.value), point.module, lambda: _import(point), what, tries_first=tries_first)


def same_method(name: str, package: str, version: str) -> InstalledMethod:
    """The method of an installed package, in a process that a server has called. Raises MethodUnavailable: as
    `find_method`, or the package is not the server's any more: one sentence."""
    found = find_method(name)
    if (found.package, found.version) != (package, version):
        raise MethodUnavailable(
            f"method {name!r} is of {found.package} {found.version} now, and was of {package} {version} when this "
            "server imported it: restart the server"
        )
    return found


def log_unusable_methods() -> None:
    """Log why installed methods cannot be used, when a server starts: in a thread, since imports may take long."""

    def report() -> None:
        for problem in problems():
            log.warning("%s", problem)

    threading.Thread(target=report, name="installed methods", daemon=True).start()


def problems() -> list[str]:
    """Why installed methods cannot be used, one sentence each. Imports all of them."""
    found = damaged_packages()
    for name in sorted(_found()):
        try:
            find_method(name)
        except MethodUnavailable as error:
            found.append(str(error))
    return found


def check_custom_rows(
    method: MethodSpec | None, dataset: DatasetRef, use: RowUse, data_format: DataFormat | None
) -> None:
    """Have a custom method check each row of a dataset whose shape is checked already. Raises InvalidRows: it refuses a
    row; MethodUnavailable: it is not installed here, or fails."""
    if not isinstance(method, CustomSpec):
        return
    found = find_method(method.type)
    check = found.method.check_row
    if check is None:
        return
    parameters = found.parameters(method.parameters)
    with open(dataset.path, encoding="utf-8") as file, without_training_libraries():
        for index, line in enumerate(file):
            example = parse_row(parse_line(line), index, use, data_format, dataset.names)
            for one in example.written_out() if isinstance(example, PreferenceExample) else [example]:
                if (problem := _problem_of(found, check, one, parameters, index)) is not None:
                    raise InvalidRows(f"dataset {dataset.dataset_id!r}, row {index}: {problem}")


def _problem_of(
    found: InstalledMethod,
    check: Callable[[Any, Any], str | None],
    example: Example | PreferencePair,
    fields: Any,
    index: int,
) -> str | None:
    with reported(f"method {found.name!r} of {found.package} {found.version} failed on row {index}"):
        try:
            problem = check(example, fields)
        except ValidationError as error:  # of a model of rows: it refuses this one
            return first_problem(error)
        return None if problem is None else str(problem)


def _found() -> dict[str, list[EntryPoint]]:
    """The entry points by name."""
    return points_of(GROUP)


def _those_installed() -> str:
    points = _found()
    names = [f"{name} ({package_of(points[name][0])})" for name in custom_names() if name in points]
    return f"installed packages add: {', '.join(names)}" if names else "no installed package adds any"


def _import(point: EntryPoint) -> InstalledMethod:
    package = package_of(point)
    with reported(f"method {point.name!r} of {package} cannot be imported"):
        method = point.load()
    if problem := _wrong(method):
        raise MethodUnavailable(
            f"method {point.name!r} of {package}: {problem}; its author has to correct {point.value}"
        )
    name, _, version = package.rpartition(" ")
    return InstalledMethod(point.name, name, version, method)


def _wrong(method: Any) -> str:
    """What is wrong about the object of an entry point; empty: nothing is."""
    if not isinstance(method, CustomMethod):
        return f"found an object of type {type(method).__name__}, expected a CustomMethod"
    if method.rows not in ALGORITHMS:
        return f"its rows are {method.rows!r}, expected one of {', '.join(ALGORITHMS)}"
    if not (isinstance(method.fields, type) and issubclass(method.fields, BaseModel)):
        return "its fields are not a pydantic model"
    if "type" in method.fields.model_fields:
        return "it has a field 'type', which names the method itself"
    if any(field.alias or field.validation_alias for field in method.fields.model_fields.values()):
        return "one of its fields has an alias"
    if not (isinstance(method.trainer, str) and _TRAINER.fullmatch(method.trainer)):
        return f"its trainer is {method.trainer!r}, expected 'package.module:Class'"
    return ""
