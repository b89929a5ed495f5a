"""What the service uses of uvicorn, without its command line: click, reloaders and multiprocessing take 1.5 MiB."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

_NAME = "uvicorn"


def _without_its_command_line() -> None:
    """Have the package import its command line when somebody asks for a name of the package itself. A process that has
    imported it already keeps it as it is."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def attribute(name: str) -> Any:
        if vars(package).pop("__getattr__", None) is not None:
            loader.exec_module(package)
        if name in vars(package):
            return vars(package)[name]
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")

    vars(package)["__getattr__"] = attribute
    sys.modules[_NAME] = package


_without_its_command_line()

from uvicorn.config import Config  # noqa: E402
from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: E402
from uvicorn.server import Server  # noqa: E402

__all__ = ["Config", "H11Protocol", "Server"]
