"""Calls the validators and row checks of installed packages where requests are served: in processes with limits.

There a package that never ends, or takes all memory, would stop the service. A training calls them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..errors import InvalidRows, MethodUnavailable
from ..system.limited import Limited, LimitExceeded, TooLate
from .custom import InstalledMethod, check_custom_rows, find_method, same_method
from .job import DataFormat, DatasetRef, RowUse
from .methods import CustomSpec, MethodSpec

FIELDS = Limited(seconds=5, memory=256 << 20)
"""For the fields of a request."""
ROWS = Limited(seconds=120, memory=1 << 30)
"""For the rows of a dataset."""


def within_limits(
    found: InstalledMethod, what: str, limits: Limited, call: Callable[..., Iterable[Any]], *arguments: Any
) -> list[Any]:
    """What a call of a package's code yields (`Limited.call`). Raises MethodUnavailable: it exceeds the limits, or has
    crashed: one sentence; LimitReached: too many requests are checked.

    Args:
        what: it does, as the end of a sentence.
    """
    try:
        return limits.call(call, *arguments, before=partial(find_method, found.name))
    except (LimitExceeded, TooLate) as error:
        raise MethodUnavailable(
            f"method {found.name!r} of {found.package} {found.version} crashed, or has not {what} within "
            f"{limits.seconds} s of CPU time, {limits.wall_seconds:.0f} s in all and {limits.memory >> 20} MiB: its "
            "author has to correct that, unless this machine was busy"
        ) from error
    except RuntimeError as error:
        raise MethodUnavailable(f"method {found.name!r} of {found.package} {found.version}: {error}") from error


def refuse_custom_rows(
    method: MethodSpec | None, dataset: DatasetRef, use: RowUse, data_format: DataFormat | None
) -> None:
    """`check_custom_rows` within limits. Raises InvalidRows, MethodUnavailable: as there; LimitReached: too many
    requests are checked."""
    custom = None if method is None else method.installed
    if custom is None:
        return
    found = find_method(custom.type)
    if found.method.check_row is None:
        return
    checked = custom, dataset, use, data_format
    what = f"checked the rows of dataset {dataset.dataset_id!r}"
    for kind, sentence in within_limits(found, what, ROWS, _problem, found.package, found.version, *checked):
        raise InvalidRows(sentence) if kind == "rows" else MethodUnavailable(sentence)


def _problem(
    package: str, version: str, method: CustomSpec, dataset: DatasetRef, use: RowUse, data_format: DataFormat | None
) -> Iterator[list[str]]:
    """What is wrong, as JSON values: in another process."""
    try:
        same_method(method.type, package, version)
        check_custom_rows(method, dataset, use, data_format)
    except InvalidRows as error:
        yield ["rows", str(error)]
    except MethodUnavailable as error:
        yield ["method", str(error)]
